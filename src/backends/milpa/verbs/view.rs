//! What is known of all pods in cells, in memory: every list and status is answered from here,
//! without a look at the store or a cell.
//!
//! What is here is on disk: records are committed first and published here second.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    hash::RandomState,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
    time::Duration,
};

use bytes::Bytes;
use kiyot_proto::{
    cri::{self, ContainerEventType},
    store,
};
use prost::Message;
use tokio::sync::watch;
use tonic::Status;

use crate::backends::milpa::id::{CellId, ContainerId, InvalidId, SandboxId};

mod annotations;
mod attributes;
mod entry;
mod events;
mod find;
mod kept_usage;
mod lists;
mod metrics;
mod samples;
mod usage;

#[cfg(test)]
mod tests;

pub(super) use entry::{Container, Sandbox};
use events::Readers;
use samples::Shapes;

/// The most that a cell may say of a container's settings, or of its pod's usage, in bytes. Answers
/// and events have it, beside those of other pods, and a kubelet takes none of more than 16 MiB.
const LONGEST: usize = 64 << 10;

/// The view.
#[derive(Debug)]
pub(super) struct View {
    known: RwLock<Known>,
    changed: watch::Sender<()>,
    hashing: RandomState,
}

#[derive(Debug, Default)]
struct Known {
    sandboxes: BTreeMap<SandboxId, Sandbox>,
    containers: BTreeMap<ContainerId, Container>,
    by_uid: HashMap<Arc<str>, Vec<SandboxId>>,
    by_annotations: HashMap<annotations::Key, Vec<SandboxId>>,
    by_cell: HashMap<CellId, SandboxId>,
    /// Counts what was inserted.
    inserted: u64,
    /// Whole encoded lists, made by the first who asks after a change. The entries' items are then
    /// slices of them, so that there is one copy of each.
    sandbox_list: Option<Bytes>,
    container_list: Option<Bytes>,
    /// Sandboxes that ran before this daemon did, and of whose usage nothing was heard yet.
    awaited: HashSet<SandboxId>,
    /// Which metrics cells have.
    shapes: Shapes,
    /// Who reads what happens.
    readers: Readers,
}

impl View {
    /// An empty one.
    pub(super) fn new() -> Self {
        Self {
            known: RwLock::default(),
            changed: watch::Sender::new(()),
            hashing: RandomState::new(),
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Known> {
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Known> {
        self.known.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut Known) -> T) -> T {
        let result = change(&mut self.write());
        self.changed.send_replace(());
        result
    }

    /// How many were inserted so far: what comes later has a greater `since`.
    pub(super) fn inserted(&self) -> u64 {
        self.read().inserted
    }

    /// Publishes a sandbox.
    pub(super) fn insert_sandbox(
        &self,
        meta: &store::SandboxMeta,
        ready: bool,
    ) -> Result<SandboxId, InvalidId> {
        let (id, cell) = (SandboxId::parse(&meta.id)?, CellId::parse(&meta.cell)?);
        let config = meta.config.clone().unwrap_or_default();
        let metadata = config.metadata.unwrap_or_default();
        let mut sandbox = Sandbox {
            id: id.clone(),
            cell: cell.clone(),
            uid: metadata.uid.as_str().into(),
            pod: format!("{}/{}", metadata.namespace, metadata.name).into(),
            ready,
            since: 0,
            containers: Vec::new(),
            records: Arc::default(),
            stopping: Arc::default(),
            meta: meta.encode_to_vec().into(),
            item: Bytes::new(),
            usage: None,
            samples: None,
            ephemeral_storage: 0,
            annotations: self.keys(meta),
        };
        sandbox.set_ready(ready);
        self.change(|known| {
            known.inserted += 1;
            sandbox.since = known.inserted;
            known.by_uid.entry(sandbox.uid.clone()).or_default().push(id.clone());
            known.index(&id, sandbox.annotations);
            known.by_cell.insert(cell, id.clone());
            known.sandboxes.insert(id.clone(), sandbox);
            known.sandbox_list = None;
            if ready {
                known.announce(ContainerEventType::ContainerCreatedEvent, id.as_str(), &id);
                known.announce(ContainerEventType::ContainerStartedEvent, id.as_str(), &id);
            }
        });
        Ok(id)
    }

    /// Publishes a container, and what the cell says of it as [`Self::tell`] does. `false` if its
    /// sandbox is not there, or does not run any more and the container could.
    pub(super) fn insert_container(
        &self,
        meta: &store::ContainerMeta,
        status: store::ContainerStatus,
        told: Option<&cri::ContainerStatus>,
    ) -> Result<bool, InvalidId> {
        self.put_container(meta, status, told, true)
    }

    /// Publishes a container of a record: also one that had not ended when its sandbox had.
    /// `false` if its sandbox is not there.
    pub(super) fn restore_container(
        &self,
        meta: &store::ContainerMeta,
        status: store::ContainerStatus,
        told: Option<&cri::ContainerStatus>,
    ) -> Result<bool, InvalidId> {
        self.put_container(meta, status, told, false)
    }

    fn put_container(
        &self,
        meta: &store::ContainerMeta,
        status: store::ContainerStatus,
        told: Option<&cri::ContainerStatus>,
        is_new: bool,
    ) -> Result<bool, InvalidId> {
        let (id, sandbox) = (ContainerId::parse(&meta.id)?, SandboxId::parse(&meta.sandbox)?);
        Ok(self.change(|known| {
            known.inserted += 1;
            let since = known.inserted;
            let Some(parent) = known.sandboxes.get_mut(&sandbox) else { return false };
            let mut container = Container {
                id: id.clone(),
                sandbox,
                cell: parent.cell.clone(),
                cell_container: meta.cell_container.as_str().into(),
                since,
                status: Arc::default(),
                meta: meta.encode_to_vec().into(),
                item: Bytes::new(),
                usage: None,
                samples: None,
                told: told.map(kept).unwrap_or_default(),
            };
            container.set_status(status);
            if is_new && !parent.ready && !container.exited() {
                return false;
            }
            parent.containers.push(id.clone());
            let sandbox = parent.id.clone();
            known.containers.insert(id.clone(), container);
            known.container_list = None;
            known.announce(ContainerEventType::ContainerCreatedEvent, id.as_str(), &sandbox);
            true
        }))
    }

    /// Publishes whether a sandbox runs.
    pub(super) fn set_ready(&self, id: &SandboxId, ready: bool) {
        self.change(|known| {
            if let Some(sandbox) = known.sandboxes.get_mut(id) {
                let was_ready = sandbox.ready;
                if !ready {
                    known.awaited.remove(id);
                }
                sandbox.set_ready(ready);
                known.sandbox_list = None;
                if was_ready && !ready {
                    known.announce(ContainerEventType::ContainerStoppedEvent, id.as_str(), id);
                }
            }
        });
    }

    /// Publishes how a container is.
    pub(super) fn set_status(&self, id: &ContainerId, status: store::ContainerStatus) {
        self.change(|known| {
            if let Some(container) = known.containers.get_mut(id) {
                let before = container.state();
                container.set_status(status);
                let container = container.clone();
                known.container_list = None;
                known.announce_state(before, &container);
            }
        });
    }

    /// Says whether a cell is a sandbox's.
    pub(super) fn has_cell(&self, cell: &CellId) -> bool {
        self.read().by_cell.contains_key(cell)
    }

    /// Forgets a container.
    pub(super) fn remove_container(&self, id: &ContainerId) {
        self.change(|known| known.remove_container(id));
    }

    /// Forgets a sandbox and its containers.
    pub(super) fn remove_sandbox(&self, id: &SandboxId) {
        self.change(|known| {
            let Some(sandbox) = known.sandboxes.get(id) else { return };
            for container in &sandbox.containers.clone() {
                known.remove_container(container);
            }
            known.announce(ContainerEventType::ContainerDeletedEvent, id.as_str(), id);
            let Some(sandbox) = known.sandboxes.remove(id) else { return };
            forget(&mut known.by_uid, &sandbox.uid, id);
            known.unindex(id, sandbox.annotations);
            known.by_cell.remove(&sandbox.cell);
            known.awaited.remove(id);
            known.sandbox_list = None;
        });
    }

    /// Takes what only the cell knows of a container (its resources, user and signal) from what the
    /// cell says.
    pub(super) fn tell(&self, id: &ContainerId, told: &cri::ContainerStatus) {
        let told = kept(told);
        if let Some(container) = self.write().containers.get_mut(id) {
            container.told = told;
        }
    }

    /// Waits until something holds of the view, for a time; the last value if it never does.
    pub(super) async fn wait<T>(
        &self,
        within: Duration,
        mut check: impl FnMut(&Self) -> Option<T>,
    ) -> Option<T> {
        let mut changed = self.changed.subscribe();
        let waiting = async {
            loop {
                changed.borrow_and_update();
                if let Some(value) = check(self) {
                    return Some(value);
                }
                if changed.changed().await.is_err() {
                    return None;
                }
            }
        };
        tokio::time::timeout(within, waiting).await.unwrap_or_default()
    }
}

impl Known {
    /// The container that a cell knows by this id. Ids of cells are theirs to choose: one that
    /// another cell uses too means nothing there.
    fn in_cell(&self, cell: &CellId, id: &str) -> Option<&Container> {
        let sandbox = self.by_cell.get(cell).and_then(|sandbox| self.sandboxes.get(sandbox))?;
        sandbox
            .containers
            .iter()
            .filter_map(|id| self.containers.get(id))
            .find(|container| *container.cell_container == *id)
    }

    fn remove_container(&mut self, id: &ContainerId) {
        let Some(container) = self.containers.remove(id) else { return };
        if let Some(sandbox) = self.sandboxes.get_mut(&container.sandbox) {
            sandbox.containers.retain(|other| other != id);
        }
        self.container_list = None;
        self.announce(ContainerEventType::ContainerDeletedEvent, id.as_str(), &container.sandbox);
    }
}

/// What is kept of what only the cell knows: without its resources and user if they are longer than
/// they may be.
pub(super) fn kept(told: &cri::ContainerStatus) -> Bytes {
    let mut kept = cri::ContainerStatus {
        resources: told.resources.clone(),
        user: told.user.clone(),
        stop_signal: told.stop_signal,
        ..Default::default()
    };
    if kept.encoded_len() > LONGEST {
        (kept.resources, kept.user) = (None, None);
    }
    kept.encode_to_vec().into()
}

fn forget<K: std::hash::Hash + Eq>(
    index: &mut HashMap<K, Vec<SandboxId>>,
    key: &K,
    id: &SandboxId,
) {
    if let Some(ids) = index.get_mut(key) {
        ids.retain(|other| other != id);
        if ids.is_empty() {
            index.remove(key);
        }
    }
}

/// The words of containerd for an id that nothing has.
pub(super) fn unknown(what: &str, id: &str) -> Status {
    Status::not_found(format!("an error occurred when try to find {what} {id:?}: not found"))
}
