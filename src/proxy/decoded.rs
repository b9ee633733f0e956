//! Calls to decoded backends: answered from memory on this thread, or on the main runtime.

use std::{sync::Arc, time::Instant};

use bytes::Bytes;
use kiyot_engine::request::RuleProviders;
use tokio::{runtime::Handle, time::timeout_at};
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;
use tracing::Instrument;

use crate::backends::{DecodedBackend, Method, cri::MAX_MESSAGE_BYTES};

/// Answers a call of any method but `ListPodSandboxMetrics`. Dropping the future drops the
/// backend's future.
pub(super) async fn answer(
    main: &Handle,
    decoded: &Arc<dyn DecodedBackend>,
    method: Method,
    message: Bytes,
    deadline: Option<Instant>,
) -> Result<Bytes, Status> {
    let answer = match decoded.snapshot(method, &message) {
        Some(answer) => answer,
        None => {
            let decoded = decoded.clone();
            let call = async move { decoded.call(method, message, deadline).await };
            on_main(main, method, deadline, call).await
        }
    }?;
    bounded(answer)
}

/// Answers `RunPodSandbox` of a pod whose rule bounds the providers of its cell.
pub(super) async fn run_by_rule(
    main: &Handle,
    decoded: &Arc<dyn DecodedBackend>,
    message: Bytes,
    rule: RuleProviders,
    deadline: Option<Instant>,
) -> Result<Bytes, Status> {
    let decoded = decoded.clone();
    let call = async move { decoded.run_by_rule(message, rule, deadline).await };
    bounded(on_main(main, Method::RunPodSandbox, deadline, call).await?)
}

/// Returns a backend's part of `ListPodSandboxMetrics`, by the descriptors of the node.
pub(super) async fn list_metrics(
    main: &Handle,
    decoded: &Arc<dyn DecodedBackend>,
    descriptors: Bytes,
    deadline: Option<Instant>,
) -> Result<Bytes, Status> {
    let decoded = decoded.clone();
    let list = async move { Ok(decoded.list_metrics(descriptors).await) };
    bounded(on_main(main, Method::ListPodSandboxMetrics, deadline, list).await?)
}

fn bounded(answer: Bytes) -> Result<Bytes, Status> {
    if answer.len() > MAX_MESSAGE_BYTES { Err(too_large(answer.len())) } else { Ok(answer) }
}

async fn on_main(
    main: &Handle,
    method: Method,
    deadline: Option<Instant>,
    call: impl Future<Output = Result<Bytes, Status>> + Send + 'static,
) -> Result<Bytes, Status> {
    // Bounded by the limit on open calls.
    let call = AbortOnDropHandle::new(main.spawn(call.in_current_span()));
    let joined = match deadline {
        Some(deadline) => match timeout_at(deadline.into(), call).await {
            Ok(joined) => joined,
            Err(_) => {
                return Err(Status::deadline_exceeded(format!(
                    "{method} was not answered before its deadline"
                )));
            }
        },
        None => call.await,
    };
    joined.unwrap_or_else(|error| {
        if error.is_panic() {
            tracing::error!(%method, "call panicked");
            Err(Status::internal(format!("{method} panicked; kiyot's log has the details")))
        } else {
            Err(Status::unavailable("kiyot is stopping"))
        }
    })
}

/// Returns the status of a response that is larger than a caller accepts.
pub(super) fn too_large(length: usize) -> Status {
    Status::resource_exhausted(format!(
        "the response has {length} bytes; allowed are at most {MAX_MESSAGE_BYTES}"
    ))
}
