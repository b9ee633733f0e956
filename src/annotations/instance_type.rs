//! Instance types, exact and by pattern.

use kiyot_engine::request::InstanceType;
use kiyot_values::problems::Field;

use super::text::is_name;

/// Values that are allowed.
const ALLOWED: &str = "allowed: an instance type such as p3.2xlarge, or a glob such as c5*";

/// Reads a type or a glob.
pub(super) fn instance_type(field: Field<'_>) -> Option<InstanceType> {
    field.try_read(|text| {
        if is_name(text, &['.', '-', '_']) {
            Ok(InstanceType::Exact(text.to_owned()))
        } else if is_name(text, &['.', '-', '_', '*', '?']) {
            Ok(InstanceType::Glob(text.to_owned()))
        } else if text.trim().is_empty() {
            Err(format!("is empty; {ALLOWED}"))
        } else if text.trim().contains([',', ';', ' ', '\t', '\n']) {
            Err(format!("is a list; {ALLOWED}"))
        } else {
            Err(format!("is invalid; {ALLOWED}"))
        }
    })
}
