//! Calls to a cell: each with a deadline, and with an answer in the kubelet's ids.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use futures::future::BoxFuture;
use kiyot_link::channel::{Channel, truncate};
use kiyot_proto::{
    bounds,
    cell::{HelloReply, agent_client::AgentClient},
    cri::{self, runtime_service_client::RuntimeServiceClient},
};
use tonic::{Code, Request, Status};

use super::view::{Container, Sandbox};
use crate::backends::milpa::cells::Cell;

/// How long a call without a deadline of its own may take: what a cell's containerd does for one
/// container.
pub(super) const CALL: Duration = Duration::from_secs(60);
/// How long a call waits for a cell that is not connected at the moment: it may just be calling
/// home again.
const LINK_PATIENCE: Duration = Duration::from_secs(5);
/// Characters of the longest id that a cell may give; containerd's have 64, and "sha256:" before
/// them for images.
const LONGEST_ID: usize = 256;
/// Characters of the longest reference of an image that a cell may give. The registries' own bound
/// is 255 for the name, to which comes a digest.
const LONGEST_REFERENCE: usize = 1024;
/// As long as any call may be said to take: a year. gRPC knows no time beyond 11,000.
const LONGEST_TIME: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// CRI of the cell's containerd, for all calls but `ExecSync`.
pub(super) fn runtime(cell: &Cell) -> RuntimeServiceClient<Channel> {
    RuntimeServiceClient::new(cell.link.bulk.clone())
        .max_decoding_message_size(bounds::MAX_RESPONSE_BYTES)
}

/// CRI of the cell's containerd, for `ExecSync`, whose answer may be as long as a kubelet takes it.
pub(super) fn runtime_for_exec(cell: &Cell) -> RuntimeServiceClient<Channel> {
    RuntimeServiceClient::new(cell.link.bulk.clone())
        .max_decoding_message_size(bounds::MAX_EXEC_RESPONSE_BYTES)
}

/// The cell's agent.
pub(super) fn agent(cell: &Cell) -> AgentClient<Channel> {
    AgentClient::new(cell.link.bulk.clone()).max_decoding_message_size(bounds::MAX_RESPONSE_BYTES)
}

/// A request that fails after this time, a year at most.
pub(super) fn within<T>(time: Duration, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(time.min(LONGEST_TIME));
    request
}

/// The id that a cell gives a sandbox, a container or an image. It is kept, in all lists some of
/// them, and told to the cell again.
///
/// INTERNAL if it is none: allowed are 1 to [`LONGEST_ID`] printable ASCII characters.
pub(super) fn checked_id(id: String) -> Result<String, Status> {
    if is_word(&id, LONGEST_ID) {
        return Ok(id);
    }
    let shown: String = id.chars().take(80).collect();
    Err(Status::internal(format!(
        "the cell gave the id {shown:?}: allowed are 1 to {LONGEST_ID} printable ASCII characters"
    )))
}

/// The reference by which a cell knows a container's image, unless it is none.
pub(super) fn checked_reference(reference: &str) -> Option<&str> {
    Some(reference).filter(|reference| is_word(reference, LONGEST_REFERENCE))
}

fn is_word(text: &str, longest: usize) -> bool {
    (1..=longest).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// What is left of a caller's time, `usual` if that is less.
pub(super) fn left(deadline: Option<Instant>, usual: Duration) -> Duration {
    deadline.map_or(usual, |deadline| deadline.saturating_duration_since(Instant::now()).min(usual))
}

/// `None` for what is not there (`NOT_FOUND`): to stop and to remove that is done, as it is for
/// containerd.
pub(super) fn known<T>(found: Result<T, Status>) -> Result<Option<T>, Status> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(status) if status.code() == Code::NotFound => Ok(None),
        Err(status) => Err(status),
    }
}

/// Removes a container from its cell; one that is not there is removed.
pub(super) async fn remove_container(cell: &Cell, container: &Container) -> Result<(), Status> {
    let request =
        cri::RemoveContainerRequest { container_id: container.cell_container.to_string() };
    let mut runtime = runtime(cell);
    let removed =
        answered(CALL, "RemoveContainer", runtime.remove_container(within(CALL, request))).await;
    known(removed).map(|_| ()).map_err(|status| container.restored(&status))
}

/// Waits for a call's answer no longer than a time, whatever becomes of the connection. The calls
/// of tonic are large: in a box, whoever waits is not.
pub(super) fn answered<'a, T: 'a>(
    time: Duration,
    what: &'static str,
    call: impl Future<Output = Result<tonic::Response<T>, Status>> + Send + 'a,
) -> BoxFuture<'a, Result<T, Status>> {
    Box::pin(async move {
        match tokio::time::timeout(time, call).await {
            Ok(answer) => answer.map(tonic::Response::into_inner),
            Err(_) => Err(Status::deadline_exceeded(format!(
                "{what}: the cell did not answer within {} s",
                time.as_secs_f32()
            ))),
        }
    })
}

/// The agent's own words about a cell that is connected; `UNAVAILABLE` for one that is not.
pub(super) async fn connected(
    cell: &Cell,
    pod: &str,
    deadline: Option<Instant>,
) -> Result<HelloReply, Status> {
    match tokio::time::timeout(left(deadline, LINK_PATIENCE), cell.link.control.connected()).await {
        Ok(Some(line)) => Ok(line.hello().clone()),
        Ok(None) | Err(_) => {
            Err(Status::unavailable(format!("cell {} of pod {pod} is not connected", cell.id)))
        }
    }
}

/// Whether a cell is connected now.
pub(super) fn is_connected(cell: &Cell) -> bool {
    cell.link.control.is_connected()
}

/// A status of a cell with the id that the kubelet knows in place of the cell's. A cell's id may be
/// much shorter, and be all that it says: the message is no longer for it.
pub(super) fn restored(status: &Status, cell_id: &str, id: &str) -> Status {
    if cell_id.is_empty() || !status.message().contains(cell_id) {
        return status.clone();
    }
    Status::new(status.code(), truncate(&status.message().replace(cell_id, id)))
}

impl Container {
    /// A status of its cell, in its own id.
    pub(super) fn restored(&self, status: &Status) -> Status {
        restored(status, &self.cell_container, self.id.as_str())
    }
}

impl Sandbox {
    /// A status of its cell, in its own id.
    pub(super) fn restored(&self, status: &Status) -> Status {
        restored(status, &self.meta().cell_sandbox, self.id.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies P11.
    #[test]
    fn ids_of_cells_are_words_of_bounded_length() {
        for good in ["0123456789abcdef", "a", &"x".repeat(LONGEST_ID)] {
            assert_eq!(checked_id(good.to_owned()).unwrap(), good);
        }
        for bad in ["", "a b", "a\n", "\u{e4}", "\0", &"x".repeat(LONGEST_ID + 1)] {
            let refused = checked_id(bad.to_owned()).unwrap_err();
            assert_eq!(refused.code(), tonic::Code::Internal);
            assert!(refused.message().contains("allowed are 1 to 256"), "{refused}");
        }
        assert_eq!(
            checked_reference("docker.io/library/busybox@sha256:2"),
            Some("docker.io/library/busybox@sha256:2")
        );
        assert!(
            checked_reference("").is_none()
                && checked_reference(&"x".repeat(LONGEST_REFERENCE + 1)).is_none()
        );
    }

    #[test]
    fn no_time_is_too_long_for_grpc() {
        let request = within(Duration::from_secs(u64::MAX), ());
        assert_eq!(request.metadata().get("grpc-timeout").unwrap(), "31622400S");
    }
}
