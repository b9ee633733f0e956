//! The configured rules of the choice.

use kiyot_config::{LocalMachine, MilpaBackend, Netns, ProviderKind};
use kiyot_values::price::Price;

use crate::request::{Architecture, InstanceType as TypeChoice};

/// The rules of the choice.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rules {
    /// The needs of pods without annotations and resources.
    pub defaults: Defaults,
    /// Instance types that no pod gets.
    pub exclude: Vec<TypeChoice>,
    /// The zones of offerings; empty for all.
    pub zones: Vec<String>,
    /// The price of instances that are parts of the node.
    pub machine_price: MachinePrice,
}

/// The default needs of pods and of their cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Defaults {
    /// Thousandths of a CPU.
    pub milli_cpus: u64,
    /// Memory in MiB; not 0.
    pub memory_mib: u64,
    /// Memory of a cell's own processes, in MiB.
    pub overhead_mib: u64,
    /// The architecture of cells.
    pub architecture: Architecture,
}

impl Default for Defaults {
    fn default() -> Self {
        Self {
            milli_cpus: 0,
            memory_mib: 512,
            overhead_mib: mib(Netns::default().memory_overhead),
            architecture: Architecture::of_node(),
        }
    }
}

impl Rules {
    /// Returns whether offerings of a zone may be taken. An unknown zone does not match configured
    /// zones.
    pub(super) fn has_zone(&self, zone: &str) -> bool {
        self.zones.is_empty() || self.zones.iter().any(|allowed| allowed == zone)
    }

    /// Returns the rules of a configured provider.
    pub fn of(config: &MilpaBackend, provider: ProviderKind) -> Self {
        let placement = &config.placement;
        let memory_mib = mib(placement.default_memory);
        let overhead_mib = mib(config.memory_overhead_of(provider));
        Self {
            defaults: Defaults { memory_mib, overhead_mib, ..Defaults::default() },
            exclude: placement.exclude.iter().cloned().map(TypeChoice::Glob).collect(),
            zones: placement.zones.clone(),
            machine_price: config.machine_of(provider).map(MachinePrice::of).unwrap_or_default(),
        }
    }
}

/// The configured price of parts of the node, for comparison with other offerings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MachinePrice {
    /// The price of a CPU.
    pub cpu: Price,
    /// The price of a GiB of memory.
    pub gib: Price,
}

impl MachinePrice {
    fn of(machine: LocalMachine) -> Self {
        Self { cpu: machine.cpu_price_per_hour, gib: machine.gib_price_per_hour }
    }

    /// Returns the price of these thousandths of a CPU and this memory.
    pub(super) fn price(self, milli_cpus: u64, memory_mib: u64) -> Price {
        let memory = memory_mib.saturating_mul(1000).div_ceil(1024);
        self.cpu.of_milli(milli_cpus) + self.gib.of_milli(memory)
    }
}

/// Returns bytes in MiB, rounded up.
fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}
