//! `RemovePodSandbox` and `RemoveContainer`: they refuse nothing, and what still runs is stopped
//! first.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kiyot_proto::cri;
use tonic::Status;

use super::{Verbs, calls, failure, view::Container};
use crate::backends::milpa::id::SandboxId;

/// How long a cell may take to remove what a container had in it; what stays ends with the cell.
const FORGET: Duration = Duration::from_secs(5);

impl Verbs {
    /// Unknown ones are removed, as for containerd.
    pub(super) async fn remove_pod_sandbox(
        self: &Arc<Self>,
        request: cri::RemovePodSandboxRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::RemovePodSandboxResponse, Status> {
        let Some(sandbox) = calls::known(self.view.sandbox(&request.pod_sandbox_id))? else {
            return Ok(cri::RemovePodSandboxResponse {});
        };
        let verbs = Arc::clone(self);
        self.detached("RemovePodSandbox", deadline, async move {
            verbs.erase_sandbox(&sandbox.id).await
        })
        .await?;
        Ok(cri::RemovePodSandboxResponse {})
    }

    /// Stops a sandbox if it is not, and forgets it and its containers.
    pub(super) async fn erase_sandbox(self: &Arc<Self>, id: &SandboxId) -> Result<(), Status> {
        self.stop_sandbox(id).await?;
        let Ok(sandbox) = self.view.sandbox(id.as_str()) else { return Ok(()) };
        self.drop_sandbox(&sandbox).await.map_err(|error| failure::of_store(&error))?;
        self.claim(id);
        Ok(())
    }

    /// Unknown ones are removed, as for containerd. One that runs is killed.
    pub(super) async fn remove_container(
        self: &Arc<Self>,
        request: cri::RemoveContainerRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::RemoveContainerResponse, Status> {
        let Some(container) = calls::known(self.view.container(&request.container_id))? else {
            return Ok(cri::RemoveContainerResponse {});
        };
        let verbs = Arc::clone(self);
        self.detached("RemoveContainer", deadline, async move {
            verbs.erase_container(&container).await
        })
        .await?;
        Ok(cri::RemoveContainerResponse {})
    }

    /// Stops a container if it runs, removes it from its cell, and forgets it.
    ///
    /// UNAVAILABLE if its cell is not connected and it has not exited: it may be starting there,
    /// for a daemon before this one, and a container that is forgotten is in no other attempt's
    /// way.
    pub(super) async fn erase_container(
        self: &Arc<Self>,
        container: &Container,
    ) -> Result<(), Status> {
        if container.state() == cri::ContainerState::ContainerRunning {
            self.end_container(container, 0).await?;
        }
        let Ok(container) = &self.view.container(container.id.as_str()) else { return Ok(()) };
        let cell = self.parts.cells.get(&container.cell);
        match &cell {
            Some(cell) if calls::is_connected(cell) => {
                calls::remove_container(cell, container).await?
            }
            Some(cell) if !container.exited() => {
                let sandbox = self.view.sandbox(container.sandbox.as_str())?;
                calls::connected(cell, &sandbox.pod, None).await?;
                calls::remove_container(cell, container).await?;
            }
            // What is left of it in the cell ends with the cell, and is in nobody's way until then.
            _ => {
                tracing::debug!(container = %container.id, cell = %container.cell, "A container is forgotten that its cell could not be told to remove")
            }
        }
        self.drop_container(container).await.map_err(|error| failure::of_store(&error))?;
        self.parts.logs.close(&container.id);
        if let Some(cell) = cell.filter(calls::is_connected) {
            let meta = container.meta();
            let config = meta.config.unwrap_or_default();
            let forgotten = self.parts.volumes.forget_container(&cell, &config, &meta.cell_log);
            match tokio::time::timeout(FORGET, forgotten).await {
                Ok(Ok(())) => {}
                Ok(Err(status)) => {
                    tracing::debug!(container = %container.id, status = status.message(), "What a container had in its cell stays there")
                }
                Err(_) => {
                    tracing::debug!(container = %container.id, "A cell did not remove in time what a container had in it")
                }
            }
        }
        Ok(())
    }
}
