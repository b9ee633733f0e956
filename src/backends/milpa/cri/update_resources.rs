//! `UpdateContainerResources`: the cell updates the resources, then reports the container's
//! resources.

use std::time::Instant;

use kiyot_engine::placement::check_resize;
use kiyot_proto::cri;
use kiyot_values::error_chain::error_chain;
use tonic::Status;

use super::{
    CriService,
    request::{Addressed, HasResources},
};
use crate::backends::milpa::{
    cell_client::{CALL_TIMEOUT, CellClient, time_left},
    pods::{Container, Sandbox},
};

impl CriService {
    pub(super) async fn update_resources(
        &self,
        request: cri::UpdateContainerResourcesRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::UpdateContainerResourcesResponse, Status> {
        let container = self.pods.container(&request.container_id)?;
        let sandbox = self.pods.sandbox(container.sandbox.as_str())?;
        let cell = self.connected_cell(&sandbox, deadline).await?;
        self.check_update(&sandbox, &container, request.linux.as_ref()).await?;
        let timeout = time_left(deadline, CALL_TIMEOUT);
        let mut request = request.to(&container.cell_container);
        if cell.capabilities.own_kernel {
            request = request.without_node_hardware();
        }
        let updated = CellClient::new(&cell).update_container_resources(timeout, request).await;
        let response = updated.map_err(|failure| container.restored(&failure))?;
        if let Err(failure) = self.sync.refresh_status(&cell, &container).await {
            tracing::debug!(
                container = %container.id,
                status = failure.message(),
                "updated resources not reported, the next event has them"
            );
        }
        // The state is unchanged, so nothing of this is recorded yet.
        let unchanged = |current: &_| Some(Clone::clone(current));
        if let Err(error) = self.sync.records.change_container(&container, unchanged).await {
            tracing::warn!(
                container = %container.id,
                error = error_chain(&error),
                "updated resources not recorded"
            );
        }
        Ok(response)
    }

    /// Refuses an update beyond the cell's machine: the cell's containerd would apply it.
    async fn check_update(
        &self,
        sandbox: &Sandbox,
        container: &Container,
        update: Option<&cri::LinuxContainerResources>,
    ) -> Result<(), Status> {
        let Some(update) = update else { return Ok(()) };
        let Some(cell) = self.cells.resources(&sandbox.cell).await else { return Ok(()) };
        let all = self.pods.containers_of(&sandbox.id);
        let others = all.iter().filter(|other| other.id != container.id && !other.exited());
        let others: Vec<_> = others.map(resources).collect();
        check_resize(cell, &resources(container), update, &others).map_err(|error| {
            let name = container.meta().config.and_then(|config| config.metadata);
            let name = name.unwrap_or_default().name;
            Status::invalid_argument(format!("container {name:?}: {error}"))
        })
    }
}

/// Returns a container's resources as its cell last reported them, or else as created.
fn resources(container: &Container) -> cri::LinuxContainerResources {
    let reported = container.answer().resources.and_then(|resources| resources.linux);
    let created = || container.meta().config?.linux?.resources;
    reported.or_else(created).unwrap_or_default()
}
