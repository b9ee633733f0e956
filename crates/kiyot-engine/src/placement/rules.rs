//! The configured rules of the choice.

use kiyot_config::{MilpaBackend, Netns};

use crate::request::{Architecture, InstanceType as TypeChoice};

/// The rules of the choice.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rules {
    /// The needs of pods that say nothing.
    pub defaults: Defaults,
    /// Instance types that no pod gets.
    pub exclude: Vec<TypeChoice>,
    /// The zones of offerings; empty for all.
    pub zones: Vec<String>,
}

/// The needs of pods that say nothing, and those of their cells.
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
    /// Returns true if offerings of a zone may be taken. An unknown zone is none of the configured.
    pub(super) fn has_zone(&self, zone: &str) -> bool {
        self.zones.is_empty() || self.zones.iter().any(|allowed| allowed == zone)
    }

    /// Returns the rules of a configuration.
    pub fn of(config: &MilpaBackend) -> Self {
        let placement = &config.placement;
        let memory_mib = mib(placement.default_memory);
        let overhead_mib = mib(config.memory_overhead());
        Self {
            defaults: Defaults { memory_mib, overhead_mib, ..Defaults::default() },
            exclude: placement.exclude.iter().cloned().map(TypeChoice::Glob).collect(),
            zones: placement.zones.clone(),
        }
    }
}

/// Returns bytes in MiB, rounded up.
fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}
