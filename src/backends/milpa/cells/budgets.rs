//! Shares of CellBudgets: their records, and the engine's part.

use std::time::Duration;

use kiyot_engine::{
    StoreError,
    engine::{BudgetFigures, NamespaceNeed, RecordedShare},
    id::SandboxId,
    provider::{ErrorClass, ProviderError},
};
use kiyot_proto::store::BudgetShare;
use kiyot_values::{budget_key::BudgetKey, price::Price};

use super::Cells;
use crate::backends::milpa::{
    providers::within,
    store::{Batch, Table},
};

/// Bounds the list of another node's instances, beyond the provider's own limit.
const OTHERS_TIMEOUT: Duration = Duration::from_secs(60);

impl Cells {
    /// Applies budgets to namespaces, at first with the recorded shares. Called before the first
    /// CRI call.
    pub async fn keep_budgets(&self) -> Result<(), StoreError> {
        let shares = self.recorded_shares().await?;
        let share = |BudgetShare { hourly_micros, limits_spending, .. }| RecordedShare {
            hourly: Price::from_micros(hourly_micros),
            limits_spending,
        };
        let shares = shares.into_iter().map(|(key, recorded)| (key, share(recorded)));
        self.shared.core().engine.keep_budgets(shares);
        Ok(())
    }

    /// Returns the recorded shares.
    pub async fn recorded_shares(&self) -> Result<Vec<(BudgetKey, BudgetShare)>, StoreError> {
        let records = self.shared.store.load::<BudgetShare>(Table::Shares).await?;
        let share = |(key, share): (String, BudgetShare)| {
            let (namespace, name) = key.split_once('/')?;
            Some((BudgetKey { namespace: namespace.to_owned(), name: name.to_owned() }, share))
        };
        Ok(records.into_iter().filter_map(share).collect())
    }

    /// Records a share; removes the record of an empty share.
    pub async fn record_share(
        &self,
        key: &BudgetKey,
        share: &BudgetShare,
    ) -> Result<(), StoreError> {
        let mut batch = Batch::default();
        if share.hourly_micros == 0 {
            batch.remove(Table::Shares, &key.to_string());
        } else {
            batch.put(Table::Shares, &key.to_string(), share);
        }
        self.shared.store.commit(batch).await
    }

    /// Waits until an order asks for a larger share.
    pub async fn share_asked(&self) {
        self.shared.share_asked.notified().await;
    }

    /// Compares the costs of cells with the limits of budgets, and returns the needs of namespaces.
    pub fn budget_needs(&self) -> Vec<NamespaceNeed> {
        self.shared.with_core(|core, now| core.engine.budget_needs(now))
    }

    /// Returns the places of the node's instances that outlive it, and the places in which no
    /// provider looks; `None` while a provider's place is unknown.
    pub fn places(&self) -> Option<(Vec<String>, Vec<String>)> {
        let sources = self.shared.sources.all();
        let outlive = sources.iter().filter(|it| !it.capabilities.ends_with_node);
        let looks_in: Option<_> = outlive.map(|source| source.provider.shared_place()).collect();
        let elsewhere = self.shared.core().engine.other_places();
        Some((looks_in?, elsewhere.keys().map(ToString::to_string).collect()))
    }

    /// Returns whether another node has instances in a place, by a complete list of them.
    pub async fn has_instances_of(&self, node: &str, place: &str) -> Result<bool, ProviderError> {
        let mut sources = self.shared.sources.all().into_iter();
        let source = sources.find(|it| it.provider.shared_place().as_deref() == Some(place));
        let doing = "list the instances of another node";
        let unknown = || ProviderError::without_cause(ErrorClass::NotFound, doing);
        let source = source.ok_or_else(unknown)?;
        within(OTHERS_TIMEOUT, doing, source.provider.has_instances_of(node)).await
    }

    /// Returns whether all instances of this node belong to known cells.
    pub fn counts_all_instances(&self) -> bool {
        self.shared.core().engine.counts_all_instances()
    }

    /// Adds a budget, or replaces its figures.
    pub fn set_budget(&self, key: &BudgetKey, figures: BudgetFigures) {
        self.shared.with_core(|core, now| ((), core.engine.set_budget(key, figures, now)));
    }

    /// Removes a budget.
    pub fn remove_budget(&self, key: &BudgetKey) {
        self.shared.with_core(|core, now| ((), core.engine.remove_budget(key, now)));
    }

    /// Sets whether all budgets are known.
    pub fn set_budgets_known(&self, are_known: bool) {
        self.shared.with_core(|core, now| ((), core.engine.set_budgets_known(are_known, now)));
    }

    /// Lowers a share to `to`, but not below the price of the namespace's cells, and always to at
    /// most `most`. Returns the share.
    pub fn lower_share(&self, key: &BudgetKey, to: Price, most: Price) -> Price {
        self.shared.core().engine.lower_share(key, to, most)
    }

    /// Raises a share. The new share is recorded before this call.
    pub fn grant_share(&self, key: &BudgetKey, share: Price) {
        self.shared.with_core(|core, now| ((), core.engine.grant_share(key, share, now)));
    }

    /// Refuses the larger share for which orders wait.
    pub fn refuse_growth(&self, orders: Vec<SandboxId>) {
        self.shared.with_core(|core, now| ((), core.engine.refuse_growth(orders, now)));
    }
}
