//! `Watch`: the board, told to the one daemon that looks.

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

use super::{board::Board, disk::Disk, metrics::Measures, runtime::Runtime, usage};

/// How often a heartbeat is sent.
const HEARTBEAT: Duration = Duration::from_secs(4);
/// How long the first list of containerd may take.
const FIRST: Duration = Duration::from_secs(20);

/// Lets one watcher at a time look at the board.
#[derive(Debug, Default)]
pub struct Watchers {
    current: Mutex<CancellationToken>,
}

impl Watchers {
    /// A new watcher's events; the one before ends.
    pub fn watch(
        &self,
        board: Arc<Board>,
        runtime: Runtime,
        measures: Arc<Measures>,
        disk: Arc<Disk>,
        own_network: bool,
    ) -> BoxStream<'static, Result<Event, Status>> {
        let replaced = CancellationToken::new();
        std::mem::replace(
            &mut *self.current.lock().unwrap_or_else(PoisonError::into_inner),
            replaced.clone(),
        )
        .cancel();
        let watcher = Watcher {
            versions: board.versions(),
            board,
            runtime,
            wishes: measures.wishes(),
            measures,
            disk,
            own_network,
            next_heartbeat: Instant::now(),
            at_once: false,
            heartbeat: None,
            replaced,
            seen: None,
            pending: VecDeque::new(),
            patience: Instant::now() + FIRST,
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
    board: Arc<Board>,
    runtime: Runtime,
    measures: Arc<Measures>,
    disk: Arc<Disk>,
    /// Told when metrics are wanted that were not before.
    wishes: watch::Receiver<()>,
    own_network: bool,
    versions: watch::Receiver<u64>,
    /// When statistics are asked for again.
    next_heartbeat: Instant,
    /// They are asked for once more before that.
    at_once: bool,
    /// Statistics that are being asked for.
    heartbeat: Option<BoxFuture<'static, Heartbeat>>,
    replaced: CancellationToken,
    seen: Option<u64>,
    /// At most one event for each entry of the board.
    pending: VecDeque<Event>,
    patience: Instant,
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
            if let Some((events, version)) = self.board.since(self.seen) {
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
                Ok(()) = self.wishes.changed() => self.at_once = true,
                () = std::future::ready(()), if self.at_once && started && resting => {
                    self.at_once = false;
                    self.begin_heartbeat();
                }
                () = tokio::time::sleep_until(self.next_heartbeat), if started && resting => {
                    self.next_heartbeat = Instant::now() + HEARTBEAT;
                    self.begin_heartbeat();
                }
                () = tokio::time::sleep_until(self.patience), if !started => {
                    return Err(Status::unavailable("containerd has not been listed yet"));
                }
            }
        }
    }
}

impl Watcher {
    fn begin_heartbeat(&mut self) {
        let (runtime, measures, own_network) =
            (self.runtime.clone(), Arc::clone(&self.measures), self.own_network);
        let disk = Arc::clone(&self.disk);
        let heartbeat = async move {
            let beat = usage::heartbeat(&runtime, &measures, own_network).await;
            Heartbeat { ephemeral_storage: disk.used(), ..beat }
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
        let board = Arc::new(Board::default());
        let watchers = Watchers::default();
        let mut events =
            watchers.watch(Arc::clone(&board), nowhere(), Arc::default(), Arc::default(), false);
        board.set_pods(vec![], vec![ContainerStatus { id: "c".into(), ..Default::default() }]);
        let first = events.next().await.unwrap().unwrap().event.unwrap();
        assert!(matches!(first, Kind::Snapshot(snapshot) if snapshot.containers.len() == 1));
        board.set_pods(vec![], vec![]);
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
        let board = Arc::new(Board::default());
        board.set_pods(vec![], vec![]);
        let mut events = Watchers::default().watch(
            Arc::clone(&board),
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
        board.set_pods(vec![], vec![running]);
        while !matches!(next().await, Kind::Heartbeat(_)) {}
        assert!(
            started.elapsed() < Duration::from_secs(1),
            "by the clock of this test, which goes as it says"
        );
        while !matches!(next().await, Kind::Heartbeat(_)) {}
        assert!(started.elapsed() >= HEARTBEAT);
    }

    /// Verifies U25.
    #[tokio::test(start_paused = true)]
    async fn metrics_are_told_at_once_and_for_as_long_as_they_are_wanted() {
        let (board, measures) = (Arc::new(Board::default()), Arc::<Measures>::default());
        board.set_pods(vec![], vec![]);
        let mut events = Watchers::default().watch(
            Arc::clone(&board),
            nowhere(),
            Arc::clone(&measures),
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
        measures.want(HEARTBEAT * 3);
        assert!(
            next().await && began.elapsed() < HEARTBEAT / 2,
            "at once, by the clock of this test"
        );
        assert!(
            next().await && began.elapsed() < HEARTBEAT + HEARTBEAT / 8,
            "the next one comes when it would have come"
        );
        // Asked for again in time, it goes on, and none comes out of its turn.
        measures.want(HEARTBEAT * 3);
        let again = Instant::now();
        assert!(next().await && again.elapsed() >= HEARTBEAT / 2);
        while next().await {
            assert!(again.elapsed() <= HEARTBEAT * 3 + HEARTBEAT / 2, "{:?}", again.elapsed());
        }
        assert!(again.elapsed() >= HEARTBEAT * 3);
    }

    #[tokio::test]
    async fn a_new_watch_ends_the_one_before() {
        let board = Arc::new(Board::default());
        board.set_pods(vec![], vec![]);
        let watchers = Watchers::default();
        let mut first =
            watchers.watch(Arc::clone(&board), nowhere(), Arc::default(), Arc::default(), false);
        assert!(first.next().await.unwrap().is_ok());
        let mut second = watchers.watch(board, nowhere(), Arc::default(), Arc::default(), false);
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
