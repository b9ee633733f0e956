//! Highest price of an instance when it is chosen.

use kiyot_values::{price::Price, problems::Field};

/// Reads dollars an hour.
pub(super) fn max_price(field: Field<'_>) -> Option<Price> {
    field.try_read(str::parse)
}
