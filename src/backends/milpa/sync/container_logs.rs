//! Logs of containers: each is followed from its container's start until it is complete on the
//! node.

use std::sync::Arc;

use async_trait::async_trait;
use kiyot_engine::{StoreError, id::ContainerId};
use kiyot_proto::store as records;
use kiyot_values::error_chain::error_chain;

use super::records::Records;
use crate::backends::milpa::{
    cells::{Cell, Cells},
    failure::Failure,
    logs::{BaseStore, LogRoute, Logs},
    pods::{Container, Pods},
    tasks::Tasks,
};

/// Follows the logs of containers.
#[derive(Debug, Clone)]
pub(crate) struct ContainerLogs {
    logs: Arc<Logs>,
    cells: Arc<Cells>,
    records: Arc<Records>,
    pods: Arc<Pods>,
    tasks: Tasks,
}

impl ContainerLogs {
    pub(super) fn new(
        logs: &Arc<Logs>,
        cells: &Arc<Cells>,
        records: &Arc<Records>,
        pods: &Arc<Pods>,
        tasks: &Tasks,
    ) -> Self {
        Self {
            logs: Arc::clone(logs),
            cells: Arc::clone(cells),
            records: Arc::clone(records),
            pods: Arc::clone(pods),
            tasks: tasks.clone(),
        }
    }

    /// Follows a container's log from now on. Succeeds for a container without a log.
    pub(crate) async fn follow(&self, cell: &Cell, container: &Container) -> Result<(), Failure> {
        let Some(route) = log_route(container) else { return Ok(()) };
        self.logs.follow(cell, route).await?;
        self.close_if_removed(cell, container);
        Ok(())
    }

    /// Follows the rest of an exited container's log, until it is complete or the container is
    /// removed.
    pub(crate) async fn resume(&self, cell: &Cell, container: &Container) {
        if container.status.log_whole {
            return;
        }
        let Some(route) = log_route(container) else { return };
        match self.logs.resume(cell, route).await {
            Ok(true) => {
                self.close_if_removed(cell, container);
                self.record_when_complete(container);
            }
            Ok(false) => {}
            // Retried at each snapshot of the cell.
            Err(failure) => {
                if let Some(suppressed) = cell.link.lines.admit() {
                    tracing::error!(
                        container = %container.id,
                        status = failure.message(),
                        suppressed,
                        "rest of an exited container's log not followed"
                    );
                }
            }
        }
    }

    /// Switches to a new file, after the kubelet has moved the log. The new file's position in the
    /// cell's log is recorded first.
    pub(crate) async fn reopen(&self, container: &Container) -> Result<(), ReopenError> {
        let log_base = self.logs.reopen(&container.id).await?;
        Ok(self.records.set_log_base(container, log_base).await?)
    }

    /// Waits in a task until an exited container's log is complete, and records this. Until then a
    /// restarted daemon resumes the log.
    pub(super) fn record_when_complete(&self, container: &Container) {
        let (logs, container) = (self.clone(), container.clone());
        self.tasks.spawn(async move {
            if !logs.logs.wait_complete(&container.id).await {
                return;
            }
            let complete = |current: &records::ContainerStatus| {
                Some(records::ContainerStatus { log_whole: true, ..current.clone() })
            };
            match logs.records.change_container(&container, complete).await {
                Ok(()) => tracing::debug!(
                    container = %container.id,
                    "log of an exited container complete"
                ),
                Err(error) => tracing::debug!(
                    container = %container.id,
                    error = error_chain(&error),
                    "complete log not recorded, the next daemon resumes it"
                ),
            }
        });
    }

    /// Closes a log that was opened while its container was removed or its cell ended: the removal
    /// has closed only logs that were open already.
    fn close_if_removed(&self, cell: &Cell, container: &Container) {
        if self.pods.container(container.id.as_str()).is_err() || self.cells.get(&cell.id).is_none()
        {
            self.logs.close(&container.id);
        }
    }
}

/// An error when switching to a new log file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReopenError {
    /// The file could not be opened.
    #[error(transparent)]
    Log(#[from] Failure),
    /// The position could not be recorded.
    #[error(transparent)]
    Store(#[from] StoreError),
}

#[async_trait]
impl BaseStore for Records {
    async fn store_base(&self, container: &ContainerId, base: i64) {
        let Ok(container) = self.pods.container(container.as_str()) else { return };
        if let Err(error) = self.set_log_base(&container, base).await {
            tracing::error!(
                container = %container.id,
                error = error_chain(&error),
                "position of a log not recorded"
            );
        }
    }
}

/// Returns the source and the target of a container's log; `None` for a container without a log.
fn log_route(container: &Container) -> Option<LogRoute> {
    let meta = container.meta();
    let (base, node_path) = (container.status.log_base, meta.log_path.into());
    (!meta.cell_log.is_empty()).then(|| LogRoute {
        container: container.id.clone(),
        node_path,
        cell_path: meta.cell_log,
        base,
    })
}
