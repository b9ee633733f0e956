//! Whose an id is that was not learned, as after a restart, or that is a prefix of one: all
//! container runtimes are asked for it.

use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use http::{request::Parts, uri::PathAndQuery};
use kiyot_proto::cri;
use prost::Message;
use tokio::time::timeout;
use tonic::{Code, Status};

use super::{
    caller::{GRPC_ACCEPT_ENCODING, status_of},
    frame, merge,
    owners::{Place, items},
    shared::Shared,
    table::Names,
    timeout::Budget,
};
use crate::backends::{
    Method,
    cri::{Answer, Failure},
};

/// How long a runtime may take to say whether it has an id. A caller's own deadline may be shorter.
const LIMIT: Duration = Duration::from_secs(30);

/// What one runtime says.
enum Said {
    Has,
    HasNot,
    Nothing(Status),
}

/// The place of the runtime that has an id. The node's if all say that they have it not: its own
/// words are the answer then. An error if one that may have it can't be asked.
pub(super) async fn find(
    front: &Shared,
    names: Names,
    id: &str,
    mut head: Parts,
    budget: Budget,
) -> Result<Place, Status> {
    let (method, request) = match names {
        Names::Sandbox => {
            let filter = Some(cri::PodSandboxFilter { id: id.to_owned(), ..Default::default() });
            (Method::ListPodSandbox, cri::ListPodSandboxRequest { filter }.encode_to_vec())
        }
        Names::Container => {
            let filter = Some(cri::ContainerFilter { id: id.to_owned(), ..Default::default() });
            (Method::ListContainers, cri::ListContainersRequest { filter }.encode_to_vec())
        }
    };
    call_instead(&mut head, method)?;
    head.headers.remove(GRPC_ACCEPT_ENCODING);
    budget.shorten(&mut head.headers);
    let body: Bytes = frame::framed(request.into()).concat().into();
    let all = join_all(front.registry.raw().enumerate().map(|(place, (name, upstream))| {
        let (head, body) = (&head, &body);
        async move {
            match timeout(LIMIT, upstream.exchange(head, body)).await {
                Ok(answer) => said(front, method, place, answer),
                Err(_) => Said::Nothing(Status::unavailable(format!(
                    "backend {name} did not say within {LIMIT:?} whether it has {id:?}"
                ))),
            }
        }
    }));
    let (mut has, mut nothing) = (Vec::new(), None);
    for (place, said) in all.await.into_iter().enumerate() {
        match said {
            Said::Has => has.push(place),
            Said::HasNot => {}
            Said::Nothing(status) => nothing = nothing.or(Some(status)),
        }
    }
    match (has.as_slice(), nothing) {
        ([place], _) => Ok(*place),
        ([], None) => Ok(0),
        ([], Some(status)) => Err(status),
        _ => Err(Status::invalid_argument(format!(
            "{id:?} is the beginning of ids of several backends; allowed is an id, or a prefix that one has"
        ))),
    }
}

/// Makes a call's metadata that of another method.
pub(super) fn call_instead(head: &mut Parts, method: Method) -> Result<(), Status> {
    let mut uri = std::mem::take(&mut head.uri).into_parts();
    uri.path_and_query = Some(PathAndQuery::from_static(method.path()));
    head.uri = http::Uri::from_parts(uri).map_err(|error| {
        Status::internal(format!("no path can be made of {}: {error}", method.path()))
    })?;
    Ok(())
}

fn said(front: &Shared, method: Method, place: Place, answer: Result<Answer, Failure>) -> Said {
    let unavailable = |what: &str| {
        Said::Nothing(Status::unavailable(format!(
            "a container runtime that may have the id {what}"
        )))
    };
    let mut answer = match answer {
        Ok(answer) => answer,
        Err(Failure::Unavailable(error)) => {
            return Said::Nothing(status_of(Code::Unavailable, &error));
        }
        Err(Failure::Reset(reason)) => {
            return unavailable(&format!("has reset the call that asks for it: {reason}"));
        }
        Err(Failure::TooLarge) => return unavailable("answers with more than is asked for"),
    };
    if !merge::is_ok(&answer) {
        return unavailable("does not list it");
    }
    let Some(message) = merge::contiguous(&mut answer) else {
        return unavailable("answers with what is no message");
    };
    front.owners.learn(method, place, b"", &message);
    if items(&message).any(|item| item.is_ok()) { Said::Has } else { Said::HasNot }
}
