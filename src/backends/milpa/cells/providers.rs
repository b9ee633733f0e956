//! The providers of the cells, with their catalogues and rules.

use std::sync::{Arc, PoisonError, RwLock};

use kiyot_engine::{
    engine::{ProviderKey, ProviderSetup},
    placement::{Catalogue, Needs, NodeShare, Rules},
    provider::{Capabilities, Provider, ProviderError},
};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::prices::Prices;

/// The most cells that a provider launches for an order, one after the other.
const MAX_LAUNCHES: u32 = 3;

/// A provider as configured.
#[derive(Debug)]
pub struct Configured {
    /// The provider.
    pub provider: Arc<dyn Provider>,
    /// The rules of its offerings.
    pub rules: Rules,
    /// Bounds the provider's cells that boot at the same time; `None` for the bound of
    /// `limits.boots`.
    pub boots: Option<usize>,
    /// The part of the node that the provider's cells may have; `None` for no bound.
    pub machine: Option<NodeShare>,
}

/// A provider with its catalogue and the requests for its listings.
#[derive(Debug)]
pub(super) struct CellSource {
    pub(super) provider: Arc<dyn Provider>,
    pub(super) capabilities: Capabilities,
    pub(super) rules: Arc<Rules>,
    prices: Prices,
    /// Requests a listing of the instances before the end of the period.
    pub(super) list_now: Notify,
    /// Requests listings soon: instances are ending.
    pub(super) list_soon: Notify,
    /// Ends the provider's tasks when it is released or the daemon stops.
    pub(super) stop: CancellationToken,
}

/// The providers, which a reload may change.
#[derive(Debug)]
pub(super) struct CellSources {
    sources: RwLock<Sources>,
    /// Ends the tasks of all providers.
    stop: CancellationToken,
}

/// The configured providers in order, and the draining ones.
#[derive(Debug, Default)]
struct Sources {
    configured: Vec<Arc<CellSource>>,
    draining: Vec<Arc<CellSource>>,
}

impl Configured {
    /// Returns a provider with the default rules.
    pub fn new(provider: Arc<dyn Provider>) -> Self {
        Self { provider, rules: Rules::default(), boots: None, machine: None }
    }

    /// Returns the provider's setup for the engine.
    pub(super) fn setup(&self) -> ProviderSetup {
        let capabilities = self.provider.capabilities();
        // A retry of a local launch by the kubelet costs nothing, and has a fresh deadline.
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

    /// Returns a pod's needs plus the memory that this provider's cells need themselves.
    pub(super) fn needs(&self, needs: &Arc<Needs>) -> Arc<Needs> {
        let overhead_mib = self.rules.defaults.overhead_mib;
        if needs.overhead_mib >= overhead_mib {
            return Arc::clone(needs);
        }
        Arc::new(Needs { overhead_mib, ..Needs::clone(needs) })
    }
}

impl Sources {
    fn all(&self) -> impl Iterator<Item = &Arc<CellSource>> {
        self.configured.iter().chain(&self.draining)
    }
}

impl CellSources {
    pub(super) fn new(configured: Vec<Configured>, stop: CancellationToken) -> Self {
        let sources = Self { sources: RwLock::default(), stop };
        sources.set(configured);
        sources
    }

    /// Configures providers; all others drain. Returns the added providers.
    pub(super) fn set(&self, configured: Vec<Configured>) -> Vec<Arc<CellSource>> {
        let mut sources = self.sources.write().unwrap_or_else(PoisonError::into_inner);
        let mut before: Vec<Arc<CellSource>> = sources.all().cloned().collect();
        let mut added = Vec::new();
        sources.configured.clear();
        for Configured { provider, rules, .. } in configured {
            let capabilities = provider.capabilities();
            let known = before.iter().position(|it| it.key() == capabilities.provider);
            let source = known.map(|index| before.remove(index)).unwrap_or_else(|| {
                let source = Arc::new(CellSource {
                    capabilities,
                    provider,
                    rules: Arc::new(rules),
                    prices: Prices::default(),
                    list_now: Notify::new(),
                    list_soon: Notify::new(),
                    stop: self.stop.child_token(),
                });
                added.push(Arc::clone(&source));
                source
            });
            sources.configured.push(source);
        }
        sources.draining = before;
        added
    }

    /// Removes a drained provider, and ends its tasks.
    pub(super) fn release(&self, key: ProviderKey) {
        let mut sources = self.sources.write().unwrap_or_else(PoisonError::into_inner);
        let released = sources.draining.iter().position(|source| source.key() == key);
        if let Some(released) = released.map(|index| sources.draining.remove(index)) {
            released.stop.cancel();
        }
    }

    /// Returns the configured providers, in order.
    pub(super) fn configured(&self) -> Vec<Arc<CellSource>> {
        self.sources.read().unwrap_or_else(PoisonError::into_inner).configured.clone()
    }

    /// Returns the configured and the draining providers.
    pub(super) fn all(&self) -> Vec<Arc<CellSource>> {
        self.sources.read().unwrap_or_else(PoisonError::into_inner).all().cloned().collect()
    }

    /// Returns a configured or draining provider.
    pub(super) fn get(&self, key: &str) -> Option<Arc<CellSource>> {
        self.all().into_iter().find(|source| source.key() == key)
    }

    /// Returns the first configured provider.
    pub(super) fn first(&self) -> Option<Arc<CellSource>> {
        self.configured().into_iter().next()
    }
}
