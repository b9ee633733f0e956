//! The write of a node's share.
//!
//! A share is used once its patch was answered and recorded. The patch has the version that was
//! read, and is a change always: so once it is answered, no earlier patch of the node can have an
//! effect any more, however late it arrives. A lost answer leaves the usable share as it was, and
//! the next write begins with what the API server has then. A share shrinks in the other order:
//! first in use, then in the record, then in the API.

use async_trait::async_trait;
use kiyot_values::budget_key::BudgetKey;
use serde_json::Value;

use super::{
    RecordedShare, ShareHolder,
    object::{Amounts, CellBudget},
    target::Wish,
};
use crate::{call::Call, client::Client, failure::Failure};

/// The calls that a write needs.
#[async_trait]
pub(super) trait Api: Send + Sync {
    /// Reads a budget: the newest.
    async fn get(&self, key: &BudgetKey) -> Result<CellBudget, Failure>;
    /// Patches the status of a budget, and returns the budget.
    async fn patch(&self, key: &BudgetKey, patch: Value) -> Result<CellBudget, Failure>;
}

#[async_trait]
impl Api for Client {
    async fn get(&self, BudgetKey { namespace, name }: &BudgetKey) -> Result<CellBudget, Failure> {
        self.object(&Call::get_budget(namespace, name)).await
    }

    async fn patch(
        &self,
        BudgetKey { namespace, name }: &BudgetKey,
        patch: Value,
    ) -> Result<CellBudget, Failure> {
        self.object(&Call::patch_budget_status(namespace, name, patch)).await
    }
}

/// A node's share of a budget, as its daemon knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ledger {
    pub(super) uid: String,
    /// The share that launches use, in millionths of a dollar an hour.
    pub(super) usable: u64,
    /// The share on disk.
    pub(super) recorded: u64,
    /// True if it is recorded that the budget limits what cells cost.
    pub(super) limits_spending: bool,
    /// False until a share that the API has without a record is the node's for sure: the record was
    /// lost, and with it those of cells.
    pub(super) is_own: bool,
}

impl Ledger {
    /// Returns the ledger of a budget without a record.
    pub(super) fn new(uid: String) -> Self {
        Self { uid, usable: 0, recorded: 0, limits_spending: false, is_own: false }
    }
}

/// The outcome of a write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Settled {
    /// The share is what it can be, with these amounts.
    Done(Amounts),
    /// Another write came between.
    Conflict,
    /// The budget was deleted, or is another of its name.
    Absent,
    /// A share without a record is not used while instances of the node belong to no cell.
    Uncounted,
}

/// An error of a write.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum SettleError {
    #[error(transparent)]
    Api(#[from] Failure),
    #[error("record of the share: {0}")]
    Record(String),
}

/// How a share is written.
#[derive(Debug, Clone, Copy)]
pub(super) struct Writing<'w> {
    pub(super) wish: &'w Wish,
    /// True if a surplus may stay for now.
    pub(super) is_patient: bool,
    /// True if what cells have cost is written with the same share too.
    pub(super) reports: bool,
    /// The places of the node's instances, if they are known.
    pub(super) places: Option<&'w [String]>,
}

/// Has the API, the record and the launches of a node agree on its share, as far as it can grow.
pub(super) async fn settle(
    (api, holder): (&dyn Api, &dyn ShareHolder),
    (node, key): (&str, &BudgetKey),
    ledger: &mut Ledger,
    Writing { wish, is_patient, reports, places }: Writing<'_>,
) -> Result<Settled, SettleError> {
    let budget = match api.get(key).await {
        Err(Failure::NotFound(_)) => return Ok(Settled::Absent),
        read => read?,
    };
    if budget.uid() != ledger.uid {
        return Ok(Settled::Absent);
    }
    let amounts = budget.amounts(node);
    let own = amounts.own.unwrap_or(0);
    if own > 0 && !ledger.is_own && !holder.counts_all_instances() {
        return Ok(Settled::Uncounted);
    }
    let mut target = amounts.target(wish, is_patient);
    if target.min(own) < ledger.usable {
        ledger.usable = holder.lower(key, target, own);
        target = target.max(ledger.usable);
    }
    let limits_spending = !amounts.spending_limits.is_empty();
    if ledger.recorded > ledger.usable
        || ledger.recorded > 0 && ledger.limits_spending != limits_spending
    {
        ledger.limits_spending = limits_spending;
        record(holder, key, ledger, ledger.usable).await?;
    }
    if target == own && ledger.usable == own && !reports {
        return Ok(Settled::Done(amounts));
    }
    let written = match api.patch(key, budget.patch(node, target, wish.spent, places)).await {
        Ok(written) => written,
        Err(Failure::Conflict(_)) => return Ok(Settled::Conflict),
        Err(Failure::NotFound(_)) => return Ok(Settled::Absent),
        Err(failure) => return Err(failure.into()),
    };
    let amounts = written.amounts(node);
    ledger.is_own = true;
    let granted = amounts.own.unwrap_or(0);
    if granted > ledger.usable {
        ledger.limits_spending = limits_spending;
        record(holder, key, ledger, granted).await?;
        ledger.usable = granted;
        holder.grant(key, granted);
    }
    Ok(Settled::Done(amounts))
}

async fn record(
    holder: &dyn ShareHolder,
    key: &BudgetKey,
    ledger: &mut Ledger,
    share: u64,
) -> Result<(), SettleError> {
    let (key, uid) = (key.clone(), ledger.uid.clone());
    let Ledger { limits_spending, .. } = *ledger;
    let recorded = RecordedShare { key, uid, hourly_micros: share, limits_spending };
    let recorded = holder.record(recorded).await;
    recorded.map_err(SettleError::Record)?;
    ledger.recorded = share;
    Ok(())
}

#[cfg(test)]
mod tests;
