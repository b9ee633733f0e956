//! Limits of a node's cells, and the queue of the orders that wait for a boot.
//!
//! An order over a limit of cells or money is refused, and the kubelet tries again. An order over
//! the limit of boots waits: the namespace with the fewest boots is next, and its order that has
//! waited longest.

use std::{collections::BTreeMap, fmt, time::Duration};

use kiyot_config::MilpaBackend;
use kiyot_proto::text::counted;
use kiyot_values::price::Price;

use crate::{
    engine::{
        CellError, Cells, Engine, Now, ProviderKey, State, cell::Cell, order::OrderState,
        providers::Provider,
    },
    id::{CellId, SandboxId},
    placement::Candidate,
};

pub(super) mod budgets;

/// Bounds the cells that the error of a reached limit names.
const MAX_NAMED_HOLDERS: usize = 3;
/// The time for which a pod keeps its place in the queue after its order has timed out: the kubelet
/// tries again within this time, even after the longest backoff.
const KEEPS_PLACE: Duration = Duration::from_secs(600);
/// Bounds the pods without an order that keep their place.
const MAX_PLACES: usize = 1000;

/// Limits of a node's cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bounds the number of cells, terminating cells included.
    pub max_cells: usize,
    /// Bounds the cells of each provider that boot at the same time; `None` for the provider's own
    /// bound.
    pub boots: Option<usize>,
    /// Bounds the price of all cells.
    pub price: Option<Price>,
    /// Bounds the price of the cells of each namespace.
    pub namespace_price: Option<Price>,
}

impl Limits {
    /// Returns the limits of a configured backend.
    pub fn of(config: &MilpaBackend) -> Self {
        Self {
            max_cells: config.max_cells,
            boots: config.limits.boots,
            price: config.limits.price_per_hour,
            namespace_price: config.limits.namespace_price_per_hour,
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self { max_cells: 250, boots: None, price: None, namespace_price: None }
    }
}

/// The error of an order over a price limit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{budget} may cost {limit} an hour, and the cheapest offering for the pod costs {cheapest}; \
     held by {}: {held} an hour{}", counted(*.cells, "cell", "cells"), named(.holders)
)]
pub struct OverBudget {
    /// The limited cells.
    pub budget: Budget,
    /// The limit.
    pub limit: Price,
    /// The price of the cells.
    pub held: Price,
    /// The number of cells.
    pub cells: usize,
    /// The most expensive cells.
    pub holders: Vec<(CellId, Price)>,
    /// The price of the cheapest offering for the pod.
    pub cheapest: Price,
}

/// Cells with a price limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Budget {
    /// All cells of the node.
    Node,
    /// The cells of a namespace on the node.
    Namespace(String),
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node => f.write_str("the cells of the node"),
            Self::Namespace(namespace) => write!(f, "the cells of namespace {namespace}"),
        }
    }
}

fn named(holders: &[(CellId, Price)]) -> String {
    let shown = holders.iter().map(|(cell, price)| format!("{cell} {price}"));
    let shown = shown.collect::<Vec<_>>().join(", ");
    if shown.is_empty() { shown } else { format!(" (the most expensive: {shown})") }
}

/// Queue places of pods whose orders ended without a cell.
#[derive(Debug, Default)]
pub(super) struct Places {
    /// By the pod's uid: the start of its wait, and the end of its place.
    by_pod: BTreeMap<String, (Duration, Duration)>,
}

impl Places {
    /// Keeps the place of a pod.
    pub(super) fn keep(&mut self, pod_uid: &str, since: Duration, now: Duration) {
        self.by_pod.retain(|_, (_, until)| now < *until);
        if self.by_pod.len() < MAX_PLACES {
            self.by_pod.insert(pod_uid.to_owned(), (since, now + KEEPS_PLACE));
        }
    }

    /// Returns the time since which a pod waits, and removes its place: the pod has an order now.
    pub(super) fn take(&mut self, pod_uid: &str, now: Duration) -> Duration {
        let place = self.by_pod.remove(pod_uid).filter(|(_, until)| now < *until);
        place.map_or(now, |(since, _)| since)
    }
}

impl Cell {
    /// Returns whether the cell boots: from its order until it is bound, is idle in a warm pool, or
    /// must end.
    pub(super) fn boots(&self) -> bool {
        let waits = self.is_warm() && matches!(self.state, State::Idle { .. });
        self.state.is_unbound() && !waits
    }

    /// Returns the price that counts for limits: before the launch is answered, the price of the
    /// most expensive candidate.
    pub(super) fn limited_price(&self) -> Price {
        if self.state.is_ended() {
            return Price::FREE;
        }
        let most = self.launch.candidates().map(|candidate| candidate.price).max();
        self.offering().map(|offering| offering.price).or(most).unwrap_or(Price::FREE)
    }
}

/// Returns the price of cells that counts for limits.
fn limited_price<'a>(cells: impl Iterator<Item = &'a Cell>) -> Price {
    cells.fold(Price::FREE, |sum, cell| sum + cell.limited_price())
}

impl Limits {
    /// Returns the candidates whose price the limits allow, for a pod of a namespace or for a pool.
    pub(super) fn affordable<T: AsRef<Candidate> + Clone>(
        &self,
        cells: &Cells,
        namespace: Option<&str>,
        candidates: &[T],
    ) -> Result<Vec<T>, OverBudget> {
        self.affordable_among(cells.values(), namespace, candidates)
    }

    /// Returns whether the limits would allow a pod a candidate if the pools had no cells. Without
    /// a namespace, only the node's limit counts.
    pub(super) fn affords_without_pools(
        &self,
        cells: &Cells,
        namespace: Option<&str>,
        candidates: &[impl AsRef<Candidate> + Clone],
    ) -> bool {
        let of_pods = cells.values().filter(|cell| cell.pool.is_none() || cell.pod.is_some());
        self.affordable_among(of_pods, namespace, candidates).is_ok()
    }

    fn affordable_among<'a, T: AsRef<Candidate> + Clone>(
        &self,
        held: impl Iterator<Item = &'a Cell> + Clone,
        namespace: Option<&str>,
        candidates: &[T],
    ) -> Result<Vec<T>, OverBudget> {
        let of_namespace =
            namespace.map(|name| (Budget::Namespace(name.to_owned()), self.namespace_price));
        let budgets = [(Budget::Node, self.price)].into_iter().chain(of_namespace);
        let mut affordable = candidates.to_vec();
        for (budget, limit) in budgets {
            let Some(limit) = limit else { continue };
            let cells = || {
                let is_counted = |cell: &&Cell| match &budget {
                    Budget::Node => true,
                    Budget::Namespace(namespace) => cell.namespace() == *namespace,
                };
                held.clone().filter(is_counted)
            };
            let held = limited_price(cells());
            let cheapest = affordable.iter().map(|it| it.as_ref().price).min();
            // What costs nothing is within every limit.
            let fits = |price: Price| price == Price::FREE || held + price <= limit;
            affordable.retain(|candidate| fits(candidate.as_ref().price));
            if let Some(cheapest) = cheapest.filter(|_| affordable.is_empty()) {
                let mut holders: Vec<(CellId, Price)> =
                    cells().map(|cell| (cell.id.clone(), cell.limited_price())).collect();
                let number = holders.len();
                holders.sort_by_key(|(_, price)| std::cmp::Reverse(*price));
                holders.truncate(MAX_NAMED_HOLDERS);
                return Err(OverBudget { budget, limit, held, cells: number, holders, cheapest });
            }
        }
        Ok(affordable)
    }

    /// Returns whether the limits allow a pod of a namespace to take a warm cell at this price. The
    /// price is higher than the cell's own if the pod uses its processors all the time.
    pub(super) fn affords_warm(
        &self,
        cells: &Cells,
        namespace: &str,
        cell: &Cell,
        price: Price,
    ) -> bool {
        let others = || cells.values().filter(|other| other.id != cell.id);
        let of_namespace = others().filter(|other| other.namespace() == namespace);
        let fits = |held, limit: Option<Price>| limit.is_none_or(|limit| held + price <= limit);
        price == Price::FREE
            || fits(limited_price(of_namespace), self.namespace_price)
                && (price <= cell.limited_price() || fits(limited_price(others()), self.price))
    }

    /// Returns the error of an order over the limit of cells.
    pub(super) fn full(&self, cells: &Cells) -> CellError {
        let mut by_namespace: BTreeMap<&str, usize> = BTreeMap::new();
        for cell in cells.values() {
            *by_namespace.entry(cell.namespace()).or_default() += 1;
        }
        let mut holders: Vec<(String, usize)> =
            by_namespace.into_iter().map(|(name, cells)| (name.to_owned(), cells)).collect();
        holders.sort_by_key(|(_, cells)| std::cmp::Reverse(*cells));
        holders.truncate(MAX_NAMED_HOLDERS);
        CellError::Full { limit: self.max_cells, cells: cells.len(), holders }
    }
}

impl Engine {
    /// Sets the limits for further launches.
    pub fn set_limits(&mut self, limits: Limits, now: Now) -> super::Effects {
        self.config.limits = limits;
        self.wake_waiting_orders(now);
        self.handle(super::Event::Tick, now)
    }

    /// Returns the error of an order that has waited for a boot until its deadline, and keeps the
    /// place of its pod.
    pub(super) fn queue_timeout(&mut self, sandbox: &SandboxId, now: Now) -> Option<CellError> {
        let order = self.orders.get(sandbox)?;
        let ranked = self.launchable(&order.offers, now).ok()?;
        let provider = ranked.first()?.provider;
        let boots = self.most_boots(provider)?;
        let is_queued = order.state == OrderState::Waiting && !self.may_boot(provider);
        if !is_queued || self.blocking_cell(&order.wanted.key.pod_uid).is_some() {
            return None;
        }
        let (pod, since) = (order.wanted.key.pod_uid.clone(), order.queued_since);
        let waiting = self.orders.values().filter(|order| order.state == OrderState::Waiting);
        let orders = waiting.count();
        self.places.keep(&pod, since, now.boot);
        let seconds = now.boot.saturating_sub(since).as_secs();
        let booting = self.booting(provider).take(MAX_NAMED_HOLDERS);
        let holders = booting.map(|cell| cell.id.clone()).collect();
        Some(CellError::Queued { boots, seconds, orders, holders })
    }

    /// Returns the bound on a provider's cells that boot at the same time.
    pub(super) fn most_boots(&self, key: ProviderKey) -> Option<usize> {
        self.config.limits.boots.or(self.providers.get(key)?.boots)
    }

    /// Returns whether a further cell of a provider may boot.
    pub(super) fn may_boot(&self, key: ProviderKey) -> bool {
        self.most_boots(key).is_none_or(|most| self.booting(key).count() < most)
    }

    fn booting(&self, key: ProviderKey) -> impl Iterator<Item = &Cell> {
        let is_own =
            move |cell: &Cell| self.providers.callee(cell).is_some_and(|it| it.key() == key);
        self.cells.values().filter(move |cell| cell.boots() && is_own(cell))
    }

    /// Places waiting orders while cells may boot, in turn by namespace.
    pub(super) fn wake_waiting_orders(&mut self, now: Now) {
        let mut waiting = self.waiting_orders(|_| true);
        let keys: Vec<ProviderKey> = self.providers.iter().map(Provider::key).collect();
        if keys.iter().all(|key| self.most_boots(key).is_none()) {
            waiting.sort_by_key(|sandbox| self.orders.get(sandbox).map(|order| order.queued_since));
            waiting.iter().for_each(|sandbox| self.place(sandbox, now));
            return;
        }
        while !waiting.is_empty() && keys.iter().any(|key| self.may_boot(key)) {
            let mut boots: BTreeMap<&str, usize> = BTreeMap::new();
            for cell in self.cells.values().filter(|cell| cell.boots()) {
                *boots.entry(cell.namespace()).or_default() += 1;
            }
            let turn = |sandbox: &SandboxId| {
                let order = self.orders.get(sandbox)?;
                let of_namespace = boots.get(order.wanted.key.namespace.as_str());
                Some((of_namespace.copied().unwrap_or_default(), order.queued_since))
            };
            let next = waiting.iter().enumerate().min_by_key(|(_, sandbox)| turn(sandbox));
            let Some(index) = next.map(|(index, _)| index) else { return };
            let sandbox = waiting.swap_remove(index);
            self.place(&sandbox, now);
        }
    }
}
