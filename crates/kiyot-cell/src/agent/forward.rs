//! Forwards CRI calls to the cell's containerd unchanged: bytes, metadata, trailers.
//!
//! containerd rolls back a cancelled call: a container whose start is cancelled reads EXITED, and a
//! kubelet counts a restart. So a call that changes state is detached from its connection and runs
//! until its own deadline. A restarted daemon finds the call completed.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body as HttpBody;
use http_body_util::Limited;
use tokio::time::timeout;
use tonic::{Status, body::Body};
use tower::{BoxError, Service, ServiceExt};

use super::{
    changing_calls::ChangingCalls,
    runtime::{MAX_MESSAGE_BYTES, Runtime},
};

/// Header of a gRPC message, in bytes.
const GRPC_FRAME_HEADER_BYTES: usize = 5;

/// Methods that run to completion when their connection is lost. ExecSync is excluded, because its
/// output would be lost. PullImage is excluded, because the daemon cancels a stalled pull, and a
/// cancelled pull does no harm.
const DETACHED_METHODS: [&str; 10] = [
    "/runtime.v1.RuntimeService/RunPodSandbox",
    "/runtime.v1.RuntimeService/StopPodSandbox",
    "/runtime.v1.RuntimeService/RemovePodSandbox",
    "/runtime.v1.RuntimeService/CreateContainer",
    "/runtime.v1.RuntimeService/StartContainer",
    "/runtime.v1.RuntimeService/StopContainer",
    "/runtime.v1.RuntimeService/RemoveContainer",
    "/runtime.v1.RuntimeService/UpdateContainerResources",
    "/runtime.v1.RuntimeService/UpdatePodSandboxResources",
    "/runtime.v1.ImageService/RemoveImage",
];
/// Upper bound on detached calls. Calls beyond it are cancelled with their connection.
pub const MAX_DETACHED_CALLS: usize = 64;
/// Timeout of a detached call without a deadline. The daemon sets one on each call.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(120);
/// gRPC's header with a call's timeout, which the channel to containerd honours.
const GRPC_TIMEOUT_HEADER: &str = "grpc-timeout";

/// Returns whether the path is a CRI method's.
pub fn is_cri(path: &str) -> bool {
    path.starts_with("/runtime.v1.RuntimeService/") || path.starts_with("/runtime.v1.ImageService/")
}

/// Sends a call to containerd and returns the response. Request and response are limited to one
/// message of [`MAX_MESSAGE_BYTES`].
///
/// A call of `DETACHED_METHODS` continues after this future is dropped, if `calls` admits it.
pub async fn forward<B>(
    runtime: &Runtime,
    calls: &ChangingCalls,
    request: Request<B>,
) -> Response<Body>
where
    B: HttpBody<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    if !DETACHED_METHODS.contains(&request.uri().path()) {
        return send(runtime.clone(), request).await;
    }
    let Some(call) = calls.begin() else {
        return send(runtime.clone(), request).await;
    };
    let has_deadline = request.headers().contains_key(GRPC_TIMEOUT_HEADER);
    let sent = send(runtime.clone(), request);
    // The task ends by its deadline, or with the agent.
    let task = tokio::spawn(async move {
        let _call = call;
        if has_deadline {
            return sent.await;
        }
        let answer = timeout(DEFAULT_TIMEOUT, sent).await;
        answer.unwrap_or_else(|_| {
            Status::deadline_exceeded(
                "the cell's containerd: no response within the default timeout",
            )
            .into_http()
        })
    });
    task.await.unwrap_or_else(|error| {
        Status::internal(format!("task of the call failed: {error}")).into_http()
    })
}

async fn send<B>(runtime: Runtime, request: Request<B>) -> Response<Body>
where
    B: HttpBody<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let limit = MAX_MESSAGE_BYTES + GRPC_FRAME_HEADER_BYTES;
    let request = request.map(|body| Body::new(Limited::new(body, limit)));
    let answer = async { runtime.channel().ready().await?.call(request).await }.await;
    match answer {
        Ok(answer) => answer.map(|body| Body::new(Limited::new(body, limit))),
        Err(error) => {
            Status::unavailable(format!("the cell's containerd: {}", crate::with_sources(&error)))
                .into_http()
        }
    }
}

#[cfg(test)]
mod tests;
