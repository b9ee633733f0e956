//! Follows what the cell's containerd does with sandboxes and containers, and keeps the [`Board`]
//! fresh.
//!
//! containerd's events say that something happened; CRI's own state follows a little later. So an
//! event only raises an expectation, and CRI is listed until it is met.

use std::{
    collections::HashMap,
    path::PathBuf,
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use containerd_client::{
    events::{ContainerCreate, ContainerDelete, TaskExit, TaskStart},
    services::v1::{PublishRequest, SubscribeRequest, events_client::EventsClient},
    types::Envelope,
};
use kiyot_proto::cri::{
    ContainerState, ContainerStatus, ContainerStatusRequest, ListContainersRequest,
    ListPodSandboxRequest, PodSandboxState, PodSandboxStatus, PodSandboxStatusRequest,
};
use prost::Message;
use tokio::time::MissedTickBehavior;
use tonic::{Code, Status, Streaming};

use super::{
    board::Board,
    disk::Disk,
    logs,
    runtime::{ASK, Runtime, namespaced, within},
};

/// The topic of an event of our own: when it comes back, we are subscribed. (containerd 1.6 answers
/// a subscription with the first event only.)
const ECHO: &str = "/kiyot/subscribed";
/// How often it is sent until then.
const ECHO_PERIOD: Duration = Duration::from_millis(50);
/// What of containerd's events is of interest.
const TOPICS: [&str; 3] =
    [r#"topic=="/kiyot/subscribed""#, r#"topic~="^/tasks/""#, r#"topic~="^/containers/""#];
/// How long CRI's state may take to follow an event, before it is taken as it is.
const EXPECTED_WITHIN: Duration = Duration::from_secs(10);
/// The first and the longest wait between two lists for an expectation.
const LIST_PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(500));
/// How often all is listed without any reason.
const LIST_PERIOD: Duration = Duration::from_secs(5);
/// How often once containerd has been started again: the shims of containers that run on then send
/// their next event late, or not at all.
const LIST_PERIOD_AFTER_LOSS: Duration = Duration::from_secs(1);
/// The wait before a lost containerd is asked again.
const RETRY: Duration = Duration::from_millis(100);
/// Expectations at a time; beyond, the periodic list must do.
const EXPECTATIONS: usize = 1024;

/// What CRI must say of an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expected {
    Present,
    Started,
    Exited,
    Absent,
}

/// Follows containerd, across its restarts. Never returns.
#[derive(Debug)]
pub struct Follower {
    runtime: Runtime,
    board: Arc<Board>,
    disk: Arc<Disk>,
    pod_dir: PathBuf,
    expected: HashMap<String, (Expected, Instant)>,
    list_period: Duration,
}

impl Follower {
    /// What it finds is written on the board.
    pub fn new(runtime: Runtime, board: Arc<Board>, disk: Arc<Disk>, pod_dir: PathBuf) -> Self {
        Self { runtime, board, disk, pod_dir, expected: HashMap::new(), list_period: LIST_PERIOD }
    }

    /// Follows until dropped.
    pub async fn run(mut self) {
        loop {
            if let Err(status) = self.follow().await {
                tracing::warn!(code = ?status.code(), message = status.message(), "containerd's events are lost, and are asked for again");
            }
            self.list_period = LIST_PERIOD_AFTER_LOSS;
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Subscribes, then lists, then follows the events until they end.
    async fn follow(&mut self) -> Result<(), Status> {
        let mut events = self.subscribe().await?;
        self.list().await?;
        let mut period = tokio::time::interval_at(
            tokio::time::Instant::now() + self.list_period,
            self.list_period,
        );
        period.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut pause = LIST_PAUSES.0;
        loop {
            let waiting = !self.expected.is_empty();
            tokio::select! {
                event = events.message() => {
                    match event? {
                        Some(event) => self.expect(&event),
                        None => return Err(Status::unavailable("containerd ended its events")),
                    }
                    pause = LIST_PAUSES.0;
                    if self.expected.is_empty() {
                        continue;
                    }
                }
                () = tokio::time::sleep(pause), if waiting => pause = (pause * 2).min(LIST_PAUSES.1),
                _ = period.tick() => {}
            }
            self.list().await?;
        }
    }

    async fn subscribe(&self) -> Result<Streaming<Envelope>, Status> {
        let mut client = EventsClient::new(self.runtime.channel());
        let request = SubscribeRequest { filters: TOPICS.map(str::to_owned).to_vec() };
        let mut subscription = pin!(client.subscribe(namespaced(tonic::Request::new(request))));
        let mut echo = tokio::time::interval(ECHO_PERIOD);
        loop {
            tokio::select! {
                answer = &mut subscription => return answer.map(tonic::Response::into_inner),
                _ = echo.tick() => {
                    let event = prost_types::Any { type_url: "google.protobuf.Empty".to_owned(), value: Vec::new() };
                    let request = PublishRequest { topic: ECHO.to_owned(), event: Some(event) };
                    EventsClient::new(self.runtime.channel()).publish(namespaced(within(ASK, request))).await?;
                }
            }
        }
    }

    fn expect(&mut self, event: &Envelope) {
        let value = event.event.as_ref().map(|any| any.value.as_slice()).unwrap_or_default();
        let Some((id, expected)) = expectation(&event.topic, value) else { return };
        if self.expected.len() < EXPECTATIONS || self.expected.contains_key(&id) {
            self.expected.insert(id, (expected, Instant::now() + EXPECTED_WITHIN));
        }
    }

    /// Lists all, and asks for the full status of what is new, has another state, or is expected to
    /// change.
    async fn list(&mut self) -> Result<(), Status> {
        let listed = self
            .runtime
            .runtime()
            .list_pod_sandbox(within(ASK, ListPodSandboxRequest::default()))
            .await?
            .into_inner()
            .items;
        let mut sandboxes = Vec::with_capacity(listed.len());
        for item in listed {
            let known = self
                .board
                .sandbox(&item.id)
                .filter(|known| known.state == item.state && !self.expected.contains_key(&item.id));
            sandboxes.extend(match known {
                Some(known) => Some(known),
                None => self.sandbox(item.id).await?,
            });
        }
        let listed = self
            .runtime
            .runtime()
            .list_containers(within(ASK, ListContainersRequest::default()))
            .await?
            .into_inner()
            .containers;
        let mut containers = Vec::with_capacity(listed.len());
        for item in listed {
            let known = self
                .board
                .container(&item.id)
                .filter(|known| known.state == item.state && !self.expected.contains_key(&item.id));
            containers.extend(match known {
                Some(known) => Some(known),
                None => self.container(item.id).await?,
            });
        }
        let now = Instant::now();
        self.expected.retain(|id, (expected, until)| {
            now < *until && !met(*expected, id, &sandboxes, &containers)
        });
        // containerd reports an exit when the log is complete: the log's size is told before the
        // exit.
        let (board, pod_dir) = (Arc::clone(&self.board), self.pod_dir.clone());
        let published = tokio::task::spawn_blocking(move || {
            board.set_logs(logs::sizes(&pod_dir));
            board.set_pods(sandboxes, containers);
        });
        published.await.map_err(|error| Status::internal(error.to_string()))
    }

    async fn sandbox(&self, id: String) -> Result<Option<PodSandboxStatus>, Status> {
        let request = PodSandboxStatusRequest { pod_sandbox_id: id, verbose: false };
        found(self.runtime.runtime().pod_sandbox_status(within(ASK, request)).await)
            .map(|answer| answer.and_then(|answer| answer.status))
    }

    async fn container(&self, id: String) -> Result<Option<ContainerStatus>, Status> {
        let request = ContainerStatusRequest { container_id: id, verbose: false };
        let answer = found(self.runtime.runtime().container_status(within(ASK, request)).await)?;
        let mut status = answer.and_then(|answer| answer.status).map(told);
        status.iter_mut().for_each(|status| self.disk.explain(status));
        Ok(status)
    }
}

/// Returns what the daemon is told of a container: what it has asked for itself is left out, so that
/// all containers of a large pod are in one message of the control connection.
fn told(status: ContainerStatus) -> ContainerStatus {
    ContainerStatus {
        labels: HashMap::new(),
        annotations: HashMap::new(),
        mounts: Vec::new(),
        ..status
    }
}

fn found<T>(answer: Result<tonic::Response<T>, Status>) -> Result<Option<T>, Status> {
    match answer {
        Ok(answer) => Ok(Some(answer.into_inner())),
        Err(status) if status.code() == Code::NotFound => Ok(None),
        Err(status) => Err(status),
    }
}

/// What an event makes us expect of which id.
fn expectation(topic: &str, value: &[u8]) -> Option<(String, Expected)> {
    match topic {
        "/containers/create" => Some((ContainerCreate::decode(value).ok()?.id, Expected::Present)),
        "/containers/delete" => Some((ContainerDelete::decode(value).ok()?.id, Expected::Absent)),
        "/tasks/start" => Some((TaskStart::decode(value).ok()?.container_id, Expected::Started)),
        "/tasks/exit" => {
            let exit = TaskExit::decode(value).ok()?;
            // Another id is that of an exec.
            (exit.id == exit.container_id).then_some((exit.container_id, Expected::Exited))
        }
        _ => None,
    }
}

fn met(
    expected: Expected,
    id: &str,
    sandboxes: &[PodSandboxStatus],
    containers: &[ContainerStatus],
) -> bool {
    let sandbox = sandboxes.iter().find(|status| status.id == id).map(|status| status.state);
    let container = containers.iter().find(|status| status.id == id).map(|status| status.state);
    let present = sandbox.is_some() || container.is_some();
    match expected {
        Expected::Present => present,
        Expected::Absent => !present,
        Expected::Started => {
            sandbox.is_some()
                || container.is_some_and(|state| state != ContainerState::ContainerCreated as i32)
        }
        Expected::Exited => {
            let gone = !present;
            gone || sandbox == Some(PodSandboxState::SandboxNotready as i32)
                || container == Some(ContainerState::ContainerExited as i32)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exec_s_exit_is_no_container_s() {
        let exit = TaskExit { container_id: "c".into(), id: "e".into(), ..Default::default() };
        assert_eq!(expectation("/tasks/exit", &exit.encode_to_vec()), None);
        let exit = TaskExit { id: "c".into(), ..exit };
        assert_eq!(
            expectation("/tasks/exit", &exit.encode_to_vec()),
            Some(("c".into(), Expected::Exited))
        );
    }

    #[test]
    fn an_expectation_is_met_by_what_cri_says() {
        let running = ContainerStatus {
            id: "c".into(),
            state: ContainerState::ContainerRunning as i32,
            ..Default::default()
        };
        let exited =
            ContainerStatus { state: ContainerState::ContainerExited as i32, ..running.clone() };
        assert!(met(Expected::Started, "c", &[], std::slice::from_ref(&running)));
        assert!(!met(Expected::Exited, "c", &[], std::slice::from_ref(&running)));
        assert!(met(Expected::Exited, "c", &[], std::slice::from_ref(&exited)));
        assert!(met(Expected::Started, "c", &[], &[exited]));
        assert!(!met(Expected::Absent, "c", &[], &[running]));
        assert!(!met(Expected::Present, "d", &[], &[]));
        assert!(met(Expected::Exited, "d", &[], &[]));
    }
}
