//! `UpdateContainerResources`: the cell updates them, and then reports the container's resources.

use std::time::Instant;

use kiyot_proto::cri;
use kiyot_values::error_chain::error_chain;
use tonic::Status;

use super::{
    CriService,
    request::{Addressed, HasResources},
};
use crate::backends::milpa::cell_client::{CALL_TIMEOUT, CellClient, time_left};

impl CriService {
    /// Updates the resources of a container.
    pub(super) async fn update_resources(
        &self,
        request: cri::UpdateContainerResourcesRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::UpdateContainerResourcesResponse, Status> {
        let container = self.pods.container(&request.container_id)?;
        let sandbox = self.pods.sandbox(container.sandbox.as_str())?;
        let cell = self.connected_cell(&sandbox, deadline).await?;
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
                "updated resources not reported, its next event has them"
            );
        }
        // The state has not changed, so that nothing of this is recorded yet.
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
}
