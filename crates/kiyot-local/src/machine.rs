//! The part of this node that cells on it may have.

use kiyot_config::{MilpaBackend, ProviderKind};
use kiyot_engine::placement::NodeShare;

use crate::qemu::NodeMemory;

/// Returns the part of this node that a provider's cells may have; `None` if nothing bounds them.
pub fn machine_for_cells(
    config: &MilpaBackend,
    provider: ProviderKind,
    processors: usize,
) -> Option<NodeShare> {
    NodeShare::for_cells(config, provider, || {
        let memory = NodeMemory::read().inspect_err(|error| {
            tracing::error!(%error, "memory of the node not read, cells on it have no bound");
        });
        Some(NodeShare {
            milli_cpus: (processors as u64).saturating_mul(1000),
            memory_mib: memory.ok()?.total_mib,
        })
    })
}
