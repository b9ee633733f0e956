//! The watch of a cell: on each connection a snapshot of the cell, then its changes.

use std::{
    collections::HashSet,
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

use futures::future::{join_all, try_join_all};
use kiyot_engine::id::CellId;
use kiyot_proto::{
    cell::{Event, Snapshot, event},
    cri,
};
use kiyot_values::error_chain::error_chain;
use tokio_util::sync::CancellationToken;

use super::{CellSync, container_status::STATUS_TIMEOUT};
use crate::backends::milpa::{
    cell_client::{self, CellClient, discard_container, found},
    cells::Cell,
    failure::{Code, Failure},
    pods::Sandbox,
    resolver::Server,
};

/// Longest silence of a watch: several heartbeats.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);
/// Delay before a failed watch is renewed.
const RENEWAL_DELAY: Duration = Duration::from_millis(500);
/// Most containers without a record that one snapshot removes; the next snapshot has the others.
const MAX_REMOVED_STRANGERS: usize = 16;
/// Reasons why a sandbox is no longer ready.
const ENDED_SANDBOX: &str = "its sandbox container has ended";
const UNKNOWN_SANDBOX: &str = "its cell does not know it any more";

/// The tasks of a cell, until its watch ends.
#[derive(Debug, Default)]
pub(super) struct Watch {
    end: CancellationToken,
    /// Set when its pod's name servers are served.
    resolves: bool,
}

impl CellSync {
    /// Watches a cell unless it is watched already, and serves its pod's name servers once they are
    /// known.
    pub(crate) fn watch(self: &Arc<Self>, id: &CellId) {
        let Some(cell) = self.cells.get(id) else { return };
        let sandbox = self.pods.sandbox_of_cell(id);
        let resolvers = sandbox.map(|sandbox| sandbox.meta().resolvers).unwrap_or_default();
        let mut watches = self.watches.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = !watches.contains_key(id);
        let watch = watches.entry(id.clone()).or_default();
        let resolves =
            !resolvers.is_empty() && !std::mem::replace(&mut watch.resolves, !resolvers.is_empty());
        let end = watch.end.clone();
        drop(watches);
        if resolves {
            let (sync, cell, end) = (Arc::clone(self), cell.clone(), end.clone());
            let servers: Vec<_> =
                resolvers.iter().filter_map(|server| Server::parse_node_only(server)).collect();
            self.tasks.spawn(async move {
                let served = Box::pin(sync.resolver.serve(&cell.id, &cell.link, &servers));
                end.run_until_cancelled(served).await;
            });
        }
        if is_new {
            let sync = Arc::clone(self);
            self.tasks.spawn(async move {
                end.run_until_cancelled(Box::pin(sync.watch_cell(cell))).await;
            });
        }
    }

    pub(super) fn unwatch(&self, id: &CellId) {
        let watch = self.watches.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
        if let Some(watch) = watch {
            watch.end.cancel();
        }
    }

    async fn watch_cell(self: Arc<Self>, cell: Cell) {
        // Without a connection the link is closed: the cell has ended, and its last event says so.
        while let Some(connection) = cell.link.control.connected().await {
            let watched = tokio::select! {
                biased;
                () = connection.ended() => Ok(()),
                watched = Box::pin(self.watch_connection(&cell)) => watched,
            };
            let renewal = tokio::time::Instant::now() + RENEWAL_DELAY;
            // The streams of a connection may fail before the connection has ended.
            let has_disconnected =
                tokio::time::timeout_at(renewal, connection.ended()).await.is_ok();
            if has_disconnected {
                if !self.cells.is_ending(&cell.id)
                    && let Some(suppressed) = cell.link.lines.admit()
                {
                    tracing::info!(cell = %cell.id, suppressed, "agent of a cell has disconnected");
                }
            } else if let Err(failure) = watched {
                if let Some(suppressed) = cell.link.lines.admit() {
                    tracing::info!(
                        cell = %cell.id,
                        status = failure.message(),
                        suppressed,
                        "watch of a cell failed, renewing it"
                    );
                }
            } else {
                tracing::debug!(cell = %cell.id, "watch of a cell ended, renewing it");
            }
            tokio::time::sleep_until(renewal).await;
        }
    }

    async fn watch_connection(self: &Arc<Self>, cell: &Cell) -> Result<(), Failure> {
        // Rare and large futures are boxed: each cell has a task like this, which mostly waits.
        let mut events = Box::pin(cell.link.control.watch()).await.map_err(Failure::of_cell)?;
        self.subscribe_to_metrics(cell);
        loop {
            let event = tokio::time::timeout(SILENCE_TIMEOUT, events.next())
                .await
                .map_err(|_| {
                    Failure::cell(Code::DeadlineExceeded, "no events, not even a heartbeat")
                })?
                .map_err(Failure::of_cell)?;
            let Some(event) = event else { return Ok(()) };
            Box::pin(self.apply_event(cell, *event)).await?;
        }
    }

    /// Applies an event. After an error the watch is renewed.
    async fn apply_event(self: &Arc<Self>, cell: &Cell, event: Event) -> Result<(), Failure> {
        let Some(event) = event.event else { return Ok(()) };
        match event {
            event::Event::Snapshot(snapshot) => self.apply_snapshot(cell, snapshot).await?,
            event::Event::Container(reported) => {
                if let Some(container) = self.pods.container_of_cell(&cell.id, &reported.id) {
                    self.apply_status(cell, &container, reported).await;
                }
            }
            event::Event::ContainerGone(id) => {
                if let Some(container) = self.pods.container_of_cell(&cell.id, &id) {
                    self.record_absence(&container);
                }
            }
            event::Event::Sandbox(reported) => {
                if reported.state() == cri::PodSandboxState::SandboxNotready {
                    self.sandbox_stopped(cell, &reported.id, ENDED_SANDBOX).await;
                }
            }
            event::Event::SandboxGone(id) => {
                self.sandbox_stopped(cell, &id, UNKNOWN_SANDBOX).await;
            }
            event::Event::Log(log) => self.logs.on_growth(&cell.id, &log.path, log.size),
            event::Event::Heartbeat(beat) => self.pods.heartbeat(&cell.id, beat, Instant::now()),
        }
        Ok(())
    }

    async fn sandbox_stopped(&self, cell: &Cell, cell_sandbox: &str, reason: &str) {
        let sandbox = self.pods.sandbox_of_cell(&cell.id);
        let Some(sandbox) =
            sandbox.filter(|sandbox| sandbox.ready && sandbox.meta().cell_sandbox == cell_sandbox)
        else {
            return;
        };
        // A stop also ends the sandbox, and records it once the end of the cell is confirmed.
        let Ok(_not_stopping) = sandbox.stopping.try_lock() else { return };
        tracing::warn!(
            sandbox = %sandbox.id,
            cell = %cell.id,
            pod = %sandbox.pod,
            reason,
            "sandbox stopped by itself"
        );
        if let Err(error) = self.records.set_not_ready(&sandbox.id, reason).await {
            tracing::error!(
                sandbox = %sandbox.id,
                error = error_chain(&error),
                "stop of a sandbox not recorded"
            );
        }
    }

    /// Removes containers without a record from a cell, because the kubelet creates them again.
    /// Either a previous daemon lost the response to their creation, or their records are lost, for
    /// example records of a later version.
    async fn remove_strangers(&self, cell: &Cell, sandbox: &Sandbox, strangers: Vec<String>) {
        let strangers = strangers.into_iter().take(MAX_REMOVED_STRANGERS);
        let valid = strangers.filter_map(|id| cell_client::checked_id(id).ok());
        let removals = valid.map(async |id| {
            if let Some(suppressed) = cell.link.lines.admit() {
                tracing::warn!(
                    cell = %cell.id,
                    pod = %sandbox.pod,
                    cell_container = id,
                    suppressed,
                    "removing a container without a record from its cell"
                );
            }
            discard_container(cell, &id).await;
        });
        join_all(removals).await;
    }

    /// Applies a snapshot. Asks the cell's containerd for entries that are absent from the
    /// snapshot: the agent's last list may have begun before their creation.
    async fn apply_snapshot(
        self: &Arc<Self>,
        cell: &Cell,
        snapshot: Snapshot,
    ) -> Result<(), Failure> {
        let Some(sandbox) = self.pods.sandbox_of_cell(&cell.id) else { return Ok(()) };
        let containers = self.pods.containers_of(&sandbox.id);
        let living = containers.iter().filter(|container| !container.exited());
        let meta = sandbox.meta();
        let config = meta.config.unwrap_or_default();
        join_all(living.map(async |container| {
            // After a restart the log is not followed yet, and a container that ended meanwhile
            // reads EXITED only once its log is complete.
            if container.state() == cri::ContainerState::ContainerRunning {
                self.follow_log(cell, container).await;
            }
            let own = container.meta().config.unwrap_or_default();
            self.volumes.keep(cell, &config, &own, &meta.replaced_files);
        }))
        .await;
        self.release_if_ended(cell);
        for log in snapshot.logs {
            self.logs.on_growth(&cell.id, &log.path, log.size);
        }
        let present: HashSet<_> =
            snapshot.containers.iter().map(|reported| reported.id.clone()).collect();
        let exited = containers.iter().filter(|container| container.exited());
        join_all(exited.map(|container| self.container_logs.resume(cell, container))).await;
        let mut strangers = Vec::new();
        for reported in snapshot.containers {
            // Checks creations first: a container is in the read model before its creation ends.
            let is_being_created = reported.metadata.as_ref().is_some_and(|metadata| {
                self.creations.contains(&(sandbox.id.clone(), metadata.name.clone()))
            });
            match self.pods.container_of_cell(&cell.id, &reported.id) {
                Some(container) => self.apply_status(cell, &container, reported).await,
                None if is_being_created => {}
                None => strangers.push(reported.id),
            }
        }
        self.remove_strangers(cell, &sandbox, strangers).await;
        let absent = containers.iter().filter(|container| {
            !container.exited() && !present.contains(&*container.cell_container)
        });
        try_join_all(absent.map(|container| self.refresh_status(cell, container))).await?;
        let cell_sandbox = sandbox.meta().cell_sandbox;
        let reported = snapshot.sandboxes.into_iter().find(|reported| reported.id == cell_sandbox);
        let reported = match reported {
            Some(reported) => Some(reported),
            None => sandbox_status(cell, &cell_sandbox).await?,
        };
        match reported.map(|reported| reported.state()) {
            None => self.sandbox_stopped(cell, &cell_sandbox, UNKNOWN_SANDBOX).await,
            Some(cri::PodSandboxState::SandboxNotready) => {
                self.sandbox_stopped(cell, &cell_sandbox, ENDED_SANDBOX).await;
            }
            Some(cri::PodSandboxState::SandboxReady) => {}
        }
        Ok(())
    }
}

/// Returns the status of a cell's sandbox; `None` if its containerd does not know it.
async fn sandbox_status(
    cell: &Cell,
    cell_sandbox: &str,
) -> Result<Option<cri::PodSandboxStatus>, Failure> {
    let pod_sandbox_id = cell_sandbox.to_owned();
    let request = cri::PodSandboxStatusRequest { pod_sandbox_id, verbose: false };
    let answer = CellClient::new(cell).pod_sandbox_status(STATUS_TIMEOUT, request).await;
    Ok(found(answer)?.and_then(|answer| answer.status))
}
