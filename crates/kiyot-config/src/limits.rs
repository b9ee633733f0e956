//! Limits of the boots and the prices of cells.

use kiyot_values::{
    price::Price,
    problems::{Field, Table},
};

/// Highest limit of boots: the limit of cells.
const MAX_BOOTS: usize = 10_000;

/// Limits of the boots and the prices of cells; `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Cells that boot at the same time; further pods wait in turn.
    pub boots: Option<usize>,
    /// Price of all cells of the node.
    pub price_per_hour: Option<Price>,
    /// Price of the cells of each namespace on the node.
    pub namespace_price_per_hour: Option<Price>,
}

impl Limits {
    pub(super) fn read(mut table: Table<'_>) -> Self {
        let mut limits = Self::default();
        table.set("boots", &mut limits.boots, |field| field.number(1..=MAX_BOOTS).map(Some));
        table.set("price_per_hour", &mut limits.price_per_hour, |field| price(field).map(Some));
        table.set("namespace_price_per_hour", &mut limits.namespace_price_per_hour, |field| {
            price(field).map(Some)
        });
        table.finish();
        limits
    }
}

pub(super) fn price(field: Field<'_>) -> Option<Price> {
    field.read("dollars an hour in quotes, such as \"2.5\", from 0 to 100000", |text| {
        text.parse().ok()
    })
}
