//! Calls that several backends answer: fan-out of the request, and merging of the responses.

use std::sync::Arc;

use bytes::Bytes;
use futures::future::join_all;
use http::request::Parts;
use kiyot_proto::cri;
use prost::Message as _;
use tonic::{Code, Status};

use super::{
    call::Call,
    caller::{Caller, GRPC_ACCEPT_ENCODING, status_from_error},
    decoded, forward, frame,
    id_cache::RuntimeIndex,
    incoming::Incoming,
    lookup,
    merge::{self, Merged},
    peek,
    server_state::ServerState,
};
use crate::backends::{
    DecodedBackend, Method,
    cri::{MAX_MESSAGE_BYTES, UnaryError, UnaryResponse, Upstream},
};

/// Sends a call to container runtimes and collects their responses, which must be uncompressed.
/// Returns `None` if the call failed and the caller has its status.
async fn collect<'a>(
    upstreams: impl Iterator<Item = &'a Upstream>,
    call: Call<'_>,
) -> Option<(Vec<UnaryResponse>, Caller)> {
    let Call { mut incoming, deadline, mut caller, .. } = call;
    incoming.head.headers.remove(GRPC_ACCEPT_ENCODING);
    deadline.write_remaining(&mut incoming.head.headers);
    let all = join_all(upstreams.map(|upstream| upstream.unary(&incoming.head, &incoming.body)));
    let responses = match caller.wait(deadline.limit(all)).await {
        Ok(Ok(responses)) => responses,
        Ok(Err(status)) => {
            caller.send_status(&status);
            return None;
        }
        Err(_cancelled) => return None,
    };
    let mut collected = Vec::with_capacity(responses.len());
    for response in responses {
        match response {
            Ok(response) => collected.push(response),
            Err(error) => {
                match error {
                    UnaryError::Unavailable(error) => {
                        caller.send_status(&status_from_error(Code::Unavailable, &error))
                    }
                    UnaryError::Reset(reason) => caller.reset(reason),
                    UnaryError::TooLarge => {
                        caller.send_status(&Status::resource_exhausted(format!(
                            "the response has more than {MAX_MESSAGE_BYTES} bytes, which is the \
                             limit"
                        )));
                    }
                }
                return None;
            }
        }
    }
    Some((collected, caller))
}

async fn collect_from_node(call: Call<'_>) -> Option<(UnaryResponse, Caller)> {
    let node = call.server.registry.node();
    let (mut responses, caller) = collect(std::iter::once(node), call).await?;
    Some((responses.pop()?, caller))
}

async fn collect_from_runtimes(call: Call<'_>) -> Option<(Vec<UnaryResponse>, Caller)> {
    let registry = &call.server.registry;
    collect(registry.raw().map(|(_, upstream)| upstream), call).await
}

/// Collects the parts of decoded backends. Returns `None` if a backend failed and the caller has
/// its status.
async fn collect_parts<'a, F: Future<Output = Result<Bytes, Status>>>(
    mut call: Call<'a>,
    part: impl Fn(&'a Arc<dyn DecodedBackend>) -> F,
) -> Option<(Vec<Bytes>, Call<'a>)> {
    let mut parts = Vec::new();
    for backend in call.server.registry.decoded() {
        match call.caller.wait(part(backend)).await {
            Ok(Ok(part)) => parts.push(part),
            Ok(Err(status)) => {
                call.caller.send_status(&status);
                return None;
            }
            Err(_cancelled) => return None,
        }
    }
    Some((parts, call))
}

async fn respond(caller: Caller, merged: Result<Merged, Status>) {
    match merged {
        Ok(merged) => caller.send_body(merged.head, merged.body, merged.trailers).await,
        Err(status) => caller.send_status(&status),
    }
}

/// Forwards a call to one of several container runtimes, and learns the id in the response.
pub(super) async fn forward_and_learn(
    call: Call<'_>,
    method: Method,
    index: RuntimeIndex,
    message: Bytes,
) {
    let server = call.server;
    let upstream = server.registry.upstream(index);
    let Some((mut responses, caller)) = collect(std::iter::once(upstream), call).await else {
        return;
    };
    learn(server, method, index, &message, &mut responses);
    if let Some(response) = responses.pop() {
        respond(caller, Ok(response.into())).await;
    }
}

/// Learns ids from the responses of the runtimes from the index `first` on.
fn learn(
    server: &ServerState,
    method: Method,
    first: RuntimeIndex,
    request: &[u8],
    responses: &mut [UnaryResponse],
) {
    for (index, response) in
        responses.iter_mut().enumerate().filter(|(_, response)| merge::is_ok(response))
    {
        if let Some(message) = merge::single_message(response) {
            server.id_cache.learn(method, first + index, request, &message);
        }
    }
}

/// Answers a list with the entries of all backends.
pub(super) async fn list(call: Call<'_>, method: Method, message: Bytes) {
    let Call { server, deadline, .. } = call;
    let part = |backend| {
        decoded::answer(&server.main, backend, method, message.clone(), deadline.instant())
    };
    let Some((parts, call)) = collect_parts(call, part).await else { return };
    if !server.registry.has_several_runtimes() && parts.iter().all(Bytes::is_empty) {
        return forward::forward(server.registry.node(), call).await;
    }
    let Some((mut responses, caller)) = collect_from_runtimes(call).await else { return };
    if server.registry.has_several_runtimes() {
        learn(server, method, 0, &message, &mut responses);
    }
    respond(caller, merge::lists(responses, parts)).await;
}

/// Answers with the metrics of all backends. If the node describes no metrics, the response has
/// only the metrics of container runtimes, because the kubelet drops metrics without a description.
pub(super) async fn metrics(mut call: Call<'_>) {
    let Call { server, deadline, .. } = call;
    let mut head = call.incoming.head.clone();
    head.headers.remove(GRPC_ACCEPT_ENCODING);
    deadline.write_remaining(&mut head.headers);
    if let Err(status) = lookup::set_method(&mut head, Method::ListMetricDescriptors) {
        return call.caller.send_status(&status);
    }
    // ListMetricDescriptorsRequest has no fields.
    let request: Bytes = frame::encode(Bytes::new()).concat().into();
    let of_node = server.registry.node().unary(&head, &request);
    let descriptions = match call.caller.wait(deadline.limit(of_node)).await {
        Ok(Ok(descriptions)) => descriptions,
        Ok(Err(status)) => return call.caller.send_status(&status),
        Err(_cancelled) => return,
    };
    // An error is ignored, because the call for the metrics fails with it as well.
    let descriptions = descriptions
        .ok()
        .filter(merge::is_ok)
        .and_then(|mut response| merge::single_message(&mut response));
    let mut parts = Vec::new();
    if let Some(descriptions) = descriptions {
        let part = |backend| {
            let descriptions = descriptions.clone();
            decoded::list_metrics(&server.main, backend, descriptions, deadline.instant())
        };
        let Some(collected) = collect_parts(call, part).await else { return };
        (parts, call) = collected;
    }
    let Some((responses, caller)) = collect_from_runtimes(call).await else { return };
    respond(caller, merge::lists(responses, parts)).await;
}

/// Answers with the node's status and the runtime handlers of all backends.
pub(super) async fn status(call: Call<'_>) {
    let server = call.server;
    let Some((response, caller)) = collect_from_node(call).await else { return };
    let declared = server.registry.declared().into_iter();
    let of_each = declared.flat_map(|(name, declared)| {
        let features = server.registry.features(name);
        declared.runtime_handlers.iter().map(move |&handler| (handler, features))
    });
    let handlers: Vec<_> = of_each.collect();
    respond(caller, merge::status(response, &handlers)).await;
}

/// Answers with the node's image. If the node lacks the image, answers with `known` or with the
/// image that a decoded backend reports. The pod of `known` may run on the node: `known` is dropped
/// if the node has an image with the same id, which a cell has reported.
pub(super) async fn image(call: Call<'_>, message: Bytes, known: Option<Bytes>) {
    let Call { server, deadline, .. } = call;
    let head = call.incoming.head.clone();
    let Some((mut response, mut caller)) = collect_from_node(call).await else { return };
    let mut found = None;
    if lacks_image(&mut response) {
        let reference = peek::string(&message, &[1, 1]).unwrap_or_default();
        let reported =
            || server.registry.decoded().find_map(|cells| cells.reported_image(reference));
        found = known.clone().or_else(reported);
    }
    if let (Some(_), Some(known)) = (&found, known) {
        let by_id = Call { server, incoming: image_status(head, &known), deadline, caller };
        let Some((mut of_node, left)) = collect_from_node(by_id).await else { return };
        caller = left;
        found = lacks_image(&mut of_node).then_some(known);
    }
    match found {
        Some(found) => caller.send_message(found).await,
        None => respond(caller, Ok(response.into())).await,
    }
}

/// Returns whether a response to `ImageStatus` says that the image is absent.
fn lacks_image(response: &mut UnaryResponse) -> bool {
    // ImageStatusResponse.image
    merge::is_ok(response)
        && merge::single_message(response).is_some_and(|message| !peek::has_field(&message, 1))
}

/// Returns an `ImageStatus` for the id of the image in a response.
fn image_status(head: Parts, response: &[u8]) -> Incoming {
    let id = peek::string(response, &[1, 1]).unwrap_or_default().to_owned();
    let image = Some(cri::ImageSpec { image: id, ..Default::default() });
    let request = cri::ImageStatusRequest { image, ..Default::default() }.encode_to_vec();
    let body = frame::encode(request.into()).concat().into();
    Incoming { head, body, rest: None, idle_timeout: None, guard: None }
}
