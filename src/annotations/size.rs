//! Size of a cell's root volume.

use super::Quantity;
use crate::problems::Field;

/// Largest root volume, in GiB: EC2's limit.
const MAX_VOLUME_GIB: u64 = 64 * 1024;

/// Reads a quantity of bytes as GiB.
pub(super) fn volume_size(field: Field<'_>) -> Option<u64> {
    let size = |text: &str| {
        text.parse::<Quantity>()
            .ok()
            .map(Quantity::gib)
            .filter(|gib| (1..=MAX_VOLUME_GIB).contains(gib))
    };
    field.read(
        &format!("a quantity of bytes such as 20Gi, more than 0 and at most {MAX_VOLUME_GIB}Gi"),
        size,
    )
}
