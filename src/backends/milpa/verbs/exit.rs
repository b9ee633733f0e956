//! The end of a container: first its log and its termination message come home, then it reads
//! EXITED.

use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};

use kiyot_proto::{cri, store as records};
use tonic::{Code, Status};

use super::{
    Verbs, calls, failure,
    transition::{self, End},
    view::Container,
};
use crate::backends::milpa::cells::Cell;

/// How long the rest of a log may take.
const DRAIN: Duration = Duration::from_secs(10);
/// How long a termination message may take.
const TERMINATION_MESSAGE: Duration = Duration::from_secs(10);
/// How long to wait after a failed commit: an end must not be forgotten.
const COMMIT_RETRY: Duration = Duration::from_secs(1);
/// How long a cell may take to say how a container is.
const ASK: Duration = Duration::from_secs(10);

impl Verbs {
    /// Takes what a cell says of one of its containers.
    pub(super) async fn note(self: &Arc<Self>, container: &Container, told: cri::ContainerStatus) {
        self.view.tell(&container.id, &told);
        let times = container.times();
        match told.state() {
            cri::ContainerState::ContainerExited => {
                let exit = transition::report(&container.status, &told, times);
                self.note_exit(container, Some(exit));
            }
            cri::ContainerState::ContainerRunning => {
                if let Err(error) = self
                    .change_container(container, |current| transition::seen(current, &told, times))
                    .await
                {
                    tracing::error!(container = %container.id, error = failure::chain(&error), "That a container runs could not be recorded");
                }
            }
            cri::ContainerState::ContainerCreated | cri::ContainerState::ContainerUnknown => {}
        }
    }

    /// Its cell has no such container, so it can't have gone on.
    pub(super) fn note_gone(self: &Arc<Self>, container: &Container) {
        self.note_exit(container, None);
    }

    /// Records an end in a task of its own, once: `reported` by the cell, or that the container is
    /// not there any more.
    ///
    /// A reported exit is kept at once: the cell may be gone, or the daemon killed, before log and
    /// termination message are here, and only then the container reads EXITED.
    fn note_exit(self: &Arc<Self>, container: &Container, reported: Option<records::ReportedExit>) {
        let mut ending = self.ending.lock().unwrap_or_else(PoisonError::into_inner);
        if container.exited() || ending.contains_key(&container.id) {
            return;
        }
        ending.insert(container.id.clone(), reported.clone());
        drop(ending);
        let (verbs, container, times) = (Arc::clone(self), container.clone(), container.times());
        self.owned(async move {
            if let Some(exit) = &reported {
                let keep = |current: &_| transition::reported(current, exit);
                let kept = verbs.change_container(&container, keep);
                if let Err(error) = kept.await {
                    tracing::warn!(
                        container = %container.id,
                        error = failure::chain(&error),
                        "reported exit not recorded, it is kept in memory"
                    );
                }
            }
            let log_whole = verbs.bring_home(&container).await;
            let decide = |current: &records::ContainerStatus| {
                let next = match &reported {
                    Some(exit) => transition::exited(current, exit),
                    None => transition::ended(current, &End::gone(current), times),
                };
                next.map(|next| records::ContainerStatus { log_whole, ..next })
            };
            while let Err(error) = verbs.change_container(&container, decide).await {
                tracing::error!(container = %container.id, error = failure::chain(&error), "The end of a container could not be recorded yet");
                tokio::time::sleep(COMMIT_RETRY).await;
            }
            verbs.ending.lock().unwrap_or_else(PoisonError::into_inner).remove(&container.id);
            if !log_whole {
                verbs.finish_log(&container);
            }
        });
    }

    /// Returns a container's status with the exit that its cell has reported, if that is not on
    /// disk yet.
    pub(super) fn with_reported(&self, container: &Container) -> records::ContainerStatus {
        let ending = self.ending.lock().unwrap_or_else(PoisonError::into_inner);
        let exit = ending.get(&container.id).and_then(Option::as_ref);
        exit.and_then(|exit| transition::reported(&container.status, exit))
            .unwrap_or_else(|| records::ContainerStatus::clone(&container.status))
    }

    /// Records that an exited container's log is all here, once it is. Until then a daemon that is
    /// started again goes on with it.
    pub(super) fn finish_log(self: &Arc<Self>, container: &Container) {
        let (verbs, container) = (Arc::clone(self), container.clone());
        self.owned(async move {
            if !verbs.parts.logs.whole(&container.id).await {
                return;
            }
            let kept = verbs.change_container(&container, |current| Some(records::ContainerStatus { log_whole: true, ..current.clone() })).await;
            match kept {
                Ok(_) => tracing::debug!(container = %container.id, "The log of an ended container is whole, and that is recorded"),
                Err(error) => {
                    tracing::debug!(container = %container.id, error = failure::chain(&error), "That a log is whole could not be recorded: the next daemon looks at it again");
                }
            }
        });
    }

    /// The rest of the log, and the termination message: the kubelet reads both from the node as
    /// soon as it sees the end. Whether the log is whole.
    async fn bring_home(&self, container: &Container) -> bool {
        let fetch = async {
            if let Some(cell) = self.parts.cells.get(&container.cell) {
                let config = container.meta().config.unwrap_or_default();
                let fetched =
                    self.parts.volumes.fetch_termination_message(&cell, &container.id, &config);
                if tokio::time::timeout(TERMINATION_MESSAGE, fetched).await.is_err() {
                    tracing::warn!(container = %container.id, "The termination message did not come in time");
                }
            }
        };
        // Drained even when the cell is gone: what has arrived is still to be written.
        tokio::join!(self.parts.logs.drain(&container.id, DRAIN), fetch).0
    }

    /// Asks a cell how a container is, and takes the answer.
    pub(super) async fn ask(
        self: &Arc<Self>,
        cell: &Cell,
        container: &Container,
    ) -> Result<(), Status> {
        let request = cri::ContainerStatusRequest {
            container_id: container.cell_container.to_string(),
            verbose: false,
        };
        let mut runtime = calls::runtime(cell);
        match calls::answered(
            ASK,
            "ContainerStatus",
            runtime.container_status(calls::within(ASK, request)),
        )
        .await
        {
            Ok(answer) => {
                if let Some(told) = answer.status {
                    self.told(cell, container, told).await;
                }
                Ok(())
            }
            Err(status) if status.code() == Code::NotFound => {
                self.note_gone(container);
                Ok(())
            }
            Err(status) => Err(status),
        }
    }
}
