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

mod annotation_index;
mod attributes;
pub(crate) mod container_state;
mod entry;
mod events;
pub(crate) mod filter;
mod lists;
mod lookup;
mod metrics;
pub(crate) mod response;
mod samples;
mod stats;
mod usage;

#[cfg(test)]
mod tests;

pub(crate) use entry::{Container, Sandbox};
use events::Readers;
use samples::Shapes;

/// The most that a cell may say of a container's settings, or of its pod's usage, in bytes. Answers
/// and events have it, beside those of other pods, and a kubelet takes none of more than 16 MiB.
const LONGEST: usize = 64 << 10;

/// The view.
#[derive(Debug)]
pub(crate) struct Pods {
    cache: RwLock<Cache>,
    changed: watch::Sender<()>,
    hashing: RandomState,
}

#[derive(Debug, Default)]
struct Cache {
    sandboxes: BTreeMap<SandboxId, Sandbox>,
    containers: BTreeMap<ContainerId, Container>,
    by_uid: HashMap<Arc<str>, Vec<SandboxId>>,
    by_annotations: HashMap<annotation_index::Key, Vec<SandboxId>>,
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

impl Pods {
    /// An empty one.
    pub(crate) fn new() -> Self {
        Self {
            cache: RwLock::default(),
            changed: watch::Sender::new(()),
            hashing: RandomState::new(),
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Cache> {
        self.cache.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Cache> {
        self.cache.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut Cache) -> T) -> T {
        let result = change(&mut self.write());
        self.changed.send_replace(());
        result
    }

    /// How many were inserted so far: what comes later has a greater `since`.
    pub(crate) fn inserted(&self) -> u64 {
        self.read().inserted
    }

    /// Publishes a sandbox.
    pub(crate) fn insert_sandbox(
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
        self.change(|cache| {
            cache.inserted += 1;
            sandbox.since = cache.inserted;
            cache.by_uid.entry(sandbox.uid.clone()).or_default().push(id.clone());
            cache.index(&id, sandbox.annotations);
            cache.by_cell.insert(cell, id.clone());
            cache.sandboxes.insert(id.clone(), sandbox);
            cache.sandbox_list = None;
            if ready {
                cache.announce(ContainerEventType::ContainerCreatedEvent, id.as_str(), &id);
                cache.announce(ContainerEventType::ContainerStartedEvent, id.as_str(), &id);
            }
        });
        Ok(id)
    }

    /// Publishes a container, and what the cell says of it as [`Self::set_reported`] does. `false` if its
    /// sandbox is not there, or does not run any more and the container could.
    pub(crate) fn insert_container(
        &self,
        meta: &store::ContainerMeta,
        status: store::ContainerStatus,
        told: Option<&cri::ContainerStatus>,
    ) -> Result<bool, InvalidId> {
        self.put_container(meta, status, told, true)
    }

    /// Publishes a container of a record: also one that had not ended when its sandbox had.
    /// `false` if its sandbox is not there.
    pub(crate) fn restore_container(
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
        Ok(self.change(|cache| {
            cache.inserted += 1;
            let since = cache.inserted;
            let Some(parent) = cache.sandboxes.get_mut(&sandbox) else { return false };
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
            cache.containers.insert(id.clone(), container);
            cache.container_list = None;
            cache.announce(ContainerEventType::ContainerCreatedEvent, id.as_str(), &sandbox);
            true
        }))
    }

    /// Publishes whether a sandbox runs.
    pub(crate) fn set_ready(&self, id: &SandboxId, ready: bool) {
        self.change(|cache| {
            if let Some(sandbox) = cache.sandboxes.get_mut(id) {
                let was_ready = sandbox.ready;
                if !ready {
                    cache.awaited.remove(id);
                }
                sandbox.set_ready(ready);
                cache.sandbox_list = None;
                if was_ready && !ready {
                    cache.announce(ContainerEventType::ContainerStoppedEvent, id.as_str(), id);
                }
            }
        });
    }

    /// Publishes how a container is.
    pub(crate) fn set_status(&self, id: &ContainerId, status: store::ContainerStatus) {
        self.change(|cache| {
            if let Some(container) = cache.containers.get_mut(id) {
                let before = container.state();
                container.set_status(status);
                let container = container.clone();
                cache.container_list = None;
                cache.announce_state(before, &container);
            }
        });
    }

    /// Says whether a cell is a sandbox's.
    pub(crate) fn has_cell(&self, cell: &CellId) -> bool {
        self.read().by_cell.contains_key(cell)
    }

    /// Forgets a container.
    pub(crate) fn remove_container(&self, id: &ContainerId) {
        self.change(|cache| cache.remove_container(id));
    }

    /// Forgets a sandbox and its containers.
    pub(crate) fn remove_sandbox(&self, id: &SandboxId) {
        self.change(|cache| {
            let Some(sandbox) = cache.sandboxes.get(id) else { return };
            for container in &sandbox.containers.clone() {
                cache.remove_container(container);
            }
            cache.announce(ContainerEventType::ContainerDeletedEvent, id.as_str(), id);
            let Some(sandbox) = cache.sandboxes.remove(id) else { return };
            forget(&mut cache.by_uid, &sandbox.uid, id);
            cache.unindex(id, sandbox.annotations);
            cache.by_cell.remove(&sandbox.cell);
            cache.awaited.remove(id);
            cache.sandbox_list = None;
        });
    }

    /// Takes what only the cell knows of a container (its resources, user and signal) from what the
    /// cell says.
    pub(crate) fn set_reported(&self, id: &ContainerId, told: &cri::ContainerStatus) {
        let told = kept(told);
        if let Some(container) = self.write().containers.get_mut(id) {
            container.told = told;
        }
    }

    /// Waits until something holds of the view, for a time; the last value if it never does.
    pub(crate) async fn wait<T>(
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

impl Cache {
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
pub(crate) fn kept(told: &cri::ContainerStatus) -> Bytes {
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
pub(crate) fn unknown(what: &str, id: &str) -> Status {
    Status::not_found(format!("an error occurred when try to find {what} {id:?}: not found"))
}
