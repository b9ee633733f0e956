//! `Watch`: the board, told to the one daemon that looks.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture, stream, stream::BoxStream};
use kiyot_proto::{
    cell::{Event, Heartbeat, event::Event as Kind},
    cri::{ListContainerStatsRequest, ListPodSandboxStatsRequest},
};
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::{
    board::Board,
    runtime::{Runtime, within},
};

/// How often a heartbeat is sent.
const HEARTBEAT: Duration = Duration::from_secs(4);
/// How long statistics may take; a heartbeat goes without them then.
const STATISTICS: Duration = Duration::from_millis(900);
/// How long the first list of containerd may take.
const FIRST: Duration = Duration::from_secs(20);

/// Lets one watcher at a time look at the board.
#[derive(Debug, Default)]
pub struct Watchers {
    current: Mutex<CancellationToken>,
}

impl Watchers {
    /// A new watcher's events; the one before ends.
    pub fn watch(&self, board: Arc<Board>, runtime: Runtime) -> BoxStream<'static, Result<Event, Status>> {
        let replaced = CancellationToken::new();
        std::mem::replace(&mut *self.current.lock().unwrap_or_else(PoisonError::into_inner), replaced.clone()).cancel();
        let watcher = Watcher {
            versions: board.versions(),
            board,
            heartbeat: heartbeat(runtime.clone(), Instant::now()),
            runtime,
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
    versions: watch::Receiver<u64>,
    heartbeat: BoxFuture<'static, Event>,
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
                self.pending.extend(events);
                if !self.pending.is_empty() {
                    continue;
                }
            }
            let started = self.seen.is_some();
            tokio::select! {
                () = self.replaced.cancelled() => {}
                changed = self.versions.changed() => changed.map_err(|_| Status::unavailable("the agent ends"))?,
                event = &mut self.heartbeat, if started => {
                    self.heartbeat = heartbeat(self.runtime.clone(), Instant::now() + HEARTBEAT);
                    return Ok(event);
                }
                () = tokio::time::sleep_until(self.patience), if !started => {
                    return Err(Status::unavailable("containerd has not been listed yet"));
                }
            }
        }
    }
}

/// A heartbeat at a time, with statistics as far as containerd has them soon.
fn heartbeat(runtime: Runtime, at: Instant) -> BoxFuture<'static, Event> {
    async move {
        tokio::time::sleep_until(at).await;
        let (mut containers, mut sandboxes) = (runtime.runtime(), runtime.runtime());
        let containers = containers.list_container_stats(within(STATISTICS, ListContainerStatsRequest::default()));
        let sandboxes = sandboxes.list_pod_sandbox_stats(within(STATISTICS, ListPodSandboxStatsRequest::default()));
        let both = futures::future::join(containers, sandboxes);
        let (containers, sandboxes) = match tokio::time::timeout(STATISTICS, both).await {
            Ok((containers, sandboxes)) => (containers.ok(), sandboxes.ok()),
            Err(_) => (None, None),
        };
        let heartbeat = Heartbeat {
            containers: containers.map(|answer| answer.into_inner().stats).unwrap_or_default(),
            sandbox: sandboxes.and_then(|answer| answer.into_inner().stats.into_iter().next()),
        };
        Event { event: Some(Kind::Heartbeat(heartbeat)) }
    }
    .boxed()
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
        let mut events = watchers.watch(Arc::clone(&board), nowhere());
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

    #[tokio::test]
    async fn a_new_watch_ends_the_one_before() {
        let board = Arc::new(Board::default());
        board.set_pods(vec![], vec![]);
        let watchers = Watchers::default();
        let mut first = watchers.watch(Arc::clone(&board), nowhere());
        assert!(first.next().await.unwrap().is_ok());
        let mut second = watchers.watch(board, nowhere());
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
