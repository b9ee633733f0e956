//! The inventory of a backend in the messages of the admin API: pods, cells, pools, prices, events.
//!
//! Contains only what an operator may see: no values of environment variables, no annotations that
//! kiyot doesn't read, no tokens, no keys.

use std::{collections::HashSet, sync::Arc};

use kiyot_config::BackendConfig;
use kiyot_engine::{
    StoreError,
    engine::{Limits, OrderView, ProviderState, ProviderView, Room},
    id::CellId,
    placement::Most,
    provider::ProviderError,
};
use kiyot_proto::{admin, text::counted};

use super::{cells::Cells, cri::CriService, pods::Pods, store::Store};
use crate::backends::BackendName;

mod cell;
mod event;
mod key;
mod labels;
mod log;
mod offering;
mod pod;
mod unit;
mod usage;

pub use key::PodKey;
pub use log::{LogSource, NoLog};

pub use super::store::Row as Record;

pub(crate) use super::cells::ProviderCatalogue;
use key::PodItem;

/// The inventory of a backend.
#[derive(Debug)]
pub struct Inventory {
    backend: BackendName,
    node: String,
    cells: Arc<Cells>,
    pods: Arc<Pods>,
    cri: Arc<CriService>,
    store: Store,
}

impl Inventory {
    pub(super) fn new(
        backend: BackendName,
        node: String,
        cells: Arc<Cells>,
        cri: Arc<CriService>,
        store: Store,
    ) -> Self {
        let pods = Arc::clone(cri.pods());
        Self { backend, node, cells, pods, cri, store }
    }

    /// Returns the name of the node.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Returns the pods, sorted: the latest sandbox of each pod, and the order of its next cell.
    pub fn pod_keys(&self) -> Vec<PodKey> {
        let orders: Vec<OrderView> = self.cells.orders();
        let sandboxes = self.pods.latest_sandboxes().into_iter();
        let mut keys: Vec<PodKey> = orders.into_iter().map(PodKey::of_order).collect();
        keys.extend(sandboxes.map(PodKey::of_sandbox));
        key::sort(&mut keys);
        keys
    }

    /// Returns the uids of the pods with a sandbox in a cell.
    pub(crate) fn pod_uids(&self) -> HashSet<Arc<str>> {
        self.pods.latest_sandboxes().into_iter().map(|(_, _, uid, _)| uid).collect()
    }

    /// Returns the pods that a request selects. An empty `namespace` selects all namespaces, an
    /// empty `name` all pods. Otherwise `name` is the name of the newest pod with this name,
    /// `namespace/name`, or else the id of a sandbox or the uid of a pod.
    pub fn find(&self, namespace: &str, name: &str) -> Vec<PodKey> {
        let found = key::find(self.pod_keys(), namespace, name);
        if !found.is_empty() || name.is_empty() {
            return found;
        }
        // No current pod matches: look for an earlier sandbox.
        let earlier = self.pods.sandbox(name).ok().filter(|sandbox| sandbox.id.as_str() == name);
        let key = earlier.map(|sandbox| {
            let created = sandbox.item().created_at;
            PodKey::of_sandbox((sandbox.id, sandbox.pod, sandbox.uid, created)).replaced()
        });
        key.into_iter().filter(|key| key.is_in(namespace)).collect()
    }

    /// Returns the pods with these keys. Pods that were removed meanwhile are left out.
    pub fn pods(&self, keys: &[PodKey]) -> Vec<admin::Pod> {
        keys.iter().filter_map(|key| self.pod(key)).collect()
    }

    /// Returns the ids of all cells whose end is not proven.
    pub fn cell_ids(&self) -> Vec<CellId> {
        self.cells.all()
    }

    /// Returns the ids of all cells whose end is not proven, with the builds of their agents;
    /// `None` for a cell that is not connected.
    pub fn agents(&self) -> Vec<(CellId, Option<String>)> {
        self.cells.agent_builds()
    }

    /// Returns the room for further pods; `None` while the daemon starts.
    pub async fn room(&self) -> Option<Room> {
        self.cells.room().await
    }

    /// Returns the most that cells can have within limits, if the provider's catalogue is known.
    pub async fn most(&self, limits: Limits) -> Option<Most> {
        self.cells.most(limits).await
    }

    /// Returns the summary of the backend.
    pub fn summary(&self) -> admin::Backend {
        let numbers = self.cells.numbers();
        let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        admin::Backend {
            name: self.backend.to_string(),
            r#type: "milpa".to_owned(),
            provider: self.providers(),
            socket: String::new(),
            cells: u32::try_from(numbers.cells.values().sum::<u64>()).unwrap_or(u32::MAX),
            max_cells: number(numbers.limits.max_cells),
            booting: number(numbers.boots),
            max_booting: numbers.limits.boots.map_or(0, number),
            waiting: number(numbers.orders_waiting),
            cordoned: numbers.is_cordoned,
            is_node_backend: false,
        }
    }

    /// Returns the names of the providers, with the state of each provider that is not configured.
    fn providers(&self) -> String {
        let name = |ProviderView { key, state, cells }| match state {
            ProviderState::Configured => String::from(&*key),
            _ => format!("{key} ({}, {})", state.name(), counted(cells, "cell", "cells")),
        };
        self.cells.providers().into_iter().map(name).collect::<Vec<_>>().join(", ")
    }

    /// Returns the summary of a container runtime; `None` for other backends.
    pub fn summary_of_runtime(
        name: &str,
        config: &BackendConfig,
        is_node: bool,
    ) -> Option<admin::Backend> {
        let BackendConfig::Cri(cri) = config else { return None };
        Some(admin::Backend {
            name: name.to_owned(),
            r#type: "cri".to_owned(),
            socket: cri.socket.display().to_string(),
            is_node_backend: is_node,
            ..admin::Backend::default()
        })
    }

    /// Returns the warm pools.
    pub fn pools(&self) -> Vec<admin::Pool> {
        let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let pools = self.cells.pools().into_iter();
        let message = |pool: kiyot_engine::engine::PoolView| admin::Pool {
            name: pool.name.to_string(),
            backend: self.backend.to_string(),
            wanted: number(pool.wanted),
            idle: number(pool.idle),
            booting: number(pool.booting),
            hits: pool.hits,
            misses: pool.misses,
        };
        pools.map(message).collect()
    }

    /// Returns a line for each instance that the provider lists: id, cell, state, offering.
    pub async fn instances(&self) -> Result<Vec<String>, ProviderError> {
        let listed = self.cells.list_owned().await?;
        let line = |instance: kiyot_engine::provider::Instance| {
            format!("{} {} {:?} {}", instance.id, instance.cell, instance.state, instance.offering)
        };
        Ok(listed.into_iter().map(line).collect())
    }

    /// Returns the next records, without their contents: the first part without `after`, then the
    /// part after that record. An empty part is the end.
    pub async fn records(&self, after: Option<Record>) -> Result<Vec<Record>, StoreError> {
        self.store.rows(after).await
    }

    /// Stops launches of cells, or permits them again. Returns the number of cells that continue.
    pub async fn cordon(&self, is_cordoned: bool) -> Result<usize, StoreError> {
        self.cells.cordon(is_cordoned).await
    }

    /// Ends a cell. Its pod fails, and the kubelet may start it again.
    pub async fn end_cell(&self, id: &CellId) -> Result<(), kiyot_engine::engine::CellError> {
        self.cells.terminate(id, "an operator ended it").await
    }
}
