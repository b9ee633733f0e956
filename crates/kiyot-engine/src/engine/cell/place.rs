//! Places in which providers look for instances: the node, or a region and an endpoint.
//!
//! A cell has the provider and the place of its launch. If no configured provider looks in that
//! place, no provider knows the instance: neither "not found" nor a confirmed end proves anything,
//! and the pod runs on. An instance that a provider shows is in the provider's place, whatever the
//! record says.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::{
    engine::{Cell, CommitOf, Engine, Now, ProviderKey},
    id::CellId,
    provider::{ErrorClass, InstanceId, ProviderError},
};

/// The end reason of a cell in a place where no provider looks, if no pod was bound to it.
pub(in crate::engine) const ELSEWHERE: &str =
    "it was launched by another provider, in another region or at another endpoint";

impl Cell {
    /// Returns the place of its launch, or its provider if the place is unknown.
    fn launched_in(&self) -> Option<&Arc<str>> {
        self.place.as_ref().or(self.provider.as_ref())
    }
}

impl Engine {
    /// Returns the places of cells where no provider looks, with their cells.
    pub fn other_places(&self) -> BTreeMap<Arc<str>, Vec<CellId>> {
        let mut places: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for cell in self.cells.values().filter(|cell| self.is_elsewhere(cell)) {
            let Some(place) = cell.launched_in().cloned() else { continue };
            places.entry(place).or_default().push(cell.id.clone());
        }
        places
    }

    /// Returns the places in which the providers look; empty if providers have no places.
    pub fn provider_places(&self) -> String {
        let mut places: Vec<&str> =
            self.providers.iter().filter_map(|provider| provider.place.as_deref()).collect();
        places.dedup();
        places.join(" and ")
    }

    /// Returns the provider that is called for a cell; `None` if it is not configured.
    pub fn provider_of(&self, id: &CellId) -> Option<ProviderKey> {
        Some(self.providers.callee(self.cells.get(id)?)?.key())
    }

    /// Returns whether no provider looks in the place of a cell.
    pub(in crate::engine) fn is_elsewhere(&self, cell: &Cell) -> bool {
        self.providers.of(cell).is_none()
    }

    /// Returns whether the end of a cell's pod awaits the confirmed end of the instance. A provider
    /// that looks in another place can't confirm the end.
    pub(in crate::engine) fn awaits_end_of(&self, cell: &Cell) -> bool {
        self.providers.of(cell).is_some_and(|provider| provider.capabilities.awaits_ends())
    }

    /// Returns the error of a termination in another place: no provider knows the instance.
    pub(in crate::engine) fn no_end_elsewhere(&self, id: &CellId) -> Option<ProviderError> {
        let cell = self.cells.get(id).filter(|cell| self.is_elsewhere(cell))?;
        let (launched_in, look_in) = (cell.launched_in()?, self.provider_places());
        let doing = format!(
            "end {id}: it was launched in {launched_in}, and the provider looks in {look_in}; \
             configure the earlier provider and place again until its pods have ended"
        );
        Some(ProviderError::without_cause(ErrorClass::NotFound, doing))
    }

    /// Records a provider and its place for the cells whose instances it shows, if their recorded
    /// place is unknown or no provider looks there.
    pub(in crate::engine) fn found(
        &mut self,
        key: ProviderKey,
        shown: &BTreeSet<&InstanceId>,
        now: Now,
    ) {
        let Some(provider) = self.providers.get(key) else { return };
        let place = provider.place.clone();
        let is_misplaced =
            |cell: &Cell| self.is_elsewhere(cell) || cell.place.is_none() && cell.place != place;
        let is_shown =
            |cell: &Cell| cell.state.instance().is_some_and(|instance| shown.contains(instance));
        let found = self.cells.values().filter(|cell| is_misplaced(cell) && is_shown(cell));
        let found: Vec<CellId> = found.map(|cell| cell.id.clone()).collect();
        for id in found {
            if let Some(cell) = self.cells.get_mut(&id) {
                (cell.provider, cell.place) = (Some(key.into()), place.clone());
            }
            self.commit(&id, CommitOf::Information, now);
        }
    }

    /// Returns whether a cell is in a place where no provider looks.
    pub(in crate::engine) fn is_out_of_sight(&self, id: &CellId) -> bool {
        self.cells.get(id).is_some_and(|cell| self.is_elsewhere(cell))
    }
}
