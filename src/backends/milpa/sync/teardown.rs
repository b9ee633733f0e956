//! Stop and removal of sandboxes: the containers end, their last output is fetched, and the cell
//! ends.

use std::{sync::Arc, time::Duration};

use futures::future::join_all;
use kiyot_engine::{
    StoreError,
    engine::CellError,
    id::{CellId, SandboxId},
};
use kiyot_proto::cri;

use super::CellSync;
use crate::backends::milpa::{
    cell_client::{self, CellClient},
    cells::Cell,
    pods::{Sandbox, container_state::Termination},
};

/// Reason of the end of a cell whose pod was stopped. Kept in records.
pub(super) const POD_STOPPED: &str = "its pod was stopped";
/// Time limit of a cell's containerd to kill a container.
const KILL_TIMEOUT: Duration = Duration::from_secs(20);
/// Time limit of the last output of killed containers. Then the cell ends without their exits.
const LAST_OUTPUT_TIMEOUT: Duration = Duration::from_secs(15);

/// An error when stopping or removing a sandbox.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TeardownError {
    /// The cell could not be ended.
    #[error(transparent)]
    Cell(#[from] CellError),
    /// The end could not be recorded.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl CellSync {
    /// Stops a sandbox. Concurrent stops run one at a time, and the second finds the sandbox
    /// stopped.
    pub(crate) async fn stop_sandbox(
        self: &Arc<Self>,
        id: &SandboxId,
    ) -> Result<(), TeardownError> {
        let Ok(sandbox) = self.pods.sandbox(id.as_str()) else { return Ok(()) };
        let _stopping = sandbox.stopping.lock().await;
        if let Some(cell) = self.cells.get(&sandbox.cell) {
            // Waits briefly: after a restart of the daemon its cells are dialling again.
            if cell_client::connected(&cell, &sandbox.pod, None).await.is_ok() {
                self.kill_containers(&cell, &sandbox).await;
            }
            self.cells.terminate(&cell.id, POD_STOPPED).await?;
        }
        self.records.end_sandbox(id, &Termination::sandbox_stopped()).await?;
        self.release(&sandbox);
        Ok(())
    }

    /// Stops a sandbox, and removes its records and the records of its containers.
    pub(crate) async fn remove_sandbox(
        self: &Arc<Self>,
        id: &SandboxId,
    ) -> Result<(), TeardownError> {
        self.stop_sandbox(id).await?;
        let Ok(sandbox) = self.pods.sandbox(id.as_str()) else { return Ok(()) };
        self.records.remove_sandbox(&sandbox).await?;
        self.set_owned(id);
        Ok(())
    }

    /// Ends the watch of a stopped sandbox's cell, and releases its volumes, images and logs.
    pub(super) fn release(&self, sandbox: &Sandbox) {
        self.unwatch(&sandbox.cell);
        self.volumes.release(&sandbox.cell);
        self.images.forget_cell(&sandbox.cell);
        for container in self.pods.containers_of(&sandbox.id) {
            self.logs.close(&container.id);
        }
    }

    /// Releases the volumes and images of a cell that ended while they were copied into it: its end
    /// released only volumes and images that were known already.
    pub(crate) fn release_if_ended(&self, cell: &Cell) {
        if self.cells.get(&cell.id).is_none() {
            self.volumes.release(&cell.id);
            self.images.forget_cell(&cell.id);
            self.release_layers(&cell.id);
        }
    }

    /// Releases the layers that the node holds for an ended cell.
    pub(super) fn release_layers(&self, cell: &CellId) {
        let (images, cell) = (Arc::clone(&self.images), cell.clone());
        self.tasks.spawn(async move { images.release_layers(&cell).await });
    }

    /// Kills the containers of a sandbox and waits for their output, both with a time limit: a
    /// broken cell must not keep its pod.
    async fn kill_containers(self: &Arc<Self>, cell: &Cell, sandbox: &Sandbox) {
        let containers = self.pods.containers_of(&sandbox.id);
        let (running, others): (Vec<_>, Vec<_>) = containers
            .into_iter()
            .partition(|container| container.state() == cri::ContainerState::ContainerRunning);
        let kills = running.iter().map(async |container| {
            let container_id = container.cell_container.to_string();
            let request = cri::StopContainerRequest { container_id, timeout: 0 };
            if let Err(failure) = CellClient::new(cell).stop_container(KILL_TIMEOUT, request).await
            {
                tracing::warn!(
                    container = %container.id,
                    pod = %sandbox.pod,
                    status = failure.message(),
                    "container not killed, it ends with its cell"
                );
            }
        });
        // Tries once more to complete logs that a previous daemon could not complete.
        let incomplete = others
            .into_iter()
            .filter(|container| container.exited() && !container.status.log_whole);
        let completions = incomplete.map(async |container| {
            self.container_logs.resume(cell, &container).await;
            self.logs.drain(&container.id, LAST_OUTPUT_TIMEOUT).await;
        });
        tokio::join!(join_all(kills), join_all(completions));
        let exited = self.pods.wait(LAST_OUTPUT_TIMEOUT, |pods| {
            running
                .iter()
                .all(|container| {
                    pods.container(container.id.as_str()).is_ok_and(|now| now.exited())
                })
                .then_some(())
        });
        if exited.await.is_none() {
            tracing::warn!(
                sandbox = %sandbox.id,
                pod = %sandbox.pod,
                timeout_s = LAST_OUTPUT_TIMEOUT.as_secs(),
                "exits of killed containers not recorded in time, ending the cell"
            );
        }
    }
}
