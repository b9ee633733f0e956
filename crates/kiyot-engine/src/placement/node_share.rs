//! Parts of the node that its cells have.

use std::{
    fmt,
    ops::{Add, Sub},
};

use kiyot_config::{LocalMachine, MilpaBackend, ProviderKind};

use crate::placement::{Catalogue, Choice, Needs, Size};

/// A part of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeShare {
    /// Thousandths of a CPU.
    pub milli_cpus: u64,
    /// Memory in MiB.
    pub memory_mib: u64,
}

impl NodeShare {
    /// Returns the part that a pod's cell needs: the pod's CPUs, and the memory of its instance.
    /// `None` if the catalogue's instances are not parts of the node.
    pub fn of(catalogue: &Catalogue, needs: &Needs) -> Option<Self> {
        let memory_mib = if catalogue.is_sized() {
            Size::of(needs).memory_mib
        } else if catalogue.any_size_offering().is_some() {
            needs.memory_mib.value.saturating_add(needs.overhead_mib)
        } else {
            return None;
        };
        Some(Self { milli_cpus: needs.milli_cpus.value, memory_mib })
    }

    /// Returns the part of the node that a provider's cells may have, without the reserve. `None`
    /// is no bound: for cells on other machines, and for a single provider without a reserve.
    pub fn for_cells(
        config: &MilpaBackend,
        provider: ProviderKind,
        node: impl FnOnce() -> Option<Self>,
    ) -> Option<Self> {
        let LocalMachine { reserve_cpu, reserve_memory, .. } = config.machine_of(provider)?;
        if config.providers.len() == 1 && reserve_cpu.is_none() && reserve_memory.is_none() {
            return None;
        }
        let reserved = Self {
            milli_cpus: reserve_cpu.unwrap_or_default().saturating_mul(1000),
            memory_mib: reserve_memory.unwrap_or_default().div_ceil(1 << 20),
        };
        Some(node()? - reserved)
    }

    /// Returns whether the share is within another.
    pub fn fits(self, within: Self) -> bool {
        self.milli_cpus <= within.milli_cpus && self.memory_mib <= within.memory_mib
    }
}

impl Choice {
    /// Returns the part of the node that the pod's cell needs, if it is on the node.
    pub(crate) fn share(&self) -> Option<NodeShare> {
        NodeShare::of(&self.catalogue, &self.needs)
    }
}

impl Add for NodeShare {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            milli_cpus: self.milli_cpus.saturating_add(other.milli_cpus),
            memory_mib: self.memory_mib.saturating_add(other.memory_mib),
        }
    }
}

impl Sub for NodeShare {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            milli_cpus: self.milli_cpus.saturating_sub(other.milli_cpus),
            memory_mib: self.memory_mib.saturating_sub(other.memory_mib),
        }
    }
}

impl fmt::Display for NodeShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}m CPU and {} MiB", self.milli_cpus, self.memory_mib)
    }
}
