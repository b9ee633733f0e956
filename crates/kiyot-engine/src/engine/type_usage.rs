//! Hours and cost by instance type and market, since the daemon started.

use std::{collections::BTreeMap, time::Duration};

use kiyot_values::price::Cost;

use crate::{
    engine::{Engine, Now, cell::Cell},
    placement::Market,
};

/// Bounds the instance types of ended cells; cells of further types are counted without a name.
const MAX_TYPES: usize = 500;

/// An instance type, if it is counted with its name, and a market.
pub type TypeKey = (Option<String>, Market);

/// The use of an instance type in a market.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TypeUsage {
    /// The time of all cells.
    pub time: Duration,
    /// The cost of all cells.
    pub cost: Cost,
    /// The cells that run now.
    pub cells: u32,
}

/// The use of ended cells.
#[derive(Debug, Default)]
pub(super) struct EndedTypes {
    by_type: BTreeMap<TypeKey, TypeUsage>,
}

impl TypeUsage {
    fn add(&mut self, cell: &Cell, now: Now) {
        self.time = self.time.saturating_add(cell.bill.time(now));
        self.cost = self.cost + cell.cost(now);
    }
}

impl EndedTypes {
    /// Adds a cell that has just ended, or its time with a pod.
    pub(super) fn add(&mut self, cell: &Cell, now: Now) {
        let Some(key) = key_of(cell) else { return };
        let is_kept = self.by_type.len() < MAX_TYPES || self.by_type.contains_key(&key);
        let key = if is_kept { key } else { (None, key.1) };
        self.by_type.entry(key).or_default().add(cell, now);
    }
}

impl Engine {
    /// Returns the use of each instance type in each market.
    pub fn type_usage(&self, now: Now) -> BTreeMap<TypeKey, TypeUsage> {
        let mut all = self.ended_types.by_type.clone();
        for cell in self.cells.values().filter(|cell| !cell.state.is_ended()) {
            let Some(key) = key_of(cell) else { continue };
            let usage = all.entry(key).or_default();
            usage.add(cell, now);
            usage.cells += 1;
        }
        all
    }
}

fn key_of(cell: &Cell) -> Option<TypeKey> {
    let offering = &cell.offering()?.offering;
    Some((Some(offering.instance_type.clone()), offering.market))
}
