//! Exits of containers: a container reads EXITED once its log and its termination message are on
//! the node.

use std::{sync::Arc, time::Duration};

use kiyot_proto::store as records;
use kiyot_values::error_chain::error_chain;

use super::CellSync;
use crate::backends::milpa::pods::{
    Container,
    container_state::{self, Termination},
};

/// Time limit of the rest of a log.
const LOG_DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of a termination message.
const TERMINATION_MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay before a failed commit is retried: an exit must not be lost.
const COMMIT_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Time limit until an exit is recorded, with its log and termination message.
pub(crate) const EXIT_RECORD_TIMEOUT: Duration = Duration::from_secs(40);

impl CellSync {
    /// Records the exit of a container that is absent from its cell, and so can't be running.
    pub(crate) fn record_absence(self: &Arc<Self>, container: &Container) {
        self.record_exit(container, None);
    }

    /// Records an exit once, in a task: the exit that the cell has `reported`, or `None` for an
    /// absent container.
    ///
    /// A reported exit is recorded at once, because the cell may end, or the daemon may be killed,
    /// before log and termination message are on the node.
    pub(super) fn record_exit(
        self: &Arc<Self>,
        container: &Container,
        reported: Option<records::ReportedExit>,
    ) {
        if container.exited() || !self.records.begin_exit(&container.id, reported.clone()) {
            return;
        }
        let absent = if self.replacements.contains(&container.id) {
            Termination::replaced
        } else {
            Termination::absent
        };
        let (sync, container, times) = (Arc::clone(self), container.clone(), container.times());
        self.tasks.spawn(async move {
            if let Some(exit) = &reported {
                let keep = |current: &_| container_state::reported(current, exit);
                if let Err(error) = sync.records.change_container(&container, keep).await {
                    tracing::warn!(
                        container = %container.id,
                        error = error_chain(&error),
                        "reported exit not recorded, it is kept in memory"
                    );
                }
            }
            let log_whole = sync.fetch_remains(&container).await;
            let decide = |current: &records::ContainerStatus| {
                let next = match &reported {
                    Some(exit) => container_state::exited(current, exit),
                    None => container_state::ended(current, &absent(current), times),
                };
                next.map(|next| records::ContainerStatus { log_whole, ..next })
            };
            while let Err(error) = sync.records.change_container(&container, decide).await {
                tracing::error!(
                    container = %container.id,
                    error = error_chain(&error),
                    "exit of a container not recorded, trying again"
                );
                tokio::time::sleep(COMMIT_RETRY_DELAY).await;
            }
            sync.records.finish_exit(&container.id);
            if !log_whole {
                sync.container_logs.record_when_complete(&container);
            }
        });
    }

    /// Fetches the rest of the log and the termination message: the kubelet reads both from the
    /// node as soon as it sees the exit. Returns whether the log is complete.
    async fn fetch_remains(&self, container: &Container) -> bool {
        let fetch = async {
            let Some(cell) = self.cells.get(&container.cell) else { return };
            let config = container.meta().config.unwrap_or_default();
            let message = self.volumes.fetch_termination_message(&cell, &container.id, &config);
            if tokio::time::timeout(TERMINATION_MESSAGE_TIMEOUT, message).await.is_err() {
                tracing::warn!(
                    container = %container.id,
                    timeout_s = TERMINATION_MESSAGE_TIMEOUT.as_secs(),
                    "termination message not fetched in time"
                );
            }
        };
        // Drains the log also after the end of the cell: received bytes are still to be written.
        tokio::join!(self.logs.drain(&container.id, LOG_DRAIN_TIMEOUT), fetch).0
    }
}
