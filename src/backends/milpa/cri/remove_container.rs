//! `RemoveContainer`: kills a running container first.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kiyot_proto::cri;
use tonic::{Code, Status};

use super::{CriService, status_code};
use crate::backends::milpa::{
    cell_client::{self, CellClient},
    cells::Cell,
    pods::Container,
};

/// Time limit for removing a container's files from a cell; remaining files end with the cell.
const FILE_REMOVAL_TIMEOUT: Duration = Duration::from_secs(5);

impl CriService {
    pub(super) async fn remove_container(
        self: &Arc<Self>,
        request: cri::RemoveContainerRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::RemoveContainerResponse, Status> {
        let (service, found) = (Arc::clone(self), self.pods.container(&request.container_id));
        self.end_if_known("RemoveContainer", deadline, found, |container| async move {
            service.remove_from_cell_and_records(&container).await
        })
        .await
    }

    /// Stops a container if it runs, and removes it from its cell and from the records.
    ///
    /// Returns UNAVAILABLE if the container has not exited and its cell is not connected: a
    /// previous daemon may have started the container, and without its record the next attempt
    /// would run beside it.
    pub(super) async fn remove_from_cell_and_records(
        self: &Arc<Self>,
        container: &Container,
    ) -> Result<(), Status> {
        if container.state() == cri::ContainerState::ContainerRunning {
            self.stop_and_wait(container, 0).await?;
        }
        let Ok(container) = &self.pods.container(container.id.as_str()) else { return Ok(()) };
        let cell = self.cells.get(&container.cell);
        match &cell {
            Some(cell) if cell_client::is_connected(cell) => {
                match CellClient::new(cell).remove_known_container(container).await {
                    // The cell of a stopped pod disconnects.
                    Err(failure) if failure.code() == Code::Unavailable && container.exited() => {
                        is_left(container);
                    }
                    removed => removed?,
                }
            }
            Some(cell) if !container.exited() => {
                let sandbox = self.pods.sandbox(container.sandbox.as_str())?;
                cell_client::connected(cell, &sandbox.pod, None).await?;
                CellClient::new(cell).remove_known_container(container).await?;
            }
            Some(_) => is_left(container),
            // The cell has ended: the pod was stopped, as before every ordinary removal.
            None => {}
        }
        let removed = self.sync.records.remove_container(container).await;
        removed.map_err(|error| status_code::of_store(&error))?;
        self.logs.close(&container.id);
        if let Some(cell) = cell.filter(cell_client::is_connected) {
            self.remove_files(&cell, container).await;
        }
        Ok(())
    }

    async fn remove_files(&self, cell: &Cell, container: &Container) {
        let meta = container.meta();
        let config = meta.config.unwrap_or_default();
        let removal = self.volumes.forget_container(cell, &config, &meta.cell_log);
        match tokio::time::timeout(FILE_REMOVAL_TIMEOUT, removal).await {
            Ok(Ok(())) => {}
            Ok(Err(failure)) => tracing::debug!(
                container = %container.id,
                status = failure.message(),
                "files of a removed container stay in its cell"
            ),
            Err(_) => tracing::debug!(
                container = %container.id,
                timeout_s = FILE_REMOVAL_TIMEOUT.as_secs(),
                "files of a removed container not removed from its cell in time"
            ),
        }
    }
}

/// Logs that an exited container stays in its cell. It ends with the cell, and is harmless until
/// then.
fn is_left(container: &Container) {
    tracing::debug!(
        container = %container.id,
        cell = %container.cell,
        "container record removed while its cell was unreachable"
    );
}
