//! The end of a standalone pod. Each part is repeated until it succeeds, also by the next run of
//! the daemon: the record goes last.

use std::{io, path::Path, time::Duration};

use futures::future::join_all;
use kiyot_linux::unmount_beneath;
use kiyot_proto::cri;
use tokio::{sync::watch, time::sleep};
use tonic::Status;

use super::{
    observed::Observed,
    runner::{Runner, next_grace},
};
use crate::{
    backends::{
        Method,
        milpa::{
            cells::OrderKey,
            store::{Batch, Table},
        },
    },
    error_chain::error_chain,
};

/// The pause before a part of the end is repeated.
const RETRY_PAUSE: Duration = Duration::from_secs(2);
/// The pause between two looks at a launch that ends.
const LAUNCH_PAUSE: Duration = Duration::from_millis(200);
/// Time that StopContainer has beyond the grace period, as the kubelet has it.
const STOP_MARGIN: Duration = Duration::from_secs(120);
/// The longest grace period, in seconds.
const MAX_GRACE_SECONDS: i64 = 24 * 3600;

impl Runner {
    /// Ends the pod. Returns once nothing is left of it.
    ///
    /// A grace period that is requested meanwhile begins the end again. The calls that were made go
    /// on by themselves: a container is killed at the end of the shortest.
    pub(super) async fn end(&self, mut grace: i64, mut requested: watch::Receiver<Option<i64>>) {
        loop {
            let ended = tokio::select! {
                ended = self.try_end(grace) => ended,
                next = next_grace(&mut requested, Some(grace)) => {
                    grace = next;
                    continue;
                }
            };
            let Err(status) = ended else { break };
            let error = status.message();
            tracing::warn!(pod = self.entry.pod(), error, "standalone pod not ended yet");
            self.entry.set_error(error);
            sleep(RETRY_PAUSE).await;
        }
        tracing::info!(pod = self.entry.pod(), "standalone pod ended");
        self.standalone.event(&self.entry, "Ended", "");
    }

    async fn try_end(&self, grace: i64) -> Result<(), Status> {
        self.end_launches().await;
        let observed = Observed::of(self.pods(), &self.entry.uid);
        let stops = observed.containers.iter().filter(|container| !container.exited());
        let stops = stops.map(|container| self.stop(container.id.as_str(), grace));
        for stopped in join_all(stops).await {
            stopped?;
        }
        for sandbox in &observed.sandboxes {
            self.remove_sandbox(sandbox.id.as_str()).await?;
        }
        // Those of launches that have ended: their callers don't wait for the end of a cell.
        let cells = &self.standalone.parts.cells;
        let ended = cells.terminate_all_of(&self.entry.uid, "its pod was deleted").await;
        ended.map_err(|error| Status::unavailable(error_chain(&error)))?;
        let (dir, logs) = (self.pod_dir(), self.log_dir());
        self.alone_on_disk(move || {
            unmount_beneath(&dir)?;
            remove_dir(&dir)?;
            remove_dir(&logs)
        })
        .await?;
        let mut batch = Batch::default();
        batch.remove(Table::StandalonePods, &self.entry.uid);
        batch.remove(Table::StandaloneEnds, &self.entry.uid);
        let removed = self.standalone.parts.store.commit(batch).await;
        removed.map_err(|error| Status::internal(error_chain(&error)))
    }

    /// Ends launches of cells for the pod. The launch that an earlier step began goes on without
    /// its caller.
    pub(super) async fn end_launches(&self) {
        let (cells, cri) = (&self.standalone.parts.cells, &self.standalone.parts.cri);
        loop {
            let orders = cells.orders().into_iter();
            let own: Vec<_> = orders.filter(|order| order.pod_uid == self.entry.uid).collect();
            if own.is_empty() && !cri.makes_sandbox_of(&self.entry.uid) {
                return;
            }
            for order in own {
                let key = OrderKey {
                    pod_uid: order.pod_uid,
                    namespace: order.namespace,
                    name: order.name,
                    attempt: order.attempt,
                };
                cells.end_changed_launch(&key, "");
            }
            sleep(LAUNCH_PAUSE).await;
        }
    }

    pub(super) async fn stop(&self, container: &str, grace: i64) -> Result<(), Status> {
        let timeout = grace.clamp(0, MAX_GRACE_SECONDS);
        let request = cri::StopContainerRequest { container_id: container.to_owned(), timeout };
        let limit = Duration::from_secs(u64::try_from(timeout).unwrap_or(0)) + STOP_MARGIN;
        let _: cri::StopContainerResponse =
            self.call_within(limit, Method::StopContainer, &request).await?;
        Ok(())
    }

    fn pod_dir(&self) -> std::path::PathBuf {
        self.node.kubelet_dir.join("pods").join(&self.entry.uid)
    }

    fn log_dir(&self) -> std::path::PathBuf {
        let entry = &self.entry;
        let name = format!("{}_{}_{}", entry.namespace, entry.name, entry.uid);
        self.node.pod_logs_dir.join(name)
    }
}

fn remove_dir(path: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
