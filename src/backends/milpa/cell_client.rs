//! Calls to a cell: CRI to its containerd, and calls to its agent.
//!
//! Only this module sets deadlines and size limits of responses, and checks and translates ids.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use futures::future::BoxFuture;
use kiyot_link::channel::{Channel, truncate};
use kiyot_proto::{
    bounds,
    cell::HelloReply,
    cri::{self, runtime_service_client::RuntimeServiceClient},
};
use tonic::{Request, Response, Status};

use super::{
    cells::Cell,
    failure::{Code, Failure},
    gateway::{CellLink, ControlChannel},
    pods::{Container, Sandbox},
};

mod agent_calls;
mod image_calls;

/// Default time limit of a call: a cell's containerd finishes its work on one container within it.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit of a call whose response is optional.
pub(crate) const OPTIONAL_CALL_TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit of a cell for changes to the files of volumes.
pub(crate) const CHANGE_FILES_TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit of a cell for a query, a file, the trim of a log, and the start of a stream.
const QUERY_TIMEOUT: Duration = Duration::from_secs(20);
/// Longest wait for a cell that is not connected: its agent may be dialling again.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest id that is accepted from a cell, in bytes. containerd's ids have 64, with the prefix
/// `sha256:` for images.
const MAX_ID_BYTES: usize = 256;
/// Longest image reference that is accepted from a cell, in bytes. Registries limit the name to 255
/// bytes, and a digest follows it.
const MAX_REFERENCE_BYTES: usize = 1024;
/// Longest part of an invalid id that an error repeats, in characters.
const MAX_SHOWN_CHARACTERS: usize = 80;
/// Longest timeout of a call: a year. gRPC can't express more than 11,000 years.
const MAX_TIMEOUT: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// Calls to one cell over its bulk connection.
#[derive(Debug, Clone)]
pub(crate) struct CellClient {
    bulk: Channel,
}

macro_rules! runtime_calls {
    ($max_response_bytes:expr;
     $($method:ident($request:ident) -> $response:ident, $name:literal;)*) => {
        impl CellClient {
            $(
                #[doc = concat!("Calls `", $name, "` of the cell's containerd.")]
                pub(crate) fn $method(
                    &self,
                    timeout: Duration,
                    request: cri::$request,
                ) -> BoxFuture<'static, Result<cri::$response, Failure>> {
                    let mut runtime = RuntimeServiceClient::new(self.bulk.clone())
                        .max_decoding_message_size($max_response_bytes);
                    call(timeout, $name, async move {
                        runtime.$method(with_timeout(timeout, request)).await
                    })
                }
            )*
        }
    };
}

runtime_calls! {
    bounds::MAX_RESPONSE_BYTES;
    attach(AttachRequest) -> AttachResponse, "Attach";
    container_stats(ContainerStatsRequest) -> ContainerStatsResponse, "ContainerStats";
    container_status(ContainerStatusRequest) -> ContainerStatusResponse, "ContainerStatus";
    create_container(CreateContainerRequest) -> CreateContainerResponse, "CreateContainer";
    exec(ExecRequest) -> ExecResponse, "Exec";
    list_pod_sandbox(ListPodSandboxRequest) -> ListPodSandboxResponse, "ListPodSandbox";
    list_containers(ListContainersRequest) -> ListContainersResponse, "ListContainers";
    pod_sandbox_stats(PodSandboxStatsRequest) -> PodSandboxStatsResponse, "PodSandboxStats";
    pod_sandbox_status(PodSandboxStatusRequest) -> PodSandboxStatusResponse, "PodSandboxStatus";
    port_forward(PortForwardRequest) -> PortForwardResponse, "PortForward";
    remove_container(RemoveContainerRequest) -> RemoveContainerResponse, "RemoveContainer";
    remove_pod_sandbox(RemovePodSandboxRequest) -> RemovePodSandboxResponse, "RemovePodSandbox";
    run_pod_sandbox(RunPodSandboxRequest) -> RunPodSandboxResponse, "RunPodSandbox";
    start_container(StartContainerRequest) -> StartContainerResponse, "StartContainer";
    status(StatusRequest) -> StatusResponse, "Status";
    stop_container(StopContainerRequest) -> StopContainerResponse, "StopContainer";
    stop_pod_sandbox(StopPodSandboxRequest) -> StopPodSandboxResponse, "StopPodSandbox";
    update_container_resources(UpdateContainerResourcesRequest)
        -> UpdateContainerResourcesResponse, "UpdateContainerResources";
    version(VersionRequest) -> VersionResponse, "Version";
}

// The response of ExecSync may be as long as a kubelet accepts.
runtime_calls! {
    bounds::MAX_EXEC_RESPONSE_BYTES;
    exec_sync(ExecSyncRequest) -> ExecSyncResponse, "ExecSync";
}

impl CellClient {
    /// Creates a client of a cell.
    pub(crate) fn new(cell: &Cell) -> Self {
        Self::over(&cell.link)
    }

    /// Creates a client over a cell's link.
    pub(crate) fn over(link: &CellLink) -> Self {
        Self { bulk: link.bulk.clone() }
    }

    /// Removes a container from the cell. Succeeds if the container is absent.
    pub(crate) async fn remove_known_container(
        &self,
        container: &Container,
    ) -> Result<(), Failure> {
        let container_id = container.cell_container.to_string();
        let request = cri::RemoveContainerRequest { container_id };
        let removed = self.remove_container(CALL_TIMEOUT, request).await;
        found(removed).map(|_| ()).map_err(|failure| container.restored(&failure))
    }
}

/// Removes a container without a record from its cell, and logs a failure. The next attempt to
/// create it finds a container that stays, and it ends with the cell.
pub(crate) async fn discard_container(cell: &Cell, cell_container: &str) {
    let request = cri::RemoveContainerRequest { container_id: cell_container.to_owned() };
    if let Err(failure) = CellClient::new(cell).remove_container(CALL_TIMEOUT, request).await
        && let Some(suppressed) = cell.link.lines.admit()
    {
        tracing::warn!(
            cell = %cell.id,
            cell_container,
            status = failure.message(),
            suppressed,
            "container not removed from its cell"
        );
    }
}

/// Returns a request with a timeout of at most a year.
fn with_timeout<T>(timeout: Duration, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(timeout.min(MAX_TIMEOUT));
    request
}

/// Limits the wait for a response, even on a broken connection. Boxed, because tonic's futures are
/// large and the callers' futures contain them.
fn call<T: 'static>(
    timeout: Duration,
    name: &'static str,
    call: impl Future<Output = Result<Response<T>, Status>> + Send + 'static,
) -> BoxFuture<'static, Result<T, Failure>> {
    Box::pin(async move {
        match tokio::time::timeout(timeout, call).await {
            Ok(response) => response.map(Response::into_inner).map_err(Failure::of_cell),
            Err(_) => Err(Failure::cell(
                Code::DeadlineExceeded,
                format!("{name}: the cell did not answer within {} s", timeout.as_secs_f32()),
            )),
        }
    })
}

/// Returns the time until a caller's deadline, `limit` at most.
pub(crate) fn time_left(deadline: Option<Instant>, limit: Duration) -> Duration {
    deadline.map_or(limit, |deadline| deadline.saturating_duration_since(Instant::now()).min(limit))
}

/// Turns `NOT_FOUND` into `None`: an absent container counts as stopped and removed, as in
/// containerd.
pub(crate) fn found<T>(result: Result<T, Failure>) -> Result<Option<T>, Failure> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(failure) if failure.code() == Code::NotFound => Ok(None),
        Err(failure) => Err(failure),
    }
}

/// Checks the id that a cell gives a sandbox, a container or an image. The daemon records and lists
/// ids, and sends them back to the cell.
///
/// Returns INTERNAL unless the id consists of 1 to [`MAX_ID_BYTES`] printable ASCII characters.
pub(crate) fn checked_id(id: String) -> Result<String, Failure> {
    if is_printable(&id, MAX_ID_BYTES) {
        return Ok(id);
    }
    let shown: String = id.chars().take(MAX_SHOWN_CHARACTERS).collect();
    Err(Failure::cell(
        Code::Internal,
        format!(
            "the cell gave the id {shown:?}: allowed are 1 to {MAX_ID_BYTES} printable ASCII \
             characters"
        ),
    ))
}

/// Returns a cell's reference of a container's image if it is valid.
pub(crate) fn checked_reference(reference: &str) -> Option<&str> {
    Some(reference).filter(|reference| is_printable(reference, MAX_REFERENCE_BYTES))
}

fn is_printable(text: &str, max_bytes: usize) -> bool {
    (1..=max_bytes).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Waits until a cell is connected, and returns its agent's greeting; UNAVAILABLE if it is not
/// connected in time.
pub(crate) async fn connected(
    cell: &Cell,
    pod: &str,
    deadline: Option<Instant>,
) -> Result<HelloReply, Failure> {
    let within = time_left(deadline, CONNECT_TIMEOUT);
    hello(&cell.link.control, within, || format!("cell {} of pod {pod}", cell.id)).await
}

/// Waits until a control connection exists, and returns the greeting of the cell's agent. The
/// error names the cell as `name` does.
pub(crate) async fn hello(
    control: &ControlChannel,
    within: Duration,
    name: impl FnOnce() -> String,
) -> Result<HelloReply, Failure> {
    let connection = tokio::time::timeout(within, control.connected()).await.ok().flatten();
    connection
        .map(|connection| connection.hello().clone())
        .ok_or_else(|| Failure::cell(Code::Unavailable, format!("{} is not connected", name())))
}

pub(crate) fn is_connected(cell: &Cell) -> bool {
    cell.link.control.is_connected()
}

/// Replaces the cell's id in a failure by the id that the kubelet knows. Truncates the message
/// again, because the kubelet's id may be longer.
fn restored(failure: &Failure, cell_id: &str, id: &str) -> Failure {
    if cell_id.is_empty() || !failure.message().contains(cell_id) {
        return failure.clone();
    }
    failure.clone().with_message(truncate(&failure.message().replace(cell_id, id)))
}

impl Container {
    /// Replaces the cell's id of this container in a failure.
    pub(crate) fn restored(&self, failure: &Failure) -> Failure {
        restored(failure, &self.cell_container, self.id.as_str())
    }
}

impl Sandbox {
    /// Replaces the cell's id of this sandbox in a failure.
    pub(crate) fn restored(&self, failure: &Failure) -> Failure {
        restored(failure, &self.meta().cell_sandbox, self.id.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies P11.
    #[test]
    fn id_of_a_cell_is_printable_and_bounded() {
        for good in ["0123456789abcdef", "a", &"x".repeat(MAX_ID_BYTES)] {
            assert_eq!(checked_id(good.to_owned()).unwrap(), good);
        }
        for bad in ["", "a b", "a\n", "\u{e4}", "\0", &"x".repeat(MAX_ID_BYTES + 1)] {
            let refused = checked_id(bad.to_owned()).unwrap_err();
            assert_eq!(refused.code(), Code::Internal);
            assert!(refused.message().contains("allowed are 1 to 256"), "{refused}");
        }
        let reference = "docker.io/library/busybox@sha256:2";
        assert_eq!(checked_reference(reference), Some(reference));
        let long = "x".repeat(MAX_REFERENCE_BYTES + 1);
        assert_eq!([checked_reference(""), checked_reference(&long)], [None, None]);
    }

    #[test]
    fn timeout_is_bounded_to_a_year() {
        let request = with_timeout(Duration::from_secs(u64::MAX), ());
        assert_eq!(request.metadata().get("grpc-timeout").unwrap(), "31622400S");
    }
}
