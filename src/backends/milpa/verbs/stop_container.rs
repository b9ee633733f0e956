//! `StopContainer`: OK only when it reads EXITED here. A kubelet that finds it RUNNING after that
//! reports a violation of CRI.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kiyot_proto::cri;
use tonic::{Code, Status};

use super::{Verbs, calls, view::Container};
use crate::backends::milpa::cells::Cell;

/// How long a container may take to end after its grace period, and its cell to say so.
const AFTER_GRACE: Duration = Duration::from_secs(30);
/// How long the news of an exit may take when the stop has been answered; then the cell is asked.
const NEWS: Duration = Duration::from_secs(5);
/// How long it may take until an exit is on disk, with log and termination message.
pub(super) const RECORDED: Duration = Duration::from_secs(40);
/// The longest grace period that is waited for in one call; the kubelet calls again.
const LONGEST_GRACE: i64 = 24 * 60 * 60;

impl Verbs {
    /// Unknown ones are stopped, as for containerd.
    pub(super) async fn stop_container(
        self: &Arc<Self>,
        request: cri::StopContainerRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::StopContainerResponse, Status> {
        let Some(container) = calls::known(self.view.container(&request.container_id))? else {
            return Ok(cri::StopContainerResponse {});
        };
        let verbs = Arc::clone(self);
        self.detached("StopContainer", deadline, async move {
            verbs.end_container(&container, request.timeout).await
        })
        .await?;
        Ok(cri::StopContainerResponse {})
    }

    /// Stops a container if it runs, and returns when it reads EXITED.
    pub(super) async fn end_container(
        self: &Arc<Self>,
        container: &Container,
        grace: i64,
    ) -> Result<(), Status> {
        let Ok(current) = self.view.container(container.id.as_str()) else { return Ok(()) };
        if current.state() != cri::ContainerState::ContainerRunning {
            return Ok(());
        }
        let sandbox = self.view.sandbox(container.sandbox.as_str())?;
        let cell = self.reachable_cell(&sandbox, None).await?;
        let grace = grace.clamp(0, LONGEST_GRACE);
        let time = Duration::from_secs(grace.unsigned_abs()) + AFTER_GRACE;
        let request = cri::StopContainerRequest {
            container_id: container.cell_container.to_string(),
            timeout: grace,
        };
        let mut runtime = calls::runtime(&cell);
        match calls::known(
            calls::answered(
                time,
                "StopContainer",
                runtime.stop_container(calls::within(time, request)),
            )
            .await,
        ) {
            Ok(Some(_)) => {}
            Ok(None) => self.note_gone(container),
            // containerd may fail in the middle because the container ends by itself just then
            // ("ttrpc: closed"): its cell is asked.
            Err(status)
                if status.code() == Code::Unknown && self.ends_anyway(&cell, container).await => {}
            Err(status) => return Err(container.restored(&status)),
        }
        if self.exited_within(container, NEWS).await {
            return Ok(());
        }
        self.ask(&cell, container).await.map_err(|status| container.restored(&status))?;
        if self.exited_within(container, RECORDED).await {
            return Ok(());
        }
        Err(Status::deadline_exceeded(format!(
            "container {} of pod {} was stopped, and its cell does not say that it has ended",
            container.id, sandbox.pod
        )))
    }

    /// Whether a container that could not be stopped has ended all the same, as its cell says.
    async fn ends_anyway(self: &Arc<Self>, cell: &Cell, container: &Container) -> bool {
        self.ask(cell, container).await.is_ok() && self.exited_within(container, NEWS).await
    }

    /// Waits until a container reads EXITED, or is not there any more.
    pub(super) async fn exited_within(&self, container: &Container, time: Duration) -> bool {
        self.view
            .wait(time, |view| {
                view.container(container.id.as_str()).map_or(true, |now| now.exited()).then_some(())
            })
            .await
            .is_some()
    }
}
