//! Answers that are put together from several backends'.

use std::future::Future;

use bytes::Bytes;
use futures::future::join_all;
use tonic::{Code, Status};

use super::{
    caller::{Caller, GRPC_ACCEPT_ENCODING, status_of},
    decoded, forward, frame,
    incoming::Incoming,
    lookup,
    merge::{self, Merged},
    owners::Place,
    peek,
    shared::Shared,
    timeout::Budget,
};
use crate::backends::{
    Method,
    cri::{Answer, Failure, MAX_MESSAGE, Upstream},
};

/// Asks container runtimes for their whole answers, which are to be uncompressed; `None` if the
/// caller was told already.
async fn whole<'a>(
    upstreams: impl Iterator<Item = &'a Upstream>,
    mut incoming: Incoming,
    budget: Budget,
    mut caller: Caller,
) -> Option<(Vec<Answer>, Caller)> {
    incoming.head.headers.remove(GRPC_ACCEPT_ENCODING);
    budget.shorten(&mut incoming.head.headers);
    let all = join_all(upstreams.map(|upstream| upstream.exchange(&incoming.head, &incoming.body)));
    let answers = match caller.wait(until(budget, all)).await {
        Ok(Ok(answers)) => answers,
        Ok(Err(status)) => {
            caller.status(&status);
            return None;
        }
        Err(_gone) => return None,
    };
    let mut whole = Vec::with_capacity(answers.len());
    for answer in answers {
        match answer {
            Ok(answer) => whole.push(answer),
            Err(failure) => {
                match failure {
                    Failure::Unavailable(error) => {
                        caller.status(&status_of(Code::Unavailable, &error))
                    }
                    Failure::Reset(reason) => caller.reset(reason),
                    Failure::TooLarge => {
                        caller.status(&Status::resource_exhausted(format!(
                            "the container runtime's answer has more than {MAX_MESSAGE} bytes"
                        )));
                    }
                }
                return None;
            }
        }
    }
    Some((whole, caller))
}

async fn of_node(
    front: &Shared,
    incoming: Incoming,
    budget: Budget,
    caller: Caller,
) -> Option<(Answer, Caller)> {
    let (mut answers, caller) =
        whole(std::iter::once(front.registry.node()), incoming, budget, caller).await?;
    Some((answers.pop()?, caller))
}

pub(super) async fn until<F: Future>(budget: Budget, work: F) -> Result<F::Output, Status> {
    match budget.deadline() {
        Some(deadline) => tokio::time::timeout_at(deadline.into(), work)
            .await
            .map_err(|_| Status::deadline_exceeded("the node did not answer before the deadline")),
        None => Ok(work.await),
    }
}

async fn pass_on(caller: Caller, merged: Result<Merged, Status>) {
    match merged {
        Ok(merged) => caller.answer(merged.head, merged.body, merged.trailers).await,
        Err(status) => caller.status(&status),
    }
}

/// Passes on the answer of one of several container runtimes, as it is, and learns from it.
pub(super) async fn learned(
    front: &Shared,
    method: Method,
    place: Place,
    incoming: Incoming,
    message: Bytes,
    budget: Budget,
    caller: Caller,
) {
    let upstream = front.registry.upstream(place);
    let Some((mut answers, caller)) =
        whole(std::iter::once(upstream), incoming, budget, caller).await
    else {
        return;
    };
    learn(front, method, place, &message, &mut answers);
    if let Some(answer) = answers.pop() {
        pass_on(caller, Ok(answer.into())).await;
    }
}

/// Learns from the answers of the runtimes from `first` on.
fn learn(front: &Shared, method: Method, first: Place, request: &[u8], answers: &mut [Answer]) {
    for (place, answer) in answers.iter_mut().enumerate().filter(|(_, answer)| merge::is_ok(answer))
    {
        if let Some(message) = merge::contiguous(answer) {
            front.owners.learn(method, first + place, request, &message);
        }
    }
}

/// Answers a list with all that the backends have.
pub(super) async fn list(
    front: &Shared,
    method: Method,
    incoming: Incoming,
    message: Bytes,
    budget: Budget,
    mut caller: Caller,
) {
    let mut ours = Vec::new();
    for backend in front.registry.decoded() {
        match caller
            .wait(decoded::answer(&front.main, backend, method, message.clone(), budget.deadline()))
            .await
        {
            Ok(Ok(part)) => ours.push(part),
            Ok(Err(status)) => return caller.status(&status),
            Err(_gone) => return,
        }
    }
    if !front.registry.has_several_raw() && ours.iter().all(Bytes::is_empty) {
        return forward::forward(front.registry.node(), incoming, budget, caller).await;
    }
    let Some((mut answers, caller)) =
        whole(front.registry.raw().map(|(_, upstream)| upstream), incoming, budget, caller).await
    else {
        return;
    };
    if front.registry.has_several_raw() {
        learn(front, method, 0, &message, &mut answers);
    }
    pass_on(caller, merge::lists(answers, ours)).await;
}

/// Answers with all metrics. Without descriptions by the node, those of container runtimes alone:
/// the kubelet would understand no others.
pub(super) async fn metrics(
    front: &Shared,
    incoming: Incoming,
    budget: Budget,
    mut caller: Caller,
) {
    let mut head = incoming.head.clone();
    head.headers.remove(GRPC_ACCEPT_ENCODING);
    budget.shorten(&mut head.headers);
    if let Err(status) = lookup::call_instead(&mut head, Method::ListMetricDescriptors) {
        return caller.status(&status);
    }
    // Its request has no fields.
    let request: Bytes = frame::framed(Bytes::new()).concat().into();
    let described =
        match caller.wait(until(budget, front.registry.node().exchange(&head, &request))).await {
            Ok(Ok(described)) => described,
            Ok(Err(status)) => return caller.status(&status),
            Err(_gone) => return,
        };
    // Why there are none, the call for the metrics says as well.
    let described =
        described.ok().filter(merge::is_ok).and_then(|mut answer| merge::contiguous(&mut answer));
    let mut ours = Vec::new();
    if let Some(described) = described {
        for backend in front.registry.decoded() {
            match caller
                .wait(decoded::answer(
                    &front.main,
                    backend,
                    Method::ListPodSandboxMetrics,
                    described.clone(),
                    budget.deadline(),
                ))
                .await
            {
                Ok(Ok(part)) => ours.push(part),
                Ok(Err(status)) => return caller.status(&status),
                Err(_gone) => return,
            }
        }
    }
    let Some((answers, caller)) =
        whole(front.registry.raw().map(|(_, upstream)| upstream), incoming, budget, caller).await
    else {
        return;
    };
    pass_on(caller, merge::lists(answers, ours)).await;
}

/// Answers with the node's status, and the runtime handlers of the other backends.
pub(super) async fn status(front: &Shared, incoming: Incoming, budget: Budget, caller: Caller) {
    let Some((answer, caller)) = of_node(front, incoming, budget, caller).await else { return };
    let declared = front.registry.declared().into_iter();
    let of_each = declared.flat_map(|(name, declared)| {
        let features = front.registry.features(name);
        declared.runtime_handlers.iter().map(move |&handler| (handler, features))
    });
    let handlers: Vec<_> = of_each.collect();
    pass_on(caller, merge::status(answer, &handlers)).await;
}

/// Answers with the node's image, or where the node has none, with `known`, or what the other
/// backends know of it.
pub(super) async fn image(
    front: &Shared,
    incoming: Incoming,
    message: Bytes,
    known: Option<Bytes>,
    budget: Budget,
    caller: Caller,
) {
    let Some((mut answer, caller)) = of_node(front, incoming, budget, caller).await else { return };
    // ImageStatusResponse.image
    let is_absent = merge::is_ok(&answer)
        && merge::contiguous(&mut answer).is_some_and(|answer| !peek::has(&answer, 1));
    let reference = peek::string(&message, &[1, 1]).unwrap_or_default();
    if is_absent
        && let Some(reported) = known.or_else(|| {
            front.registry.decoded().find_map(|backend| backend.reported_image(reference))
        })
    {
        return caller.message(reported).await;
    }
    pass_on(caller, Ok(answer.into())).await;
}
