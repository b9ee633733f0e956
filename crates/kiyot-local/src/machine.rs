//! The part of this node that cells on it may have.

use kiyot_config::{LocalMachine, MilpaBackend, ProviderKind};
use kiyot_engine::placement::NodeShare;

use crate::qemu::NodeMemory;

/// Returns the part of this node that a provider's cells may have, without what is kept free;
/// `None` if nothing bounds them: cells on other machines, and those of a single provider without a
/// reserve.
pub fn machine_for_cells(
    config: &MilpaBackend,
    provider: ProviderKind,
    processors: usize,
) -> Option<NodeShare> {
    let LocalMachine { reserve_cpu, reserve_memory, .. } = config.machine_of(provider)?;
    if config.providers.len() == 1 && reserve_cpu.is_none() && reserve_memory.is_none() {
        return None;
    }
    let memory = NodeMemory::read().inspect_err(|error| {
        tracing::error!(%error, "memory of the node not read, cells on it have no bound");
    });
    let machine = NodeShare {
        milli_cpus: (processors as u64).saturating_mul(1000),
        memory_mib: memory.ok()?.total_mib,
    };
    let reserved = NodeShare {
        milli_cpus: reserve_cpu.unwrap_or_default().saturating_mul(1000),
        memory_mib: reserve_memory.unwrap_or_default().div_ceil(1 << 20),
    };
    Some(machine - reserved)
}
