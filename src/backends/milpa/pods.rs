//! The read model of pods in cells: every list, status and statistic is answered from memory,
//! without the store or a cell.
//!
//! Records are committed first and published here second, so that each entry is on disk.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    hash::RandomState,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
    time::Duration,
};

use bytes::Bytes;
use kiyot_engine::id::{CellId, ContainerId, InvalidId, SandboxId};
use kiyot_proto::{
    cri::{self, ContainerEventType},
    store,
};
use prost::Message;
use tokio::sync::watch;

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
pub(crate) use events::EventLost;
use events::Subscribers;
pub(crate) use lookup::LookupError;
use samples::Shapes;

/// Most bytes kept of a cell's report on a container or on its pod's usage. A response has the
/// reports of all pods, and a kubelet accepts at most 16 MiB.
const MAX_REPORT_BYTES: usize = 64 << 10;

/// The pods in cells. Changes wake the tasks in [`Self::wait`].
#[derive(Debug)]
pub(crate) struct Pods {
    cache: RwLock<Cache>,
    changed: watch::Sender<()>,
    hashing: RandomState,
}

/// Entries and their indices.
#[derive(Debug, Default)]
struct Cache {
    sandboxes: BTreeMap<SandboxId, Sandbox>,
    containers: BTreeMap<ContainerId, Container>,
    by_uid: HashMap<Arc<str>, Vec<SandboxId>>,
    by_annotations: HashMap<annotation_index::Key, Vec<SandboxId>>,
    by_cell: HashMap<CellId, SandboxId>,
    /// Sequence number of the last insertion.
    last_sequence: u64,
    /// Encoded lists without a filter, made by the first call after a change. The items of the
    /// entries are then slices of the lists, so that memory has a single copy.
    sandbox_list: Option<Bytes>,
    container_list: Option<Bytes>,
    /// Recovered sandboxes whose usage was not reported yet.
    awaiting_usage: HashSet<SandboxId>,
    /// Names and labels of the metrics of cells.
    shapes: Shapes,
    subscribers: Subscribers,
}

impl Pods {
    /// Creates a model without pods.
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
            cache.by_uid.entry(sandbox.uid.clone()).or_default().push(id.clone());
            cache.index(&id, sandbox.annotations);
            cache.by_cell.insert(cell, id.clone());
            cache.sandboxes.insert(id.clone(), sandbox);
            cache.sandbox_list = None;
            if ready {
                cache.emit(ContainerEventType::ContainerCreatedEvent, id.as_str(), &id);
                cache.emit(ContainerEventType::ContainerStartedEvent, id.as_str(), &id);
            }
        });
        Ok(id)
    }

    /// Publishes a new container with its reported details. Returns whether it is published: not if
    /// its sandbox is absent, or has stopped before the container exited.
    pub(crate) fn insert_container(
        &self,
        meta: &store::ContainerMeta,
        status: store::ContainerStatus,
        reported: Option<&cri::ContainerStatus>,
    ) -> Result<bool, InvalidId> {
        self.put_container(meta, status, reported, true)
    }

    /// Publishes a recorded container, even if it had not exited when its sandbox stopped. Returns
    /// whether its sandbox exists.
    pub(crate) fn restore_container(
        &self,
        meta: &store::ContainerMeta,
        status: store::ContainerStatus,
        reported: Option<&cri::ContainerStatus>,
    ) -> Result<bool, InvalidId> {
        self.put_container(meta, status, reported, false)
    }

    fn put_container(
        &self,
        meta: &store::ContainerMeta,
        status: store::ContainerStatus,
        reported: Option<&cri::ContainerStatus>,
        is_new: bool,
    ) -> Result<bool, InvalidId> {
        let (id, sandbox) = (ContainerId::parse(&meta.id)?, SandboxId::parse(&meta.sandbox)?);
        Ok(self.change(|cache| {
            cache.last_sequence += 1;
            let sequence = cache.last_sequence;
            let Some(parent) = cache.sandboxes.get_mut(&sandbox) else { return false };
            let mut container = Container {
                id: id.clone(),
                sandbox,
                cell: parent.cell.clone(),
                cell_container: meta.cell_container.as_str().into(),
                sequence,
                status: Arc::default(),
                meta: meta.encode_to_vec().into(),
                item: Bytes::new(),
                usage: None,
                samples: None,
                reported: reported.map(reported_details).unwrap_or_default(),
            };
            container.set_status(status);
            if is_new && !parent.ready && !container.exited() {
                return false;
            }
            parent.containers.push(id.clone());
            let sandbox = parent.id.clone();
            cache.containers.insert(id.clone(), container);
            cache.container_list = None;
            cache.emit(ContainerEventType::ContainerCreatedEvent, id.as_str(), &sandbox);
            true
        }))
    }

    /// Publishes whether a sandbox is ready.
    pub(crate) fn set_ready(&self, id: &SandboxId, ready: bool) {
        self.change(|cache| {
            if let Some(sandbox) = cache.sandboxes.get_mut(id) {
                let was_ready = sandbox.ready;
                if !ready {
                    cache.awaiting_usage.remove(id);
                }
                sandbox.set_ready(ready);
                cache.sandbox_list = None;
                if was_ready && !ready {
                    cache.emit(ContainerEventType::ContainerStoppedEvent, id.as_str(), id);
                }
            }
        });
    }

    /// Publishes the status of a container.
    pub(crate) fn set_status(&self, id: &ContainerId, status: store::ContainerStatus) {
        self.change(|cache| {
            if let Some(container) = cache.containers.get_mut(id) {
                let before = container.state();
                container.set_status(status);
                let container = container.clone();
                cache.container_list = None;
                cache.emit_transition(before, &container);
            }
        });
    }

    /// Returns whether a cell belongs to a sandbox.
    pub(crate) fn has_cell(&self, cell: &CellId) -> bool {
        self.read().by_cell.contains_key(cell)
    }

    pub(crate) fn remove_container(&self, id: &ContainerId) {
        self.change(|cache| cache.remove_container(id));
    }

    /// Removes a sandbox and its containers.
    pub(crate) fn remove_sandbox(&self, id: &SandboxId) {
        self.change(|cache| {
            let Some(sandbox) = cache.sandboxes.get(id) else { return };
            for container in &sandbox.containers.clone() {
                cache.remove_container(container);
            }
            cache.emit(ContainerEventType::ContainerDeletedEvent, id.as_str(), id);
            let Some(sandbox) = cache.sandboxes.remove(id) else { return };
            remove_from(&mut cache.by_uid, &sandbox.uid, id);
            cache.unindex(id, sandbox.annotations);
            cache.by_cell.remove(&sandbox.cell);
            cache.awaiting_usage.remove(id);
            cache.sandbox_list = None;
        });
    }

    /// Keeps the reported details of a container.
    pub(crate) fn set_reported(&self, id: &ContainerId, reported: &cri::ContainerStatus) {
        let reported = reported_details(reported);
        if let Some(container) = self.write().containers.get_mut(id) {
            container.reported = reported;
        }
    }

    /// Waits until a check succeeds, and returns its value; `None` at the timeout.
    pub(crate) async fn wait<T>(
        &self,
        timeout: Duration,
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
        tokio::time::timeout(timeout, waiting).await.unwrap_or_default()
    }
}

impl Cache {
    /// Finds a container by its id in its cell. Cells choose these ids, and two cells may choose
    /// the same.
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
        self.emit(ContainerEventType::ContainerDeletedEvent, id.as_str(), &container.sandbox);
    }
}

/// Encodes the details of a status that only the cell knows: resources, user and stop signal.
/// Leaves out resources and user if they are too long.
pub(crate) fn reported_details(reported: &cri::ContainerStatus) -> Bytes {
    let mut kept = cri::ContainerStatus {
        resources: reported.resources.clone(),
        user: reported.user.clone(),
        stop_signal: reported.stop_signal,
        ..Default::default()
    };
    if kept.encoded_len() > MAX_REPORT_BYTES {
        (kept.resources, kept.user) = (None, None);
    }
    kept.encode_to_vec().into()
}

fn remove_from<K: std::hash::Hash + Eq>(
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
