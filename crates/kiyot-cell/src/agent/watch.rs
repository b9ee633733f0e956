//! `Watch`: streams changes of the cell's state and heartbeats to the daemon.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::{
    FutureExt,
    future::{BoxFuture, OptionFuture},
    stream,
    stream::BoxStream,
};
use kiyot_proto::{
    cell::{Event, Heartbeat, event::Event as Kind},
    cri::ContainerState,
};
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::{
    ephemeral_storage::EphemeralStorage, metrics::MetricsSubscription, runtime::Runtime,
    state::CellState, stats,
};

/// Interval between heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(4);
/// Longest wait for the first list of containerd.
const FIRST_LIST_TIMEOUT: Duration = Duration::from_secs(20);

/// Allows one watcher at a time.
#[derive(Debug, Default)]
pub struct Watchers {
    current: Mutex<CancellationToken>,
}

impl Watchers {
    /// Returns the events of a new watcher. The previous watcher ends with ABORTED.
    pub fn watch(
        &self,
        state: Arc<CellState>,
        runtime: Runtime,
        metrics_subscription: Arc<MetricsSubscription>,
        storage: Arc<EphemeralStorage>,
        own_network: bool,
    ) -> BoxStream<'static, Result<Event, Status>> {
        let replaced = CancellationToken::new();
        std::mem::replace(
            &mut *self.current.lock().unwrap_or_else(PoisonError::into_inner),
            replaced.clone(),
        )
        .cancel();
        let watcher = Watcher {
            versions: state.subscribe(),
            state,
            runtime,
            activations: metrics_subscription.activations(),
            metrics_subscription,
            storage,
            own_network,
            next_heartbeat: Instant::now(),
            heartbeat_due: false,
            heartbeat: None,
            replaced,
            seen: None,
            pending: VecDeque::new(),
            first_list_deadline: Instant::now() + FIRST_LIST_TIMEOUT,
        };
        Box::pin(stream::unfold(Some(watcher), |watcher| async {
            let mut watcher = watcher?;
            match watcher.next().await {
                Ok(event) => Some((Ok(event), Some(watcher))),
                Err(status) => Some((Err(status), None)),
            }
        }))
    }
}

struct Watcher {
    state: Arc<CellState>,
    runtime: Runtime,
    metrics_subscription: Arc<MetricsSubscription>,
    storage: Arc<EphemeralStorage>,
    /// Notified when a subscription to metrics begins.
    activations: watch::Receiver<()>,
    own_network: bool,
    versions: watch::Receiver<u64>,
    /// Time of the next heartbeat.
    next_heartbeat: Instant,
    /// True if an additional heartbeat must be sent before `next_heartbeat`.
    heartbeat_due: bool,
    /// Heartbeat that is being collected.
    heartbeat: Option<BoxFuture<'static, Heartbeat>>,
    replaced: CancellationToken,
    seen: Option<u64>,
    /// At most one event per entry of the state.
    pending: VecDeque<Event>,
    first_list_deadline: Instant,
}

impl Watcher {
    async fn next(&mut self) -> Result<Event, Status> {
        loop {
            if self.replaced.is_cancelled() {
                return Err(Status::aborted("replaced by another watch"));
            }
            if let Some(event) = self.pending.pop_front() {
                return Ok(event);
            }
            self.versions.borrow_and_update();
            if let Some((events, version)) = self.state.events_since(self.seen) {
                self.seen = Some(version);
                if events.iter().any(is_running) {
                    // A new container's first statistics are sent early for the kubelet.
                    self.next_heartbeat = Instant::now();
                }
                self.pending.extend(events);
                if !self.pending.is_empty() {
                    continue;
                }
            }
            let (listed, idle) = (self.seen.is_some(), self.heartbeat.is_none());
            tokio::select! {
                () = self.replaced.cancelled() => {}
                changed = self.versions.changed() => {
                    changed.map_err(|_| Status::unavailable("agent is stopping"))?;
                }
                Some(heartbeat) = OptionFuture::from(self.heartbeat.as_mut()) => {
                    self.heartbeat = None;
                    return Ok(Event { event: Some(Kind::Heartbeat(heartbeat)) });
                }
                // The additional heartbeat doesn't shift the periodic heartbeats: a scrape reaches
                // all cells at once, and their heartbeats should stay spread.
                Ok(()) = self.activations.changed() => self.heartbeat_due = true,
                () = std::future::ready(()), if self.heartbeat_due && listed && idle => {
                    self.heartbeat_due = false;
                    self.begin_heartbeat();
                }
                () = tokio::time::sleep_until(self.next_heartbeat), if listed && idle => {
                    self.next_heartbeat = Instant::now() + HEARTBEAT_INTERVAL;
                    self.begin_heartbeat();
                }
                () = tokio::time::sleep_until(self.first_list_deadline), if !listed => {
                    return Err(Status::unavailable("containerd not listed in time"));
                }
            }
        }
    }
}

impl Watcher {
    fn begin_heartbeat(&mut self) {
        let (runtime, metrics_subscription, own_network) =
            (self.runtime.clone(), Arc::clone(&self.metrics_subscription), self.own_network);
        let (storage, pod) = (Arc::clone(&self.storage), self.state.pod_sandbox());
        let heartbeat = async move {
            let beat =
                stats::heartbeat(&runtime, &metrics_subscription, pod.as_deref(), own_network)
                    .await;
            Heartbeat { ephemeral_storage: storage.used(), ..beat }
        };
        self.heartbeat = Some(heartbeat.boxed());
    }
}

/// Returns whether the event shows a running container.
fn is_running(event: &Event) -> bool {
    let Some(Kind::Container(status)) = &event.event else { return false };
    status.state() == ContainerState::ContainerRunning
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;
    use kiyot_proto::cri::ContainerStatus;

    use super::*;

    fn nowhere() -> Runtime {
        Runtime::new("/nowhere/at/all".into())
    }

    #[tokio::test]
    async fn watch_without_containerd_sends_snapshot_and_heartbeats() {
        let state = Arc::new(CellState::default());
        let watchers = Watchers::default();
        let mut events =
            watchers.watch(Arc::clone(&state), nowhere(), Arc::default(), Arc::default(), false);
        state.set_pods(vec![], vec![ContainerStatus { id: "c".into(), ..Default::default() }]);
        let first = events.next().await.unwrap().unwrap().event.unwrap();
        assert!(matches!(first, Kind::Snapshot(snapshot) if snapshot.containers.len() == 1));
        state.set_pods(vec![], vec![]);
        let mut kinds = Vec::new();
        while !(kinds.contains(&"gone") && kinds.contains(&"heartbeat")) {
            kinds.push(match events.next().await.unwrap().unwrap().event.unwrap() {
                Kind::ContainerGone(_) => "gone",
                Kind::Heartbeat(_) => "heartbeat",
                other => panic!("{other:?}"),
            });
        }
    }

    /// Verifies U3.
    #[tokio::test(start_paused = true)]
    async fn started_container_causes_a_heartbeat() {
        let state = Arc::new(CellState::default());
        state.set_pods(vec![], vec![]);
        let mut events = Watchers::default().watch(
            Arc::clone(&state),
            nowhere(),
            Arc::default(),
            Arc::default(),
            false,
        );
        let mut next = async || events.next().await.unwrap().unwrap().event.unwrap();
        while !matches!(next().await, Kind::Heartbeat(_)) {}
        let listed = Instant::now();
        let running = ContainerStatus {
            id: "c".into(),
            state: ContainerState::ContainerRunning.into(),
            ..Default::default()
        };
        state.set_pods(vec![], vec![running]);
        while !matches!(next().await, Kind::Heartbeat(_)) {}
        assert!(listed.elapsed() < Duration::from_secs(1), "by the paused clock");
        while !matches!(next().await, Kind::Heartbeat(_)) {}
        assert!(listed.elapsed() >= HEARTBEAT_INTERVAL);
    }

    /// Verifies U25.
    #[tokio::test(start_paused = true)]
    async fn metrics_are_sent_at_once_and_while_subscribed() {
        let (state, metrics_subscription) =
            (Arc::new(CellState::default()), Arc::<MetricsSubscription>::default());
        state.set_pods(vec![], vec![]);
        let mut events = Watchers::default().watch(
            Arc::clone(&state),
            nowhere(),
            Arc::clone(&metrics_subscription),
            Arc::default(),
            false,
        );
        let mut next = async || loop {
            if let Kind::Heartbeat(beat) = events.next().await.unwrap().unwrap().event.unwrap() {
                return beat.metrics.is_some();
            }
        };
        assert!(!next().await && !next().await);
        let began = Instant::now();
        metrics_subscription.renew(HEARTBEAT_INTERVAL * 3);
        assert!(
            next().await && began.elapsed() < HEARTBEAT_INTERVAL / 2,
            "at once, by the paused clock"
        );
        assert!(
            next().await && began.elapsed() < HEARTBEAT_INTERVAL + HEARTBEAT_INTERVAL / 8,
            "the next periodic heartbeat isn't shifted"
        );
        // A renewal in time sends no additional heartbeat.
        metrics_subscription.renew(HEARTBEAT_INTERVAL * 3);
        let again = Instant::now();
        assert!(next().await && again.elapsed() >= HEARTBEAT_INTERVAL / 2);
        while next().await {
            assert!(
                again.elapsed() <= HEARTBEAT_INTERVAL * 3 + HEARTBEAT_INTERVAL / 2,
                "{:?}",
                again.elapsed()
            );
        }
        assert!(again.elapsed() >= HEARTBEAT_INTERVAL * 3);
    }

    #[tokio::test]
    async fn new_watch_replaces_the_previous_watch() {
        let state = Arc::new(CellState::default());
        state.set_pods(vec![], vec![]);
        let watchers = Watchers::default();
        let mut first =
            watchers.watch(Arc::clone(&state), nowhere(), Arc::default(), Arc::default(), false);
        assert!(first.next().await.unwrap().is_ok());
        let mut second = watchers.watch(state, nowhere(), Arc::default(), Arc::default(), false);
        let ended = loop {
            // A heartbeat may be in flight.
            match first.next().await {
                Some(Ok(_)) => {}
                other => break other,
            }
        };
        assert_eq!(ended.unwrap().unwrap_err().code(), tonic::Code::Aborted);
        assert!(first.next().await.is_none());
        assert!(second.next().await.unwrap().is_ok());
    }
}
