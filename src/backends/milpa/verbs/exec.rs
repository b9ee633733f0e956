//! `ExecSync`, and the calls that answer with a URL: `Exec`, `Attach`, `PortForward`.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kiyot_proto::cri;
use tonic::Status;

use super::{
    Verbs, calls, failure,
    rewrite::Addressed,
    view::{Container, Sandbox},
};
use crate::backends::milpa::cells::Cell;

/// How long an `ExecSync` may take beyond its own timeout, so that the cell's word comes first.
const AFTER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long an `ExecSync` without a timeout may take.
const WITHOUT_TIMEOUT: Duration = Duration::from_secs(4 * 60 * 60);

impl Verbs {
    /// The command ends with its caller's patience: a status `DEADLINE_EXCEEDED` of the cell is
    /// passed on, as the kubelet takes it for a probe's timeout.
    pub(super) async fn exec_sync(
        &self,
        request: cri::ExecSyncRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::ExecSyncResponse, Status> {
        let (container, _, cell) = self.running(&request.container_id, deadline).await?;
        let time = match u64::try_from(request.timeout) {
            Ok(seconds) if seconds > 0 => {
                Duration::from_secs(seconds).saturating_add(AFTER_TIMEOUT)
            }
            _ => WITHOUT_TIMEOUT,
        };
        let time = calls::left(deadline, time);
        let mut runtime = calls::runtime_for_exec(&cell);
        let call = runtime.exec_sync(calls::within(time, request.to(&container.cell_container)));
        calls::answered(time, "ExecSync", call).await.map_err(|status| container.restored(&status))
    }

    /// A URL on the node's loopback that leads to the cell's streaming server, once.
    pub(super) async fn exec(
        &self,
        request: cri::ExecRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::ExecResponse, Status> {
        let (container, _, cell) = self.running(&request.container_id, deadline).await?;
        let time = calls::left(deadline, calls::CALL);
        let mut runtime = calls::runtime(&cell);
        let call = runtime.exec(calls::within(time, request.to(&container.cell_container)));
        let answer = calls::answered(time, "Exec", call)
            .await
            .map_err(|status| container.restored(&status))?;
        Ok(cri::ExecResponse { url: self.parts.streaming.url(&cell, &answer.url)? })
    }

    /// As [`Self::exec`].
    pub(super) async fn attach(
        &self,
        request: cri::AttachRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::AttachResponse, Status> {
        let (container, _, cell) = self.running(&request.container_id, deadline).await?;
        let time = calls::left(deadline, calls::CALL);
        let mut runtime = calls::runtime(&cell);
        let call = runtime.attach(calls::within(time, request.to(&container.cell_container)));
        let answer = calls::answered(time, "Attach", call)
            .await
            .map_err(|status| container.restored(&status))?;
        Ok(cri::AttachResponse { url: self.parts.streaming.url(&cell, &answer.url)? })
    }

    /// As [`Self::exec`].
    pub(super) async fn port_forward(
        &self,
        request: cri::PortForwardRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::PortForwardResponse, Status> {
        let sandbox = self.view.sandbox(&request.pod_sandbox_id)?;
        if !sandbox.ready {
            return Err(Status::failed_precondition(format!(
                "sandbox container {:?} is not running",
                sandbox.id.as_str()
            )));
        }
        let cell = self.reachable_cell(&sandbox, deadline).await?;
        let time = calls::left(deadline, calls::CALL);
        let mut runtime = calls::runtime(&cell);
        let call =
            runtime.port_forward(calls::within(time, request.to(&sandbox.meta().cell_sandbox)));
        let answer = calls::answered(time, "PortForward", call)
            .await
            .map_err(|status| sandbox.restored(&status))?;
        Ok(cri::PortForwardResponse { url: self.parts.streaming.url(&cell, &answer.url)? })
    }

    /// A container that runs, its sandbox, and its cell, connected.
    pub(super) async fn running(
        &self,
        id: &str,
        deadline: Option<Instant>,
    ) -> Result<(Container, Sandbox, Cell), Status> {
        let container = self.view.container(id)?;
        if container.state() != cri::ContainerState::ContainerRunning {
            return Err(Status::failed_precondition(format!(
                "container is in {} state",
                container.state().as_str_name()
            )));
        }
        let sandbox = self.view.sandbox(container.sandbox.as_str())?;
        let cell = self.reachable_cell(&sandbox, deadline).await?;
        Ok((container, sandbox, cell))
    }

    /// Passed on to the cell, which then says what the container's resources are.
    pub(super) async fn update_resources(
        self: &Arc<Self>,
        request: cri::UpdateContainerResourcesRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::UpdateContainerResourcesResponse, Status> {
        let container = self.view.container(&request.container_id)?;
        let sandbox = self.view.sandbox(container.sandbox.as_str())?;
        let cell = self.reachable_cell(&sandbox, deadline).await?;
        let time = calls::left(deadline, calls::CALL);
        let mut runtime = calls::runtime(&cell);
        let call = runtime
            .update_container_resources(calls::within(time, request.to(&container.cell_container)));
        let answer = calls::answered(time, "UpdateContainerResources", call)
            .await
            .map_err(|status| container.restored(&status))?;
        if let Err(status) = self.ask(&cell, &container).await {
            tracing::debug!(container = %container.id, status = status.message(), "What a container's resources are now will be known with the next news of it");
        }
        // Its state is the same, so that nothing of this was kept yet.
        if let Err(error) = self.change_container(&container, |current| Some(current.clone())).await
        {
            tracing::warn!(container = %container.id, error = failure::chain(&error), "What a container's resources are now could not be recorded");
        }
        Ok(answer)
    }
}
