//! The part of this node that cells on it may have, and its price: keys of their providers.

use kiyot_values::{
    price::Price,
    problems::{Field, Table},
};

use super::{limits, read};

/// Most CPUs that may be kept free.
const MAX_CPUS: u64 = 10_000;
/// Range of the memory that may be kept free, in bytes.
const RESERVE_MEMORY: std::ops::RangeInclusive<u64> = (1 << 20)..=(64 << 40);

/// The part of this node that cells on it may have, and its price.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LocalMachine {
    /// CPUs that cells leave free for everything else on the node. `None` is no bound, or 0 if
    /// there are other providers.
    pub reserve_cpu: Option<u64>,
    /// Memory that cells leave free, in bytes. `None` has the same meaning.
    pub reserve_memory: Option<u64>,
    /// Price of a CPU, by which offerings of several providers are compared.
    pub cpu_price_per_hour: Price,
    /// Price of a GiB of memory.
    pub gib_price_per_hour: Price,
}

impl LocalMachine {
    /// Reads the keys of the machine from a provider's table.
    pub(super) fn read(table: &mut Table<'_>) -> Self {
        let mut machine = Self::default();
        table.set("reserve_cpu", &mut machine.reserve_cpu, |field| {
            field.number(0..=MAX_CPUS.cast_signed()).map(|cpus| Some(cpus.cast_unsigned()))
        });
        table.set("reserve_memory", &mut machine.reserve_memory, |field| {
            read::bytes_or_zero_in(field, "from \"1Mi\" to \"64Ti\"", RESERVE_MEMORY).map(Some)
        });
        let price = |field: Field<'_>| limits::price(field);
        table.set("cpu_price_per_hour", &mut machine.cpu_price_per_hour, price);
        table.set("gib_price_per_hour", &mut machine.gib_price_per_hour, price);
        machine
    }
}
