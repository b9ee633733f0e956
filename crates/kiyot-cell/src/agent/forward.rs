//! CRI, forwarded to the cell's containerd as it came: bytes, metadata, trailers.
//!
//! containerd undoes what it has half done when a call is cancelled: a container whose start is cut
//! short reads EXITED, and a kubelet counts a restart. So a call that changes something is done to
//! its end, with_timeout its deadline, when the connection that it came by is lost: the daemon that is
//! started again finds it done.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body as HttpBody;
use http_body_util::Limited;
use tokio::{sync::Semaphore, time::timeout};
use tonic::{Status, body::Body};
use tower::{BoxError, Service, ServiceExt};

use super::runtime::{MAX_MESSAGE_BYTES, Runtime};

/// A message's head in gRPC's framing, in bytes.
const GRPC_FRAME_HEADER_BYTES: usize = 5;

/// What is done to its end. Not ExecSync: nobody would get its output. Not PullImage: the daemon
/// ends one that stands still or that is to begin again, and one that is cut short is no harm.
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
/// How many calls at a time are done to their end; more are cancelled with their connection.
pub const MAX_DETACHED_CALLS: usize = 64;
/// How long a call may take that came without a deadline. The daemon gives each one.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(120);
/// A call's deadline, in gRPC. The channel to containerd keeps to it.
const GRPC_TIMEOUT_HEADER: &str = "grpc-timeout";

/// Whether a path is one of CRI's.
pub fn is_cri(path: &str) -> bool {
    path.starts_with("/runtime.v1.RuntimeService/") || path.starts_with("/runtime.v1.ImageService/")
}

/// Sends a call to containerd and hands back its answer. Either way no more than one message of the
/// largest size goes through.
///
/// One that changes something goes on when this is dropped, if `detached_calls` has room for it.
pub async fn forward<B>(
    runtime: &Runtime,
    detached_calls: &Arc<Semaphore>,
    request: Request<B>,
) -> Response<Body>
where
    B: HttpBody<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    if !DETACHED_METHODS.contains(&request.uri().path()) {
        return send(runtime.clone(), request).await;
    }
    let Ok(permit) = Arc::clone(detached_calls).try_acquire_owned() else {
        return send(runtime.clone(), request).await;
    };
    let has_deadline = request.headers().contains_key(GRPC_TIMEOUT_HEADER);
    let sent = send(runtime.clone(), request);
    // It ends by its deadline, and with the agent.
    let task = tokio::spawn(async move {
        let _permit = permit;
        if has_deadline {
            return sent.await;
        }
        let answer = timeout(DEFAULT_TIMEOUT, sent).await;
        answer.unwrap_or_else(|_| {
            Status::deadline_exceeded(
                "the cell's containerd: no answer to a call without a deadline",
            )
            .into_http()
        })
    });
    task.await.unwrap_or_else(|error| {
        Status::internal(format!("the call's task ended: {error}")).into_http()
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
