//! The inventory of a backend in the messages of the admin API: pods, cells, pools, prices, events.
//!
//! Only what an operator may see: no values of environment variables, no annotations that kiyot
//! doesn't read, no tokens and keys.

use std::{collections::HashSet, sync::Arc};

use kiyot_proto::admin;

use super::{
    cells::{Cells, OrderView},
    id::{CellId, SandboxId},
    pods::Pods,
    providers::ProviderError,
    standalone::{Standalone, View},
    store::StoreError,
};
use crate::{
    backends::BackendName,
    config::{BackendConfig, ProviderKind},
};

mod cell;
mod event;
mod labels;
mod log;
mod offering;
mod pod;
mod usage;

pub use log::{LogSource, NoLog};

/// The inventory of a backend.
#[derive(Debug)]
pub struct Inventory {
    backend: BackendName,
    node: String,
    provider: ProviderKind,
    cells: Arc<Cells>,
    pods: Arc<Pods>,
    standalone: Arc<Standalone>,
}

/// A pod of a list.
#[derive(Debug, Clone)]
pub struct PodKey {
    /// Namespace/name, by which pods are sorted.
    name: String,
    created_unix_nanos: i64,
    item: PodItem,
}

#[derive(Debug, Clone)]
enum PodItem {
    Waiting(Box<OrderView>),
    Sandbox(SandboxId),
    /// A standalone pod without a sandbox and without an order.
    Standalone(Box<View>),
}

impl Inventory {
    /// Returns the inventory of a backend with these parts.
    pub(super) fn new(
        backend: BackendName,
        node: String,
        provider: ProviderKind,
        cells: Arc<Cells>,
        pods: Arc<Pods>,
        standalone: Arc<Standalone>,
    ) -> Self {
        Self { backend, node, provider, cells, pods, standalone }
    }

    /// Returns the name of the node.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Returns the pods, sorted: the latest sandbox of each, or the order of its cell, or the
    /// standalone pod before both.
    pub fn pod_keys(&self) -> Vec<PodKey> {
        let waiting = self.cells.orders().into_iter().map(|order| PodKey {
            name: format!("{}/{}", order.namespace, order.name),
            created_unix_nanos: order.since_unix_nanos,
            item: PodItem::Waiting(Box::new(order)),
        });
        let sandboxes = self.pods.latest_sandboxes().into_iter();
        let sandboxes = sandboxes.map(|(id, name, created_unix_nanos)| PodKey {
            name: name.to_string(),
            created_unix_nanos,
            item: PodItem::Sandbox(id),
        });
        let mut keys: Vec<PodKey> = waiting.chain(sandboxes).collect();
        let standalone = self.standalone.views();
        if !standalone.is_empty() {
            let names: HashSet<String> = keys.iter().map(|key| key.name.clone()).collect();
            let pending = standalone.into_iter().map(|view| PodKey {
                name: format!("{}/{}", view.namespace, view.name),
                created_unix_nanos: view.created_unix_nanos,
                item: PodItem::Standalone(Box::new(view)),
            });
            keys.extend(pending.filter(|key| !names.contains(&key.name)));
        }
        keys.sort_by(|one, other| {
            (&one.name, one.created_unix_nanos).cmp(&(&other.name, other.created_unix_nanos))
        });
        keys
    }

    /// Returns the pods of keys. Those that were removed since are left out.
    pub fn pods(&self, keys: &[PodKey]) -> Vec<admin::Pod> {
        keys.iter().filter_map(|key| self.pod(key)).collect()
    }

    /// Returns the ids of all cells whose end is not proven.
    pub fn cell_ids(&self) -> Vec<CellId> {
        self.cells.all()
    }

    /// Returns the summary of the backend.
    pub fn summary(&self) -> admin::Backend {
        let numbers = self.cells.numbers();
        let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let provider = match self.provider {
            ProviderKind::Netns => "netns",
            ProviderKind::Qemu => "qemu",
            ProviderKind::Ec2 => "ec2",
        };
        admin::Backend {
            name: self.backend.to_string(),
            r#type: "milpa".to_owned(),
            provider: provider.to_owned(),
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
        let message = |pool: super::cells::PoolView| admin::Pool {
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

    /// Returns the ids of the instances that the provider lists, each with its cell.
    pub async fn instances(&self) -> Result<Vec<String>, ProviderError> {
        let listed = self.cells.list_owned().await?;
        let line = |instance: super::providers::Instance| {
            format!("{} {} {:?} {}", instance.id, instance.cell, instance.state, instance.offering)
        };
        Ok(listed.into_iter().map(line).collect())
    }

    /// Stops launches of cells, or permits them again. Returns the number of cells that go on.
    pub async fn cordon(&self, is_cordoned: bool) -> Result<usize, StoreError> {
        self.cells.cordon(is_cordoned).await
    }

    /// Ends a cell. Its pod fails, and the kubelet may start it again.
    pub async fn end_cell(&self, id: &CellId) -> Result<(), super::cells::CellError> {
        self.cells.terminate(id, "an operator ended it").await
    }
}
