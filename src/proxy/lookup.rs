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
    caller::{GRPC_ACCEPT_ENCODING, status_from_error},
    deadline::Deadline,
    frame,
    id_cache::{RuntimeIndex, list_items},
    merge,
    methods::IdKind,
    server_state::ServerState,
};
use crate::backends::{
    Method,
    cri::{UnaryError, UnaryResponse},
};

/// How long a runtime may take to say whether it has an id. A caller's own deadline may be shorter.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(30);

/// What one runtime says.
enum Reply {
    Has,
    HasNot,
    Unknown(Status),
}

/// The index of the runtime that has an id. The node's if all say that they have it not: its own
/// words are the answer then. An error if one that may have it can't be asked.
pub(super) async fn find_runtime(
    server: &ServerState,
    kind: IdKind,
    id: &str,
    mut head: Parts,
    deadline: Deadline,
) -> Result<RuntimeIndex, Status> {
    let (method, request) = match kind {
        IdKind::Sandbox => {
            let filter = Some(cri::PodSandboxFilter { id: id.to_owned(), ..Default::default() });
            (Method::ListPodSandbox, cri::ListPodSandboxRequest { filter }.encode_to_vec())
        }
        IdKind::Container => {
            let filter = Some(cri::ContainerFilter { id: id.to_owned(), ..Default::default() });
            (Method::ListContainers, cri::ListContainersRequest { filter }.encode_to_vec())
        }
    };
    set_method(&mut head, method)?;
    head.headers.remove(GRPC_ACCEPT_ENCODING);
    deadline.write_remaining(&mut head.headers);
    let body: Bytes = frame::encode(request.into()).concat().into();
    let all = join_all(server.registry.raw().enumerate().map(|(index, (name, upstream))| {
        let (head, body) = (&head, &body);
        async move {
            match timeout(LOOKUP_TIMEOUT, upstream.unary(head, body)).await {
                Ok(answer) => parse_reply(server, method, index, answer),
                Err(_) => Reply::Unknown(Status::unavailable(format!(
                    "backend {name} did not say within {LOOKUP_TIMEOUT:?} whether it has {id:?}"
                ))),
            }
        }
    }));
    let (mut has, mut nothing) = (Vec::new(), None);
    for (index, reply) in all.await.into_iter().enumerate() {
        match reply {
            Reply::Has => has.push(index),
            Reply::HasNot => {}
            Reply::Unknown(status) => nothing = nothing.or(Some(status)),
        }
    }
    match (has.as_slice(), nothing) {
        ([index], _) => Ok(*index),
        ([], None) => Ok(0),
        ([], Some(status)) => Err(status),
        _ => Err(Status::invalid_argument(format!(
            "{id:?} is the beginning of ids of several backends; allowed is an id, or a prefix that one has"
        ))),
    }
}

/// Makes a call's metadata that of another method.
pub(super) fn set_method(head: &mut Parts, method: Method) -> Result<(), Status> {
    let mut uri = std::mem::take(&mut head.uri).into_parts();
    uri.path_and_query = Some(PathAndQuery::from_static(method.path()));
    head.uri = http::Uri::from_parts(uri).map_err(|error| {
        Status::internal(format!("no path can be made of {}: {error}", method.path()))
    })?;
    Ok(())
}

fn parse_reply(
    server: &ServerState,
    method: Method,
    index: RuntimeIndex,
    answer: Result<UnaryResponse, UnaryError>,
) -> Reply {
    let unavailable = |what: &str| {
        Reply::Unknown(Status::unavailable(format!(
            "a container runtime that may have the id {what}"
        )))
    };
    let mut answer = match answer {
        Ok(answer) => answer,
        Err(UnaryError::Unavailable(error)) => {
            return Reply::Unknown(status_from_error(Code::Unavailable, &error));
        }
        Err(UnaryError::Reset(reason)) => {
            return unavailable(&format!("has reset the call that asks for it: {reason}"));
        }
        Err(UnaryError::TooLarge) => return unavailable("answers with more than is asked for"),
    };
    if !merge::is_ok(&answer) {
        return unavailable("does not list it");
    }
    let Some(message) = merge::single_message(&mut answer) else {
        return unavailable("answers with what is no message");
    };
    server.id_cache.learn(method, index, b"", &message);
    if list_items(&message).any(|item| item.is_ok()) { Reply::Has } else { Reply::HasNot }
}
