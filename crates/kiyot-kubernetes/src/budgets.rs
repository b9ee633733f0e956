//! The node's shares of CellBudgets.
//!
//! The API server is the only arbiter. A share is an entry in its budget's status. Only the node's
//! daemon changes the entry, by a patch of the version that it has read. `target` decides the share
//! that a node should have, `settle` writes it, and [`BudgetKeeper`] settles when orders wait,
//! cells have ended, or budgets change.

use std::{
    collections::BTreeMap,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use kiyot_values::{budget_key::BudgetKey, spending::SpendingLimits};
use tokio::{
    sync::watch,
    time::{sleep, sleep_until},
};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    client::{Access, CALL_TIMEOUT, Connection},
    counter::Counter,
    failure::Failure,
    gate::{FIRST_PAUSE, Gate},
    reflector::Reflector,
};

mod informer;
mod object;
mod settle;
mod sweep;
mod target;

pub use object::{Amounts, CellBudget};
pub use target::{OrderWish, Wish};

use informer::{Budgets, Known, KnownBudget};
use settle::{Ledger, SettleError, Settled, Writing, settle};
use sweep::{DELETED_FOR, SWEEP_PERIOD, Sweeper};

/// Period in which shares are compared with the price of cells.
const PERIOD: Duration = Duration::from_secs(5);
/// Least time between two writes of a share. The launches of a burst share a write.
const WRITE_PAUSE: Duration = Duration::from_secs(1);
/// Time for which a too large share stays while much of the budget is left. [`SCARCE_PATIENCE`]
/// counts while little is left.
const PATIENCE: Duration = Duration::from_secs(60);
const SCARCE_PATIENCE: Duration = Duration::from_secs(5);
/// Least time between two rounds, however often budgets change.
const ROUND_PAUSE: Duration = Duration::from_millis(100);
/// Bounds the successive attempts to write a share while other nodes write.
const MAX_CONFLICTS: u32 = 10;
/// Longest pause before another attempt, for each earlier conflict.
const CONFLICT_PAUSE: Duration = Duration::from_millis(30);
/// Longest time for which a small cost stays unreported.
const REPORT_PERIOD: Duration = Duration::from_mins(10);
/// Pause after a refused write of a share, as a multiple of the pause after a first failure.
const REFUSED_PAUSES: u32 = 30;
/// Bounds the places of an entry, and the characters of a place, as the schema does.
const MAX_PLACES: usize = 8;
const MAX_PLACE_CHARS: usize = 512;

/// A share on disk, in millionths of a dollar an hour.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedShare {
    /// The budget.
    pub key: BudgetKey,
    /// The uid of the budget.
    pub uid: String,
    /// The share.
    pub hourly_micros: u64,
    /// True if the budget limits the cost of cells in a day or a month.
    pub limits_spending: bool,
}

/// The places of a node's instances, which outlive the node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Places {
    /// The places in which the node's providers also find the instances of other nodes.
    pub looks_in: Vec<String>,
    /// The other places of the node's instances. The node sweeps no entries there.
    pub elsewhere: Vec<String>,
}

impl Places {
    /// Returns the places for the node's entries; no places if they exceed the bounds, so that no
    /// node sweeps the entries.
    fn of_entry(self) -> Vec<String> {
        let places = [self.looks_in, self.elsewhere].concat();
        let is_short = |place: &String| place.chars().count() <= MAX_PLACE_CHARS;
        let fits = places.len() <= MAX_PLACES && places.iter().all(is_short);
        if fits { places } else { Vec::new() }
    }
}

/// The cells that use the shares. Amounts are in millionths of a dollar an hour.
#[async_trait]
pub trait ShareHolder: fmt::Debug + Send + Sync + 'static {
    /// Returns the recorded shares, which launches already use.
    async fn recorded(&self) -> Result<Vec<RecordedShare>, String>;
    /// Records a share. A share of 0 removes the record.
    async fn record(&self, share: RecordedShare) -> Result<(), String>;
    /// Waits until an order asks for a larger share.
    async fn asked(&self);
    /// Compares the cost of cells with the limits of budgets, and returns wishes by namespace. A
    /// namespace has a wish if it has cells or waiting orders, or if its cells have cost something
    /// this month.
    fn wishes(&self) -> BTreeMap<String, Wish>;
    /// Returns the places of the node's instances; `None` until they are known.
    fn places(&self) -> Option<Places>;
    /// Returns whether another node has instances in a place, by a complete list.
    async fn has_instances_of(&self, node: &str, place: &str) -> Result<bool, String>;
    /// Returns whether all instances of the node belong to counted cells.
    fn counts_all_instances(&self) -> bool;
    /// Takes the amounts of a known or new budget.
    fn show(&self, key: &BudgetKey, amounts: Amounts);
    /// Takes the end of a budget.
    fn remove(&self, key: &BudgetKey);
    /// Sets whether all budgets are known.
    fn set_known(&self, are_known: bool);
    /// Lowers a share to `share` or to the price of the cells, whichever is more, but to `most` at
    /// most. Returns the lowered share.
    fn lower(&self, key: &BudgetKey, share: u64, most: u64) -> u64;
    /// Raises a share that is recorded.
    fn grant(&self, key: &BudgetKey, share: u64);
    /// Refuses these orders a larger share.
    fn refuse(&self, orders: Vec<String>);
}

/// Options of the keeper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BudgetOptions {
    /// Address and credentials.
    pub access: Access,
    /// Name of this node.
    pub node: String,
    /// Period in which shares are compared with the price of cells.
    pub period: Duration,
    /// Least time between two writes of a share.
    pub write_pause: Duration,
    /// Time for which a too large share stays while much of the budget is left.
    pub patience: Duration,
    /// The same time while little of the budget is left.
    pub scarce_patience: Duration,
    /// Longest time for which a small cost stays unreported.
    pub report_period: Duration,
    /// Period of the search for entries of deleted nodes.
    pub sweep_period: Duration,
    /// Time between two reads that find no Node object, after which the node counts as deleted.
    pub deleted_for: Duration,
    /// Pause after a first failure.
    pub first_pause: Duration,
}

impl BudgetOptions {
    /// Returns the options of a node, with the usual times.
    pub fn new(access: Access, node: String) -> Self {
        Self {
            access,
            node,
            period: PERIOD,
            write_pause: WRITE_PAUSE,
            patience: PATIENCE,
            scarce_patience: SCARCE_PATIENCE,
            report_period: REPORT_PERIOD,
            sweep_period: SWEEP_PERIOD,
            deleted_for: DELETED_FOR,
            first_pause: FIRST_PAUSE,
        }
    }
}

/// The running keeper. Dropping it ends its tasks; shares stay.
#[derive(Debug)]
pub struct BudgetKeeper {
    _tasks: [AbortOnDropHandle<()>; 3],
}

impl BudgetKeeper {
    /// Starts the tasks. Called on a runtime of tokio.
    pub fn start(
        options: BudgetOptions,
        holder: Arc<dyn ShareHolder>,
        counter: Arc<dyn Counter>,
    ) -> Self {
        let (sender, known) = watch::channel(Known::default());
        let (node, listed) = (options.node.clone(), Known::default());
        let budgets = Budgets { node, counter: Arc::clone(&counter), known: sender, listed };
        let sweeper =
            Sweeper::new(&options, Arc::clone(&holder), Arc::clone(&counter), known.clone());
        let (access, pause) = (options.access.clone(), Some(options.first_pause));
        let reflector = Reflector::new(access.clone(), budgets, pause, Arc::clone(&counter));
        let keeper = Keeper {
            connection: Connection::new(access, counter, CALL_TIMEOUT),
            gate: Gate::new(options.first_pause),
            shares: BTreeMap::new(),
            are_known: false,
            next: Instant::now(),
            options,
            holder,
            known,
        };
        let spawn = |task| AbortOnDropHandle::new(tokio::spawn(task));
        Self {
            _tasks: [
                spawn(Box::pin(reflector.run()) as BoxTask),
                spawn(Box::pin(keeper.run())),
                spawn(Box::pin(sweeper.run())),
            ],
        }
    }
}

type BoxTask = std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;

/// A share with the times of its changes.
#[derive(Debug)]
struct KeptShare {
    ledger: Ledger,
    shown: Option<Amounts>,
    /// The time since which the share is too large.
    surplus_since: Option<Instant>,
    /// The time of the earliest next write.
    not_before: Instant,
    /// The time of the last write.
    written: Instant,
    /// The limits of cells' cost that the status shows.
    limits: Option<SpendingLimits>,
    /// The places that were written last. An API server with an older definition drops them.
    places: Option<Vec<String>>,
}

impl KeptShare {
    fn new(ledger: Ledger, now: Instant) -> Self {
        let (not_before, written) = (now, now);
        let (shown, surplus_since, limits, places) = (None, None, None, None);
        Self { ledger, shown, surplus_since, not_before, written, limits, places }
    }
}

struct Keeper {
    options: BudgetOptions,
    connection: Connection,
    holder: Arc<dyn ShareHolder>,
    known: watch::Receiver<Known>,
    gate: Gate,
    shares: BTreeMap<BudgetKey, KeptShare>,
    are_known: bool,
    /// The time of the next round.
    next: Instant,
}

impl Keeper {
    async fn run(mut self) {
        loop {
            match self.holder.recorded().await {
                Ok(recorded) => {
                    self.shares = recorded.into_iter().map(kept).collect();
                    break;
                }
                Err(error) => {
                    tracing::error!(error, "recorded shares of budgets not read");
                    sleep(self.options.period).await;
                }
            }
        }
        loop {
            let begun = Instant::now();
            self.next = begun + self.options.period;
            self.round().await;
            let pause = ROUND_PAUSE.min(self.options.write_pause);
            sleep_until((begun + pause).into()).await;
            tokio::select! {
                () = self.holder.asked() => {}
                Ok(()) = self.known.changed() => {}
                () = sleep_until(self.next.into()) => {}
            }
        }
    }

    async fn round(&mut self) {
        let known = self.known.borrow_and_update().clone();
        if known.is_listed {
            self.drop_removed(&known).await;
        }
        let now = Instant::now();
        for (key, budget) in &known.budgets {
            let new = || KeptShare::new(Ledger::new(budget.uid.clone()), now);
            let share = self.shares.entry(key.clone()).or_insert_with(new);
            // A former budget of this name is removed first.
            if share.ledger.uid == budget.uid && share.shown.as_ref() != Some(&budget.amounts) {
                share.shown = Some(budget.amounts.clone());
                self.holder.show(key, budget.amounts.clone());
            }
        }
        let are_known = known.is_listed && !known.has_more;
        if std::mem::replace(&mut self.are_known, are_known) != are_known {
            self.holder.set_known(are_known);
        }
        let wishes = self.holder.wishes();
        let places = self.holder.places().map(Places::of_entry);
        for (key, budget) in &known.budgets {
            let wish = wishes.get(&key.namespace).cloned().unwrap_or_default();
            self.keep(key, budget, &wish, places.as_deref()).await;
        }
    }

    /// Drops the shares of budgets that were deleted.
    async fn drop_removed(&mut self, known: &Known) {
        let is_present = |(key, share): &(&BudgetKey, &KeptShare)| {
            known.budgets.get(*key).is_some_and(|budget| budget.uid == share.ledger.uid)
        };
        // If there are more budgets than the bound, a budget may be missing from the list.
        let removed = self.shares.iter().filter(|it| !is_present(it) && !known.has_more);
        let removed: Vec<BudgetKey> = removed.map(|(key, _)| key.clone()).collect();
        for key in removed {
            let (uid, hourly_micros) = (String::new(), 0);
            let none =
                RecordedShare { key: key.clone(), uid, hourly_micros, limits_spending: false };
            if let Err(error) = self.holder.record(none).await {
                tracing::error!(budget = %key, error, "record of a deleted budget not removed");
                continue;
            }
            self.shares.remove(&key);
            self.holder.remove(&key);
        }
    }

    /// Writes the share of a budget, if it differs from the target.
    async fn keep(
        &mut self,
        key: &BudgetKey,
        budget: &KnownBudget,
        wish: &Wish,
        places: Option<&[String]>,
    ) {
        let now = Instant::now();
        let Some(share) = self.shares.get_mut(key) else { return };
        if share.ledger.uid != budget.uid {
            return;
        }
        let usable = share.ledger.usable;
        let seen = Amounts { own: Some(usable), ..budget.amounts.clone() };
        let surplus = seen.has_surplus(wish).then(|| share.surplus_since.unwrap_or(now));
        share.surplus_since = surplus;
        let BudgetOptions { patience, scarce_patience, report_period, .. } = self.options;
        let patience = if seen.are_scarce(usable) { scarce_patience } else { patience };
        let patience_ends = surplus.map(|since| since + patience);
        let is_patient = patience_ends.is_none_or(|end| now < end);
        self.next = patience_ends.filter(|_| is_patient).map_or(self.next, |it| it.min(self.next));
        let is_seen = budget.amounts.own.unwrap_or(0) == usable;
        let limits = *share.limits.get_or_insert(seen.spending_limits);
        let is_late = now.duration_since(share.written) >= report_period;
        let shows_others = seen.own_spent.is_some() && limits != seen.spending_limits;
        let is_new = |places| places != seen.places && Some(places) != share.places.as_deref();
        let is_elsewhere = usable > 0 && places.is_some_and(is_new);
        let reports =
            shows_others || is_elsewhere || budget.amounts.must_report(wish.spent, is_late);
        let limits_spending = !seen.spending_limits.is_empty();
        let is_recorded =
            share.ledger.recorded == 0 || share.ledger.limits_spending == limits_spending;
        if is_seen && is_recorded && !reports && seen.target(wish, is_patient) == usable {
            // The call of a waiting pod is repeated without another read of the object.
            return self.refuse_beyond(&seen, usable, wish);
        }
        let open = self.gate.open_at().unwrap_or(now).max(share.not_before);
        if now < open {
            self.next = self.next.min(open);
            return;
        }
        let settled = self.write(key, Writing { wish, is_patient, reports, places }).await;
        let Some(share) = self.shares.get_mut(key) else { return };
        let now = Instant::now();
        share.not_before = now + self.options.write_pause;
        match settled {
            Ok(Settled::Done(amounts)) => {
                if self.gate.succeeded() {
                    tracing::info!("shares of budgets are written again");
                }
                share.shown = Some(amounts.clone());
                (share.surplus_since, share.written) = (None, now);
                share.limits = Some(amounts.spending_limits);
                share.places = places.map(<[_]>::to_vec);
                let usable = share.ledger.usable;
                self.holder.show(key, amounts.clone());
                self.refuse_beyond(&amounts, usable, wish);
            }
            Ok(Settled::Conflict) => self.next = self.next.min(share.not_before),
            Ok(Settled::Absent) => {}
            Ok(Settled::Uncounted) => share.not_before = now + self.options.period,
            Err(error) => {
                let failure = match error {
                    SettleError::Api(failure) => failure,
                    SettleError::Record(error) => Failure::Unreachable(error),
                };
                self.connection.failed(&failure);
                let is_logged = match &failure {
                    // Only this budget is affected, for example by its definition's rule or a
                    // webhook.
                    Failure::Invalid(_) | Failure::Denied(_) => {
                        share.not_before = now + self.options.first_pause * REFUSED_PAUSES;
                        self.gate.noted(&failure)
                    }
                    failure => self.gate.failed(failure, now, fastrand::f64()),
                };
                if is_logged {
                    tracing::warn!(
                        budget = %key,
                        error = %failure,
                        "share of a budget is not written, launches beyond it wait"
                    );
                }
                if matches!(failure, Failure::Invalid(_)) {
                    let usable = share.ledger.usable;
                    self.refuse_beyond(&seen, usable, wish);
                }
            }
        }
    }

    /// Refuses a larger share to the orders of a wish that exceeds it.
    fn refuse_beyond(&self, amounts: &Amounts, usable: u64, wish: &Wish) {
        let is_beyond = amounts.limit.is_some() && wish.whole() > usable;
        if is_beyond && !wish.orders.is_empty() {
            self.holder.refuse(wish.orders.iter().map(|order| order.id.clone()).collect());
        }
    }

    async fn write(
        &mut self,
        key: &BudgetKey,
        writing: Writing<'_>,
    ) -> Result<Settled, SettleError> {
        let Some(share) = self.shares.get_mut(key) else { return Ok(Settled::Absent) };
        let client = self.connection.client().await?;
        for conflicts in 0..MAX_CONFLICTS {
            let settled = settle(
                (&*client, &*self.holder),
                (&self.options.node, key),
                &mut share.ledger,
                writing,
            );
            let settled = settled.await?;
            if settled != Settled::Conflict {
                return Ok(settled);
            }
            sleep((CONFLICT_PAUSE * (conflicts + 1)).mul_f64(fastrand::f64())).await;
        }
        Ok(Settled::Conflict)
    }
}

fn kept(recorded: RecordedShare) -> (BudgetKey, KeptShare) {
    let RecordedShare { key, uid, hourly_micros: usable, limits_spending } = recorded;
    let ledger = Ledger { uid, usable, recorded: usable, limits_spending, is_own: true };
    (key, KeptShare::new(ledger, Instant::now()))
}
