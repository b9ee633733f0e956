//! `Shutdown`: stops the pod's containers. Its sandbox ends with the cell.

use std::time::Duration;

use futures::{StreamExt, stream};
use kiyot_proto::cri::{ContainerState, ListContainersRequest, StopContainerRequest};
use tonic::Status;

use super::runtime::{QUERY_TIMEOUT, Runtime, with_timeout};

/// Deadline of a `StopContainer` call. The rest of the containers ends with the cell.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum of concurrent `StopContainer` calls.
const MAX_CONCURRENT_STOPS: usize = 8;

/// Kills all containers that have not exited, so that containerd still reports their exits and the
/// rest of their logs. Returns the last error; the cell's power-off ends the remaining containers.
///
/// The sandbox is not stopped: without containers it is only a pause process and mounts of the
/// cell, and these end with the cell faster than runc and a shim would remove them.
pub async fn stop_all(runtime: &Runtime) -> Result<(), Status> {
    let containers = runtime
        .runtime()
        .list_containers(with_timeout(QUERY_TIMEOUT, ListContainersRequest::default()))
        .await?
        .into_inner()
        .containers;
    let alive =
        containers.into_iter().filter(|of| of.state != ContainerState::ContainerExited as i32);
    let stops = alive.map(|container| {
        let mut client = runtime.runtime();
        // A timeout of 0 kills at once (CRI, StopContainerRequest).
        let request = StopContainerRequest { container_id: container.id, timeout: 0 };
        async move { client.stop_container(with_timeout(STOP_TIMEOUT, request)).await.map(drop) }
    });
    stream::iter(stops)
        .buffer_unordered(MAX_CONCURRENT_STOPS)
        .fold(Ok(()), async |outcome, stopped| stopped.and(outcome))
        .await
}
