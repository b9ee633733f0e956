//! `StartContainer` and `ReopenContainerLog`.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use kiyot_proto::{cri, store as records};
use tonic::Status;

use super::{SAMPLE, Verbs, calls, failure, rewrite::Addressed, transition, view::Container};
use crate::backends::milpa::{
    cells::Cell,
    id::ContainerId,
    logs::{Keeper, LogRoute},
    store::StoreError,
};

/// How long the cell's containerd may take to start a container.
const START: Duration = Duration::from_secs(110);
/// How long it may take until a failed start reads EXITED.
const FAILED: Duration = Duration::from_secs(5);

impl Verbs {
    /// When it answers, the log's file is there and the container reads RUNNING. One that runs
    /// already is fine: its answer was lost.
    pub(super) async fn start_container(
        self: &Arc<Self>,
        request: cri::StartContainerRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::StartContainerResponse, Status> {
        let container = self.view.container(&request.container_id)?;
        let verbs = Arc::clone(self);
        self.detached(
            "StartContainer",
            deadline,
            async move { verbs.begin(container, request).await },
        )
        .await
    }

    async fn begin(
        self: Arc<Self>,
        container: Container,
        request: cri::StartContainerRequest,
    ) -> Result<cri::StartContainerResponse, Status> {
        let sandbox = self.view.sandbox(container.sandbox.as_str())?;
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
            return Err(Status::failed_precondition(format!(
                "sandbox container {:?} is not running",
                sandbox.id.as_str()
            )));
        }
        let cell = self.reachable_cell(&sandbox, None).await?;
        self.follow_log(&cell, &container).await?;
        let mut runtime = calls::runtime(&cell);
        let call =
            runtime.start_container(calls::within(START, request.to(&container.cell_container)));
        if let Err(status) = calls::answered(START, "StartContainer", call).await {
            // containerd keeps a container that did not start as one that has exited, with the
            // reason: that is what the kubelet looks for next.
            if self.ask(&cell, &container).await.is_ok() {
                self.view
                    .wait(FAILED, |view| {
                        view.container(container.id.as_str())
                            .map_or(true, |now| now.exited())
                            .then_some(())
                    })
                    .await;
            }
            return Err(container.restored(&status));
        }
        self.runs(&cell, &container).await?;
        Ok(cri::StartContainerResponse {})
    }

    /// Records that a container runs, by the cell's clock if the cell can be asked, and what it
    /// uses: from now on its usage is listed.
    async fn runs(self: &Arc<Self>, cell: &Cell, container: &Container) -> Result<(), Status> {
        let (status, usage) = (
            cri::ContainerStatusRequest {
                container_id: container.cell_container.to_string(),
                verbose: false,
            },
            cri::ContainerStatsRequest { container_id: container.cell_container.to_string() },
        );
        let (mut runtime, mut other) = (calls::runtime(cell), calls::runtime(cell));
        let (told, sample) = tokio::join!(
            calls::answered(
                calls::CALL,
                "ContainerStatus",
                runtime.container_status(calls::within(calls::CALL, status))
            ),
            calls::answered(
                SAMPLE,
                "ContainerStats",
                other.container_stats(calls::within(SAMPLE, usage))
            ),
        );
        let (told, sample) = (
            told.ok().and_then(|answer| answer.status),
            sample.ok().and_then(|answer| answer.stats),
        );
        let (times, started_at) =
            (container.times(), told.as_ref().map(|told| told.started_at).unwrap_or_default());
        if let Some(told) = &told {
            self.view.tell(&container.id, told);
        }
        // It may have ended by now: that comes after, when its log is here.
        let running = cri::ContainerStatus {
            state: cri::ContainerState::ContainerRunning.into(),
            started_at,
            ..Default::default()
        };
        if let Err(error) = self
            .change_container(container, |current| transition::seen(current, &running, times))
            .await
        {
            // A container that runs and is not known to run would never be stopped.
            let request = cri::StopContainerRequest {
                container_id: container.cell_container.to_string(),
                timeout: 0,
            };
            let stopped = calls::answered(
                calls::CALL,
                "StopContainer",
                runtime.stop_container(calls::within(calls::CALL, request)),
            )
            .await;
            tracing::error!(container = %container.id, error = failure::chain(&error), stopped = stopped.is_ok(), "A container was started, could not be recorded, and is stopped");
            return Err(failure::of_store(&error));
        }
        self.view.first_usage(&container.id, sample, Instant::now());
        if let Some(told) = told {
            self.note(container, told).await;
        }
        Ok(())
    }

    /// Brings a container's log to the node from now on; one without a log is fine.
    pub(super) async fn follow_log(
        &self,
        cell: &Cell,
        container: &Container,
    ) -> Result<(), Status> {
        let Some(route) = log_route(container) else { return Ok(()) };
        self.parts.logs.follow(cell, route).await?;
        self.close_if_gone(cell, container);
        Ok(())
    }

    /// Whoever removed a container while its log was being opened, or ended its cell, has closed
    /// what was not yet open.
    fn close_if_gone(&self, cell: &Cell, container: &Container) {
        if self.view.container(container.id.as_str()).is_err()
            || self.parts.cells.get(&cell.id).is_none()
        {
            self.parts.logs.close(&container.id);
        }
    }

    /// Brings home what is left in the cell of the log of a container that has exited, until it is
    /// all here or the container is removed. One that is here already is fine.
    pub(super) async fn resume_log(self: &Arc<Self>, cell: &Cell, container: &Container) {
        if container.status.log_whole {
            return;
        }
        let Some(route) = log_route(container) else { return };
        match self.parts.logs.resume(cell, route).await {
            Ok(true) => {
                self.close_if_gone(cell, container);
                self.finish_log(container);
            }
            Ok(false) => {}
            Err(status) => {
                tracing::error!(container = %container.id, status = status.message(), "The rest of the log of a container that has exited can't be written")
            }
        }
    }

    /// The kubelet has moved the log's file away: the next line goes to a new one. Where that
    /// begins in the cell's log is on disk before the answer.
    pub(super) async fn reopen_log(
        self: &Arc<Self>,
        request: cri::ReopenContainerLogRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::ReopenContainerLogResponse, Status> {
        let container = self.view.container(&request.container_id)?;
        if container.state() != cri::ContainerState::ContainerRunning {
            return Err(Status::failed_precondition("container is not running"));
        }
        if container.meta().cell_log.is_empty() {
            return Ok(cri::ReopenContainerLogResponse {});
        }
        let verbs = Arc::clone(self);
        let reopened = async move {
            let log_base = verbs.parts.logs.reopen(&container.id).await?;
            verbs.note_base(&container, log_base).await.map_err(|error| failure::of_store(&error))
        };
        self.detached("ReopenContainerLog", deadline, reopened).await?;
        Ok(cri::ReopenContainerLogResponse {})
    }
}

impl Verbs {
    async fn note_base(&self, container: &Container, log_base: i64) -> Result<(), StoreError> {
        self.change_container(container, |current| {
            Some(records::ContainerStatus { log_base, ..current.clone() })
        })
        .await
    }
}

#[async_trait]
impl Keeper for Verbs {
    async fn keep_base(&self, container: &ContainerId, base: i64) {
        let Ok(container) = self.view.container(container.as_str()) else { return };
        if let Err(error) = self.note_base(&container, base).await {
            tracing::error!(container = %container.id, error = failure::chain(&error), "Where the log of a container goes on could not be recorded");
        }
    }
}

/// Where a container's log is and goes; `None` for one without a log.
fn log_route(container: &Container) -> Option<LogRoute> {
    let meta = container.meta();
    let (base, node_path) = (container.status.log_base, meta.log_path.into());
    (!meta.cell_log.is_empty()).then(|| LogRoute {
        container: container.id.clone(),
        node_path,
        cell_path: meta.cell_log,
        base,
    })
}
