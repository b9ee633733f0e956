//! The budgets of all namespaces, kept current by a list and a watch.
//!
//! Memory holds only the amounts of each budget.

use std::{collections::BTreeMap, sync::Arc};

use kiyot_values::budget_key::BudgetKey;
use tokio::sync::watch;

use super::object::{Amounts, CellBudget, OtherEntry};
use crate::{call::Call, counter::Counter, failure::Failure, reflector::Watched};

/// Bounds the remembered budgets.
const MAX_BUDGETS: usize = 4096;
/// Bounds the remembered entries of other nodes in a budget, to be swept. They are a random part,
/// so that all nodes together check all entries.
const MAX_OTHERS: usize = 8;

/// The known budgets.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Known {
    /// False until the first list.
    pub(super) is_listed: bool,
    /// True if there are more budgets than are remembered.
    pub(super) has_more: bool,
    pub(super) budgets: BTreeMap<BudgetKey, KnownBudget>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KnownBudget {
    pub(super) uid: String,
    pub(super) amounts: Amounts,
    /// A random part of the entries of other nodes that may be swept.
    pub(super) others: Vec<OtherEntry>,
}

impl Known {
    fn insert(&mut self, key: BudgetKey, budget: KnownBudget) -> bool {
        if self.budgets.len() >= MAX_BUDGETS && !self.budgets.contains_key(&key) {
            return !std::mem::replace(&mut self.has_more, true);
        }
        self.budgets.insert(key, budget.clone()) != Some(budget)
    }
}

/// Watches the budgets for a node.
pub(super) struct Budgets {
    pub(super) node: String,
    pub(super) counter: Arc<dyn Counter>,
    pub(super) known: watch::Sender<Known>,
    /// The budgets of the list so far.
    pub(super) listed: Known,
}

impl Budgets {
    fn known(&self, budget: &CellBudget) -> (BudgetKey, KnownBudget) {
        let (uid, amounts) = (budget.uid().to_owned(), budget.amounts(&self.node));
        let others = fastrand::choose_multiple(budget.sweepable(&self.node), MAX_OTHERS);
        (budget.key(), KnownBudget { uid, amounts, others })
    }
}

impl Watched for Budgets {
    type Object = CellBudget;

    fn list_call(&self, position: Option<&str>) -> Call {
        Call::list_budgets(position)
    }

    fn watch_call(&self, position: &str) -> Call {
        Call::watch_budgets(position)
    }

    fn version(budget: &CellBudget) -> &str {
        budget.version()
    }

    fn take_part(&mut self, is_first: bool, budgets: Vec<CellBudget>) {
        if is_first {
            self.listed = Known { is_listed: true, ..Known::default() };
        }
        for budget in budgets {
            let (key, budget) = self.known(&budget);
            self.listed.insert(key, budget);
        }
    }

    fn end_list(&mut self) {
        self.known.send_replace(std::mem::take(&mut self.listed));
    }

    fn changed(&mut self, change: &str, budget: CellBudget) {
        let (key, budget) = self.known(&budget);
        self.known.send_if_modified(|known| match change {
            "ADDED" | "MODIFIED" => known.insert(key, budget),
            "DELETED" => {
                let is_same = known.budgets.get(&key).is_some_and(|own| own.uid == budget.uid);
                is_same && known.budgets.remove(&key).is_some()
            }
            _ => false,
        });
    }

    fn is_read(&self) {
        self.counter.budgets_read();
    }

    fn log_failed(failure: &Failure) {
        tracing::warn!(
            error = %failure,
            "budgets of cells are not read from the Kubernetes API, the last known budgets count"
        );
    }

    fn log_recovered() {
        tracing::info!("budgets of cells are read from the Kubernetes API again");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies K20.
    #[test]
    fn budgets_beyond_the_bound_do_not_count_as_absent() {
        let mut known = Known::default();
        let amounts = || Amounts { limit: Some(1), ..Amounts::default() };
        let budget = || KnownBudget { uid: "u".to_owned(), amounts: amounts(), others: Vec::new() };
        let key = |number| BudgetKey { namespace: format!("n{number}"), name: "cells".to_owned() };
        for number in 0..MAX_BUDGETS {
            assert!(known.insert(key(number), budget()));
        }
        assert!(!known.has_more);
        assert!(known.insert(key(MAX_BUDGETS), budget()));
        assert!(known.has_more && known.budgets.len() == MAX_BUDGETS);
        assert!(!known.insert(key(0), budget()));
    }
}
