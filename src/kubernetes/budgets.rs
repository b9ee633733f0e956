//! The node's shares of budgets, as a backend's cells hold them.

use std::{collections::BTreeMap, fmt, sync::Arc};

use async_trait::async_trait;
use kiyot_engine::{
    engine::{BudgetFigures, NamespaceNeed, OrderNeed},
    id::SandboxId,
};
use kiyot_kubernetes::{
    ShareHolder,
    budgets::{Amounts, OrderWish, Places, RecordedShare, Wish},
};
use kiyot_proto::store::BudgetShare;
use kiyot_values::{budget_key::BudgetKey, error_chain::error_chain, price::Price};

use crate::backends::milpa::Milpa;

/// The shares of a backend's cells.
pub(super) struct Shares(pub(super) Arc<Milpa>);

impl fmt::Debug for Shares {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shares").finish_non_exhaustive()
    }
}

fn wish(NamespaceNeed { namespace, held, spent, orders }: NamespaceNeed) -> (String, Wish) {
    let order = |OrderNeed { sandbox, cheapest, dearest }: OrderNeed| OrderWish {
        id: sandbox.to_string(),
        cheapest: cheapest.micros(),
        dearest: dearest.micros(),
    };
    let orders = orders.into_iter().map(order).collect();
    (namespace, Wish { held: held.micros(), spent, orders })
}

#[async_trait]
impl ShareHolder for Shares {
    async fn recorded(&self) -> Result<Vec<RecordedShare>, String> {
        let shares = self.0.cells().recorded_shares().await;
        let share = |(key, share): (BudgetKey, BudgetShare)| RecordedShare {
            key,
            uid: share.uid,
            hourly_micros: share.hourly_micros,
            limits_spending: share.limits_spending,
        };
        let shares = shares.map_err(|error| error_chain(&error))?;
        Ok(shares.into_iter().map(share).collect())
    }

    async fn record(&self, share: RecordedShare) -> Result<(), String> {
        let RecordedShare { key, uid, hourly_micros, limits_spending } = share;
        let share = BudgetShare { uid, hourly_micros, limits_spending };
        let recorded = self.0.cells().record_share(&key, &share).await;
        recorded.map_err(|error| error_chain(&error))
    }

    async fn asked(&self) {
        self.0.cells().share_asked().await;
    }

    fn wishes(&self) -> BTreeMap<String, Wish> {
        self.0.cells().budget_needs().into_iter().map(wish).collect()
    }

    fn places(&self) -> Option<Places> {
        let (looks_in, elsewhere) = self.0.cells().places()?;
        Some(Places { looks_in, elsewhere })
    }

    async fn has_instances_of(&self, node: &str, place: &str) -> Result<bool, String> {
        let found = self.0.cells().has_instances_of(node, place).await;
        found.map_err(|error| error_chain(&error))
    }

    fn counts_all_instances(&self) -> bool {
        self.0.cells().counts_all_instances()
    }

    fn show(&self, budget: &BudgetKey, amounts: Amounts) {
        let figures = BudgetFigures {
            limit: amounts.limit.map(Price::from_micros),
            reserved: Price::from_micros(amounts.reserved()),
            spending_limits: amounts.spending_limits,
            ends_cells: amounts.ends_cells,
            others: amounts.others_spent,
            own: amounts.own_spent,
        };
        self.0.cells().set_budget(budget, figures);
    }

    fn remove(&self, budget: &BudgetKey) {
        self.0.cells().remove_budget(budget);
    }

    fn set_known(&self, are_known: bool) {
        self.0.cells().set_budgets_known(are_known);
    }

    fn lower(&self, budget: &BudgetKey, share: u64, most: u64) -> u64 {
        let (share, most) = (Price::from_micros(share), Price::from_micros(most));
        self.0.cells().lower_share(budget, share, most).micros()
    }

    fn grant(&self, budget: &BudgetKey, share: u64) {
        self.0.cells().grant_share(budget, Price::from_micros(share));
    }

    fn refuse(&self, orders: Vec<String>) {
        let orders = orders.iter().filter_map(|order| SandboxId::parse(order).ok());
        self.0.cells().refuse_growth(orders.collect());
    }
}
