//! Answers that are put together from several backends'.

use std::future::Future;

use bytes::Bytes;
use futures::future::join_all;
use tonic::{Code, Status};

use super::{
    caller::{Caller, GRPC_ACCEPT_ENCODING, status_from_error},
    deadline::Deadline,
    decoded, forward, frame,
    id_cache::RuntimeIndex,
    incoming::Incoming,
    lookup,
    merge::{self, Merged},
    peek,
    server_state::ServerState,
};
use crate::backends::{
    Method,
    cri::{MAX_MESSAGE_BYTES, UnaryError, UnaryResponse, Upstream},
};

/// Asks container runtimes for their whole answers, which are to be uncompressed; `None` if the
/// caller was told already.
async fn collect<'a>(
    upstreams: impl Iterator<Item = &'a Upstream>,
    mut incoming: Incoming,
    deadline: Deadline,
    mut caller: Caller,
) -> Option<(Vec<UnaryResponse>, Caller)> {
    incoming.head.headers.remove(GRPC_ACCEPT_ENCODING);
    deadline.write_remaining(&mut incoming.head.headers);
    let all = join_all(upstreams.map(|upstream| upstream.unary(&incoming.head, &incoming.body)));
    let answers = match caller.wait(with_deadline(deadline, all)).await {
        Ok(Ok(answers)) => answers,
        Ok(Err(status)) => {
            caller.send_status(&status);
            return None;
        }
        Err(_cancelled) => return None,
    };
    let mut whole = Vec::with_capacity(answers.len());
    for answer in answers {
        match answer {
            Ok(answer) => whole.push(answer),
            Err(failure) => {
                match failure {
                    UnaryError::Unavailable(error) => {
                        caller.send_status(&status_from_error(Code::Unavailable, &error))
                    }
                    UnaryError::Reset(reason) => caller.reset(reason),
                    UnaryError::TooLarge => {
                        caller.send_status(&Status::resource_exhausted(format!(
                            "the container runtime's answer has more than {MAX_MESSAGE_BYTES} bytes"
                        )));
                    }
                }
                return None;
            }
        }
    }
    Some((whole, caller))
}

async fn collect_from_node(
    server: &ServerState,
    incoming: Incoming,
    deadline: Deadline,
    caller: Caller,
) -> Option<(UnaryResponse, Caller)> {
    let (mut answers, caller) =
        collect(std::iter::once(server.registry.node()), incoming, deadline, caller).await?;
    Some((answers.pop()?, caller))
}

pub(super) async fn with_deadline<F: Future>(
    deadline: Deadline,
    work: F,
) -> Result<F::Output, Status> {
    match deadline.instant() {
        Some(deadline) => tokio::time::timeout_at(deadline.into(), work)
            .await
            .map_err(|_| Status::deadline_exceeded("the node did not answer before the deadline")),
        None => Ok(work.await),
    }
}

async fn respond(caller: Caller, merged: Result<Merged, Status>) {
    match merged {
        Ok(merged) => caller.send_body(merged.head, merged.body, merged.trailers).await,
        Err(status) => caller.send_status(&status),
    }
}

/// Passes on the answer of one of several container runtimes, as it is, and learns from it.
pub(super) async fn forward_and_learn(
    server: &ServerState,
    method: Method,
    index: RuntimeIndex,
    incoming: Incoming,
    message: Bytes,
    deadline: Deadline,
    caller: Caller,
) {
    let upstream = server.registry.upstream(index);
    let Some((mut answers, caller)) =
        collect(std::iter::once(upstream), incoming, deadline, caller).await
    else {
        return;
    };
    learn(server, method, index, &message, &mut answers);
    if let Some(answer) = answers.pop() {
        respond(caller, Ok(answer.into())).await;
    }
}

/// Learns from the answers of the runtimes from `first` on.
fn learn(
    server: &ServerState,
    method: Method,
    first: RuntimeIndex,
    request: &[u8],
    answers: &mut [UnaryResponse],
) {
    for (index, answer) in answers.iter_mut().enumerate().filter(|(_, answer)| merge::is_ok(answer))
    {
        if let Some(message) = merge::single_message(answer) {
            server.id_cache.learn(method, first + index, request, &message);
        }
    }
}

/// Answers a list with all that the backends have.
pub(super) async fn list(
    server: &ServerState,
    method: Method,
    incoming: Incoming,
    message: Bytes,
    deadline: Deadline,
    mut caller: Caller,
) {
    let mut ours = Vec::new();
    for backend in server.registry.decoded() {
        match caller
            .wait(decoded::answer(
                &server.main,
                backend,
                method,
                message.clone(),
                deadline.instant(),
            ))
            .await
        {
            Ok(Ok(part)) => ours.push(part),
            Ok(Err(status)) => return caller.send_status(&status),
            Err(_cancelled) => return,
        }
    }
    if !server.registry.has_several_runtimes() && ours.iter().all(Bytes::is_empty) {
        return forward::forward(server.registry.node(), incoming, deadline, caller).await;
    }
    let Some((mut answers, caller)) =
        collect(server.registry.raw().map(|(_, upstream)| upstream), incoming, deadline, caller)
            .await
    else {
        return;
    };
    if server.registry.has_several_runtimes() {
        learn(server, method, 0, &message, &mut answers);
    }
    respond(caller, merge::lists(answers, ours)).await;
}

/// Answers with all metrics. Without descriptions by the node, those of container runtimes alone:
/// the kubelet would understand no others.
pub(super) async fn metrics(
    server: &ServerState,
    incoming: Incoming,
    deadline: Deadline,
    mut caller: Caller,
) {
    let mut head = incoming.head.clone();
    head.headers.remove(GRPC_ACCEPT_ENCODING);
    deadline.write_remaining(&mut head.headers);
    if let Err(status) = lookup::set_method(&mut head, Method::ListMetricDescriptors) {
        return caller.send_status(&status);
    }
    // Its request has no fields.
    let request: Bytes = frame::encode(Bytes::new()).concat().into();
    let described = match caller
        .wait(with_deadline(deadline, server.registry.node().unary(&head, &request)))
        .await
    {
        Ok(Ok(described)) => described,
        Ok(Err(status)) => return caller.send_status(&status),
        Err(_cancelled) => return,
    };
    // Why there are none, the call for the metrics says as well.
    let described = described
        .ok()
        .filter(merge::is_ok)
        .and_then(|mut answer| merge::single_message(&mut answer));
    let mut ours = Vec::new();
    if let Some(described) = described {
        for backend in server.registry.decoded() {
            match caller
                .wait(decoded::answer(
                    &server.main,
                    backend,
                    Method::ListPodSandboxMetrics,
                    described.clone(),
                    deadline.instant(),
                ))
                .await
            {
                Ok(Ok(part)) => ours.push(part),
                Ok(Err(status)) => return caller.send_status(&status),
                Err(_cancelled) => return,
            }
        }
    }
    let Some((answers, caller)) =
        collect(server.registry.raw().map(|(_, upstream)| upstream), incoming, deadline, caller)
            .await
    else {
        return;
    };
    respond(caller, merge::lists(answers, ours)).await;
}

/// Answers with the node's status, and the runtime handlers of the other backends.
pub(super) async fn status(
    server: &ServerState,
    incoming: Incoming,
    deadline: Deadline,
    caller: Caller,
) {
    let Some((answer, caller)) = collect_from_node(server, incoming, deadline, caller).await else {
        return;
    };
    let declared = server.registry.declared().into_iter();
    let of_each = declared.flat_map(|(name, declared)| {
        let features = server.registry.features(name);
        declared.runtime_handlers.iter().map(move |&handler| (handler, features))
    });
    let handlers: Vec<_> = of_each.collect();
    respond(caller, merge::status(answer, &handlers)).await;
}

/// Answers with the node's image, or where the node has none, with `known`, or what the other
/// backends know of it.
pub(super) async fn image(
    server: &ServerState,
    incoming: Incoming,
    message: Bytes,
    known: Option<Bytes>,
    deadline: Deadline,
    caller: Caller,
) {
    let Some((mut answer, caller)) = collect_from_node(server, incoming, deadline, caller).await
    else {
        return;
    };
    // ImageStatusResponse.image
    let is_absent = merge::is_ok(&answer)
        && merge::single_message(&mut answer).is_some_and(|answer| !peek::has_field(&answer, 1));
    let reference = peek::string(&message, &[1, 1]).unwrap_or_default();
    if is_absent
        && let Some(reported) = known.or_else(|| {
            server.registry.decoded().find_map(|backend| backend.reported_image(reference))
        })
    {
        return caller.send_message(reported).await;
    }
    respond(caller, Ok(answer.into())).await;
}
