//! `Exec`, `Attach` and `PortForward`: each returns a URL on the node's loopback, which leads once
//! to the cell's streaming server.

use std::time::Instant;

use kiyot_proto::cri;
use tonic::Status;

use super::{CriService, not_running, request::Addressed};
use crate::backends::milpa::{
    cell_client::{CALL_TIMEOUT, CellClient, time_left},
    cells::Cell,
    pods::Container,
};

impl CriService {
    /// Returns the URL for running a command.
    pub(super) async fn exec(
        &self,
        request: cri::ExecRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::ExecResponse, Status> {
        let (container, cell) = self.running_container(&request.container_id, deadline).await?;
        let request = request.to(&container.cell_container);
        let response =
            CellClient::new(&cell).exec(time_left(deadline, CALL_TIMEOUT), request).await;
        let response = response.map_err(|failure| container.restored(&failure))?;
        Ok(cri::ExecResponse { url: self.streaming.url(&cell, &response.url)? })
    }

    /// Returns the URL for attaching to a container's streams.
    pub(super) async fn attach(
        &self,
        request: cri::AttachRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::AttachResponse, Status> {
        let (container, cell) = self.running_container(&request.container_id, deadline).await?;
        let request = request.to(&container.cell_container);
        let response =
            CellClient::new(&cell).attach(time_left(deadline, CALL_TIMEOUT), request).await;
        let response = response.map_err(|failure| container.restored(&failure))?;
        Ok(cri::AttachResponse { url: self.streaming.url(&cell, &response.url)? })
    }

    /// Returns the URL for forwarding ports of a pod.
    pub(super) async fn port_forward(
        &self,
        request: cri::PortForwardRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::PortForwardResponse, Status> {
        let sandbox = self.pods.sandbox(&request.pod_sandbox_id)?;
        if !sandbox.ready {
            return Err(not_running(&sandbox.id));
        }
        let cell = self.connected_cell(&sandbox, deadline).await?;
        let request = request.to(&sandbox.meta().cell_sandbox);
        let response =
            CellClient::new(&cell).port_forward(time_left(deadline, CALL_TIMEOUT), request).await;
        let response = response.map_err(|failure| sandbox.restored(&failure))?;
        Ok(cri::PortForwardResponse { url: self.streaming.url(&cell, &response.url)? })
    }

    /// Returns a running container and its cell, connected.
    pub(super) async fn running_container(
        &self,
        id: &str,
        deadline: Option<Instant>,
    ) -> Result<(Container, Cell), Status> {
        let container = self.pods.container(id)?;
        if container.state() != cri::ContainerState::ContainerRunning {
            return Err(Status::failed_precondition(format!(
                "container is in {} state",
                container.state().as_str_name()
            )));
        }
        let sandbox = self.pods.sandbox(container.sandbox.as_str())?;
        let cell = self.connected_cell(&sandbox, deadline).await?;
        Ok((container, cell))
    }
}
