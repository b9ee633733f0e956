//! Isolation of a cell from the node.

use kiyot_engine::request::Isolation;
use kiyot_values::problems::Field;

/// Reads the least isolation.
pub(super) fn isolation(field: Field<'_>) -> Option<Isolation> {
    field.choice(&[("machine", Isolation::Machine), ("instance", Isolation::Instance)])
}
