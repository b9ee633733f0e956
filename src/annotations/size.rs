//! Sizes of an instance: CPUs, memory and root volume.

use kiyot_engine::request::MAX_VOLUME_GIB;
use kiyot_values::{problems::Field, quantity::Quantity};

/// Limit on CPUs: five times as many as the largest instance types have.
const MAX_CPUS: u64 = 10_000;
/// Limit on memory, in TiB: twice the memory of the largest instance types.
const MAX_MEMORY_TIB: u64 = 64;

/// Reads a quantity of CPUs as milli-CPUs.
pub(super) fn cpu(field: Field<'_>) -> Option<u64> {
    let allowed =
        format!("a quantity of CPUs such as 500m or 2, more than 0 and at most {MAX_CPUS}");
    field.read(&allowed, |text| amount(text, Quantity::milli, MAX_CPUS * 1000))
}

/// Reads a quantity of bytes.
pub(super) fn memory(field: Field<'_>) -> Option<u64> {
    let allowed = format!(
        "a quantity of bytes such as 512Mi or 4Gi, more than 0 and at most {MAX_MEMORY_TIB}Ti"
    );
    field.read(&allowed, |text| amount(text, Quantity::units, MAX_MEMORY_TIB << 40))
}

/// Reads a quantity of bytes as GiB.
pub(super) fn volume_size(field: Field<'_>) -> Option<u64> {
    let allowed =
        format!("a quantity of bytes such as 20Gi, more than 0 and at most {MAX_VOLUME_GIB}Gi");
    field.read(&allowed, |text| amount(text, Quantity::gib, MAX_VOLUME_GIB))
}

fn amount(text: &str, unit: impl Fn(Quantity) -> u64, most: u64) -> Option<u64> {
    text.parse().ok().map(unit).filter(|amount| (1..=most).contains(amount))
}
