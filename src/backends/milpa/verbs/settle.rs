//! Attempts of a container whose start was cut short.

use std::sync::Arc;

use kiyot_proto::cri;
use tonic::Status;

use super::{Verbs, calls, stop_container::RECORDED, view::Sandbox};
use crate::backends::milpa::cells::Cell;

impl Verbs {
    /// Sees to it that no other attempt of a container runs, or can begin to run any more.
    ///
    /// A kubelet makes the next attempt for one that reads CREATED
    /// (kubecontainer.ShouldContainerBeRestarted), and that one may just be starting in its cell:
    /// its start goes on there when the daemon that asked for it is killed. One that runs by now is
    /// `FAILED_PRECONDITION`: the kubelet finds it RUNNING when it looks again. (One that it knows
    /// to run it stops first.)
    pub(super) async fn settle_attempts(
        self: &Arc<Self>,
        cell: &Cell,
        sandbox: &Sandbox,
        metadata: &cri::ContainerMetadata,
    ) -> Result<(), Status> {
        for other in self.view.containers_of(&sandbox.id) {
            let config = other.meta().config.unwrap_or_default();
            let is_attempt = config
                .metadata
                .is_some_and(|of| of.name == metadata.name && of.attempt != metadata.attempt);
            if !is_attempt || other.exited() {
                continue;
            }
            if other.state() == cri::ContainerState::ContainerCreated {
                self.ask(cell, &other).await.map_err(|status| other.restored(&status))?;
            }
            match self.view.container(other.id.as_str()).map(|now| now.state()) {
                Ok(cri::ContainerState::ContainerRunning) => {
                    return Err(Status::failed_precondition(format!(
                        "container {} is another attempt of {:?}, and runs",
                        other.id, metadata.name
                    )));
                }
                // Its end may be on its way into the records: then it is that end which is kept.
                // Until it is there, a start that was just answered may make it read RUNNING.
                Ok(cri::ContainerState::ContainerCreated) => {
                    calls::remove_container(cell, &other).await?;
                    self.note_gone(&other);
                    if !self.exited_within(&other, RECORDED).await {
                        return Err(Status::unavailable(format!(
                            "the end of container {}, another attempt of {:?}, is not recorded yet",
                            other.id, metadata.name
                        )));
                    }
                }
                Ok(_) | Err(_) => {}
            }
        }
        Ok(())
    }
}
