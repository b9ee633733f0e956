//! The providers of the cells, with their catalogues and rules.

use std::sync::Arc;

use kiyot_engine::{
    engine::{ProviderKey, ProviderSetup},
    placement::{Catalogue, Needs, NodeShare, Rules},
    provider::{Capabilities, Provider, ProviderError},
};
use tokio::sync::Notify;

use super::prices::Prices;

/// The cells that a provider launches for an order at most, one after the other.
const MAX_LAUNCHES: u32 = 3;

/// A provider, as it is configured.
#[derive(Debug)]
pub struct Configured {
    /// The provider.
    pub provider: Arc<dyn Provider>,
    /// The rules of its offerings.
    pub rules: Rules,
    /// Bounds its cells that boot at the same time, unless `limits.boots` does.
    pub boots: Option<usize>,
    /// The part of the node that its cells may have; `None` for no bound.
    pub machine: Option<NodeShare>,
}

/// A provider, with its catalogue and the requests for its listings.
#[derive(Debug)]
pub(super) struct CellSource {
    pub(super) provider: Arc<dyn Provider>,
    pub(super) capabilities: Capabilities,
    pub(super) rules: Arc<Rules>,
    prices: Prices,
    /// Requests a listing of the instances before its period is over.
    pub(super) list_now: Notify,
    /// Requests listings soon: instances are ending.
    pub(super) list_soon: Notify,
}

/// The providers, in the configured order.
#[derive(Debug)]
pub(super) struct CellSources(Vec<Arc<CellSource>>);

impl Configured {
    /// Returns a provider with the default rules.
    pub fn new(provider: Arc<dyn Provider>) -> Self {
        Self { provider, rules: Rules::default(), boots: None, machine: None }
    }

    /// Returns the provider's setup for the engine.
    pub(super) fn setup(&self) -> ProviderSetup {
        let capabilities = self.provider.capabilities();
        // The kubelet's retry of a local launch costs nothing, and has a fresh deadline.
        let max_launches = if capabilities.awaits_ends() { 1 } else { MAX_LAUNCHES };
        let place = self.provider.place().map(Into::into);
        let Self { boots, machine, .. } = *self;
        ProviderSetup { capabilities, place, max_launches, boots, machine }
    }
}

impl CellSource {
    pub(super) fn key(&self) -> ProviderKey {
        self.capabilities.provider
    }

    /// Returns the catalogue, not older than five minutes unless the provider does not answer.
    pub(super) async fn catalogue(&self) -> Result<Arc<Catalogue>, ProviderError> {
        self.prices.current(&*self.provider).await
    }

    /// Returns the needs of a pod with the memory that this provider's cells need themselves.
    pub(super) fn needs(&self, needs: &Arc<Needs>) -> Arc<Needs> {
        let overhead_mib = self.rules.defaults.overhead_mib;
        if needs.overhead_mib >= overhead_mib {
            return Arc::clone(needs);
        }
        Arc::new(Needs { overhead_mib, ..Needs::clone(needs) })
    }
}

impl CellSources {
    pub(super) fn new(configured: Vec<Configured>) -> Self {
        let source = |Configured { provider, rules, .. }: Configured| CellSource {
            capabilities: provider.capabilities(),
            provider,
            rules: Arc::new(rules),
            prices: Prices::default(),
            list_now: Notify::new(),
            list_soon: Notify::new(),
        };
        Self(configured.into_iter().map(|it| Arc::new(source(it))).collect())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<CellSource>> {
        self.0.iter()
    }

    pub(super) fn get(&self, key: &str) -> Option<&Arc<CellSource>> {
        self.0.iter().find(|source| source.key() == key)
    }
}
