//! `StopContainer`: OK only when the container reads EXITED. A kubelet that then finds it RUNNING
//! reports a violation of CRI.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kiyot_proto::cri;
use tonic::{Code, Status};

use super::CriService;
use crate::backends::milpa::{
    cell_client::{self, CellClient},
    cells::Cell,
    pods::Container,
    sync::EXIT_RECORD_TIMEOUT,
};

/// Time limit of a cell for a stop, after the grace period.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit of the exit event after the stop; afterwards the daemon asks the cell.
const EXIT_EVENT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest grace period of one call, in seconds; the kubelet calls again.
const MAX_GRACE_SECONDS: i64 = 24 * 60 * 60;

impl CriService {
    pub(super) async fn stop_container(
        self: &Arc<Self>,
        request: cri::StopContainerRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::StopContainerResponse, Status> {
        let (service, found) = (Arc::clone(self), self.pods.container(&request.container_id));
        self.end_if_known("StopContainer", deadline, found, |container| async move {
            service.stop_and_wait(&container, request.timeout).await
        })
        .await
    }

    /// Stops a container if it runs, and waits until it reads EXITED.
    pub(super) async fn stop_and_wait(
        self: &Arc<Self>,
        container: &Container,
        grace_seconds: i64,
    ) -> Result<(), Status> {
        let Ok(current) = self.pods.container(container.id.as_str()) else { return Ok(()) };
        if current.state() != cri::ContainerState::ContainerRunning {
            return Ok(());
        }
        let sandbox = self.pods.sandbox(container.sandbox.as_str())?;
        let cell = self.connected_cell(&sandbox, None).await?;
        let grace_seconds = grace_seconds.clamp(0, MAX_GRACE_SECONDS);
        let timeout = Duration::from_secs(grace_seconds.unsigned_abs()) + STOP_TIMEOUT;
        let request = cri::StopContainerRequest {
            container_id: container.cell_container.to_string(),
            timeout: grace_seconds,
        };
        let stopped = CellClient::new(&cell).stop_container(timeout, request).await;
        match cell_client::found(stopped) {
            Ok(Some(_)) => {}
            Ok(None) => self.sync.record_absence(container),
            // containerd fails ("ttrpc: closed") when the container ends by itself during the stop.
            Err(failure)
                if failure.code() == Code::Unknown && self.has_exited(&cell, container).await => {}
            Err(failure) => return Err(container.restored(&failure).into()),
        }
        if self.pods.wait_for_exit(&container.id, EXIT_EVENT_TIMEOUT).await {
            return Ok(());
        }
        let refreshed = self.sync.refresh_status(&cell, container).await;
        refreshed.map_err(|failure| container.restored(&failure))?;
        if self.pods.wait_for_exit(&container.id, EXIT_RECORD_TIMEOUT).await {
            return Ok(());
        }
        Err(Status::deadline_exceeded(format!(
            "container {} of pod {} was stopped, but its cell has not confirmed the exit",
            container.id, sandbox.pod
        )))
    }

    /// Returns whether a container has exited although its stop failed, by asking its cell.
    async fn has_exited(&self, cell: &Cell, container: &Container) -> bool {
        self.sync.refresh_status(cell, container).await.is_ok()
            && self.pods.wait_for_exit(&container.id, EXIT_EVENT_TIMEOUT).await
    }
}
