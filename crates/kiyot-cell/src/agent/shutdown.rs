//! `Shutdown`: stops the pod's sandboxes.

use std::time::Duration;

use kiyot_proto::cri::{ListPodSandboxRequest, PodSandboxState, StopPodSandboxRequest};
use tonic::Status;

use super::runtime::{QUERY_TIMEOUT, Runtime, with_timeout};

/// Deadline of a `StopPodSandbox` call. What is left ends with the cell.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// Stops all sandboxes. Returns the last error; the cell's power-off ends what could not be
/// stopped.
pub async fn stop_all(runtime: &Runtime) -> Result<(), Status> {
    let sandboxes = runtime
        .runtime()
        .list_pod_sandbox(with_timeout(QUERY_TIMEOUT, ListPodSandboxRequest::default()))
        .await?
        .into_inner()
        .items;
    let mut outcome = Ok(());
    for sandbox in sandboxes {
        if sandbox.state != PodSandboxState::SandboxReady as i32 {
            continue;
        }
        if let Err(status) = runtime
            .runtime()
            .stop_pod_sandbox(with_timeout(
                STOP_TIMEOUT,
                StopPodSandboxRequest { pod_sandbox_id: sandbox.id },
            ))
            .await
        {
            outcome = Err(status);
        }
    }
    outcome
}
