//! Instance types, exact and by pattern.

use super::text::is_name;
use crate::problems::Field;

/// Choice of an instance type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstanceType {
    /// This type, whatever the pod's resources are.
    Exact(String),
    /// The cheapest fitting type whose name matches (`*`, `?`).
    Glob(String),
}

/// Reads a type or a glob.
pub(super) fn instance_type(field: Field<'_>) -> Option<InstanceType> {
    field.read("an instance type such as p3.2xlarge, or a glob such as c5*", |text| {
        if is_name(text, &['.', '-', '_']) {
            Some(InstanceType::Exact(text.to_owned()))
        } else {
            is_name(text, &['.', '-', '_', '*', '?']).then(|| InstanceType::Glob(text.to_owned()))
        }
    })
}
