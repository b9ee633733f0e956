//! Watches sandboxes and containers in the cell's containerd, and updates the [`CellState`].
//!
//! containerd publishes an event before CRI's own state has changed. So an event adds an
//! expectation, and CRI is listed until the expectation is met. Most expectations come from a call
//! that the agent forwards, and are met when the call has ended: the watcher waits for the end of
//! the call instead of listing.

use std::{
    collections::HashMap,
    path::PathBuf,
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use containerd_client::{
    events::{ContainerCreate, ContainerDelete, ContainerUpdate, TaskExit, TaskStart},
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
    changing_calls::ChangingCalls,
    ephemeral_storage::EphemeralStorage,
    logs,
    runtime::{QUERY_TIMEOUT, Runtime, namespaced, with_timeout},
    state::CellState,
};

/// Topic of a probe event, which shows that the subscription is active: containerd 1.6 answers
/// `Subscribe` with the first event only.
const PROBE_TOPIC: &str = "/kiyot/subscribed";
/// Interval between probes until the subscription answers.
const PROBE_INTERVAL: Duration = Duration::from_millis(50);
/// Subscribed topics.
const TOPIC_FILTERS: [&str; 3] =
    [r#"topic=="/kiyot/subscribed""#, r#"topic~="^/tasks/""#, r#"topic~="^/containers/""#];
/// Longest wait for CRI's state to follow an event; then the expectation is dropped.
const EXPECTATION_TIMEOUT: Duration = Duration::from_secs(10);
/// First and longest interval between two lists while an expectation is unmet.
const LIST_INTERVALS: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(500));
/// Interval between lists without an event.
const RELIST_INTERVAL: Duration = Duration::from_secs(5);
/// Interval between lists after a restart of containerd: shims of running containers then send
/// their next event late, or not at all.
const RELIST_INTERVAL_AFTER_RESTART: Duration = Duration::from_secs(1);
/// Delay before a lost containerd is called again.
const RECONNECT_DELAY: Duration = Duration::from_millis(100);
/// Upper bound on unmet expectations. The periodic list covers further events.
const MAX_EXPECTATIONS: usize = 1024;

/// State of an id that CRI must reach after an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expectation {
    Present,
    Started,
    Exited,
    Absent,
    /// Other resources; no state shows this change.
    Updated,
}

impl Expectation {
    /// Returns whether only a call causes this state, not the end of a process.
    fn is_of_call(self) -> bool {
        self != Self::Exited
    }
}

/// Watches containerd across its restarts.
#[derive(Debug)]
pub struct RuntimeWatcher {
    runtime: Runtime,
    state: Arc<CellState>,
    storage: Arc<EphemeralStorage>,
    calls: Arc<ChangingCalls>,
    pod_dir: PathBuf,
    expected: HashMap<String, (Expectation, Instant)>,
    relist_interval: Duration,
}

impl RuntimeWatcher {
    /// Creates a watcher that publishes to `state`.
    pub fn new(
        runtime: Runtime,
        state: Arc<CellState>,
        storage: Arc<EphemeralStorage>,
        calls: Arc<ChangingCalls>,
        pod_dir: PathBuf,
    ) -> Self {
        Self {
            runtime,
            state,
            storage,
            calls,
            pod_dir,
            expected: HashMap::new(),
            relist_interval: RELIST_INTERVAL,
        }
    }

    /// Watches until dropped.
    pub async fn run(mut self) {
        loop {
            if let Err(status) = self.follow().await {
                tracing::warn!(
                    code = ?status.code(),
                    message = status.message(),
                    "containerd event stream lost, reconnecting"
                );
            }
            self.relist_interval = RELIST_INTERVAL_AFTER_RESTART;
            tokio::time::sleep(RECONNECT_DELAY).await;
        }
    }

    /// Subscribes, lists, then handles events until the stream ends.
    async fn follow(&mut self) -> Result<(), Status> {
        let mut events = self.subscribe().await?;
        self.list().await?;
        let mut relist = tokio::time::interval_at(
            tokio::time::Instant::now() + self.relist_interval,
            self.relist_interval,
        );
        relist.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut interval = LIST_INTERVALS.0;
        // Events without an expectation, for example probes, must not delay the next poll.
        let mut next_poll = tokio::time::Instant::now();
        loop {
            let polls = self.polls();
            tokio::select! {
                event = events.message() => {
                    let Some(event) = event? else {
                        return Err(Status::unavailable("containerd closed its event stream"));
                    };
                    if !self.expect(&event) || !self.polls() {
                        continue;
                    }
                    interval = LIST_INTERVALS.0;
                }
                () = self.calls.ended() => interval = LIST_INTERVALS.0,
                () = tokio::time::sleep_until(next_poll), if polls => {
                    interval = (interval * 2).min(LIST_INTERVALS.1);
                }
                _ = relist.tick() => {}
            }
            self.list().await?;
            next_poll = tokio::time::Instant::now() + interval;
        }
    }

    async fn subscribe(&self) -> Result<Streaming<Envelope>, Status> {
        let mut client = EventsClient::new(self.runtime.channel());
        let request = SubscribeRequest { filters: TOPIC_FILTERS.map(str::to_owned).to_vec() };
        let mut subscription = pin!(client.subscribe(namespaced(tonic::Request::new(request))));
        let mut probe = tokio::time::interval(PROBE_INTERVAL);
        loop {
            tokio::select! {
                answer = &mut subscription => return answer.map(tonic::Response::into_inner),
                _ = probe.tick() => {
                    self.publish_probe().await?;
                }
            }
        }
    }

    async fn publish_probe(&self) -> Result<(), Status> {
        let type_url = "google.protobuf.Empty".to_owned();
        let event = prost_types::Any { type_url, value: Vec::new() };
        let request = PublishRequest { topic: PROBE_TOPIC.to_owned(), event: Some(event) };
        EventsClient::new(self.runtime.channel())
            .publish(namespaced(with_timeout(QUERY_TIMEOUT, request)))
            .await
            .map(drop)
    }

    /// Adds the expectation of an event. Returns whether the event has an expectation.
    fn expect(&mut self, event: &Envelope) -> bool {
        let value = event.event.as_ref().map(|any| any.value.as_slice()).unwrap_or_default();
        let Some((id, expected)) = expectation(&event.topic, value) else { return false };
        if self.expected.len() < MAX_EXPECTATIONS || self.expected.contains_key(&id) {
            self.expected.insert(id, (expected, Instant::now() + EXPECTATION_TIMEOUT));
        }
        true
    }

    /// Returns whether CRI must be listed until an expectation is met, because no running call ends
    /// with it.
    fn polls(&self) -> bool {
        let is_calling = self.calls.is_any_running();
        self.expected.values().any(|(expected, _)| !(is_calling && expected.is_of_call()))
    }

    /// Lists sandboxes and containers. Reads the status of each that is new, has changed its state,
    /// or has an unmet expectation.
    async fn list(&mut self) -> Result<(), Status> {
        let listed = self
            .runtime
            .runtime()
            .list_pod_sandbox(with_timeout(QUERY_TIMEOUT, ListPodSandboxRequest::default()))
            .await?
            .into_inner()
            .items;
        let mut sandboxes = Vec::with_capacity(listed.len());
        for item in listed {
            let known = self
                .state
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
            .list_containers(with_timeout(QUERY_TIMEOUT, ListContainersRequest::default()))
            .await?
            .into_inner()
            .containers;
        let mut containers = Vec::with_capacity(listed.len());
        for item in listed {
            let known = self
                .state
                .container(&item.id)
                .filter(|known| known.state == item.state && !self.expected.contains_key(&item.id));
            containers.extend(match known {
                Some(known) => Some(known),
                None => self.container(item.id).await?,
            });
        }
        let now = Instant::now();
        self.expected.retain(|id, (expected, until)| {
            now < *until && !is_met(*expected, id, &sandboxes, &containers)
        });
        // containerd reports an exit after the log is complete, so the log's size is published
        // first.
        let (state, pod_dir) = (Arc::clone(&self.state), self.pod_dir.clone());
        let published = tokio::task::spawn_blocking(move || {
            state.set_logs(logs::sizes(&pod_dir));
            state.set_pods(sandboxes, containers);
        });
        published.await.map_err(|error| Status::internal(error.to_string()))
    }

    async fn sandbox(&self, id: String) -> Result<Option<PodSandboxStatus>, Status> {
        let request = PodSandboxStatusRequest { pod_sandbox_id: id, verbose: false };
        found(self.runtime.runtime().pod_sandbox_status(with_timeout(QUERY_TIMEOUT, request)).await)
            .map(|answer| answer.and_then(|answer| answer.status))
    }

    async fn container(&self, id: String) -> Result<Option<ContainerStatus>, Status> {
        let request = ContainerStatusRequest { container_id: id, verbose: false };
        let answer = found(
            self.runtime.runtime().container_status(with_timeout(QUERY_TIMEOUT, request)).await,
        )?;
        let mut status = answer.and_then(|answer| answer.status).map(without_config);
        status.iter_mut().for_each(|status| self.storage.set_eviction_reason(status));
        Ok(status)
    }
}

/// Removes fields that the daemon knows because it has set them, so that the statuses of all
/// containers of a large pod fit into one message of the control connection.
fn without_config(status: ContainerStatus) -> ContainerStatus {
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

/// Returns the id and the expectation of an event.
fn expectation(topic: &str, value: &[u8]) -> Option<(String, Expectation)> {
    match topic {
        "/containers/create" => {
            Some((ContainerCreate::decode(value).ok()?.id, Expectation::Present))
        }
        "/containers/delete" => {
            Some((ContainerDelete::decode(value).ok()?.id, Expectation::Absent))
        }
        "/containers/update" => {
            Some((ContainerUpdate::decode(value).ok()?.id, Expectation::Updated))
        }
        "/tasks/start" => Some((TaskStart::decode(value).ok()?.container_id, Expectation::Started)),
        "/tasks/exit" => {
            let exit = TaskExit::decode(value).ok()?;
            // Another id belongs to an exec.
            (exit.id == exit.container_id).then_some((exit.container_id, Expectation::Exited))
        }
        _ => None,
    }
}

fn is_met(
    expected: Expectation,
    id: &str,
    sandboxes: &[PodSandboxStatus],
    containers: &[ContainerStatus],
) -> bool {
    let sandbox = sandboxes.iter().find(|status| status.id == id).map(|status| status.state);
    let container = containers.iter().find(|status| status.id == id).map(|status| status.state);
    let present = sandbox.is_some() || container.is_some();
    match expected {
        Expectation::Present => present,
        Expectation::Absent => !present,
        Expectation::Updated => false,
        Expectation::Started => {
            sandbox.is_some()
                || container.is_some_and(|state| state != ContainerState::ContainerCreated as i32)
        }
        Expectation::Exited => {
            !present
                || sandbox == Some(PodSandboxState::SandboxNotready as i32)
                || container == Some(ContainerState::ContainerExited as i32)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_of_an_exec_adds_no_expectation() {
        let exit = TaskExit { container_id: "c".into(), id: "e".into(), ..Default::default() };
        assert_eq!(expectation("/tasks/exit", &exit.encode_to_vec()), None);
        let exit = TaskExit { id: "c".into(), ..exit };
        assert_eq!(
            expectation("/tasks/exit", &exit.encode_to_vec()),
            Some(("c".into(), Expectation::Exited))
        );
    }

    #[tokio::test]
    async fn effects_of_a_running_call_are_not_polled() {
        let calls = Arc::new(ChangingCalls::new(1));
        let mut watcher = RuntimeWatcher::new(
            Runtime::new("/nowhere".into()),
            Arc::default(),
            Arc::default(),
            Arc::clone(&calls),
            PathBuf::new(),
        );
        assert!(!watcher.polls());
        let until = Instant::now() + EXPECTATION_TIMEOUT;
        let expectations = [
            (Expectation::Present, false),
            (Expectation::Started, false),
            (Expectation::Absent, false),
            (Expectation::Updated, false),
            (Expectation::Exited, true),
        ];
        for (expected, is_polled_meanwhile) in expectations {
            watcher.expected = HashMap::from([("c".to_owned(), (expected, until))]);
            let call = calls.begin().unwrap();
            assert_eq!(watcher.polls(), is_polled_meanwhile, "{expected:?}");
            // Containers also change by calls that the agent does not forward.
            drop(call);
            assert!(watcher.polls(), "{expected:?}");
        }
    }

    #[test]
    fn updated_container_is_read_until_the_expectation_times_out() {
        let update = ContainerUpdate { id: "c".into(), ..Default::default() };
        assert_eq!(
            expectation("/containers/update", &update.encode_to_vec()),
            Some(("c".into(), Expectation::Updated))
        );
        let running = ContainerStatus {
            id: "c".into(),
            state: ContainerState::ContainerRunning as i32,
            ..Default::default()
        };
        assert!(!is_met(Expectation::Updated, "c", &[], &[running]));
    }

    #[test]
    fn expectation_is_met_by_cri_state() {
        let running = ContainerStatus {
            id: "c".into(),
            state: ContainerState::ContainerRunning as i32,
            ..Default::default()
        };
        let exited =
            ContainerStatus { state: ContainerState::ContainerExited as i32, ..running.clone() };
        assert!(is_met(Expectation::Started, "c", &[], std::slice::from_ref(&running)));
        assert!(!is_met(Expectation::Exited, "c", &[], std::slice::from_ref(&running)));
        assert!(is_met(Expectation::Exited, "c", &[], std::slice::from_ref(&exited)));
        assert!(is_met(Expectation::Started, "c", &[], &[exited]));
        assert!(!is_met(Expectation::Absent, "c", &[], &[running]));
        assert!(!is_met(Expectation::Present, "d", &[], &[]));
        assert!(is_met(Expectation::Exited, "d", &[], &[]));
    }
}
