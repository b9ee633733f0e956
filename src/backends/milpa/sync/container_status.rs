//! Statuses of containers from the reports of their cells.

use std::{sync::Arc, time::Duration};

use kiyot_proto::cri;
use kiyot_values::error_chain::error_chain;

use super::CellSync;
use crate::backends::milpa::{
    cell_client::CellClient,
    cells::Cell,
    failure::{Code, Failure},
    pods::{Container, container_state},
};

/// Time limit of a cell's response about a container or a sandbox.
pub(super) const STATUS_TIMEOUT: Duration = Duration::from_secs(10);

impl CellSync {
    /// Asks a cell for the status of a container, and applies it.
    pub(crate) async fn refresh_status(
        self: &Arc<Self>,
        cell: &Cell,
        container: &Container,
    ) -> Result<(), Failure> {
        let request = cri::ContainerStatusRequest {
            container_id: container.cell_container.to_string(),
            verbose: false,
        };
        match CellClient::new(cell).container_status(STATUS_TIMEOUT, request).await {
            Ok(response) => {
                if let Some(reported) = response.status {
                    self.apply_status(cell, container, reported).await;
                }
                Ok(())
            }
            Err(failure) if failure.code() == Code::NotFound => {
                self.record_absence(container);
                Ok(())
            }
            Err(failure) => Err(failure),
        }
    }

    /// Applies a status that a cell reports. If the start of the container was not recorded,
    /// follows its log first: a previous daemon began the start, and was killed.
    pub(super) async fn apply_status(
        self: &Arc<Self>,
        cell: &Cell,
        container: &Container,
        reported: cri::ContainerStatus,
    ) {
        let has_started = matches!(
            reported.state(),
            cri::ContainerState::ContainerRunning | cri::ContainerState::ContainerExited
        );
        if has_started && container.state() == cri::ContainerState::ContainerCreated {
            self.follow_log(cell, container).await;
        }
        self.record_status(container, reported).await;
    }

    /// Records a status that a cell reports.
    pub(crate) async fn record_status(
        self: &Arc<Self>,
        container: &Container,
        reported: cri::ContainerStatus,
    ) {
        self.pods.set_reported(&container.id, &reported);
        let times = container.times();
        match reported.state() {
            cri::ContainerState::ContainerExited => {
                let exit = container_state::report(&container.status, &reported, times);
                self.record_exit(container, Some(exit));
            }
            cri::ContainerState::ContainerRunning => {
                let decide = |current: &_| container_state::next(current, &reported, times);
                if let Err(error) = self.records.change_container(container, decide).await {
                    tracing::error!(
                        container = %container.id,
                        error = error_chain(&error),
                        "start of a container not recorded"
                    );
                }
            }
            cri::ContainerState::ContainerCreated | cri::ContainerState::ContainerUnknown => {}
        }
    }

    /// Follows a container's log, and logs a failure.
    pub(super) async fn follow_log(&self, cell: &Cell, container: &Container) {
        if let Err(failure) = self.container_logs.follow(cell, container).await
            && let Some(suppressed) = cell.link.lines.admit()
        {
            tracing::error!(
                container = %container.id,
                status = failure.message(),
                suppressed,
                "log of a container not followed"
            );
        }
    }
}
