//! The offerings of the simulated cloud: their capacity changes over time.

use std::{collections::BTreeSet, time::Duration};

use kiyot_engine::{
    engine::{Event, Launch},
    id::{CellId, SandboxId},
    placement::{LaunchRefusal, Offering},
    provider::ErrorClass,
};

use crate::world::{Happening, World};

/// The period at which capacities change.
const PERIOD: Duration = Duration::from_secs(600);
/// The most instances of a scarce offering.
const MAX_SCARCE: usize = 2;
/// The most candidates that a launch tries, in a world where launches don't try all.
const MAX_TRIED: usize = 3;

impl World<'_> {
    /// Chooses how many candidates a launch tries.
    pub(super) fn limit_tries(&mut self) {
        if self.options.faults.scarce > 0 {
            let tried = self.rng.below(MAX_TRIED + 1);
            self.cloud.set_max_tried((tried > 0).then_some(tried));
            self.log(format_args!("a launch tries {tried} candidates, 0 is all"));
        }
    }

    /// Makes some offerings scarce and others plentiful.
    pub(super) fn change_capacity(&mut self) {
        let scarce = self.faults().scarce;
        for number in 0..self.offerings.len() {
            let Some(offering) = self.offerings.get(number).cloned() else { continue };
            if self.strikes("scarce", scarce) {
                let room = self.rng.below(MAX_SCARCE + 1);
                self.log(format_args!("{offering} has room for {room} instances"));
                self.cloud.set_capacity(offering, room);
            } else if self.cloud.clear_capacity(&offering) {
                self.log(format_args!("{offering} has room"));
            }
        }
        if !self.is_calm() {
            self.after(PERIOD, Happening::CapacityChanges);
        }
    }

    /// Returns the cell and the refused offerings of a refusal.
    pub(super) fn refusal(event: &Event) -> Option<(CellId, Vec<Offering>)> {
        match event {
            Event::Launched(cell, Err(error)) if error.class == ErrorClass::Capacity => {
                let refused = match &error.refusal {
                    Some(LaunchRefusal::Offerings(refused)) => refused.clone(),
                    _ => Vec::new(),
                };
                Some((cell.clone(), refused))
            }
            _ => None,
        }
    }

    /// Records the offerings that were refused to a cell's order.
    pub(super) fn refused(&mut self, cell: &CellId, offerings: Vec<Offering>) {
        if let Some(order) = self.order_of(cell) {
            self.refused.entry(order).or_default().extend(offerings);
        }
    }

    /// Checks that a launch requests offerings of one market, and no offerings that were refused to
    /// its order.
    pub(super) fn check_candidates(&mut self, launch: &Launch) {
        let cell = &launch.spec.cell;
        let refused: Option<&BTreeSet<Offering>> =
            self.order_of(cell).and_then(|order| self.refused.get(&order));
        let again = refused.and_then(|refused| {
            launch.spec.offerings().find(|offering| refused.contains(offering))
        });
        let mut markets = launch.spec.offerings().map(|offering| offering.market);
        let first = markets.next();
        let is_mixed = markets.any(|market| Some(market) != first);
        if let Some(offering) = again {
            let text = format!("{cell} requests {offering}, which was refused to its order");
            self.violation(text);
        }
        if is_mixed {
            self.violation(format!("{cell} requests offerings of two markets"));
        }
    }

    fn order_of(&self, cell: &CellId) -> Option<SandboxId> {
        SandboxId::parse(&self.cells.get(cell)?.sandbox).ok()
    }
}
