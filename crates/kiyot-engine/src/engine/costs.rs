//! The cost of cells: the price of their offerings times the time since their launch.

use std::{collections::BTreeMap, time::Duration};

use kiyot_proto::store;
use kiyot_values::price::{Cost, Price};

use crate::{
    engine::{
        Cells, Change, Engine, Now, Step, Timeline,
        cell::{Cell, Offered},
        order::starts::{Kind, Starts},
    },
    id::CellId,
    placement::{Accuracy, Candidate, Offering, Selection},
    request::InstanceType as TypeChoice,
};

/// Bounds the namespaces whose cells have ended; the cost of further namespaces is kept without
/// their names.
const MAX_NAMESPACES: usize = 1000;

/// The account of a cell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    /// The provider's id of the instance; empty if it is not known.
    pub instance: String,
    /// The offering with its price; `None` if it is not known.
    pub offering: Option<Candidate>,
    /// The time of the cell's creation, in nanoseconds since 1970.
    pub created_unix_nanos: i64,
    /// The steps of its start.
    pub timeline: Timeline,
    /// The cost since its launch.
    pub cost: Cost,
    /// The cells of its namespace.
    pub namespace: NamespaceAccount,
    /// The kind of the cell, and the starts and costs of cells of this kind.
    pub starts: (Kind, Starts),
}

/// The time of a cell that is at the cost of its namespace.
#[derive(Debug, Default)]
pub(super) struct Bill {
    /// The time from its launch until this daemon began.
    pub(super) ran_before: Duration,
    /// The time from which on this daemon counts its cost: of its launch, or of its pod's order.
    pub(super) from: Option<Duration>,
    /// The cost of its time before, with another pod or none, until its next commit.
    pub(super) settled: Option<Change>,
}

impl Bill {
    /// Returns the bill of a cell that a previous daemon launched.
    pub(super) fn resumed(timeline: &Timeline, now: Now) -> Self {
        Self { ran_before: since_launch(timeline, now), from: Some(now.boot), settled: None }
    }

    /// Begins again, after the cost until now was settled.
    pub(super) fn restart(&mut self, settled: Option<Change>, now: Now) {
        *self = Self { ran_before: Duration::ZERO, from: self.from.map(|_| now.boot), settled };
    }

    /// Returns the time since the launch was answered.
    pub(super) fn time(&self, now: Now) -> Duration {
        // A clock that is set while the daemon runs changes nothing.
        let billed = self.from.map(|from| now.boot.saturating_sub(from));
        self.ran_before + billed.unwrap_or_default()
    }
}

/// The account of a namespace on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NamespaceAccount {
    /// The cells that have not ended.
    pub cells: u64,
    /// Their price in sum.
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

/// The cost of ended cells by namespace.
#[derive(Debug, Default)]
pub(super) struct Costs {
    ended: BTreeMap<String, Cost>,
}

impl Costs {
    /// Returns the costs of a journal.
    pub(super) fn from_stored(records: Vec<(String, store::NamespaceCost)>) -> Self {
        let cost = |record: store::NamespaceCost| Cost::from_micros(record.micros);
        let ended = records.into_iter().map(|(namespace, record)| (namespace, cost(record)));
        Self { ended: ended.take(MAX_NAMESPACES + 1).collect() }
    }

    /// Adds the cost of an ended cell. Returns the change of the journal.
    fn add(&mut self, namespace: &str, cost: Cost) -> Option<Change> {
        if cost == Cost::default() {
            return None;
        }
        let is_kept = self.ended.len() < MAX_NAMESPACES || self.ended.contains_key(namespace);
        let namespace = if is_kept { namespace } else { "" };
        let total = self.ended.entry(namespace.to_owned()).or_default();
        *total = *total + cost;
        Some(Change::Cost(namespace.to_owned(), store::NamespaceCost { micros: total.micros() }))
    }

    /// Replaces costs that could not be written earlier by those of now.
    pub(super) fn refresh(&self, changes: &mut [Change]) {
        for change in changes {
            if let Change::Cost(namespace, record) = change {
                record.micros = self.of(namespace).micros();
            }
        }
    }

    /// Returns an account of each namespace with the cost of its ended cells.
    pub(super) fn accounts(&self) -> BTreeMap<String, NamespaceAccount> {
        let account = |cost: &Cost| NamespaceAccount { cost: *cost, ..Default::default() };
        self.ended.iter().map(|(namespace, cost)| (namespace.clone(), account(cost))).collect()
    }

    /// Returns the account of a namespace.
    fn account(&self, cells: &Cells, namespace: &str, now: Now) -> NamespaceAccount {
        let mut account = NamespaceAccount { cost: self.of(namespace), ..Default::default() };
        let cells = cells.values().filter(|cell| cell.namespace() == namespace);
        cells.for_each(|cell| account.add(cell, now));
        account
    }

    fn of(&self, namespace: &str) -> Cost {
        self.ended.get(namespace).copied().unwrap_or_default()
    }
}

/// Returns the time since a recorded launch.
fn since_launch(timeline: &Timeline, now: Now) -> Duration {
    let launched = timeline.at(Step::Launched).and_then(|nanos| u64::try_from(nanos).ok());
    let launched = launched.map(Duration::from_nanos);
    launched.map_or(Duration::ZERO, |launched| now.unix.saturating_sub(launched))
}

impl Cell {
    /// Takes the answer of its launch. An offering that was not requested is taken to cost what the
    /// most expensive requested one does. `types` are those that the pod names or accepts.
    pub(super) fn launched(&mut self, offering: &Offering, types: Option<&TypeChoice>) {
        let Some(request) = &self.launch.request else { return };
        let requested = &request.spec.candidates;
        let selection = Selection { candidates: requested, offering, types };
        let found = requested.iter().find(|candidate| candidate.offering == *offering);
        let candidate = found.cloned().unwrap_or_else(|| {
            let price = requested.iter().map(|candidate| candidate.price).max();
            let price = price.unwrap_or(Price::FREE);
            Candidate { offering: offering.clone(), price, accuracy: Accuracy::AtMost }
        });
        self.offered = Some(Offered { candidate, reason: selection.to_string() });
    }

    /// Returns the cost since the launch was answered.
    pub(super) fn cost(&self, now: Now) -> Cost {
        let price = self.offering().map_or(Price::FREE, |offering| offering.price);
        price.over(self.bill.time(now))
    }
}

impl Engine {
    /// Returns the account of a cell.
    pub fn account(&self, id: &CellId, now: Now) -> Option<Account> {
        let cell = self.cells.get(id)?;
        let instance = cell.state.instance();
        Some(Account {
            instance: instance.map(|instance| instance.0.clone()).unwrap_or_default(),
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
        let cell = self.cells.get(id)?;
        self.ended_types.add(cell, now);
        let (namespace, cost, kind) = (cell.namespace().to_owned(), cell.cost(now), cell.kind());
        if cell.bill.from.is_some() {
            self.count_cost(kind, cost);
        }
        self.costs.add(&namespace, cost)
    }
}
