//! Sweeps the entries of deleted nodes.
//!
//! A share does not expire, because instances outlive their node. A node's share is given back if
//! two reads found no Node object, and two complete lists of instances in each of the entry's
//! places showed no instance of the node. The entry's cost stays until its month is over.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use jiff::civil::Date;
use kiyot_values::{budget_key::BudgetKey, price::Price, spending::date_of};
use tokio::{sync::watch, time::sleep};

use super::{BudgetOptions, Places, ShareHolder, informer::Known, object::OtherEntry, settle::Api};
use crate::{
    call::Call,
    client::{CALL_TIMEOUT, Client, Connection},
    counter::{Counter, FAILED, REMOVED, SWEPT},
    failure::Failure,
    time,
};

/// Period of the search for entries of deleted nodes. Half of it is random.
pub(super) const SWEEP_PERIOD: Duration = Duration::from_mins(5);
/// Time between the two reads. EC2 lists an instance within minutes of its launch.
pub(super) const DELETED_FOR: Duration = Duration::from_mins(10);
/// Bounds the Node objects that are read in a period, for the first reads and for the second.
const MAX_LOOKS: usize = 4;
/// Bounds the remembered nodes without a Node object.
const MAX_SUSPECTS: usize = 64;
/// Bounds the budgets in which a node is swept in a period.
const MAX_BUDGETS: usize = 64;
/// Bounds the writes of an entry: its share, then its removal.
const MAX_WRITES: usize = 2;

/// The serials of a node's entries.
type Serials = BTreeMap<BudgetKey, u64>;

/// A node without a Node object.
struct Suspect {
    since: Instant,
    serials: Serials,
    /// The places whose list showed no instance of the node.
    empty: BTreeSet<String>,
}

impl Suspect {
    /// Returns whether the node's daemon has written no entry since.
    fn is_silent(&self, serials: &Serials) -> bool {
        self.serials.iter().all(|(key, own)| serials.get(key).is_none_or(|serial| serial == own))
    }
}

/// The entry of a suspect in a budget, as it was in an earlier period.
#[derive(Clone, Copy)]
struct Seen<'a> {
    node: &'a str,
    key: &'a BudgetKey,
    serial: u64,
    /// The places whose list showed none of the node's instances.
    were_empty: &'a BTreeSet<String>,
}

#[derive(Debug, thiserror::Error)]
enum SweepError {
    #[error(transparent)]
    Api(#[from] Failure),
    #[error("instances of node {node} in {place}: {error}")]
    Instances { node: String, place: String, error: String },
}

/// Sweeps the entries of other nodes.
pub(super) struct Sweeper {
    connection: Connection,
    node: String,
    period: Duration,
    deleted_for: Duration,
    holder: Arc<dyn ShareHolder>,
    counter: Arc<dyn Counter>,
    known: watch::Receiver<Known>,
    suspects: BTreeMap<String, Suspect>,
    has_failed: bool,
}

impl Sweeper {
    pub(super) fn new(
        options: &BudgetOptions,
        holder: Arc<dyn ShareHolder>,
        counter: Arc<dyn Counter>,
        known: watch::Receiver<Known>,
    ) -> Self {
        let BudgetOptions { access, node, sweep_period: period, deleted_for, .. } = options.clone();
        let connection = Connection::new(access, Arc::clone(&counter), CALL_TIMEOUT);
        let (suspects, has_failed) = (BTreeMap::new(), false);
        Self { connection, node, period, deleted_for, holder, counter, known, suspects, has_failed }
    }

    /// Searches and sweeps until it is dropped.
    pub(super) async fn run(mut self) {
        loop {
            // Random, so that the nodes of a cluster do not search at the same time.
            sleep(self.period.mul_f64(0.75 + fastrand::f64() / 2.0)).await;
            let swept = self.round().await;
            let has_failed = swept.is_err();
            if let Err(error) = swept {
                self.counter.swept(FAILED);
                if let SweepError::Api(failure) = &error {
                    self.connection.failed(failure);
                }
                if !self.has_failed {
                    tracing::warn!(%error, "shares of deleted nodes are not swept");
                }
            }
            self.has_failed = has_failed;
        }
    }

    /// Returns the nodes with entries that this node may sweep.
    fn nodes(&self, places: &Places) -> BTreeMap<String, Serials> {
        let mut nodes: BTreeMap<String, Serials> = BTreeMap::new();
        for (key, budget) in &self.known.borrow().budgets {
            for entry in budget.others.iter().filter(|entry| places.include(entry)) {
                let serials = nodes.entry(entry.node.clone()).or_default();
                serials.insert(key.clone(), entry.serial);
            }
        }
        nodes
    }

    async fn round(&mut self) -> Result<(), SweepError> {
        let Some(places) = self.holder.places() else { return Ok(()) };
        let nodes = self.nodes(&places);
        self.suspects
            .retain(|node, suspect| nodes.get(node).is_some_and(|found| suspect.is_silent(found)));
        let suspects = self.suspects.iter();
        let due = suspects.filter(|(_, suspect)| suspect.since.elapsed() >= self.deleted_for);
        let due = fastrand::choose_multiple(due.map(|(node, _)| node.clone()), MAX_LOOKS);
        let new = nodes.into_iter().filter(|(node, _)| !self.suspects.contains_key(node));
        let room = MAX_SUSPECTS.saturating_sub(self.suspects.len()).min(MAX_LOOKS);
        let new = fastrand::choose_multiple(new, room);
        if due.is_empty() && new.is_empty() {
            return Ok(());
        }
        let client = self.connection.client().await?;
        // Absence proves something only if this node's own Node object exists.
        if is_absent(&client, &self.node).await? {
            self.suspects.clear();
            return Ok(());
        }
        for (node, serials) in new {
            if is_absent(&client, &node).await? {
                let (since, empty) = (Instant::now(), BTreeSet::new());
                self.suspects.insert(node, Suspect { since, serials, empty });
            }
        }
        let mut outcome = Ok(());
        for node in due {
            let swept = match is_absent(&client, &node).await? {
                true => self.sweep(&*client, &node, &places).await,
                false => Ok(BTreeSet::new()),
            };
            match swept {
                Ok(empty) => match self.suspects.get_mut(&node) {
                    // A list may be stale: the places are listed again in the next period.
                    Some(suspect) if !empty.is_subset(&suspect.empty) => suspect.empty = empty,
                    _ => drop(self.suspects.remove(&node)),
                },
                Err(error) => outcome = Err(error),
            }
        }
        outcome
    }

    /// Sweeps the entries of a node without a Node object. Returns the places whose list shows no
    /// instance of the node.
    async fn sweep(
        &self,
        api: &dyn Api,
        node: &str,
        places: &Places,
    ) -> Result<BTreeSet<String>, SweepError> {
        let mut empty = BTreeSet::new();
        let Some(suspect) = self.suspects.get(node) else { return Ok(empty) };
        for (key, serial) in suspect.serials.iter().take(MAX_BUDGETS) {
            let seen = Seen { node, key, serial: *serial, were_empty: &suspect.empty };
            match self.sweep_of(api, seen, places, &mut empty).await {
                // Another node has swept the entry, or the deleted node has come back.
                Ok(()) | Err(SweepError::Api(Failure::Conflict(_) | Failure::NotFound(_))) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(empty)
    }

    /// Sweeps a node's entry in a budget. `empty` are the places without the node's instances in
    /// this period.
    async fn sweep_of(
        &self,
        api: &dyn Api,
        Seen { node, key, serial, were_empty }: Seen<'_>,
        places: &Places,
        empty: &mut BTreeSet<String>,
    ) -> Result<(), SweepError> {
        let mut budget = api.get(key).await?;
        for _ in 0..MAX_WRITES {
            let mut entries = budget.sweepable(&self.node);
            let Some(entry) = entries.find(|it| it.node == node && it.serial == serial) else {
                return Ok(());
            };
            drop(entries);
            let micros = entry.hourly_micros;
            let is_share = micros > 0;
            if !places.include(&entry)
                || is_share && self.has_instances(&entry, empty).await?
                || is_share && !entry.places.iter().all(|place| were_empty.contains(place))
            {
                return Ok(());
            }
            let Some(patch) = budget.sweep(&entry, today()) else { return Ok(()) };
            budget = api.patch(key, patch).await?;
            self.counter.swept(if is_share { SWEPT } else { REMOVED });
            match micros {
                0 => tracing::info!(node, budget = %key, "entry of a deleted node is removed"),
                _ => tracing::info!(
                    node,
                    budget = %key,
                    dollars_per_hour = %Price::from_micros(micros),
                    "share of a deleted node is given back"
                ),
            }
        }
        Ok(())
    }

    /// Returns whether a place of an entry has instances of its node.
    async fn has_instances(
        &self,
        OtherEntry { node, places, .. }: &OtherEntry,
        empty: &mut BTreeSet<String>,
    ) -> Result<bool, SweepError> {
        for place in places {
            if empty.contains(place) {
                continue;
            }
            let found = self.holder.has_instances_of(node, place).await;
            let (node, name) = (node.clone(), place.clone());
            if found.map_err(|error| SweepError::Instances { node, place: name, error })? {
                return Ok(true);
            }
            empty.insert(place.clone());
        }
        Ok(false)
    }
}

impl Places {
    /// Returns whether an entry has no share, or names only places in which this node finds
    /// instances.
    fn include(&self, entry: &OtherEntry) -> bool {
        entry.hourly_micros == 0 || entry.places.iter().all(|place| self.looks_in.contains(place))
    }
}

/// Returns whether a Node object is absent.
async fn is_absent(client: &Client, node: &str) -> Result<bool, Failure> {
    match client.call(&Call::get_node(node)).await {
        Ok(_) => Ok(false),
        Err(Failure::NotFound(_)) => Ok(true),
        Err(failure) => Err(failure),
    }
}

fn today() -> Date {
    date_of(Duration::from_nanos(u64::try_from(time::now()).unwrap_or(0)))
}
