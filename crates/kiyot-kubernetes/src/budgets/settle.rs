//! Writes a node's share.
//!
//! A share is used once its patch was answered and recorded. The patch has the version that was
//! read, and always changes the object. So after its response, no earlier patch of the node can
//! take effect, however late it arrives. After a lost response, the usable share stays, and the
//! next write begins with the API server's current state. A share shrinks in the other order: first
//! in use, then in the record, then in the API.

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
    /// Reads the newest version of a budget.
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
    /// The recorded share.
    pub(super) recorded: u64,
    /// True if the record says that the budget limits the cost of cells.
    pub(super) limits_spending: bool,
    /// False while a share in the API without a record may not be this node's: the record was lost,
    /// and the records of cells with it.
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
    /// The share has reached its possible size. Has the budget's amounts.
    Done(Amounts),
    /// Another write came between.
    Conflict,
    /// The budget was deleted, or replaced by another of its name.
    Absent,
    /// The share has no record. It is not used while instances of the node belong to no cell.
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

/// The parameters of a write.
#[derive(Debug, Clone, Copy)]
pub(super) struct Writing<'w> {
    pub(super) wish: &'w Wish,
    /// True if a surplus may stay for now.
    pub(super) is_patient: bool,
    /// True if the cost of cells is written even with an unchanged share.
    pub(super) reports: bool,
    /// The places of the node's instances, if they are known.
    pub(super) places: Option<&'w [String]>,
}

/// Makes the API, the record and the launches of a node agree on its share, which grows as far as
/// it can.
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
