//! Events of all cells: connected cells are watched, and the pods of ended cells end.

use std::{sync::Arc, time::Duration};

use kiyot_engine::id::CellId;
use kiyot_values::error_chain::error_chain;
use tokio::{
    sync::broadcast::{Receiver, error::RecvError},
    time::timeout,
};

use super::{CellSync, teardown::POD_STOPPED};
use crate::backends::milpa::{
    cells::CellEvent,
    failure::{Code, Failure},
    pods::container_state::Termination,
};

/// Delay before a failed step is retried.
const RETRY_DELAY: Duration = Duration::from_secs(2);
/// Time limit of the copy of the pause image into a warm cell.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(120);

impl CellSync {
    /// Follows the events of all cells. Compares all pods with their cells at the start and after
    /// missed events.
    pub(super) async fn follow_events(self: Arc<Self>, mut events: Receiver<CellEvent>) {
        self.resync();
        loop {
            match events.recv().await {
                Ok(CellEvent::Connected(cell)) => self.watch(&cell),
                Ok(CellEvent::Warm(cell)) => self.prepare(cell),
                Ok(CellEvent::Gone { cell, reason }) => {
                    self.release_layers(&cell);
                    self.cell_ended(cell, Some(reason));
                }
                Err(RecvError::Lagged(missed)) => {
                    tracing::warn!(missed, "events of cells missed, comparing all pods");
                    self.resync();
                }
                Err(RecvError::Closed) => return,
            }
        }
    }

    fn resync(self: &Arc<Self>) {
        let (images, cells) = (Arc::clone(&self.images), Arc::clone(&self.cells));
        let known = move || cells.all().into_iter().collect();
        images.begin_with(&known);
        self.tasks.spawn(async move { images.release_unknown_layers(known).await });
        for sandbox in self.pods.all_sandboxes() {
            let has_cell = self.cells.get(&sandbox.cell).is_some();
            if !has_cell {
                self.cell_ended(sandbox.cell, None);
                continue;
            }
            self.watch(&sandbox.cell);
            if !sandbox.ready {
                // A stopped sandbox must not keep its cell. Until its end, the cell may report the
                // exits of its containers.
                let sync = Arc::clone(self);
                self.tasks.spawn(async move {
                    while let Err(error) = sync.stop_sandbox(&sandbox.id).await {
                        tracing::warn!(
                            sandbox = %sandbox.id,
                            cell = %sandbox.cell,
                            error = error_chain(&error),
                            "cell of a stopped pod not ended, trying again"
                        );
                        tokio::time::sleep(RETRY_DELAY).await;
                    }
                });
            }
        }
    }

    /// Copies the pause image into a warm cell, and rehearses. A pod that takes the cell meanwhile
    /// waits for this copy, and makes its own after a failure.
    fn prepare(self: &Arc<Self>, id: CellId) {
        let Some(cell) = self.cells.get(&id) else { return };
        let sync = Arc::clone(self);
        self.tasks.spawn(async move {
            let pause = timeout(PAUSE_TIMEOUT, sync.images.ensure_pause(&cell)).await;
            let prepared = match pause {
                // Only its calls have time limits: cut short, it would leave its sandbox beside the
                // pod's.
                Ok(Ok(pause)) => sync.rehearse(&cell, pause).await,
                Ok(Err(failure)) => Err(failure),
                Err(_) => {
                    Err(Failure::node(Code::DeadlineExceeded, "copy of the pause image timed out"))
                }
            };
            match prepared {
                Ok(()) => tracing::debug!(cell = %id, "warm cell is prepared"),
                Err(failure) => {
                    let status = failure.message();
                    tracing::warn!(cell = %id, status, "warm cell not prepared");
                }
            }
            sync.release_if_ended(&cell);
        });
    }

    /// Ends the pod of a cell whose end is certain.
    fn cell_ended(self: &Arc<Self>, cell: CellId, reason: Option<String>) {
        self.unwatch(&cell);
        let sync = Arc::clone(self);
        self.tasks.spawn(async move {
            let Some(sandbox) = sync.pods.sandbox_of_cell(&cell) else { return };
            // A stop of the sandbox also ends the cell, and records the end itself.
            let _stopping = sandbox.stopping.lock().await;
            if !sync.pods.sandbox(sandbox.id.as_str()).is_ok_and(|sandbox| sandbox.ready)
                && sync.pods.containers_of(&sandbox.id).iter().all(|container| container.exited())
            {
                return;
            }
            let reason = reason.unwrap_or_else(|| sync.end_reason(&cell));
            let termination = if reason == POD_STOPPED {
                // The daemon was killed, or the provider failed, while the pod was stopped.
                tracing::info!(
                    sandbox = %sandbox.id,
                    %cell,
                    pod = %sandbox.pod,
                    "interrupted stop of a pod completed"
                );
                Termination::sandbox_stopped()
            } else {
                tracing::warn!(
                    sandbox = %sandbox.id,
                    %cell,
                    pod = %sandbox.pod,
                    reason,
                    "pod lost its cell"
                );
                Termination::cell_lost(&reason)
            };
            while let Err(error) = sync.records.end_sandbox(&sandbox.id, &termination).await {
                tracing::error!(
                    sandbox = %sandbox.id,
                    error = error_chain(&error),
                    "end of a cell not recorded, trying again"
                );
                tokio::time::sleep(RETRY_DELAY).await;
            }
            sync.release(&sandbox);
        });
    }
}
