//! Lookup of an id's container runtime by asking all runtimes. It serves ids that the cache lacks,
//! as after a restart, and prefixes of ids.

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

/// Timeout of a runtime's reply. The caller's deadline may be shorter.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(30);

/// A runtime's reply.
enum Reply {
    Found,
    Absent,
    Unknown(Status),
}

/// Returns the index of the runtime that has an id. If no runtime has it, returns the node backend,
/// whose error the caller gets. Fails if a runtime that may have the id does not reply.
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
                Ok(response) => parse_reply(server, method, index, response),
                Err(_) => Reply::Unknown(Status::unavailable(format!(
                    "backend {name}: no reply within {LOOKUP_TIMEOUT:?} for the id {id:?}"
                ))),
            }
        }
    }));
    let (mut found, mut unknown) = (Vec::new(), None);
    for (index, reply) in all.await.into_iter().enumerate() {
        match reply {
            Reply::Found => found.push(index),
            Reply::Absent => {}
            Reply::Unknown(status) => unknown = unknown.or(Some(status)),
        }
    }
    match (found.as_slice(), unknown) {
        ([index], _) => Ok(*index),
        ([], None) => Ok(0),
        ([], Some(status)) => Err(status),
        _ => Err(Status::invalid_argument(format!(
            "{id:?} is a prefix of ids of several backends; allowed: an id, or a unique prefix"
        ))),
    }
}

/// Changes the method of a request's head.
pub(super) fn set_method(head: &mut Parts, method: Method) -> Result<(), Status> {
    let mut uri = std::mem::take(&mut head.uri).into_parts();
    uri.path_and_query = Some(PathAndQuery::from_static(method.path()));
    head.uri = http::Uri::from_parts(uri)
        .map_err(|error| Status::internal(format!("path {}: {error}", method.path())))?;
    Ok(())
}

fn parse_reply(
    server: &ServerState,
    method: Method,
    index: RuntimeIndex,
    response: Result<UnaryResponse, UnaryError>,
) -> Reply {
    let unavailable = |problem: &str| {
        Reply::Unknown(Status::unavailable(format!(
            "a container runtime that may have the id {problem}"
        )))
    };
    let mut response = match response {
        Ok(response) => response,
        Err(UnaryError::Unavailable(error)) => {
            return Reply::Unknown(status_from_error(Code::Unavailable, &error));
        }
        Err(UnaryError::Reset(reason)) => {
            return unavailable(&format!("has reset the lookup: {reason}"));
        }
        Err(UnaryError::TooLarge) => return unavailable("has replied with too large a list"),
    };
    if !merge::is_ok(&response) {
        return unavailable("has failed to list it");
    }
    let Some(message) = merge::single_message(&mut response) else {
        return unavailable("has replied without a message");
    };
    server.id_cache.learn(method, index, b"", &message);
    if list_items(&message).any(|item| item.is_ok()) { Reply::Found } else { Reply::Absent }
}
