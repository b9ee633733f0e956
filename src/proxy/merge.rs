//! Merging of responses by appending: repeated fields, and fields of messages, concatenate on the
//! wire. Pure.

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, response};
use kiyot_proto::cri;
use prost::Message as _;
use tonic::Status;

use super::{
    copy_body::GRPC_STATUS,
    decoded::too_large,
    frame::{self, Frame, HEADER_BYTES},
    peek,
};
use crate::backends::{
    Features,
    cri::{MAX_MESSAGE_BYTES, UnaryResponse},
};

/// A merged response.
#[derive(Debug)]
pub(super) struct Merged {
    pub(super) head: response::Parts,
    pub(super) body: Vec<Bytes>,
    pub(super) trailers: Option<HeaderMap>,
}

impl From<UnaryResponse> for Merged {
    fn from(response: UnaryResponse) -> Self {
        Self { head: response.head, body: response.body, trailers: response.trailers }
    }
}

/// `StatusResponse.runtime_handlers`.
const RUNTIME_HANDLERS: u32 = 3;

/// Returns whether a response has the status OK. Other responses are forwarded unchanged.
pub(super) fn is_ok(response: &UnaryResponse) -> bool {
    response
        .trailers
        .as_ref()
        .and_then(|trailers| trailers.get(GRPC_STATUS))
        .is_some_and(|status| status == "0")
}

/// Takes the message of a response, in parts, and its length.
fn message(response: &mut UnaryResponse) -> Result<(Vec<Bytes>, usize), Status> {
    let mut parts = std::mem::take(&mut response.body);
    let length: usize = parts.iter().map(Bytes::len).sum();
    if parts.first().is_some_and(|first| first.len() < HEADER_BYTES) {
        parts = vec![parts.concat().into()];
    }
    let unmergeable = |what: &str| {
        Err(Status::internal(format!("the container runtime's response can't be merged: {what}")))
    };
    let Some(first) = parts.first_mut().filter(|first| first.len() >= HEADER_BYTES) else {
        return unmergeable("it has no message");
    };
    let head = first.split_to(HEADER_BYTES);
    if head[0] != 0 {
        return unmergeable("it is compressed; allowed is the encoding identity");
    }
    let length_in_header = match frame::parse(&head) {
        Frame::Complete { length, .. } | Frame::TooLarge(length) => length,
        Frame::Partial => u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize,
    };
    if length_in_header != length - HEADER_BYTES {
        return unmergeable("it is not one message");
    }
    Ok((parts, length_in_header))
}

/// Returns the message of a response in one part; `None` if the response has no complete and
/// uncompressed message. The response keeps its bytes.
pub(super) fn single_message(response: &mut UnaryResponse) -> Option<Bytes> {
    if response.body.len() > 1 {
        response.body = vec![response.body.concat().into()];
    }
    let body = response.body.first()?;
    match frame::parse(body) {
        Frame::Complete { length, compressed: false } => {
            Some(body.slice(HEADER_BYTES..HEADER_BYTES + length))
        }
        _ => None,
    }
}

/// Appends lists: those of container runtimes (at least one), then `more`. Returns the first error
/// response instead, if any.
pub(super) fn lists(mut responses: Vec<UnaryResponse>, more: Vec<Bytes>) -> Result<Merged, Status> {
    if let Some(index) = responses.iter().position(|response| !is_ok(response)) {
        return Ok(responses.swap_remove(index).into());
    }
    let (mut body, mut total) = (vec![Bytes::new()], 0);
    for response in &mut responses {
        let (parts, length) = message(response)?;
        body.extend(parts);
        total += length;
    }
    for part in more {
        total += part.len();
        body.push(part);
    }
    if total > MAX_MESSAGE_BYTES {
        return Err(too_large(total));
    }
    body[0] = Bytes::copy_from_slice(&frame::header(total));
    body.retain(|part| !part.is_empty());
    match responses.into_iter().next() {
        Some(first) => Ok(Merged { head: first.head, body, trailers: first.trailers }),
        None => Err(Status::internal("there is no container runtime to list")),
    }
}

/// Appends runtime handlers to the node's `StatusResponse`. An empty list gets the default handler
/// too: the kubelet reads an empty list as "all handlers exist", and any other list as complete.
pub(super) fn status(
    mut response: UnaryResponse,
    handlers: &[(&str, Features)],
) -> Result<Merged, Status> {
    if !is_ok(&response) || handlers.is_empty() {
        return Ok(response.into());
    }
    let message = single_message(&mut response).unwrap_or_default();
    let mut more = BytesMut::new();
    if !peek::has_field(&message, RUNTIME_HANDLERS) {
        put_handler(&mut more, "", false);
    }
    for (handler, features) in handlers {
        // A handler whose pods may run on the node has only features of the node's runtime, which
        // could ignore others silently.
        let recursive = features.recursive_read_only_mounts
            && (!features.may_be_on_node || default_handler(&message).recursive_read_only_mounts);
        put_handler(&mut more, handler, recursive);
    }
    lists(vec![response], vec![more.freeze()])
}

/// Returns the features of the default handler of a `StatusResponse`.
fn default_handler(status: &[u8]) -> cri::RuntimeHandlerFeatures {
    let handlers = cri::StatusResponse::decode(status).unwrap_or_default().runtime_handlers;
    handlers
        .into_iter()
        .find(|handler| handler.name.is_empty())
        .and_then(|handler| handler.features)
        .unwrap_or_default()
}

/// Appends `RuntimeHandler { name, features: { recursive_read_only_mounts } }` as an element of
/// `runtime_handlers`.
fn put_handler(out: &mut BytesMut, name: &str, recursive_read_only_mounts: bool) {
    // Backends declare short names. The handler of a RuntimeClass is a DNS label, 63 bytes at most.
    let name = &name.as_bytes()[..name.len().min(63)];
    let name_field = if name.is_empty() { 0 } else { 2 + name.len() };
    let features: &[u8] = if recursive_read_only_mounts { &[0x12, 2, 0x08, 1] } else { &[0x12, 0] };
    out.put_slice(&[(RUNTIME_HANDLERS as u8) << 3 | 2, (name_field + features.len()) as u8]);
    if !name.is_empty() {
        out.put_slice(&[0x0a, name.len() as u8]);
        out.put_slice(name);
    }
    out.put_slice(features);
}

#[cfg(test)]
mod tests;
