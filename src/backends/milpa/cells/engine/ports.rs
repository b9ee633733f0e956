//! Host ports of pods in cells: a pod with a port that another has gets no cell.

use super::{Engine, OrderKey, State, order::Order};
use crate::backends::milpa::providers::{Held, HostPort};

/// The host ports of the pod that a cell is bound to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PodPorts {
    /// Namespace and name of the pod.
    pub(crate) pod: String,
    /// The ports. Not empty.
    pub(crate) ports: Vec<HostPort>,
}

/// A host port that another pod has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{port} is taken by pod {pod}{}; allowed is a port that no other pod has", in_cell(.cell))]
pub struct PortTaken {
    /// The port.
    pub port: HostPort,
    /// Namespace and name of the other pod.
    pub pod: String,
    /// Its cell; empty before its launch.
    pub cell: String,
}

fn in_cell(cell: &str) -> String {
    if cell.is_empty() { String::new() } else { format!(" in {cell}") }
}

impl Engine {
    /// Returns the first of a pod's host ports that another pod has, whose cell is ordered or may
    /// hold the port.
    pub(crate) fn taken_port(&self, pod: &OrderKey, wanted: &[HostPort]) -> Option<PortTaken> {
        if wanted.is_empty() {
            return None;
        }
        let overlapping = |taken: &[HostPort]| {
            let mut wanted = wanted.iter();
            wanted.find(|port| taken.iter().any(|taken| taken.overlaps(port))).cloned()
        };
        let ordered = self.orders.values().filter(|order| order.key.pod_uid != pod.pod_uid);
        let ordered = ordered.filter_map(|order| {
            let cell = order.state.cell().map(ToString::to_string).unwrap_or_default();
            Some((order.pod_ports()?, cell))
        });
        let bound = self.cells.values().filter(|cell| {
            let frees = !self.capabilities.awaits_ends() && cell.state.is_released();
            cell.pod_uid != pod.pod_uid && !frees
        });
        let bound = bound.filter_map(|cell| {
            let ports = cell.ports.as_deref()?.clone();
            Some((ports, cell.id.to_string()))
        });
        bound.chain(ordered).find_map(|(PodPorts { pod, ports }, cell)| {
            Some(PortTaken { port: overlapping(&ports)?, pod, cell })
        })
    }

    /// Returns the attachments that a previous daemon made.
    pub(crate) fn held(&self) -> Vec<Held> {
        let held = self.cells.values().filter_map(|cell| {
            let State::Bound { instance, addresses } = &cell.state else { return None };
            let ports = cell.ports.as_ref().map(|held| held.ports.clone()).unwrap_or_default();
            Some(Held { instance: instance.clone(), addresses: addresses.clone(), ports })
        });
        held.collect()
    }
}

impl Order {
    /// Returns the host ports of its pod; `None` without any.
    pub(super) fn pod_ports(&self) -> Option<PodPorts> {
        let ports = &self.attachment.as_ref()?.ports;
        let pod = || format!("{}/{}", self.key.namespace, self.key.name);
        (!ports.is_empty()).then(|| PodPorts { pod: pod(), ports: ports.clone() })
    }
}
