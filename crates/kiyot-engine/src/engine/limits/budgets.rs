//! CellBudgets: this node's shares, within which the cells of a namespace are launched.
//!
//! A launch whose price is within the shares of its namespace begins at once, even while the
//! Kubernetes API is down. Beyond the shares, the order waits while the daemon asks for a larger
//! share. A cell counts from its order to its proven end; until the launch is answered, it counts
//! as its most expensive candidate. The daemon decides the shares; the engine launches within them.
//!
//! Limits of a day and a month need no share: once the cells of all nodes have cost the limit, no
//! cell with a price is launched until the next day or month.

use std::collections::{BTreeMap, BTreeSet};

use jiff::civil::Date;
use kiyot_values::{
    budget_key::BudgetKey,
    price::{Cost, Price},
    spending::{Period, Spending, SpendingLimits},
};

use crate::{
    engine::{
        BudgetMetrics, CellError, Cells, Effects, Engine, Event, Now, cell::Cell, order::OrderState,
    },
    id::{CellId, SandboxId},
    placement::Ranked,
};

/// The figures of a CellBudget.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BudgetFigures {
    /// The price that the cells of all nodes may have; `None` for no limit.
    pub limit: Option<Price>,
    /// The shares of all nodes.
    pub reserved: Price,
    /// The limits of the cost of all nodes' cells.
    pub spending_limits: SpendingLimits,
    /// True if cells end once a limit of the cost is reached.
    pub ends_cells: bool,
    /// The cost of other nodes' cells, by the date of the report.
    pub others: Vec<Spending>,
    /// The cost that this node has reported.
    pub own: Option<Spending>,
}

/// A recorded share of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordedShare {
    /// The price that cells may have.
    pub hourly: Price,
    /// True if the budget has a limit of a day or a month. Then launches wait for its figures.
    pub limits_spending: bool,
}

/// The need of a namespace for shares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespaceNeed {
    /// The namespace.
    pub namespace: String,
    /// The price of its cells, launches without an answer included.
    pub held: Price,
    /// The cost of its cells.
    pub spent: Spending,
    /// The orders that wait for a larger share, the longest wait first.
    pub orders: Vec<OrderNeed>,
}

/// The need of an order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OrderNeed {
    /// The id of its sandbox.
    pub sandbox: SandboxId,
    /// The price of its cheapest candidate.
    pub cheapest: Price,
    /// The price of its most expensive candidate.
    pub dearest: Price,
}

/// The reason why an order gets no cell within its CellBudgets.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BudgetRefusal {
    /// The rest of the budget is too small.
    #[error(
        "{}; the cheapest offering for the pod costs {cheapest}, the node's share is {share}, \
         and its cells hold {held}", left(.budget, .figures.as_ref())
    )]
    Exhausted {
        /// The budget.
        budget: BudgetKey,
        /// Its figures, if they are known.
        figures: Option<BudgetFigures>,
        /// The share of the node.
        share: Price,
        /// The price of the namespace's cells on the node.
        held: Price,
        /// The price of the cheapest offering for the pod.
        cheapest: Price,
    },
    /// The limit of a day or a month is reached.
    #[error(transparent)]
    Spent(Spent),
    /// The API did not answer in time.
    #[error(
        "no cell was launched for {seconds} s, because the Kubernetes API did not grant the node a \
         larger share of CellBudget {budget}; its share is {share}, and its cells hold {held}"
    )]
    NotGranted {
        /// The budget.
        budget: BudgetKey,
        /// The time for which the order has waited, in seconds.
        seconds: u64,
        /// The share of the node.
        share: Price,
        /// The price of the namespace's cells on the node.
        held: Price,
    },
    /// The budgets were not read in time.
    #[error(
        "no cell was launched for {seconds} s, because the CellBudgets of namespace {namespace} \
         are not known: since the daemon started, the Kubernetes API has not returned all of them"
    )]
    NotKnown {
        /// The namespace.
        namespace: String,
        /// The time for which the order has waited, in seconds.
        seconds: u64,
    },
}

impl BudgetRefusal {
    /// The names of all limits that refuse orders.
    const LIMITS: [&str; 5] = ["hour", "day", "month", "not_granted", "not_known"];

    /// Returns the name of the limit, for metrics.
    fn limit(&self) -> &'static str {
        match self {
            Self::Exhausted { .. } => "hour",
            Self::Spent(Spent { period: Period::Day, .. }) => "day",
            Self::Spent(Spent { period: Period::Month, .. }) => "month",
            Self::NotGranted { .. } => "not_granted",
            Self::NotKnown { .. } => "not_known",
        }
    }
}

/// A reached limit of a CellBudget.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "CellBudget {budget} allows {limit} a {period} on all nodes, and {spent} are spent; its \
     namespace gets cells again on {} (UTC), or once the budget is raised", .period.next(*.date)
)]
pub struct Spent {
    /// The budget.
    pub budget: BudgetKey,
    /// The period.
    pub period: Period,
    /// The limit.
    pub limit: Cost,
    /// The cost of the cells of all nodes.
    pub spent: Cost,
    /// The date.
    pub date: Date,
}

fn left(budget: &BudgetKey, figures: Option<&BudgetFigures>) -> String {
    let Some(BudgetFigures { limit: Some(limit), reserved, .. }) = figures else {
        return format!("CellBudget {budget} has too little left");
    };
    let left = Price::from_micros(limit.micros().saturating_sub(reserved.micros()));
    format!(
        "CellBudget {budget} allows {limit} an hour on all nodes: {reserved} are reserved, {left} \
         are left"
    )
}

/// A node's share of a budget.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Share {
    /// The price that cells may have: read back from the API, and recorded.
    hourly: Price,
    /// True while the budget has a limit of a day or a month, and its figures are not known.
    awaits_figures: bool,
    figures: Option<BudgetFigures>,
    /// The reached limit.
    spent: Option<Spent>,
}

impl Share {
    fn recorded(RecordedShare { hourly, limits_spending }: RecordedShare) -> Self {
        Self { hourly, awaits_figures: limits_spending, figures: None, spent: None }
    }

    fn limits_spending(&self) -> bool {
        self.figures.as_ref().is_some_and(|figures| !figures.spending_limits.is_empty())
    }

    fn is_too_small_for(&self, needed: Price) -> bool {
        let is_limited = self.figures.as_ref().is_none_or(|figures| figures.limit.is_some());
        is_limited && self.hourly < needed
    }
}

/// The shares of all namespaces.
#[derive(Debug, Default)]
pub(in crate::engine) struct Budgets {
    /// False if namespaces have no budgets.
    is_on: bool,
    /// True once all budgets are known: a namespace without a budget has no limit.
    are_known: bool,
    shares: BTreeMap<BudgetKey, Share>,
    /// The orders that wait for a larger share, with their candidates' lowest and highest price.
    asking: BTreeMap<SandboxId, (Price, Price)>,
    /// The orders whose requests for a larger share were refused.
    refused: BTreeSet<SandboxId>,
    /// True if an order has begun to ask, or asks for other prices.
    has_new_ask: bool,
    /// The number of refused orders, by limit.
    refusals: BTreeMap<&'static str, u64>,
}

/// Returns the price of the cells of a namespace.
fn held(cells: &Cells, namespace: &str) -> Price {
    let of_namespace = cells.values().filter(|cell| cell.namespace() == namespace);
    of_namespace.map(Cell::limited_price).fold(Price::FREE, |sum, price| sum + price)
}

impl Budgets {
    fn of<'b>(&'b self, namespace: &str) -> impl Iterator<Item = (&'b BudgetKey, &'b Share)> {
        let first = BudgetKey { namespace: namespace.to_owned(), name: String::new() };
        let namespace = namespace.to_owned();
        self.shares.range(first..).take_while(move |(key, _)| key.namespace == namespace)
    }

    /// Returns whether the budgets of a namespace, or figures that limit it, are unknown.
    fn is_unknown(&self, namespace: &str) -> bool {
        let mut shares = self.of(namespace).peekable();
        !self.are_known && shares.peek().is_none() || shares.any(|(_, share)| share.awaits_figures)
    }

    /// Returns the reached limit of a namespace.
    fn spent(&self, namespace: &str) -> Option<&Spent> {
        self.of(namespace).find_map(|(_, share)| share.spent.as_ref())
    }

    /// Returns the budget whose share is too small for a further cell of a namespace.
    fn lacking(&self, cells: &Cells, namespace: &str, price: Price) -> Option<&BudgetKey> {
        let needed = held(cells, namespace) + price;
        let mut budgets = self.of(namespace);
        budgets.find(|(_, share)| share.is_too_small_for(needed)).map(|(key, _)| key)
    }

    /// Returns whether the shares of a namespace allow a further cell at this price. Cells without
    /// a namespace have no budget.
    pub(in crate::engine) fn allows(&self, cells: &Cells, namespace: &str, price: Price) -> bool {
        // What costs nothing is within every budget.
        !self.is_on
            || price == Price::FREE
            || namespace.is_empty()
            || !self.is_unknown(namespace)
                && self.spent(namespace).is_none()
                && self.lacking(cells, namespace, price).is_none()
    }
}

impl Engine {
    /// Limits namespaces by budgets, at first by the recorded shares.
    pub fn keep_budgets(&mut self, recorded: impl IntoIterator<Item = (BudgetKey, RecordedShare)>) {
        self.budgets.is_on = true;
        self.budgets.refusals = BudgetRefusal::LIMITS.map(|limit| (limit, 0)).into();
        let shares = recorded.into_iter().map(|(key, share)| (key, Share::recorded(share)));
        self.budgets.shares = shares.collect();
    }

    /// Sets the figures of a budget. A new budget has no share yet.
    pub fn set_budget(&mut self, key: &BudgetKey, figures: BudgetFigures, now: Now) -> Effects {
        if let Some(own) = figures.own {
            self.costs.raise(&self.cells, &key.namespace, own, now);
        }
        let none = RecordedShare { hourly: Price::FREE, limits_spending: false };
        let share = self.budgets.shares.entry(key.clone());
        let share = share.or_insert_with(|| Share::recorded(none));
        let was_awaited = std::mem::take(&mut share.awaits_figures);
        share.figures = Some(figures);
        let spent = self.costs.spending(&self.cells, &key.namespace, now);
        self.count_spending_of(key, spent, now);
        self.place_asking(|_| was_awaited, now)
    }

    /// Compares the cost of cells with the limits of budgets, and ends the cells of reached budgets
    /// that demand it. Returns the needs of all namespaces with cells, waiting orders, a cost in
    /// this month, or a reported cost.
    pub fn budget_needs(&mut self, now: Now) -> (Vec<NamespaceNeed>, Effects) {
        let limited = self.budgets.shares.iter().filter(|(_, share)| share.limits_spending());
        let limited: Vec<BudgetKey> = limited.map(|(key, _)| key.clone()).collect();
        let mut spent = BTreeMap::new();
        for key in limited {
            let cost = || self.costs.spending(&self.cells, &key.namespace, now);
            let own = *spent.entry(key.namespace.clone()).or_insert_with(cost);
            self.count_spending_of(&key, own, now);
        }
        let effects = self.handle(Event::Tick, now);
        (self.needs(&spent, now), effects)
    }

    fn count_spending_of(&mut self, key: &BudgetKey, own: Spending, now: Now) {
        let spent = self.reached(key, own);
        let Some(share) = self.budgets.shares.get_mut(key) else { return };
        share.spent = spent;
        let ends = share.figures.as_ref().is_some_and(|figures| figures.ends_cells);
        if let Some(spent) = share.spent.clone().filter(|_| ends) {
            self.end_cells_of(&key.namespace, &spent, now);
        }
    }

    /// Returns the reached limit of a budget.
    fn reached(&self, key: &BudgetKey, own: Spending) -> Option<Spent> {
        let share = self.budgets.shares.get(key).filter(|share| share.limits_spending())?;
        let figures = share.figures.as_ref()?;
        let limits = figures.spending_limits;
        let all = own.plus_all(&figures.others);
        let period = limits.reached(all)?;
        let (limit, spent) = (limits.of(period)?, all.of(period));
        Some(Spent { budget: key.clone(), period, limit, spent, date: all.date })
    }

    /// Ends the cells of a namespace that have a price.
    fn end_cells_of(&mut self, namespace: &str, spent: &Spent, now: Now) {
        let costs = |cell: &&Cell| {
            cell.namespace() == namespace
                && cell.state.end().is_none()
                && cell.limited_price() > Price::FREE
        };
        let ended: Vec<CellId> =
            self.cells.values().filter(costs).map(|it| it.id.clone()).collect();
        for id in ended {
            let refusal = BudgetRefusal::Spent(spent.clone());
            self.fail(&id, CellError::NoShare(Box::new(refusal)));
            self.stop(&id, spent.to_string().into(), now);
        }
    }

    /// Removes a budget, which no longer limits its namespace.
    pub fn remove_budget(&mut self, key: &BudgetKey, now: Now) -> Effects {
        self.budgets.shares.remove(key);
        self.place_asking(|_| true, now)
    }

    /// Sets whether all budgets are known.
    pub fn set_budgets_known(&mut self, are_known: bool, now: Now) -> Effects {
        self.budgets.are_known = are_known;
        self.place_asking(|_| true, now)
    }

    /// Raises the share of a budget. The share was read back and recorded before.
    pub fn grant_share(&mut self, key: &BudgetKey, hourly: Price, now: Now) -> Effects {
        if let Some(share) = self.budgets.shares.get_mut(key) {
            share.hourly = hourly;
        }
        self.place_asking(|_| true, now)
    }

    /// Lowers the share of a budget to `to`, but not below the price of the namespace's cells.
    /// Lowers it to `most` in any case: the node has no more. Returns the share.
    pub fn lower_share(&mut self, key: &BudgetKey, to: Price, most: Price) -> Price {
        let held = held(&self.cells, &key.namespace);
        let Some(share) = self.budgets.shares.get_mut(key) else { return Price::FREE };
        share.hourly = share.hourly.min(to.max(held)).min(most);
        share.hourly
    }

    /// Places orders again after their requests for a larger share were refused: each order takes
    /// the candidates that fit, or is refused.
    pub fn refuse_growth(&mut self, orders: Vec<SandboxId>, now: Now) -> Effects {
        self.budgets.refused.extend(orders);
        let refused = self.budgets.refused.clone();
        let effects = self.place_asking(|sandbox| refused.contains(sandbox), now);
        self.budgets.refused.clear();
        effects
    }

    fn place_asking(&mut self, which: impl Fn(&SandboxId) -> bool, now: Now) -> Effects {
        for (sandbox, _) in self.take_asking().into_iter().filter(|(it, _)| which(it)) {
            self.place(&sandbox, now);
        }
        self.handle(Event::Tick, now)
    }

    /// Returns the orders that wait for a larger share, the longest wait first.
    fn take_asking(&mut self) -> Vec<(SandboxId, (Price, Price))> {
        let orders = &self.orders;
        let waits = |sandbox: &SandboxId| {
            orders.get(sandbox).is_some_and(|order| order.state == OrderState::Waiting)
        };
        self.budgets.asking.retain(|sandbox, _| waits(sandbox));
        let mut asking: Vec<_> = self
            .budgets
            .asking
            .iter()
            .map(|(sandbox, prices)| (sandbox.clone(), *prices))
            .collect();
        asking.sort_by_key(|(sandbox, _)| orders.get(sandbox).map(|order| order.queued_since));
        asking
    }

    /// Returns the needs of namespaces. `spent` has costs that are computed already.
    pub(in crate::engine) fn needs(
        &mut self,
        spent: &BTreeMap<String, Spending>,
        now: Now,
    ) -> Vec<NamespaceNeed> {
        let mut needs: BTreeMap<String, Vec<OrderNeed>> = BTreeMap::new();
        let of_cells = self.cells.values().map(Cell::namespace).filter(|it| !it.is_empty());
        let has_reported =
            |share: &Share| share.figures.as_ref().is_some_and(|figures| figures.own.is_some());
        let reported = self.budgets.shares.iter().filter(|(_, share)| has_reported(share));
        let reported = reported.map(|(key, _)| key.namespace.as_str());
        for namespace in of_cells.chain(self.costs.spenders()).chain(reported) {
            needs.entry(namespace.to_owned()).or_default();
        }
        for (sandbox, (cheapest, dearest)) in self.take_asking() {
            let Some(order) = self.orders.get(&sandbox) else { continue };
            let orders = needs.entry(order.wanted.key.namespace.clone()).or_default();
            orders.push(OrderNeed { sandbox, cheapest, dearest });
        }
        let need = |(namespace, orders): (String, _)| NamespaceNeed {
            held: held(&self.cells, &namespace),
            spent: spent
                .get(&namespace)
                .copied()
                .unwrap_or_else(|| self.costs.spending(&self.cells, &namespace, now)),
            namespace,
            orders,
        };
        needs.into_iter().map(need).collect()
    }

    pub(in crate::engine) fn count_refusal(&mut self, refusal: &BudgetRefusal) {
        *self.budgets.refusals.entry(refusal.limit()).or_default() += 1;
    }

    /// Returns the metrics of the budgets; `None` if namespaces have no budgets.
    pub(in crate::engine) fn budget_metrics(&self) -> Option<BudgetMetrics> {
        let Budgets { is_on, shares, asking, refusals, .. } = &self.budgets;
        let waiting = asking.keys().filter_map(|sandbox| self.orders.get(sandbox));
        let waiting = waiting.filter(|order| order.state == OrderState::Waiting);
        let waiting: BTreeSet<&str> =
            waiting.map(|order| order.wanted.key.namespace.as_str()).collect();
        let shares = shares.values().fold(Price::FREE, |sum, share| sum + share.hourly);
        let (waiting, refusals) = (waiting.len(), refusals.clone());
        is_on.then_some(BudgetMetrics { shares, waiting, refusals })
    }

    /// Returns whether an order has begun to ask for a larger share since the last call.
    pub fn has_new_ask(&mut self) -> bool {
        std::mem::take(&mut self.budgets.has_new_ask)
    }

    /// Returns whether all instances of this node belong to known cells. After the loss of the
    /// journal, strays may run at the cost of namespaces.
    pub fn counts_all_instances(&self) -> bool {
        !self.providers.iter().any(|provider| provider.evidence.may_have_strays())
    }

    /// Returns the candidates of an order that the shares of its namespace allow, if the shares
    /// allow all candidates of the preferred provider, or a larger share was refused. Returns
    /// `None` while the order waits for a larger share.
    pub(in crate::engine) fn within_shares(
        &mut self,
        sandbox: &SandboxId,
        mut ranked: Vec<Ranked>,
    ) -> Result<Option<Vec<Ranked>>, Box<BudgetRefusal>> {
        let Some(order) = self.orders.get(sandbox) else { return Ok(None) };
        let namespace = order.wanted.key.namespace.clone();
        let preferred = Ranked::first_run(&ranked).map(|(_, candidates)| candidates);
        let preferred = preferred.unwrap_or_default();
        let dearest = preferred.iter().map(|it| it.price).max().unwrap_or(Price::FREE);
        let cheapest = ranked.iter().map(|it| it.as_ref().price).min().unwrap_or(Price::FREE);
        let (budgets, cells) = (&mut self.budgets, &self.cells);
        if let Some(spent) = budgets.spent(&namespace) {
            let refusal = || Box::new(BudgetRefusal::Spent(spent.clone()));
            ranked.retain(|it| it.as_ref().price == Price::FREE);
            return if ranked.is_empty() { Err(refusal()) } else { Ok(Some(ranked)) };
        }
        if budgets.allows(cells, &namespace, dearest) {
            budgets.asking.remove(sandbox);
            ranked.retain(|it| budgets.allows(cells, &namespace, it.as_ref().price));
            return Ok(Some(ranked));
        }
        if !budgets.refused.contains(sandbox) || budgets.is_unknown(&namespace) {
            let before = budgets.asking.insert(sandbox.clone(), (cheapest, dearest));
            budgets.has_new_ask |= before != Some((cheapest, dearest));
            return Ok(None);
        }
        budgets.asking.remove(sandbox);
        ranked.retain(|it| budgets.allows(cells, &namespace, it.as_ref().price));
        if ranked.is_empty()
            && let Some(budget) = budgets.lacking(cells, &namespace, cheapest)
        {
            let share = budgets.shares.get(budget);
            return Err(Box::new(BudgetRefusal::Exhausted {
                budget: budget.clone(),
                figures: share.and_then(|share| share.figures.clone()),
                share: share.map_or(Price::FREE, |share| share.hourly),
                held: held(cells, &namespace),
                cheapest,
            }));
        }
        Ok(Some(ranked))
    }

    /// Returns the error of an order that has waited for a larger share until its deadline.
    pub(in crate::engine) fn share_timeout(
        &self,
        sandbox: &SandboxId,
        seconds: u64,
    ) -> Option<Box<BudgetRefusal>> {
        let (_, dearest) = self.budgets.asking.get(sandbox)?;
        let namespace = &self.orders.get(sandbox)?.wanted.key.namespace;
        if self.budgets.is_unknown(namespace) {
            let namespace = namespace.clone();
            return Some(Box::new(BudgetRefusal::NotKnown { namespace, seconds }));
        }
        let budget = self.budgets.lacking(&self.cells, namespace, *dearest)?;
        let share = self.budgets.shares.get(budget)?;
        Some(Box::new(BudgetRefusal::NotGranted {
            budget: budget.clone(),
            seconds,
            share: share.hourly,
            held: held(&self.cells, namespace),
        }))
    }
}
