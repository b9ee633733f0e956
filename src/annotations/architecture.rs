//! Architecture of an instance's processor.

use kiyot_engine::request::Architecture;
use kiyot_values::problems::Field;

/// Reads the name that images or the kernel use.
pub(super) fn architecture(field: Field<'_>) -> Option<Architecture> {
    field.read("amd64 (or x86_64), arm64 (or aarch64)", Architecture::named)
}
