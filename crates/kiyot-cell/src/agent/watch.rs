//! `Watch`: the state, told to the one daemon that looks.

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

/// How often a heartbeat is sent.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(4);
/// How long the first list of containerd may take.
const FIRST_LIST_TIMEOUT: Duration = Duration::from_secs(20);

/// Lets one watcher at a time look at the board.
#[derive(Debug, Default)]
pub struct Watchers {
    current: Mutex<CancellationToken>,
}

impl Watchers {
    /// A new watcher's events; the one before ends.
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
    /// Told when metrics are wanted that were not before.
    activations: watch::Receiver<()>,
    own_network: bool,
    versions: watch::Receiver<u64>,
    /// When statistics are asked for again.
    next_heartbeat: Instant,
    /// They are asked for once more before that.
    heartbeat_due: bool,
    /// Statistics that are being asked for.
    heartbeat: Option<BoxFuture<'static, Heartbeat>>,
    replaced: CancellationToken,
    seen: Option<u64>,
    /// At most one event for each entry of the board.
    pending: VecDeque<Event>,
    first_list_deadline: Instant,
}

impl Watcher {
    async fn next(&mut self) -> Result<Event, Status> {
        loop {
            if self.replaced.is_cancelled() {
                return Err(Status::aborted("another watch began"));
            }
            if let Some(event) = self.pending.pop_front() {
                return Ok(event);
            }
            self.versions.borrow_and_update();
            if let Some((events, version)) = self.state.events_since(self.seen) {
                self.seen = Some(version);
                if events.iter().any(starts) {
                    // The kubelet should soon read what it uses.
                    self.next_heartbeat = Instant::now();
                }
                self.pending.extend(events);
                if !self.pending.is_empty() {
                    continue;
                }
            }
            let (started, resting) = (self.seen.is_some(), self.heartbeat.is_none());
            tokio::select! {
                () = self.replaced.cancelled() => {}
                changed = self.versions.changed() => changed.map_err(|_| Status::unavailable("the agent ends"))?,
                Some(heartbeat) = OptionFuture::from(self.heartbeat.as_mut()) => {
                    self.heartbeat = None;
                    return Ok(Event { event: Some(Kind::Heartbeat(heartbeat)) });
                }
                // Whoever waits for metrics waits for those of all cells, which need not be told at
                // the same moments for ever: the others keep their times.
                Ok(()) = self.activations.changed() => self.heartbeat_due = true,
                () = std::future::ready(()), if self.heartbeat_due && started && resting => {
                    self.heartbeat_due = false;
                    self.begin_heartbeat();
                }
                () = tokio::time::sleep_until(self.next_heartbeat), if started && resting => {
                    self.next_heartbeat = Instant::now() + HEARTBEAT_INTERVAL;
                    self.begin_heartbeat();
                }
                () = tokio::time::sleep_until(self.first_list_deadline), if !started => {
                    return Err(Status::unavailable("containerd has not been listed yet"));
                }
            }
        }
    }
}

impl Watcher {
    fn begin_heartbeat(&mut self) {
        let (runtime, metrics_subscription, own_network) =
            (self.runtime.clone(), Arc::clone(&self.metrics_subscription), self.own_network);
        let ephemeral_storage = Arc::clone(&self.storage);
        let heartbeat = async move {
            let beat = stats::heartbeat(&runtime, &metrics_subscription, own_network).await;
            Heartbeat { ephemeral_storage: ephemeral_storage.used(), ..beat }
        };
        self.heartbeat = Some(heartbeat.boxed());
    }
}

/// Whether a container runs, by these news.
fn starts(event: &Event) -> bool {
    matches!(&event.event, Some(Kind::Container(status)) if status.state() == ContainerState::ContainerRunning)
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
    async fn the_snapshot_comes_first_and_heartbeats_without_containerd() {
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
    async fn a_start_has_a_heartbeat_of_its_own() {
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
        let started = Instant::now();
        let running = ContainerStatus {
            id: "c".into(),
            state: ContainerState::ContainerRunning.into(),
            ..Default::default()
        };
        state.set_pods(vec![], vec![running]);
        while !matches!(next().await, Kind::Heartbeat(_)) {}
        assert!(
            started.elapsed() < Duration::from_secs(1),
            "by the clock of this test, which goes as it says"
        );
        while !matches!(next().await, Kind::Heartbeat(_)) {}
        assert!(started.elapsed() >= HEARTBEAT_INTERVAL);
    }

    /// Verifies U25.
    #[tokio::test(start_paused = true)]
    async fn metrics_are_told_at_once_and_for_as_long_as_they_are_wanted() {
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
            "at once, by the clock of this test"
        );
        assert!(
            next().await && began.elapsed() < HEARTBEAT_INTERVAL + HEARTBEAT_INTERVAL / 8,
            "the next one comes when it would have come"
        );
        // Asked for again in time, it goes on, and none comes out of its turn.
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
    async fn a_new_watch_ends_the_one_before() {
        let state = Arc::new(CellState::default());
        state.set_pods(vec![], vec![]);
        let watchers = Watchers::default();
        let mut first =
            watchers.watch(Arc::clone(&state), nowhere(), Arc::default(), Arc::default(), false);
        assert!(first.next().await.unwrap().is_ok());
        let mut second = watchers.watch(state, nowhere(), Arc::default(), Arc::default(), false);
        let ended = loop {
            // A heartbeat may be under way.
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
