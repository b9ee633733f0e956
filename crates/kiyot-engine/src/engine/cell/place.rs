//! Places in which a provider looks for instances: the node, or a region and an endpoint.
//!
//! A cell has the place in which it was launched. If the configuration names another, the provider
//! does not know the instance, and neither its "not found" nor a confirmed end proves anything: the
//! pod runs on. An instance that the provider shows is in its place, whatever the record says.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::{
    engine::{Cell, CommitOf, Engine, EngineConfig, Now},
    id::CellId,
    provider::{ErrorClass, InstanceId, ProviderError},
};

/// The reason of a cell that no pod has had before the provider's place was changed.
pub(in crate::engine) const ELSEWHERE: &str =
    "it was launched by another provider, in another region or at another endpoint";

impl Engine {
    /// Returns the places of cells in which the provider does not look, with their cells.
    pub fn other_places(&self) -> BTreeMap<Arc<str>, Vec<CellId>> {
        let mut places: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for cell in self.cells.values().filter(|cell| self.is_elsewhere(cell)) {
            let Some(place) = cell.place.clone() else { continue };
            places.entry(place).or_default().push(cell.id.clone());
        }
        places
    }

    /// Returns the place in which the provider looks; empty if it has none.
    pub fn provider_place(&self) -> &str {
        self.config.place.as_deref().unwrap_or_default()
    }

    /// Returns true if the provider looks in another place than that of a cell. The place of a cell
    /// of an older daemon is not known.
    pub(in crate::engine) fn is_elsewhere(&self, cell: &Cell) -> bool {
        self.config.is_other_place(cell.place.as_ref())
    }

    /// Returns true if the end of a cell's pod awaits the confirmed end of the instance. The
    /// provider of another place can't confirm it.
    pub(in crate::engine) fn awaits_end_of(&self, cell: &Cell) -> bool {
        self.capabilities.awaits_ends() && !self.is_elsewhere(cell)
    }

    /// Returns the error of a termination in another place: the provider knows no such instance.
    pub(in crate::engine) fn no_end_elsewhere(&self, id: &CellId) -> Option<ProviderError> {
        let cell = self.cells.get(id).filter(|cell| self.is_elsewhere(cell))?;
        let (launched_in, looks_in) = (cell.place.as_deref()?, self.provider_place());
        let doing = format!(
            "end {id}: it was launched in {launched_in}, and the provider looks in {looks_in}; \
             configure the earlier provider and place again until its pods have ended"
        );
        Some(ProviderError::without_cause(ErrorClass::NotFound, doing))
    }

    /// Takes the instances that the provider shows for those of its place.
    pub(in crate::engine) fn found(&mut self, shown: &BTreeSet<&InstanceId>, now: Now) {
        let mut found = Vec::new();
        let place = self.config.place.clone();
        for cell in self.cells.values_mut().filter(|cell| cell.place != place) {
            if cell.state.instance().is_some_and(|instance| shown.contains(instance)) {
                cell.place.clone_from(&place);
                found.push(cell.id.clone());
            }
        }
        for cell in found {
            self.commit(&cell, CommitOf::Information, now);
        }
    }

    /// Returns true if a cell is in another place than the provider.
    pub(in crate::engine) fn is_out_of_sight(&self, id: &CellId) -> bool {
        self.cells.get(id).is_some_and(|cell| self.is_elsewhere(cell))
    }
}

impl EngineConfig {
    /// Returns true if a recorded place is known and is not that of the provider.
    pub(in crate::engine) fn is_other_place(&self, recorded: Option<&Arc<str>>) -> bool {
        recorded.is_some() && recorded != self.place.as_ref()
    }
}
