//! Host ports and networks of pods in cells: a pod gets no cell if another pod has its port or
//! network.

use std::fmt;

use crate::{
    engine::{Cell, Engine, ProviderKey, State},
    id::CellId,
    provider::{Held, HostPort},
    wanted::Wanted,
};

/// The host ports and networks of the pod that a cell is bound to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodPorts {
    /// Namespace and name of the pod.
    pub pod: String,
    /// The ports.
    pub ports: Vec<HostPort>,
    /// The networks that the cloud routes to its cell.
    pub networks: Vec<String>,
}

impl PodPorts {
    /// Returns whether there are neither ports nor networks.
    pub fn is_empty(&self) -> bool {
        self.ports.is_empty() && self.networks.is_empty()
    }
}

/// A host port or a network that another pod has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{taken} is taken by pod {pod}{}; allowed: a port or network that no other pod has",
    in_cell(.cell)
)]
pub struct PortTaken {
    /// The port or the network.
    pub taken: Taken,
    /// Namespace and name of the other pod.
    pub pod: String,
    /// The cell of the other pod, once it is launched.
    pub cell: Option<CellId>,
}

/// A host port or a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Taken {
    /// A port of the node.
    Port(HostPort),
    /// A network of `pod.elotl.co/cloud-route`.
    Network(String),
}

impl fmt::Display for Taken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port(port) => port.fmt(f),
            Self::Network(network) => write!(f, "cloud-route {network}"),
        }
    }
}

fn in_cell(cell: &Option<CellId>) -> String {
    cell.as_ref().map(|cell| format!(" in {cell}")).unwrap_or_default()
}

impl Engine {
    /// Returns the first of a pod's host ports and networks that another pod has. The other pod has
    /// a cell that is ordered, or that may hold the port or network.
    pub fn taken_port(&self, wanted: &Wanted) -> Option<PortTaken> {
        let PodPorts { ports, networks, .. } = wanted.pod_ports()?;
        let uid = &wanted.key.pod_uid;
        let common = |of: &PodPorts| {
            let is_taken = |port: &&HostPort| of.ports.iter().any(|taken| taken.overlaps(port));
            let port = ports.iter().find(is_taken).cloned().map(Taken::Port);
            let mut networks = networks.iter();
            port.or_else(|| {
                networks.find(|it| of.networks.contains(it)).cloned().map(Taken::Network)
            })
        };
        let ordered = self.orders.values().filter(|order| order.wanted.key.pod_uid != *uid);
        let ordered = ordered
            .filter_map(|order| Some((order.wanted.pod_ports()?, order.state.cell().cloned())));
        let bound = self.cells.values().filter(|cell| {
            let provider = self.providers.callee(cell);
            let awaits_end = provider.is_some_and(|it| it.capabilities.awaits_ends());
            let frees = !awaits_end && cell.state.is_released();
            cell.pod_uid() != uid && !frees
        });
        let bound = bound.filter_map(|cell| {
            let ports = cell.pod.as_ref()?.ports.as_deref()?.clone();
            Some((ports, Some(cell.id.clone())))
        });
        bound
            .chain(ordered)
            .find_map(|(of, cell)| Some(PortTaken { taken: common(&of)?, pod: of.pod, cell }))
    }

    /// Returns the attachments that a provider made for a previous daemon.
    pub fn held(&self, key: ProviderKey) -> Vec<Held> {
        let is_own = |cell: &&Cell| self.providers.callee(cell).is_some_and(|it| it.key() == key);
        let held = self.cells.values().filter(is_own).filter_map(|cell| {
            let State::Bound { instance, addresses } = &cell.state else { return None };
            let held = cell.pod.as_ref().and_then(|pod| pod.ports.as_ref());
            let ports = held.map(|held| held.ports.clone()).unwrap_or_default();
            Some(Held { instance: instance.clone(), addresses: addresses.clone(), ports })
        });
        held.collect()
    }
}

impl Wanted {
    /// Returns the host ports and networks of its pod; `None` if the pod has neither.
    pub(in crate::engine) fn pod_ports(&self) -> Option<PodPorts> {
        let networks = self.cloud_routes();
        let held = PodPorts { pod: self.key.pod(), ports: self.ports.clone(), networks };
        (!held.is_empty()).then_some(held)
    }
}
