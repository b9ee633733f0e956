//! Exec, attach and port-forward: the calls of CRI, by names instead of ids.

use std::time::Instant;

use kiyot_proto::{admin, cri};
use tonic::Status;

use super::{deadlines::SHORT, parts::Parts};
use crate::backends::{Method, milpa::Milpa};

impl Parts {
    /// Returns the URL at which a command runs.
    pub(super) async fn exec(&self, request: admin::ExecRequest) -> Result<String, Status> {
        let admin::ExecRequest { namespace, pod, unit, command, stdin, tty } = request;
        let (milpa, container) = self.container(&namespace, &pod, &unit)?;
        let message = cri::ExecRequest {
            container_id: container,
            cmd: command,
            tty,
            stdin,
            stdout: true,
            // A terminal has a single output (`validateExecRequest` of containerd).
            stderr: !tty,
        };
        let answer: cri::ExecResponse = milpa.call(Method::Exec, &message, deadline()).await?;
        Ok(answer.url)
    }

    /// Returns the URL at which the streams of a container are attached.
    pub(super) async fn attach(&self, request: admin::AttachRequest) -> Result<String, Status> {
        let admin::AttachRequest { namespace, pod, unit, stdin, tty } = request;
        let (milpa, container) = self.container(&namespace, &pod, &unit)?;
        let message =
            cri::AttachRequest { container_id: container, stdin, tty, stdout: true, stderr: !tty };
        let answer: cri::AttachResponse = milpa.call(Method::Attach, &message, deadline()).await?;
        Ok(answer.url)
    }

    /// Returns the URL at which ports of a pod are forwarded.
    pub(super) async fn port_forward(
        &self,
        request: admin::PortForwardRequest,
    ) -> Result<String, Status> {
        let (milpa, key) = self.find_pod(&request.namespace, &request.pod)?;
        let sandbox = milpa.inventory().sandbox(&key).ok_or_else(|| {
            Status::failed_precondition(format!("pod {} waits for its cell", key.name()))
        })?;
        let port = |port: &u32| i32::from(u16::try_from(*port).unwrap_or_default());
        if let Some(wrong) = request.ports.iter().find(|wanted| port(wanted) == 0) {
            let allowed = "allowed: ports from 1 to 65535";
            return Err(Status::invalid_argument(format!("port {wrong}: {allowed}")));
        }
        let message = cri::PortForwardRequest {
            pod_sandbox_id: sandbox,
            port: request.ports.iter().map(port).collect(),
        };
        let answer: cri::PortForwardResponse =
            milpa.call(Method::PortForward, &message, deadline()).await?;
        Ok(answer.url)
    }

    fn container(
        &self,
        namespace: &str,
        pod: &str,
        unit: &str,
    ) -> Result<(&Milpa, String), Status> {
        let (milpa, key) = self.find_pod(namespace, pod)?;
        let unit = milpa.inventory().unit(&key, unit);
        let unit = unit.map_err(|error| Status::not_found(error.to_string()))?;
        Ok((milpa, unit.container))
    }
}

/// Returns the deadline of a call that begins now.
fn deadline() -> Option<Instant> {
    Some(Instant::now() + SHORT)
}
