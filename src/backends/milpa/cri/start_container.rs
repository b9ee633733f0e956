//! `StartContainer`: OK when the log's file exists and the container reads RUNNING.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kiyot_engine::engine::Step;
use kiyot_proto::cri;
use kiyot_values::error_chain::error_chain;
use tonic::Status;

use super::{CriService, not_running, request::Addressed, status_code};
use crate::backends::milpa::{
    cell_client::{CALL_TIMEOUT, CellClient, OPTIONAL_CALL_TIMEOUT},
    cells::Cell,
    pods::{Container, container_state},
};

/// Time limit of the cell's containerd for a start.
const START_TIMEOUT: Duration = Duration::from_secs(110);
/// Time limit until a failed start reads EXITED.
const FAILED_START_TIMEOUT: Duration = Duration::from_secs(5);

impl CriService {
    /// Starts a container. Succeeds for a running container, because the first response was lost.
    pub(super) async fn start_container(
        self: &Arc<Self>,
        request: cri::StartContainerRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::StartContainerResponse, Status> {
        let container = self.pods.container(&request.container_id)?;
        let service = Arc::clone(self);
        let started = async move { service.start_in_cell(container, request).await };
        self.detached("StartContainer", deadline, started).await
    }

    async fn start_in_cell(
        &self,
        container: Container,
        request: cri::StartContainerRequest,
    ) -> Result<cri::StartContainerResponse, Status> {
        let sandbox = self.pods.sandbox(container.sandbox.as_str())?;
        match container.state() {
            cri::ContainerState::ContainerCreated => {}
            cri::ContainerState::ContainerRunning => return Ok(cri::StartContainerResponse {}),
            state => {
                return Err(Status::failed_precondition(format!(
                    "container {} is in {} state",
                    container.id,
                    state.as_str_name()
                )));
            }
        }
        if !sandbox.ready {
            return Err(not_running(&sandbox.id));
        }
        let cell = self.connected_cell(&sandbox, None).await?;
        self.sync.container_logs.follow(&cell, &container).await?;
        let request = request.to(&container.cell_container);
        if let Err(failure) = CellClient::new(&cell).start_container(START_TIMEOUT, request).await {
            // containerd keeps a container that failed to start as exited, with the reason, which
            // the kubelet reads next.
            if self.sync.refresh_status(&cell, &container).await.is_ok() {
                self.pods.wait_for_exit(&container.id, FAILED_START_TIMEOUT).await;
            }
            return Err(container.restored(&failure).into());
        }
        self.cells.reached(&cell.id, Step::FirstContainer);
        self.record_start(&cell, &container).await?;
        Ok(cri::StartContainerResponse {})
    }

    /// Records a start, with the cell's time if the cell responds, and the first usage. From now on
    /// the container's usage is listed.
    async fn record_start(&self, cell: &Cell, container: &Container) -> Result<(), Status> {
        let client = CellClient::new(cell);
        let container_id = container.cell_container.to_string();
        let status =
            cri::ContainerStatusRequest { container_id: container_id.clone(), verbose: false };
        let usage = cri::ContainerStatsRequest { container_id: container_id.clone() };
        let (reported, sample) = tokio::join!(
            client.container_status(CALL_TIMEOUT, status),
            client.container_stats(OPTIONAL_CALL_TIMEOUT, usage),
        );
        let reported = reported.ok().and_then(|response| response.status);
        let sample = sample.ok().and_then(|response| response.stats);
        let times = container.times();
        if let Some(reported) = &reported {
            self.pods.set_reported(&container.id, reported);
        }
        // The container may have exited already: the exit is recorded after the log is on the node.
        let running = cri::ContainerStatus {
            state: cri::ContainerState::ContainerRunning.into(),
            started_at: reported.as_ref().map(|reported| reported.started_at).unwrap_or_default(),
            ..Default::default()
        };
        let decide = |current: &_| container_state::next(current, &running, times);
        if let Err(error) = self.sync.records.change_container(container, decide).await {
            // Without a record of its start, the container would never be stopped.
            let request = cri::StopContainerRequest { container_id, timeout: 0 };
            let stopped = client.stop_container(CALL_TIMEOUT, request).await;
            tracing::error!(
                container = %container.id,
                error = error_chain(&error),
                stopped = stopped.is_ok(),
                "start of a container not recorded, stopping it"
            );
            return Err(status_code::of_store(&error));
        }
        self.pods.set_first_usage(&container.id, sample, Instant::now());
        if let Some(reported) = reported {
            self.sync.record_status(container, reported).await;
        }
        Ok(())
    }
}
