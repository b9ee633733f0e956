//! The watch of one cell: everything that is, then everything that changes, again for each
//! connection.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::future::join_all;
use kiyot_proto::{
    cell::{Event, Snapshot, event},
    cri,
};
use tonic::Status;

use super::{
    Verbs, calls, failure,
    view::{Container, Sandbox},
};
use crate::backends::milpa::cells::Cell;

/// How long nothing may come: several heartbeats.
const SILENCE: Duration = Duration::from_secs(30);
/// So many containers that nobody knows are removed for one look at a cell; the next one finds the
/// others.
const STRANGERS: usize = 16;
/// How long to wait before a watch that ended is begun again.
const AGAIN: Duration = Duration::from_millis(500);

impl Verbs {
    /// Watches a cell for as long as it is polled.
    pub(super) async fn watch_cell(self: Arc<Self>, cell: Cell) {
        // None: the link is forgotten, so the cell is gone, which its last news say.
        while let Some(line) = cell.link.control.connected().await {
            tokio::select! {
                ended = Box::pin(self.watch_connection(&cell)) => match ended {
                    Ok(()) => tracing::debug!(cell = %cell.id, "The watch of a cell ended and is begun again"),
                    Err(status) => if let Some(suppressed) = cell.link.lines.admit() {
                        tracing::info!(cell = %cell.id, status = status.message(), suppressed, "The watch of a cell failed and is begun again");
                    },
                },
                // There is nothing more to come on it.
                () = line.ended() => {}
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    async fn watch_connection(self: &Arc<Self>, cell: &Cell) -> Result<(), Status> {
        // What comes into the view from now on may be missing in the snapshot.
        let known_before = self.view.inserted();
        // There are as many of these tasks as cells, and all they mostly do is to wait: what is
        // seldom and large is in boxes.
        let mut events = Box::pin(cell.link.control.watch()).await?;
        self.measure(cell);
        loop {
            let event = tokio::time::timeout(SILENCE, events.next())
                .await
                .map_err(|_| Status::deadline_exceeded("no news, not even a heartbeat"))??;
            let Some(event) = event else { return Ok(()) };
            Box::pin(self.take(cell, *event, known_before)).await;
        }
    }

    async fn take(self: &Arc<Self>, cell: &Cell, event: Event, known_before: u64) {
        let Some(event) = event.event else { return };
        match event {
            event::Event::Snapshot(snapshot) => {
                self.take_snapshot(cell, snapshot, known_before).await
            }
            event::Event::Container(told) => {
                if let Some(container) = self.view.container_of_cell(&cell.id, &told.id) {
                    self.told(cell, &container, told).await;
                }
            }
            event::Event::ContainerGone(id) => {
                if let Some(container) = self.view.container_of_cell(&cell.id, &id) {
                    self.note_gone(&container);
                }
            }
            event::Event::Sandbox(told) => {
                if told.state() == cri::PodSandboxState::SandboxNotready {
                    self.sandbox_ended(cell, &told.id, "its sandbox container has ended").await;
                }
            }
            event::Event::SandboxGone(id) => {
                self.sandbox_ended(cell, &id, "its cell does not know it any more").await
            }
            event::Event::Log(log) => self.parts.logs.grown(&cell.id, &log.path, log.size),
            event::Event::Heartbeat(beat) => self.view.heartbeat(&cell.id, beat, Instant::now()),
        }
    }

    async fn sandbox_ended(&self, cell: &Cell, cell_sandbox: &str, reason: &str) {
        let Some(sandbox) = self
            .view
            .sandbox_of_cell(&cell.id)
            .filter(|sandbox| sandbox.ready && sandbox.meta().cell_sandbox == cell_sandbox)
        else {
            return;
        };
        tracing::warn!(sandbox = %sandbox.id, cell = %cell.id, pod = %sandbox.pod, reason, "A sandbox does not run any more");
        if let Err(error) = self.not_ready(&sandbox.id, reason).await {
            tracing::error!(sandbox = %sandbox.id, error = failure::chain(&error), "The end of a sandbox could not be recorded");
        }
    }

    async fn followed(&self, cell: &Cell, container: &Container) {
        if let Err(status) = self.follow_log(cell, container).await
            && let Some(suppressed) = cell.link.lines.admit()
        {
            tracing::error!(container = %container.id, status = status.message(), suppressed, "The log of a container can't be followed");
        }
    }

    /// Takes what a cell says of one of its containers, its log first if the start was not heard
    /// of: a daemon before this one began it, and was killed.
    pub(super) async fn told(
        self: &Arc<Self>,
        cell: &Cell,
        container: &Container,
        told: cri::ContainerStatus,
    ) {
        let has_begun = matches!(
            told.state(),
            cri::ContainerState::ContainerRunning | cri::ContainerState::ContainerExited
        );
        if has_begun && container.state() == cri::ContainerState::ContainerCreated {
            self.followed(cell, container).await;
        }
        self.note(container, told).await;
    }

    /// Removes containers that nobody knows: the answer to their creation was lost with a daemon
    /// before this one, or their records were, which may be of a later version. The kubelet would
    /// make them anew beside them.
    async fn remove_strangers(&self, cell: &Cell, sandbox: &Sandbox, strangers: Vec<String>) {
        let removed = strangers.into_iter().take(STRANGERS).filter_map(|id| calls::checked_id(id).ok()).map(async |id| {
            if let Some(suppressed) = cell.link.lines.admit() {
                tracing::warn!(cell = %cell.id, pod = %sandbox.pod, cell_container = id, suppressed, "A cell has a container that nobody knows; it is removed");
            }
            self.remove_in_cell(cell, &id).await;
        });
        join_all(removed).await;
    }

    /// Everything that the cell has: what it has not, and was known before it was asked, has ended.
    async fn take_snapshot(self: &Arc<Self>, cell: &Cell, snapshot: Snapshot, known_before: u64) {
        let Some(sandbox) = self.view.sandbox_of_cell(&cell.id) else { return };
        let containers = self.view.containers_of(&sandbox.id);
        let living = containers.iter().filter(|container| !container.exited());
        let config = sandbox.config();
        join_all(living.map(async |container| {
            // After a restart nobody follows its log yet; before one that ended meanwhile is said
            // to have, its log must be here.
            if container.state() == cri::ContainerState::ContainerRunning {
                self.followed(cell, container).await;
            }
            self.parts.volumes.keep(cell, &config, &container.meta().config.unwrap_or_default());
        }))
        .await;
        self.forget_if_gone(cell);
        for log in snapshot.logs {
            self.parts.logs.grown(&cell.id, &log.path, log.size);
        }
        let there: HashSet<_> = snapshot.containers.iter().map(|told| told.id.clone()).collect();
        // Of one that ended before, and whose log could not be brought home then, the rest.
        join_all(
            containers
                .iter()
                .filter(|container| container.exited())
                .map(|container| self.resume_log(cell, container)),
        )
        .await;
        let mut strangers = Vec::new();
        for told in snapshot.containers {
            // Asked in this order: what is being made is in the view before it is made no more.
            let is_being_made = told
                .metadata
                .as_ref()
                .is_some_and(|of| self.creations.has(&(sandbox.id.clone(), of.name.clone())));
            match self.view.container_of_cell(&cell.id, &told.id) {
                Some(container) => self.told(cell, &container, told).await,
                None if is_being_made => {}
                None => strangers.push(told.id),
            }
        }
        self.remove_strangers(cell, &sandbox, strangers).await;
        for container in containers.iter().filter(|container| {
            container.since <= known_before && !there.contains(&*container.cell_container)
        }) {
            self.note_gone(container);
        }
        let cell_sandbox = sandbox.meta().cell_sandbox;
        let found = snapshot.sandboxes.iter().find(|told| told.id == cell_sandbox);
        match found {
            Some(told) if told.state() == cri::PodSandboxState::SandboxNotready => {
                self.sandbox_ended(cell, &cell_sandbox, "its sandbox container has ended").await;
            }
            None if sandbox.since <= known_before => {
                self.sandbox_ended(cell, &cell_sandbox, "its cell does not know it any more").await
            }
            Some(_) | None => {}
        }
    }
}
