//! Attempts of a container whose start was interrupted.

use std::sync::Arc;

use kiyot_engine::id::ContainerId;
use kiyot_proto::cri;

use super::{CellSync, EXIT_RECORD_TIMEOUT};
use crate::backends::milpa::{
    cell_client::CellClient, cells::Cell, failure::Failure, pods::Sandbox,
};

/// An error when removing a container's other attempts.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AttemptError {
    /// Another attempt runs.
    #[error("container {container} is another attempt of {name:?}, and runs")]
    Running {
        /// The other attempt.
        container: ContainerId,
        /// The container's name.
        name: String,
    },
    /// The exit of another attempt is not recorded.
    #[error("the end of container {container}, another attempt of {name:?}, is not recorded yet")]
    ExitNotRecorded {
        /// The other attempt.
        container: ContainerId,
        /// The container's name.
        name: String,
    },
    /// The cell failed.
    #[error(transparent)]
    Cell(#[from] Failure),
}

impl CellSync {
    /// Makes sure that no other attempt of a container runs or can start.
    ///
    /// A kubelet creates the next attempt for a container that reads CREATED
    /// (kubecontainer.ShouldContainerBeRestarted). The previous attempt may be starting in its
    /// cell: a start goes on there when the daemon that requested it is killed. Fails if another
    /// attempt runs by now: the kubelet then finds that attempt RUNNING. (A kubelet first stops an
    /// attempt that it knows to be running.)
    pub(crate) async fn end_stale_attempts(
        self: &Arc<Self>,
        cell: &Cell,
        sandbox: &Sandbox,
        metadata: &cri::ContainerMetadata,
    ) -> Result<(), AttemptError> {
        for other in self.pods.containers_of(&sandbox.id) {
            let config = other.meta().config.unwrap_or_default();
            let is_attempt = config.metadata.is_some_and(|other| {
                other.name == metadata.name && other.attempt != metadata.attempt
            });
            if !is_attempt || other.exited() {
                continue;
            }
            if other.state() == cri::ContainerState::ContainerCreated {
                let refreshed = self.refresh_status(cell, &other).await;
                refreshed.map_err(|failure| other.restored(&failure))?;
            }
            let (container, name) = (other.id.clone(), metadata.name.clone());
            match self.pods.container(other.id.as_str()).map(|now| now.state()) {
                Ok(cri::ContainerState::ContainerRunning) => {
                    return Err(AttemptError::Running { container, name });
                }
                // An exit that is already being recorded counts. Until it is recorded, the response
                // to a start may make the container read RUNNING.
                Ok(cri::ContainerState::ContainerCreated) => {
                    let _replacement = self.replacements.begin(container.clone());
                    CellClient::new(cell).remove_known_container(&other).await?;
                    self.record_absence(&other);
                    if !self.pods.wait_for_exit(&other.id, EXIT_RECORD_TIMEOUT).await {
                        return Err(AttemptError::ExitNotRecorded { container, name });
                    }
                }
                Ok(_) | Err(_) => {}
            }
        }
        Ok(())
    }
}
