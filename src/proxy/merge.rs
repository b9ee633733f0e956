//! Appends answers to one another: a repeated field concatenates on the wire, and a message's
//! fields do as well. Pure.

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, response};
use kiyot_proto::cri;
use prost::Message as _;
use tonic::Status;

use super::{
    caller::GRPC_STATUS,
    decoded::too_large,
    frame::{self, Frame, HEADER_BYTES},
    peek,
};
use crate::backends::{
    Features,
    cri::{MAX_MESSAGE_BYTES, UnaryResponse},
};

/// An answer to pass on.
#[derive(Debug)]
pub(super) struct Merged {
    pub(super) head: response::Parts,
    pub(super) body: Vec<Bytes>,
    pub(super) trailers: Option<HeaderMap>,
}

impl From<UnaryResponse> for Merged {
    fn from(answer: UnaryResponse) -> Self {
        Self { head: answer.head, body: answer.body, trailers: answer.trailers }
    }
}

/// `StatusResponse.runtime_handlers`.
const RUNTIME_HANDLERS: u32 = 3;

/// Whether an answer has the status OK. What has another is passed on as it is.
pub(super) fn is_ok(answer: &UnaryResponse) -> bool {
    answer
        .trailers
        .as_ref()
        .and_then(|trailers| trailers.get(GRPC_STATUS))
        .is_some_and(|status| status == "0")
}

/// The message of an answer, in parts.
fn message(answer: &mut UnaryResponse) -> Result<(Vec<Bytes>, usize), Status> {
    let mut parts = std::mem::take(&mut answer.body);
    let length: usize = parts.iter().map(Bytes::len).sum();
    if parts.first().is_some_and(|first| first.len() < HEADER_BYTES) {
        parts = vec![parts.concat().into()];
    }
    let bad = |what: &str| {
        Err(Status::internal(format!("the container runtime's answer can't be added to: {what}")))
    };
    let Some(first) = parts.first_mut().filter(|first| first.len() >= HEADER_BYTES) else {
        return bad("it has no message");
    };
    let head = first.split_to(HEADER_BYTES);
    if head[0] != 0 {
        return bad("it is compressed, though only an uncompressed one was asked for");
    }
    let length_in_header = match frame::parse(&head) {
        Frame::Complete { length, .. } | Frame::TooLarge(length) => length,
        Frame::Partial => u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize,
    };
    if length_in_header != length - HEADER_BYTES {
        return bad("it is not one message");
    }
    Ok((parts, length_in_header))
}

/// The bytes of an answer's message in one piece; the answer stays as it is. `None` if it has none
/// that can be read.
pub(super) fn single_message(answer: &mut UnaryResponse) -> Option<Bytes> {
    if answer.body.len() > 1 {
        answer.body = vec![answer.body.concat().into()];
    }
    let body = answer.body.first()?;
    match frame::parse(body) {
        Frame::Complete { length, compressed: false } => {
            Some(body.slice(HEADER_BYTES..HEADER_BYTES + length))
        }
        _ => None,
    }
}

/// Appends lists to one another: the answers of container runtimes (one at least), then `more`. The
/// first answer that is an error is the whole's.
pub(super) fn lists(mut answers: Vec<UnaryResponse>, more: Vec<Bytes>) -> Result<Merged, Status> {
    if let Some(index) = answers.iter().position(|answer| !is_ok(answer)) {
        return Ok(answers.swap_remove(index).into());
    }
    let (mut body, mut total) = (vec![Bytes::new()], 0);
    for answer in &mut answers {
        let (parts, length) = message(answer)?;
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
    match answers.into_iter().next() {
        Some(first) => Ok(Merged { head: first.head, body, trailers: first.trailers }),
        None => Err(Status::internal("there is no container runtime whose list could be answered")),
    }
}

/// Appends runtime handlers to the node's `StatusResponse`. A list that was empty gets the default
/// handler too: the kubelet takes an empty list for "all are known" and any other for the whole.
pub(super) fn status(
    mut answer: UnaryResponse,
    handlers: &[(&str, Features)],
) -> Result<Merged, Status> {
    if !is_ok(&answer) || handlers.is_empty() {
        return Ok(answer.into());
    }
    let message = single_message(&mut answer).unwrap_or_default();
    let mut more = BytesMut::new();
    if !peek::has_field(&message, RUNTIME_HANDLERS) {
        put_handler(&mut more, "", false);
    }
    for (handler, features) in handlers {
        // Of a pod that the node may get nothing is promised that the node does not do: its runtime
        // could pass over it without a word.
        let recursive = features.recursive_read_only_mounts
            && (!features.may_be_on_node || default_handler(&message).recursive_read_only_mounts);
        put_handler(&mut more, handler, recursive);
    }
    lists(vec![answer], vec![more.freeze()])
}

/// What the default handler of a `StatusResponse` does.
fn default_handler(status: &[u8]) -> cri::RuntimeHandlerFeatures {
    let handlers = cri::StatusResponse::decode(status).unwrap_or_default().runtime_handlers;
    handlers
        .into_iter()
        .find(|handler| handler.name.is_empty())
        .and_then(|handler| handler.features)
        .unwrap_or_default()
}

/// `RuntimeHandler { name, features: { recursive_read_only_mounts } }`, as an element of
/// `runtime_handlers`.
fn put_handler(out: &mut BytesMut, name: &str, recursive_read_only_mounts: bool) {
    // Names are the backends' own short words; a longer one could not be a RuntimeClass's handler
    // (a DNS label).
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
