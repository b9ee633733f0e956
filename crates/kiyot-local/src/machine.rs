//! The share of this node that its cells may use.

use kiyot_config::{MilpaBackend, ProviderKind};
use kiyot_engine::placement::NodeShare;

use crate::qemu::NodeMemory;

/// Returns the share of this node that a provider's cells may use; `None` if nothing limits them.
pub fn machine_for_cells(
    config: &MilpaBackend,
    provider: ProviderKind,
    processors: usize,
) -> Option<NodeShare> {
    NodeShare::for_cells(config, provider, || {
        let memory = NodeMemory::read().inspect_err(|error| {
            tracing::error!(%error, "memory of the node not read, its cells are not limited");
        });
        Some(NodeShare {
            milli_cpus: (processors as u64).saturating_mul(1000),
            memory_mib: memory.ok()?.total_mib,
        })
    })
}
