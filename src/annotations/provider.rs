//! Provider of a cell, and its isolation from the node.

use kiyot_config::ProviderKind;
use kiyot_engine::request::Isolation;
use kiyot_values::problems::Field;

/// Reads a provider.
pub(super) fn provider(field: Field<'_>) -> Option<ProviderKind> {
    field.choice(
        &[ProviderKind::Netns, ProviderKind::Qemu, ProviderKind::Ec2].map(|it| (it.name(), it)),
    )
}

/// Reads the least isolation.
pub(super) fn isolation(field: Field<'_>) -> Option<Isolation> {
    field.choice(&[("machine", Isolation::Machine), ("instance", Isolation::Instance)])
}
