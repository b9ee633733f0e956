//! Numbers of all cells and orders.

use std::collections::BTreeMap;

use kiyot_values::price::Price;

use crate::engine::{
    Engine, Histogram, Limits, Now, State, costs::NamespaceAccount, order::OrderState, pools,
};

/// The names of the steps of a start, in the order of [`super::Timeline::STEPS`].
const STEPS: [&str; 6] =
    ["launched", "booted", "enrolled", "bound", "image_ready", "first_container"];

/// Numbers of all cells and orders.
#[derive(Debug)]
pub struct Metrics {
    /// The cells by state.
    pub cells: BTreeMap<&'static str, u64>,
    /// The limits.
    pub limits: Limits,
    /// The cells that boot.
    pub boots: usize,
    /// The orders that wait for a launch.
    pub orders_waiting: usize,
    /// True while an operator has stopped launches.
    pub is_cordoned: bool,
    /// The number of pauses of launches after boots that did not enrol.
    pub launch_pauses: u64,
    /// The warm pools.
    pub pools: PoolMetrics,
    /// The shares of budgets; `None` if namespaces have no budgets.
    pub budgets: Option<BudgetMetrics>,
    /// The accounts of the namespaces, by name; the empty name has the cells without a pod.
    pub namespaces: BTreeMap<String, NamespaceAccount>,
    /// The time to each step, in milliseconds, of cold and warm starts.
    pub starts: Vec<(&'static str, &'static str, Histogram)>,
}

/// Numbers of all warm pools.
#[derive(Debug, Default)]
pub struct PoolMetrics {
    /// The cells that wait for a pod.
    pub idle: usize,
    /// The cells that boot.
    pub booting: usize,
    /// The cells that the pools should have.
    pub wanted: usize,
    /// The orders that got a cell of a pool.
    pub hits: u64,
    /// The orders that suit a pool, but got a new cell because no idle cell suited.
    pub misses: u64,
}

/// Numbers of CellBudgets.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct BudgetMetrics {
    /// The sum of this node's shares.
    pub shares: Price,
    /// The namespaces with orders that wait for a larger share.
    pub waiting: usize,
    /// The number of refused orders, by limit.
    pub refusals: BTreeMap<&'static str, u64>,
}

/// Returns the name of a state.
const fn state_name(state: &State) -> &'static str {
    match state {
        State::Requested => "requested",
        State::Launching { .. } => "launching",
        State::Booting { .. } => "booting",
        State::Idle { .. } => "idle",
        State::Binding { .. } => "binding",
        State::Bound { .. } => "bound",
        State::Stopping { .. } => "stopping",
        State::Terminating { .. } | State::Ended { .. } => "terminating",
    }
}

/// The names of all states. A state without cells is shown, too.
const STATES: [&str; 8] =
    ["requested", "launching", "booting", "idle", "binding", "bound", "stopping", "terminating"];

impl Engine {
    /// Returns the lowest bound on boots of all providers.
    fn least_boots(&self) -> Option<usize> {
        self.providers.configured().filter_map(|provider| self.most_boots(provider.key())).min()
    }

    /// Returns the numbers of all cells and orders, in one pass over the cells.
    pub fn metrics(&self, now: Now) -> Metrics {
        let mut cells: BTreeMap<_, _> = STATES.into_iter().map(|state| (state, 0)).collect();
        let mut pools = PoolMetrics {
            wanted: self.pools.by_name.values().map(|filling| filling.count).sum(),
            hits: self.pools.hits,
            misses: self.pools.misses,
            ..PoolMetrics::default()
        };
        let mut namespaces: BTreeMap<String, NamespaceAccount> = self.costs.accounts();
        let mut boots = 0;
        for cell in self.cells.values() {
            *cells.entry(state_name(&cell.state)).or_default() += 1;
            boots += usize::from(cell.boots());
            if cell.is_warm() {
                let count = if pools::is_idle(cell) { &mut pools.idle } else { &mut pools.booting };
                *count += 1;
            }
            if !namespaces.contains_key(cell.namespace()) {
                namespaces.insert(cell.namespace().to_owned(), NamespaceAccount::default());
            }
            if let Some(account) = namespaces.get_mut(cell.namespace()) {
                account.add(cell, now);
            }
        }
        let waiting = self.orders.values().filter(|order| order.state == OrderState::Waiting);
        Metrics {
            cells,
            limits: Limits { boots: self.least_boots(), ..self.config.limits },
            boots,
            orders_waiting: waiting.count(),
            is_cordoned: self.is_cordoned,
            launch_pauses: self.breaker.pauses,
            pools,
            budgets: self.budget_metrics(),
            namespaces,
            starts: self.starts.by_step(STEPS),
        }
    }
}
