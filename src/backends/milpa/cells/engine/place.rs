//! Places in which a provider looks for instances, such as a region and an endpoint.
//!
//! A cell has the place in which it was launched. If the configuration names another, the provider
//! does not know the instance, and its "not found" proves nothing: the pod runs on. An instance
//! that the provider shows is in its place, whatever the record says.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{Cell, CommitOf, Engine, Now};
use crate::backends::milpa::{id::CellId, providers::InstanceId};

/// The reason of a cell that no pod has had before the provider's place was changed.
pub(super) const ELSEWHERE: &str = "it was launched in another region or at another endpoint";

impl Engine {
    /// Returns the places of cells in which the provider does not look, with the number of cells.
    pub(crate) fn other_places(&self) -> BTreeMap<Arc<str>, usize> {
        let mut places = BTreeMap::new();
        for cell in self.cells.values().filter(|cell| self.is_elsewhere(cell)) {
            *places.entry(Arc::clone(&cell.place)).or_default() += 1;
        }
        places
    }

    /// Returns the place in which the provider looks.
    pub(crate) fn provider_place(&self) -> &str {
        &self.config.place
    }

    /// Returns true if the provider looks in another place than that of a cell. The place of a cell
    /// of an older daemon is not known.
    pub(super) fn is_elsewhere(&self, cell: &Cell) -> bool {
        is_other_place(&cell.place, &self.config.place)
    }

    /// Takes the instances that the provider shows for those of its place.
    pub(super) fn found(&mut self, shown: &BTreeSet<&InstanceId>, now: Now) {
        let mut found = Vec::new();
        for cell in self.cells.values_mut().filter(|cell| cell.place != self.config.place) {
            if cell.state.instance().is_some_and(|instance| shown.contains(instance)) {
                cell.place = Arc::clone(&self.config.place);
                found.push(cell.id.clone());
            }
        }
        for cell in found {
            self.commit(&cell, CommitOf::Information, now);
        }
    }

    /// Returns true if a cell is in another place than the provider.
    pub(super) fn is_out_of_sight(&self, id: &CellId) -> bool {
        self.cells.get(id).is_some_and(|cell| self.is_elsewhere(cell))
    }
}

/// Returns true if a recorded place is known and is not that of the provider.
pub(super) fn is_other_place(recorded: &str, place: &str) -> bool {
    !recorded.is_empty() && recorded != place
}
