//! The set of providers, which changes while the daemon runs.
//!
//! An added provider launches once its instances are listed. A removed provider drains: its warm
//! cells end, its cells of pods go on, and its listings stay evidence. It is released once it has
//! neither cells nor strays.

use std::{collections::BTreeMap, sync::Arc};

use super::{Provider, ProviderKey, ProviderSetup, Providers};
use crate::{
    engine::{Effect, Effects, Engine, Event, Now, cell::Cell},
    id::CellId,
};

/// A provider and its cells, as operators see them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProviderView {
    /// Its key.
    pub key: Arc<str>,
    /// Its state.
    pub state: ProviderState,
    /// The number of its cells whose end is not proven.
    pub cells: usize,
}

/// The state of a provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProviderState {
    /// Configured.
    Configured,
    /// Removed by a reload, but still with cells or strays.
    Draining,
    /// Not configured at the start, and named by records of cells.
    NotConfigured,
}

impl ProviderState {
    /// Returns the name of the state.
    pub fn name(self) -> &'static str {
        match self {
            Self::Configured => "configured",
            Self::Draining => "draining",
            Self::NotConfigured => "not configured",
        }
    }
}

impl Providers {
    /// Configures these providers, in this order. Other providers drain.
    fn set(&mut self, setups: Vec<ProviderSetup>) {
        let mut before = std::mem::take(&mut self.0);
        for setup in setups {
            let key = setup.capabilities.provider;
            let known = before.iter().position(|provider| provider.key() == key);
            self.0.push(match known.map(|index| before.remove(index)) {
                Some(known) => Provider { machine: setup.machine, is_draining: false, ..known },
                None => Provider { lists_first: true, ..Provider::new(setup) },
            });
        }
        self.0.extend(before.into_iter().map(|it| Provider { is_draining: true, ..it }));
    }
}

impl Engine {
    /// Configures providers, in the order in which equal offerings are preferred. Other providers
    /// drain. A known provider goes on; only its part of the node changes.
    pub fn set_providers(&mut self, providers: Vec<ProviderSetup>, now: Now) -> Effects {
        self.providers.set(providers);
        self.drain_pools(now);
        // A cell whose instance no provider knew may have a provider now.
        let cells: Vec<CellId> = self.cells.keys().cloned().collect();
        for cell in cells {
            self.settle(&cell, now);
        }
        self.wake_waiting_orders(now);
        self.handle(Event::Tick, now)
    }

    /// Returns whether the provider of a cell drains.
    pub(in crate::engine) fn is_draining(&self, cell: &Cell) -> bool {
        self.providers.callee(cell).is_some_and(|provider| provider.is_draining)
    }

    /// Releases the draining providers that have neither cells nor strays.
    pub(in crate::engine) fn release_providers(&mut self) {
        if self.providers.iter().all(Provider::is_configured) {
            return;
        }
        let is_held = |provider: &Provider| {
            let mut callees = self.cells.values().filter_map(|cell| self.providers.callee(cell));
            provider.evidence.has_strays() || callees.any(|it| it.key() == provider.key())
        };
        let drained = self.providers.iter().filter(|it| it.is_draining && !is_held(it));
        let drained: Vec<ProviderKey> = drained.map(Provider::key).collect();
        for key in drained {
            self.providers.0.retain(|provider| provider.key() != key);
            self.effects.push((None, Effect::ReleaseProvider(key)));
        }
    }

    /// Returns the providers in order, and the providers that only records of cells name.
    pub fn provider_views(&self) -> Vec<ProviderView> {
        let mut cells: BTreeMap<Arc<str>, usize> = BTreeMap::new();
        for cell in self.cells.values() {
            let callee = || Some(self.providers.callee(cell)?.key().into());
            if let Some(key) = cell.provider.clone().or_else(callee) {
                *cells.entry(key).or_default() += 1;
            }
        }
        let known = self.providers.iter().map(|provider| ProviderView {
            key: provider.key().into(),
            state: match provider.is_draining {
                true => ProviderState::Draining,
                false => ProviderState::Configured,
            },
            cells: cells.remove(provider.key()).unwrap_or_default(),
        });
        let mut views: Vec<ProviderView> = known.collect();
        let state = ProviderState::NotConfigured;
        views.extend(cells.into_iter().map(|(key, cells)| ProviderView { key, state, cells }));
        views
    }
}
