//! The cost of cells: the price of their offerings times the time since their launch.

use std::{collections::BTreeMap, time::Duration};

use kiyot_proto::store;
use kiyot_values::{
    price::{Cost, Price},
    spending::Spending,
};

use crate::{
    engine::{
        Cells, Change, Engine, Now, Timeline,
        calendar::Calendar,
        cell::{Cell, Offered},
        order::starts::{Kind, Starts},
    },
    id::CellId,
    placement::{Accuracy, Candidate, Catalogue, Offering, Selection},
    provider::InstanceId,
    request::InstanceType as TypeChoice,
};

/// Bounds the namespaces whose cells have ended; the cost of further namespaces is kept without
/// their names.
const MAX_NAMESPACES: usize = 1000;

/// The account of a cell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    /// The provider's id of the instance, if known.
    pub instance: Option<InstanceId>,
    /// The offering with its price; `None` if unknown.
    pub offering: Option<Candidate>,
    /// The time of the cell's creation, in nanoseconds since 1970.
    pub created_unix_nanos: i64,
    /// The steps of its start.
    pub timeline: Timeline,
    /// The cost since its launch.
    pub cost: Cost,
    /// The account of its namespace.
    pub namespace: NamespaceAccount,
    /// The kind of the cell, and the starts and costs of cells of this kind.
    pub starts: (Kind, Starts),
}

/// The account of a namespace on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NamespaceAccount {
    /// The cells that have not ended.
    pub cells: u64,
    /// The sum of their prices.
    pub price: Price,
    /// The cost of all cells, ended cells included.
    pub cost: Cost,
}

impl NamespaceAccount {
    /// Adds a cell that has not ended.
    pub(super) fn add(&mut self, cell: &Cell, now: Now) {
        self.cells += 1;
        self.price = self.price + cell.limited_price();
        self.cost = self.cost + cell.cost(now);
    }
}

/// The cost of a namespace's ended cells.
#[derive(Debug, Clone, Copy, Default)]
struct Ended {
    total: Cost,
    spending: Spending,
}

impl Ended {
    fn from_stored(record: &store::NamespaceCost) -> Self {
        let spending = Spending {
            date: record.date.parse().unwrap_or_default(),
            day: Cost::from_micros(record.day_micros),
            month: Cost::from_micros(record.month_micros),
        };
        Self { total: Cost::from_micros(record.micros), spending }
    }

    fn stored(&self) -> store::NamespaceCost {
        let Self { total, spending } = self;
        store::NamespaceCost {
            micros: total.micros(),
            date: spending.date.to_string(),
            day_micros: spending.day.micros(),
            month_micros: spending.month.micros(),
        }
    }
}

/// The cost of ended cells by namespace.
#[derive(Debug, Default)]
pub(super) struct Costs {
    ended: BTreeMap<String, Ended>,
    calendar: Calendar,
}

impl Costs {
    /// Returns the costs of a journal.
    pub(super) fn from_stored(records: Vec<(String, store::NamespaceCost)>, now: Now) -> Self {
        let ended = records.iter().take(MAX_NAMESPACES + 1);
        let ended =
            ended.map(|(namespace, record)| (namespace.clone(), Ended::from_stored(record)));
        let mut costs = Self { ended: ended.collect(), calendar: Calendar::default() };
        costs.calendar.advance(now);
        for ended in costs.ended.values() {
            costs.calendar.reach(ended.spending.date, now);
        }
        costs
    }

    /// Returns the name under which the cost of a namespace is kept; empty beyond the bound.
    fn kept<'n>(&self, namespace: &'n str) -> &'n str {
        let is_kept = self.ended.len() < MAX_NAMESPACES || self.ended.contains_key(namespace);
        if is_kept { namespace } else { "" }
    }

    /// Adds the cost of an ended cell. Returns the change of the journal.
    fn add(&mut self, namespace: &str, cost: Cost, spending: Spending) -> Option<Change> {
        if cost == Cost::default() {
            return None;
        }
        let namespace = self.kept(namespace);
        let ended = self.ended.entry(namespace.to_owned()).or_default();
        ended.total = ended.total + cost;
        ended.spending = spending.plus(ended.spending);
        Some(Change::Cost(namespace.to_owned(), ended.stored()))
    }

    /// Returns the cost of a namespace's cells of today and of this month.
    pub(super) fn spending(&mut self, cells: &Cells, namespace: &str, now: Now) -> Spending {
        self.calendar.advance(now);
        let none = Spending { date: self.calendar.date(), ..Spending::default() };
        let ended = self.ended.get(self.kept(namespace)).copied().unwrap_or_default();
        let cells = cells.values().filter(|cell| cell.namespace() == namespace);
        cells.fold(none.plus(ended.spending), |sum, cell| {
            sum.plus(cell.spending(&self.calendar, now))
        })
    }

    /// Raises the cost of a namespace's cells to an amount that was reported earlier. Neither a
    /// clock that was set back nor the loss of the journal may lower the cost.
    pub(super) fn raise(&mut self, cells: &Cells, namespace: &str, to: Spending, now: Now) {
        let found = self.spending(cells, namespace, now);
        let missing = Spending { date: found.date, ..to.on(found.date) }.beyond(found);
        if missing.month > Cost::default() || missing.day > Cost::default() {
            let ended = self.ended.entry(self.kept(namespace).to_owned()).or_default();
            ended.spending = missing.plus(ended.spending);
        }
    }

    /// Returns the namespaces whose ended cells have cost something in this month.
    pub(super) fn spenders(&self) -> impl Iterator<Item = &str> {
        let date = self.calendar.date();
        let is_spender = move |ended: &Ended| ended.spending.on(date).month > Cost::default();
        let spenders = self.ended.iter().filter(move |(_, ended)| is_spender(ended));
        spenders.map(|(namespace, _)| namespace.as_str()).filter(|namespace| !namespace.is_empty())
    }

    /// Replaces costs that could not be written earlier by the current costs.
    pub(super) fn refresh(&self, changes: &mut [Change]) {
        for change in changes {
            if let Change::Cost(namespace, record) = change {
                *record = self.ended.get(namespace).copied().unwrap_or_default().stored();
            }
        }
    }

    /// Returns an account of each namespace with the cost of its ended cells.
    pub(super) fn accounts(&self) -> BTreeMap<String, NamespaceAccount> {
        let account = |it: &Ended| NamespaceAccount { cost: it.total, ..Default::default() };
        self.ended.iter().map(|(namespace, ended)| (namespace.clone(), account(ended))).collect()
    }

    fn account(&self, cells: &Cells, namespace: &str, now: Now) -> NamespaceAccount {
        let cost = self.ended.get(namespace).map(|ended| ended.total).unwrap_or_default();
        let mut account = NamespaceAccount { cost, ..Default::default() };
        let cells = cells.values().filter(|cell| cell.namespace() == namespace);
        cells.for_each(|cell| account.add(cell, now));
        account
    }
}

impl Cell {
    /// Takes the offering of the launch's answer. Returns whether the offering was requested. An
    /// offering that was not requested has the price of the catalogue, or else the highest
    /// requested price as an estimate. `types` are the instance types that the pod names or
    /// accepts.
    pub(super) fn launched(
        &mut self,
        offering: &Offering,
        types: Option<&TypeChoice>,
        catalogue: Option<&Catalogue>,
    ) -> bool {
        let Some(request) = &self.launch.request else { return true };
        let requested = &request.spec.candidates;
        let selection = Selection { candidates: requested, offering, types };
        let is_it = |candidate: &Candidate| candidate.offering == *offering;
        let found = requested.iter().find(|candidate| is_it(candidate)).cloned();
        let is_requested = found.is_some();
        let known = || catalogue.and_then(|catalogue| catalogue.candidates().find(is_it));
        let candidate = found.or_else(known).unwrap_or_else(|| {
            let price = requested.iter().map(|candidate| candidate.price).max();
            let price = price.unwrap_or(Price::FREE);
            Candidate { offering: offering.clone(), price, accuracy: Accuracy::Estimate }
        });
        self.offered = Some(Offered { candidate, reason: selection.to_string() });
        is_requested
    }

    /// Returns the cost since the launch was answered.
    pub(super) fn cost(&self, now: Now) -> Cost {
        let price = self.offering().map_or(Price::FREE, |offering| offering.price);
        price.over(self.bill.time(now))
    }

    /// Returns the parts of the cost that belong to today and to this month.
    fn spending(&self, calendar: &Calendar, now: Now) -> Spending {
        let price = self.offering().map_or(Price::FREE, |offering| offering.price);
        let (time, (day, month)) = (self.bill.time(now), calendar.elapsed(now));
        let cost = |elapsed: Duration| price.over(time.min(elapsed));
        Spending { date: calendar.date(), day: cost(day), month: cost(month) }
    }
}

impl Engine {
    /// Returns the account of a cell.
    pub fn account(&self, id: &CellId, now: Now) -> Option<Account> {
        let cell = self.cells.get(id)?;
        Some(Account {
            instance: cell.state.instance().cloned(),
            offering: cell.offering().cloned(),
            created_unix_nanos: cell.created_unix_nanos,
            timeline: cell.timeline,
            cost: cell.cost(now),
            namespace: self.costs.account(&self.cells, cell.namespace(), now),
            starts: (cell.kind(), self.starts_of(&cell.kind())),
        })
    }

    /// Adds the cost of a cell that has just ended. Returns the change of the journal.
    pub(super) fn settle_cost(&mut self, id: &CellId, now: Now) -> Option<Change> {
        self.costs.calendar.advance(now);
        let cell = self.cells.get(id)?;
        self.ended_types.add(cell, now);
        let (namespace, cost, kind) = (cell.namespace().to_owned(), cell.cost(now), cell.kind());
        let spending = cell.spending(&self.costs.calendar, now);
        if cell.bill.from.is_some() {
            self.count_cost(kind, cost);
        }
        self.costs.add(&namespace, cost, spending)
    }
}
