//! The providers of an engine, with the evidence of their answers.

use std::sync::Arc;

use crate::{
    engine::{CellError, Evidence, cell::Cell},
    id::ProviderKey,
    placement::{NodeShare, Refusals},
    provider::Capabilities,
};

mod denials;
mod set;

pub(super) use denials::Denials;
pub use set::{ProviderState, ProviderView};

/// The setup of a provider, as an engine gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProviderSetup {
    /// The capabilities, with the key ([`Capabilities::provider`]).
    pub capabilities: Capabilities,
    /// The place in which the provider looks for instances ([`Provider::place`]).
    ///
    /// [`Provider::place`]: crate::provider::Provider::place
    pub place: Option<Arc<str>>,
    /// Bounds the cells that it launches for an order, one after the other.
    pub max_launches: u32,
    /// Bounds its cells that boot at the same time, unless [`Limits::boots`] does.
    ///
    /// [`Limits::boots`]: super::Limits::boots
    pub boots: Option<usize>,
    /// The part of the node that its cells may have; `None` for no bound.
    pub machine: Option<NodeShare>,
}

/// A provider, with the evidence of its answers.
#[derive(Debug)]
pub(super) struct Provider {
    pub(super) capabilities: Capabilities,
    pub(super) place: Option<Arc<str>>,
    pub(super) max_launches: u32,
    pub(super) boots: Option<usize>,
    pub(super) machine: Option<NodeShare>,
    pub(super) evidence: Evidence,
    /// The offerings that were refused lately.
    pub(super) refusals: Refusals,
    /// The launches that were not permitted lately.
    pub(super) denials: Denials,
    /// True if it was added while the daemon runs: it launches once its instances are listed.
    lists_first: bool,
    /// True once it was removed: its cells go on, and it launches no further cell.
    is_draining: bool,
}

/// The configured providers in their order, and after them the draining providers.
#[derive(Debug)]
pub(super) struct Providers(Vec<Provider>);

impl Provider {
    fn new(setup: ProviderSetup) -> Self {
        let ProviderSetup { capabilities, place, max_launches, boots, machine } = setup;
        Self {
            capabilities,
            place,
            max_launches,
            boots,
            machine,
            evidence: Evidence::default(),
            refusals: Refusals::default(),
            denials: Denials::default(),
            lists_first: false,
            is_draining: false,
        }
    }

    pub(super) fn key(&self) -> ProviderKey {
        self.capabilities.provider
    }

    pub(super) fn is_configured(&self) -> bool {
        !self.is_draining
    }

    /// Refuses launches of a draining provider, and of an added provider that has not listed its
    /// instances.
    pub(super) fn check_launches(&self) -> Result<(), CellError> {
        if self.is_draining {
            return Err(CellError::Removed(self.key()));
        }
        if self.lists_first && !self.evidence.has_listed() {
            return Err(CellError::NotListed(self.key()));
        }
        Ok(())
    }

    /// Returns whether this provider finds an instance that was launched in a place. The place of
    /// an older daemon's cell is unknown (`None`), and fits.
    fn looks_in(&self, place: Option<&Arc<str>>) -> bool {
        place.is_none() || self.place.as_ref() == place
    }
}

impl Providers {
    pub(super) fn new(setups: Vec<ProviderSetup>) -> Self {
        Self(setups.into_iter().map(Provider::new).collect())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Provider> {
        self.0.iter()
    }

    pub(super) fn configured(&self) -> impl Iterator<Item = &Provider> {
        self.0.iter().filter(|provider| provider.is_configured())
    }

    pub(super) fn get(&self, key: &str) -> Option<&Provider> {
        self.0.iter().find(|provider| provider.key() == key)
    }

    pub(super) fn get_mut(&mut self, key: &str) -> Option<&mut Provider> {
        self.0.iter_mut().find(|provider| provider.key() == key)
    }

    /// Returns the provider that finds the instances of a launch: the provider with this key if it
    /// looks in the place, or else the first provider that looks there. `None` if no provider does.
    pub(super) fn of_launch(
        &self,
        key: Option<&str>,
        place: Option<&Arc<str>>,
    ) -> Option<&Provider> {
        let named = key.and_then(|key| self.get(key)).filter(|named| named.looks_in(place));
        // If the place is unknown, a key names its provider alone.
        let may_be_other = key.is_none() || place.is_some();
        named.or_else(|| self.0.iter().find(|other| may_be_other && other.looks_in(place)))
    }

    /// Returns the provider that finds the instance of a cell.
    pub(super) fn of(&self, cell: &Cell) -> Option<&Provider> {
        self.of_launch(cell.provider.as_deref(), cell.place.as_ref())
    }

    pub(super) fn of_mut(&mut self, cell: &Cell) -> Option<&mut Provider> {
        let key = self.of(cell)?.key();
        self.get_mut(key)
    }

    /// Returns the provider that is called for a cell: the provider that finds its instance, or
    /// else the provider with the cell's key. `None` if there is no provider with the key.
    pub(super) fn callee(&self, cell: &Cell) -> Option<&Provider> {
        self.of(cell).or_else(|| match &cell.provider {
            Some(key) => self.get(key),
            None => self.0.first(),
        })
    }
}
