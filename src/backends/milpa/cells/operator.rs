//! Cells for operators, and the cordon.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures::future::{join_all, try_join_all};
use kiyot_engine::{
    StoreError,
    engine::{
        CellView, Metrics, OrderView, PoolView, ProviderKey, ProviderView, StartTimes, TypeKey,
        TypeUsage,
    },
    id::CellId,
    placement::{Catalogue, Refusals},
    provider::{Instance, InstanceId, InstanceNames, ProviderError},
};
use kiyot_proto::{store::Cordon, text::counted};

use super::{
    Cells,
    history::{History, Subject},
    provider_calls,
    shared::now,
};
use crate::backends::milpa::{
    clock,
    store::{Batch, Table},
};

#[derive(Debug)]
pub(crate) struct ProviderCatalogue {
    /// The provider.
    pub provider: ProviderKey,
    /// The catalogue, unless it could not be read.
    pub catalogue: Result<Arc<Catalogue>, ProviderError>,
    /// The offerings that were refused lately.
    pub refusals: Refusals,
    /// The time that decides which refusals still count.
    pub now: Duration,
}

impl Cells {
    /// Returns the cells with these ids that have not ended, and whether their agents are
    /// connected.
    pub(crate) fn views(&self, ids: &[CellId]) -> Vec<(CellView, bool)> {
        let core = self.shared.core();
        let now = now();
        let view = |id: &CellId| {
            let link = core.links.get(id);
            let is_connected = link.is_some_and(|link| link.control.is_connected());
            Some((core.engine.cell_view(id, now)?, is_connected))
        };
        ids.iter().filter_map(view).collect()
    }

    /// Returns all cells whose end is not proven, with the builds of their agents; `None` if the
    /// cell has no connection.
    pub(crate) fn agent_builds(&self) -> Vec<(CellId, Option<String>)> {
        let core = self.shared.core();
        let build = |id: &CellId| core.links.get(id).and_then(|link| link.control.agent_build());
        core.engine.ids().map(|id| (id.clone(), build(id))).collect()
    }

    /// Returns the public address and the names of an instance, as far as they are known.
    pub(crate) fn names(&self, instance: &InstanceId) -> InstanceNames {
        let sources = self.shared.sources.all();
        let mut names = sources.iter().map(|source| source.provider.names(instance));
        names.find(|names| *names != InstanceNames::default()).unwrap_or_default()
    }

    /// Returns the pods that wait for their cells.
    pub(crate) fn orders(&self) -> Vec<OrderView> {
        self.shared.core().engine.order_views(now())
    }

    pub(crate) fn pools(&self) -> Vec<PoolView> {
        self.shared.core().engine.pool_views()
    }

    /// Returns the configured providers, the draining ones, and the ones that only cell records
    /// name.
    pub(crate) fn providers(&self) -> Vec<ProviderView> {
        self.shared.core().engine.provider_views()
    }

    /// Returns the numbers of all cells and orders.
    pub(crate) fn numbers(&self) -> Metrics {
        self.shared.core().engine.metrics(now())
    }

    /// Returns the use of each instance type in each market, since the daemon started.
    pub(crate) fn type_usage(&self) -> BTreeMap<TypeKey, TypeUsage> {
        self.shared.core().engine.type_usage(now())
    }

    pub(crate) fn history(&self) -> &History {
        &self.shared.history
    }

    /// Returns each provider's catalogue with current prices, the offerings that were refused
    /// lately, and the time that decides which refusals still count.
    pub(crate) async fn catalogues(&self) -> Vec<ProviderCatalogue> {
        let sources = self.shared.sources.configured();
        let read = sources.iter().map(|source| async {
            let catalogue = source.catalogue().await;
            let refusals = self.shared.core().engine.refusals(source.key());
            ProviderCatalogue { provider: source.key(), catalogue, refusals, now: now().boot }
        });
        join_all(read).await
    }

    pub(crate) fn start_times(&self) -> StartTimes {
        self.shared.core().engine.start_times().clone()
    }

    /// Returns the end of the console of a cell's instance; empty for an unknown cell, and until
    /// the launch is answered.
    pub(crate) async fn console(&self, id: &CellId) -> Result<String, ProviderError> {
        let view = self.shared.core().engine.cell_view(id, now());
        let source = self.shared.source_of(&self.shared.core(), id);
        match view.as_ref().and_then(|view| view.state.instance()).zip(source) {
            Some((instance, source)) => provider_calls::console(&*source.provider, instance).await,
            None => Ok(view.and_then(|view| view.console).unwrap_or_default()),
        }
    }

    /// Returns the instances of this owner from the providers' lists. The list is complete, or an
    /// error.
    pub(crate) async fn list_owned(&self) -> Result<Vec<Instance>, ProviderError> {
        let sources = self.shared.sources.all();
        let lists = sources.iter().map(|source| provider_calls::list_owned(&*source.provider));
        Ok(try_join_all(lists).await?.concat())
    }

    /// Stops launches of cells, or permits them again. The state survives a restart. Returns the
    /// number of cells that continue.
    pub(crate) async fn cordon(&self, is_cordoned: bool) -> Result<usize, StoreError> {
        const KEY: &str = "cells";
        let mut batch = Batch::default();
        if is_cordoned {
            batch.put(Table::Cordon, KEY, &Cordon { since_unix_nanos: clock::now() });
        } else {
            batch.remove(Table::Cordon, KEY);
        }
        // Recorded first, because a confirmed cordon must survive the daemon.
        self.shared.store.commit(batch).await?;
        let cells = self.shared.with_core(|core, now| {
            let effects = core.engine.set_cordoned(is_cordoned, now);
            (core.engine.ids().count(), effects)
        });
        tracing::warn!(is_cordoned, cells, "launches of cells stopped or permitted by an operator");
        let status = if is_cordoned { "Cordoned" } else { "Uncordoned" };
        self.shared.history.add(
            Subject::Backend,
            status,
            &counted(cells, "cell runs", "cells run"),
        );
        Ok(cells)
    }
}
