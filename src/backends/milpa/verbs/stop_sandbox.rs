//! `StopPodSandbox`: the pod's containers end, what they wrote last comes home, and the cell ends.
//! Only then the answer is OK.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures::future::join_all;
use kiyot_proto::cri;
use tonic::Status;

use super::{Verbs, calls, failure, transition::End, view::Sandbox};
use crate::backends::milpa::{cells::Cell, id::SandboxId};

/// How long a cell's containerd may take to kill one container.
const KILL: Duration = Duration::from_secs(20);
/// How long it may take until the last words of killed containers are on the node. After that the
/// cell ends without them.
const LAST_WORDS: Duration = Duration::from_secs(15);

impl Verbs {
    /// Unknown ones are stopped, as for containerd.
    pub(super) async fn stop_pod_sandbox(
        self: &Arc<Self>,
        request: cri::StopPodSandboxRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::StopPodSandboxResponse, Status> {
        let Some(sandbox) = calls::known(self.view.sandbox(&request.pod_sandbox_id))? else {
            return Ok(cri::StopPodSandboxResponse {});
        };
        let verbs = Arc::clone(self);
        self.detached(
            "StopPodSandbox",
            deadline,
            async move { verbs.stop_sandbox(&sandbox.id).await },
        )
        .await?;
        Ok(cri::StopPodSandboxResponse {})
    }

    /// Stops a sandbox, one call at a time: who comes second finds it stopped.
    pub(super) async fn stop_sandbox(self: &Arc<Self>, id: &SandboxId) -> Result<(), Status> {
        let Ok(sandbox) = self.view.sandbox(id.as_str()) else { return Ok(()) };
        let _stopping = sandbox.stopping.lock().await;
        if let Some(cell) = self.parts.cells.get(&sandbox.cell) {
            // Waited for a moment: after a restart of the daemon its cells are just calling home
            // again.
            if calls::connected(&cell, &sandbox.pod, None).await.is_ok() {
                self.quiet(&cell, &sandbox).await;
            }
            let reason = "its pod was stopped";
            self.parts
                .cells
                .terminate(&cell.id, reason)
                .await
                .map_err(|error| failure::of_cell(&error))?;
        }
        self.end_sandbox(id, &End::sandbox_stopped())
            .await
            .map_err(|error| failure::of_store(&error))?;
        self.let_go(&sandbox);
        Ok(())
    }

    /// Ends what is done on the node for a sandbox that does not run any more.
    pub(super) fn let_go(&self, sandbox: &Sandbox) {
        self.unwatch(&sandbox.cell);
        self.parts.volumes.release(&sandbox.cell);
        self.parts.images.forget_cell(&sandbox.cell);
        for container in self.view.containers_of(&sandbox.id) {
            self.parts.logs.close(&container.id);
        }
    }

    /// Kills the containers of a sandbox and waits for what they wrote, both for a bounded time: a
    /// sick cell must not keep its pod.
    async fn quiet(self: &Arc<Self>, cell: &Cell, sandbox: &Sandbox) {
        let running: Vec<_> = self
            .view
            .containers_of(&sandbox.id)
            .into_iter()
            .filter(|container| container.state() == cri::ContainerState::ContainerRunning)
            .collect();
        let killed = running.iter().map(|container| {
            let request = cri::StopContainerRequest { container_id: container.cell_container.to_string(), timeout: 0 };
            async move {
                let mut runtime = calls::runtime(cell);
                let call = runtime.stop_container(calls::within(KILL, request));
                if let Err(status) = calls::answered(KILL, "StopContainer", call).await {
                    tracing::warn!(container = %container.id, pod = %sandbox.pod, status = status.message(), "A container could not be stopped; it ends with its cell");
                }
            }
        });
        // What an earlier daemon could not write of a log is tried once more.
        let unwritten = self
            .view
            .containers_of(&sandbox.id)
            .into_iter()
            .filter(|container| container.exited() && !container.status.log_whole);
        let written = unwritten.map(async |container| {
            self.resume_log(cell, &container).await;
            self.parts.logs.drain(&container.id, LAST_WORDS).await;
        });
        tokio::join!(join_all(killed), join_all(written));
        let ended = self.view.wait(LAST_WORDS, |view| {
            running
                .iter()
                .all(|one| view.container(one.id.as_str()).is_ok_and(|now| now.exited()))
                .then_some(())
        });
        if ended.await.is_none() {
            tracing::warn!(sandbox = %sandbox.id, pod = %sandbox.pod, "The cell has not said in time how its containers ended; it is ended without that");
        }
    }
}
