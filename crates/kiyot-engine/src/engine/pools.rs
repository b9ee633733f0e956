//! Warm pools: cells that are launched before a pod needs them, and wait idle for an order.
//!
//! After each event the pools are filled within the limits, unless a pod waits for a cell. An order
//! takes the cheapest idle cell that suits its pod. If an order reaches a limit, a warm cell ends
//! to make room. A cell that an order has taken does not return to its pool.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kiyot_values::{backoff::doubled, error_chain::error_chain};

use crate::{
    engine::{
        CellError, CellEvent, Effect, Effects, Engine, Event, Notice, Now, Offers, OrderSpec,
        ProviderKey, SILENT, State,
        cell::{
            Cell, CellOrder, Offered, Pod,
            timeline::{self, Step, Timeline},
        },
        launch,
        order::OrderState,
        timers::Timer,
    },
    id::{CellId, SandboxId},
    placement::{
        Candidate, MAX_CANDIDATES, NodeShare, Offering, Ranked, Refusals, Refused,
        leave_out_dear_spot,
    },
    wanted::Wanted,
};

/// The longest pause after failed launches of a pool.
const MAX_PAUSE: Duration = Duration::from_secs(180);
/// Bounds the warm cells that boot at the same time, without and beside a pod that waits for its
/// cell.
const MAX_BOOTS: usize = 4;
const MAX_BOOTS_BESIDE_PODS: usize = 1;

/// The longest time for which starting pods delay the launches of further warm cells.
const MAX_REFILL_DELAY: Duration = Duration::from_secs(10);

/// The end reason of a cell whose pool was removed or made smaller.
const DRAINED: &str = "its warm pool is smaller now";
/// The end reason of a warm cell whose provider was removed.
const REMOVED: &str = "its provider was removed from the configuration";
/// The end reason of a warm cell while launches are stopped.
const CORDONED: &str = "launches of cells were stopped by an operator";
/// The end reason of a warm cell that makes room for a pod.
const GAVE_WAY: &str = "a limit was reached, and a pod needed another cell";
/// The end reason of a warm cell that was launched with an earlier configuration or image.
const OTHER_PARAMETERS: &str = "cells of its warm pool are launched with other parameters now";
/// The end reason of a warm cell that was idle for too long.
const TOO_OLD: &str = "it was in its warm pool for longer than ttl";

/// A warm pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// The identity, by which records of cells name it.
    pub name: Arc<str>,
    /// The provider of its cells.
    pub provider: ProviderKey,
    /// The architecture and the instance types that it asks for ([`Needs::machine`]).
    ///
    /// [`Needs::machine`]: crate::placement::Needs::machine
    pub machine: String,
    /// The part of the node that each of its cells uses; zero on other machines.
    pub share: NodeShare,
    /// The number of cells that wait, idle or booting.
    pub count: usize,
    /// The age at which an idle cell is replaced.
    pub ttl: Duration,
    /// The offerings of its cells, the preferred first; `None` to keep the previous offerings.
    pub candidates: Option<Vec<Candidate>>,
    /// The offerings of its cells while all `candidates` are refused, the preferred first.
    pub further: Vec<Candidate>,
}

#[derive(Debug, Default)]
pub(super) struct Pools {
    pub(super) by_name: BTreeMap<Arc<str>, Filling>,
    /// The providers' own parameters for launches of warm cells: the parameters of a pod without
    /// annotations.
    parameters: BTreeMap<ProviderKey, BTreeMap<String, String>>,
    /// The orders that got a cell of a pool.
    pub(super) hits: u64,
    /// The orders that suit a pool, but got a new cell because no idle cell suited.
    pub(super) misses: u64,
    /// The time from which starting pods no longer delay launches.
    refill_by: Duration,
}

/// A pool with its failures.
#[derive(Debug, Default)]
pub(super) struct Filling {
    provider: ProviderKey,
    share: NodeShare,
    machine: String,
    pub(super) count: usize,
    ttl: Duration,
    pub(super) candidates: Vec<Candidate>,
    further: Vec<Candidate>,
    /// The failures since a cell was idle last.
    pub(super) failures: u32,
    /// The time until which it is not filled.
    not_before: Duration,
    /// The time since which its launches fail.
    failing_since: Option<Duration>,
    /// The orders that got a cell of the pool.
    pub(super) hits: u64,
    /// The orders that the pool suits, but that got a new cell.
    pub(super) misses: u64,
}

/// The reason why a pool gets no cell now.
#[derive(Debug)]
enum Missing {
    /// A limit is reached, or a pod waits: an event will change that.
    Room,
    /// A pause, which ends at this time.
    Until(Duration),
}

impl Pools {
    fn parameters(&self, key: ProviderKey) -> BTreeMap<String, String> {
        self.parameters.get(key).cloned().unwrap_or_default()
    }
}

impl Engine {
    /// Sets the pools. Cells of removed pools end, and cells beyond the count of their pool.
    pub fn set_pools(&mut self, pools: Vec<Pool>, now: Now) -> Effects {
        let mut before = std::mem::take(&mut self.pools.by_name);
        for Pool { name, provider, machine, share, count, ttl, candidates, further } in pools {
            let mut filling = before.remove(&name).unwrap_or_default();
            (filling.provider, filling.machine, filling.share) = (provider, machine, share);
            (filling.count, filling.ttl) = (count, ttl);
            if let Some(candidates) = candidates {
                (filling.candidates, filling.further) = (candidates, further);
            }
            self.pools.by_name.insert(name, filling);
        }
        self.drain_pools(now);
        self.handle(Event::Tick, now)
    }

    /// Sets a provider's own parameters for further warm cells. Its warm cells with other
    /// parameters end.
    pub fn set_pool_parameters(
        &mut self,
        key: ProviderKey,
        parameters: BTreeMap<String, String>,
        now: Now,
    ) -> Effects {
        self.pools.parameters.insert(key, parameters);
        let is_own = |cell: &Cell| self.providers.of(cell).is_some_and(|it| it.key() == key);
        let is_other =
            |cell: &&Cell| cell.is_warm() && is_own(cell) && !self.has_parameters_of_pools(cell);
        let ended: Vec<CellId> =
            self.cells.values().filter(is_other).map(|cell| cell.id.clone()).collect();
        for cell in ended {
            self.apply(&cell, CellEvent::End(OTHER_PARAMETERS.into()), now);
        }
        self.handle(Event::Tick, now)
    }

    /// Returns whether a cell was launched with the current parameters of warm cells.
    pub(super) fn has_parameters_of_pools(&self, cell: &Cell) -> bool {
        let parameters =
            self.providers.of(cell).map(|provider| self.pools.parameters(provider.key()));
        cell.launch.parameters_sha256 == launch::parameters_digest(&parameters.unwrap_or_default())
    }

    /// Limits the launch times of a previous daemon's warm cells.
    pub(super) fn start_pools(&mut self, now: Now) {
        for cell in self.cells.values().filter(|cell| cell.is_warm()) {
            let at = now.boot + self.config.launch_timeout;
            self.timers.set(Timer::Warm(cell.id.clone()), at);
        }
    }

    /// Ends warm cells beyond the counts of their pools: first booting cells, then the oldest. Ends
    /// all warm cells of draining providers, and all warm cells while launches are stopped.
    pub(super) fn drain_pools(&mut self, now: Now) {
        let mut kept: BTreeMap<Arc<str>, usize> = BTreeMap::new();
        let warm = self.cells.values().filter_map(|cell| Some((cell, cell.warm_in()?)));
        let mut warm: Vec<(&Cell, &Arc<str>)> = warm.collect();
        warm.sort_by_key(|(cell, _)| (!is_idle(cell), std::cmp::Reverse(cell.created_unix_nanos)));
        let mut ended = Vec::new();
        for (cell, pool) in warm {
            let filling = self.pools.by_name.get(pool);
            let kept = kept.entry(Arc::clone(pool)).or_default();
            let reason = if self.is_cordoned {
                CORDONED
            } else if self.is_draining(cell) {
                REMOVED
            } else if filling.is_none_or(|filling| *kept >= filling.count) {
                DRAINED
            } else {
                *kept += 1;
                continue;
            };
            ended.push((cell.id.clone(), reason));
        }
        for (cell, reason) in ended {
            self.apply(&cell, CellEvent::End(reason.into()), now);
        }
    }

    /// Launches the cells that the pools lack.
    pub(super) fn fill_pools(&mut self, now: Now) {
        if self.is_cordoned {
            return;
        }
        let mut next: Option<Duration> = None;
        let names: Vec<Arc<str>> = self.pools.by_name.keys().cloned().collect();
        for name in names {
            while let Some(filling) = self.pools.by_name.get(&name) {
                if self.warm_cells(&name) >= filling.count {
                    break;
                }
                match self.launch_warm(&name, now) {
                    Ok(()) => {}
                    Err(Missing::Room) => break,
                    Err(Missing::Until(at)) => {
                        next = Some(next.map_or(at, |next| next.min(at)));
                        break;
                    }
                }
            }
        }
        match next {
            Some(at) => self.timers.set(Timer::Pools, at),
            None => self.timers.clear(&Timer::Pools),
        }
    }

    /// Returns the number of a pool's cells, booting cells included.
    pub(super) fn warm_cells(&self, pool: &Arc<str>) -> usize {
        self.cells.values().filter(|cell| cell.warm_in() == Some(pool)).count()
    }

    fn launch_warm(&mut self, name: &Arc<str>, now: Now) -> Result<(), Missing> {
        let filling = self.pools.by_name.get(name).ok_or(Missing::Room)?;
        let provider = self.providers.get(filling.provider).ok_or(Missing::Room)?;
        if filling.not_before > now.boot {
            return Err(Missing::Until(filling.not_before));
        }
        let booting = self.cells.values().filter(|cell| cell.is_warm() && !is_idle(cell)).count();
        let most = if self.orders.is_empty() { MAX_BOOTS } else { MAX_BOOTS_BESIDE_PODS };
        let limits = self.config.limits;
        let is_full = self.cells.len() >= limits.max_cells;
        let is_behind = self.orders.values().any(|order| order.state == OrderState::Waiting);
        if booting >= most
            || is_full
            || is_behind
            || !self.may_boot(filling.provider)
            || provider.check_launches().is_err()
            || provider.evidence.foreign().is_some()
            || self.free_beside(provider, None).is_some_and(|free| !filling.share.fits(free))
        {
            return Err(Missing::Room);
        }
        if now.boot < self.pools.refill_by && self.has_starting_pod(now) {
            return Err(Missing::Until(self.pools.refill_by));
        }
        if let Some(denial) = provider.denials.of_all(now) {
            return Err(Missing::Until(denial.until));
        }
        let (key, share) = (filling.provider, filling.share);
        let parameters = self.pools.parameters(key);
        let kind = self.boot_kind_of(key, &parameters, &filling.machine);
        let refusals = self.refusals_of_kind(&kind, now);
        let mut candidates = not_refused(&refusals, &filling.candidates, now);
        let over_quota = provider.refusals.at(now.boot);
        let is_over_quota = |it: &Candidate| over_quota.is_over_quota(&it.offering);
        if candidates.is_empty() && !filling.candidates.iter().any(is_over_quota) {
            candidates = not_refused(&refusals, &filling.further, now);
            leave_out_dear_spot(&mut candidates);
        }
        if candidates.is_empty() {
            let all = filling.candidates.iter().chain(&filling.further);
            let end = refusals.first_end(all.map(|candidate| &candidate.offering));
            let until = end.map(|(_, refusal)| refusal.until).filter(|until| *until > now.boot);
            return Err(until.map_or(Missing::Room, Missing::Until));
        }
        let ranked = Ranked::merge([(key, candidates)]);
        let mut ranked = self.of_market(&ranked, filling.failing_since.unwrap_or(now.boot), now);
        ranked.truncate(MAX_CANDIDATES);
        let affordable = limits.affordable(&self.cells, None, &ranked);
        let ranked = affordable.map_err(|_| Missing::Room)?;
        let candidates: Vec<Candidate> = ranked.into_iter().map(|it| it.candidate).collect();
        if let Some(denial) = provider.denials.of_kind(&parameters, &candidates, now) {
            return Err(Missing::Until(denial.until));
        }
        match self.new_cell(key, candidates, parameters, kind, &Wanted::default(), now) {
            Ok((cell, request)) => {
                let at = now.boot + self.config.launch_timeout;
                self.timers.set(Timer::Warm(cell.id.clone()), at);
                self.begin(Cell { pool: Some(Arc::clone(name)), share, ..cell }, request, now);
                Ok(())
            }
            // The daemon starts or stops.
            Err(_) => Err(Missing::Until(now.boot + self.config.retry_pause)),
        }
    }

    /// Returns whether a pod that has just taken a cell of the node has no container yet: a launch
    /// would compete with it for the node's processors.
    fn has_starting_pod(&self, now: Now) -> bool {
        let is_starting = |cell: &Cell| {
            let taken = cell.requested.filter(|_| cell.pool.is_some() && !cell.is_warm());
            let is_recent = taken.is_some_and(|taken| now.boot < taken + MAX_REFILL_DELAY);
            let is_live = matches!(cell.state, State::Binding { .. } | State::Bound { .. });
            let provider = self.providers.of(cell);
            provider.is_some_and(|it| it.capabilities.launches_on_node())
                && is_recent
                && is_live
                && cell.timeline.at(Step::FirstContainer).is_none()
        };
        self.cells.values().any(is_starting)
    }

    /// Returns whether a cell belongs to a warm pool, and no pod has taken it.
    pub fn is_warm(&self, id: &CellId) -> bool {
        self.cells.get(id).is_some_and(Cell::is_warm)
    }

    /// Lets an idle cell of a pool wait for an order.
    pub(super) fn on_warm(&mut self, id: &CellId, now: Now) {
        let Some(cell) = self.cells.get(id) else { return };
        let Some(pool) = cell.warm_in() else { return };
        let Some(filling) = self.pools.by_name.get_mut(pool) else { return };
        filling.failures = 0;
        filling.failing_since = None;
        let left = filling.ttl.saturating_sub(cell.bill.ran_before);
        let notice = Notice::Warm(Arc::clone(pool));
        self.emit(id, Effect::Log(notice));
        self.emit(id, Effect::PublishWarm);
        self.timers.set(Timer::Warm(id.clone()), now.boot + left);
        self.wake_waiting_orders(now);
    }

    /// Ends a warm cell whose launch takes too long, or that is too old. Cells of a pool are
    /// replaced one at a time.
    pub(super) fn on_warm_timer(&mut self, id: &CellId, now: Now) {
        let Some(cell) = self.cells.get(id) else { return };
        let Some(pool) = cell.warm_in() else { return };
        if !is_idle(cell) {
            let seconds = self.config.launch_timeout.as_secs();
            let console = String::new();
            self.fail(id, CellError::Silent { cell: id.clone(), seconds, console });
            return self.apply(id, CellEvent::End(SILENT.into()), now);
        }
        let count = self.pools.by_name.get(pool).map_or(0, |filling| filling.count);
        let is_idle_too = |other: &&Cell| other.warm_in() == Some(pool) && is_idle(other);
        let idle = self.cells.values().filter(is_idle_too);
        if idle.count() < count {
            return self.timers.set(Timer::Warm(id.clone()), now.boot + self.config.retry_pause);
        }
        self.apply(id, CellEvent::End(TOO_OLD.into()), now);
    }

    /// Delays the refill of a pool whose cell could not be launched, or has ended.
    pub(super) fn on_cell_of_pool_ended(&mut self, mut cell: Cell, now: Now) {
        let Some(failure) = cell.end.failure.take() else { return };
        let Some(pool) = cell.pool.filter(|_| cell.pod.is_none()) else { return };
        let Some(filling) = self.pools.by_name.get_mut(&pool) else { return };
        filling.failures = filling.failures.saturating_add(1);
        filling.failing_since.get_or_insert(now.boot);
        let first = self.config.retry_pause;
        let pause = doubled(first, filling.failures.saturating_sub(1), MAX_PAUSE.max(first));
        filling.not_before = now.boot + pause;
        let notice =
            Notice::PoolFailed { pool, reason: error_chain(&failure), seconds: pause.as_secs() };
        self.emit(&cell.id, Effect::Log(notice));
    }

    /// Returns the number of offerings of all pools.
    pub fn pool_offerings(&self) -> usize {
        self.pools.by_name.values().map(|filling| filling.candidates.len()).sum()
    }

    /// Returns whether an idle cell suits the pod of an order.
    pub fn has_warm_cell(&self, spec: &OrderSpec) -> bool {
        self.warm_cell(&spec.offers, &spec.wanted.key.namespace).is_some()
    }

    /// Returns the cheapest idle cell that suits a pod, the oldest at equal prices, with its
    /// offering at the price for the pod.
    fn warm_cell(&self, offers: &[Offers], namespace: &str) -> Option<(CellId, Candidate)> {
        let suited = self.warm_cells_for(offers, namespace);
        let cheapest = suited.min_by_key(|(suited, cell)| (suited.price, cell.created_unix_nanos));
        cheapest.map(|(suited, cell)| (cell.id.clone(), suited))
    }

    /// Returns the idle cells that suit a pod, with their offerings at the price for the pod. Only
    /// cells that were launched with the pod's parameters suit it, because an instance keeps its
    /// security groups and its role.
    pub(super) fn warm_cells_for<'e>(
        &'e self,
        offers: &'e [Offers],
        namespace: &'e str,
    ) -> impl Iterator<Item = (Candidate, &'e Cell)> {
        // The instance of a silent agent may have ended.
        let idle = |cell: &&Cell| cell.is_warm() && is_idle(cell) && !self.is_silent(&cell.id);
        let idle = self.cells.values().filter(idle);
        let suited = idle.filter_map(|cell| {
            let key = self.providers.of(cell)?.key();
            let offers = offers.iter().find(|offers| offers.provider == key)?;
            let is_alike =
                cell.launch.parameters_sha256 == launch::parameters_digest(&offers.parameters);
            let choice = offers.choice.as_ref().filter(|_| is_alike)?;
            let free = self.free_beside(self.providers.of(cell)?, Some(cell));
            let has_room = |share: NodeShare| free.is_none_or(|free| share.fits(free));
            if !choice.share().is_none_or(has_room) {
                return None;
            }
            Some((choice.suited(cell.offering()?)?, cell))
        });
        suited.filter(move |(suited, cell)| {
            self.config.limits.affords_warm(&self.cells, namespace, cell, suited.price)
                && self.budgets.allows(&self.cells, namespace, suited.price)
        })
    }

    /// Gives an order the cheapest idle cell that suits its pod. Returns whether an idle cell
    /// suits.
    pub(super) fn take_warm_cell(&mut self, sandbox: &SandboxId, now: Now) -> bool {
        let Some(order) = self.orders.get(sandbox) else { return false };
        let warm = self.warm_cell(&order.offers, &order.wanted.key.namespace);
        let Some((id, suited)) = warm else { return false };
        // Only the first of several pods that start together sets the delay: it must not grow.
        if !self.has_starting_pod(now) {
            self.pools.refill_by = now.boot + MAX_REFILL_DELAY;
        }
        // The time in the pool is not billed to the namespace.
        let cost = self.settle_cost(&id, now);
        let (Some(order), Some(cell)) = (self.orders.get_mut(sandbox), self.cells.get_mut(&id))
        else {
            return false;
        };
        let Some(pool) = cell.warm_in().cloned() else { return false };
        let offers = cell.provider.as_deref().and_then(|key| order.offers_of(key));
        let share = offers.and_then(|offers| offers.choice.as_ref()?.share());
        cell.bill.restart(cost, now);
        cell.created_unix_nanos = timeline::nanos(now.unix);
        cell.requested = Some(now.boot);
        cell.timeline = Timeline::default();
        for step in [Step::Launched, Step::Booted, Step::Enrolled] {
            cell.timeline.reach(step, now.unix);
        }
        let reason = format!("cheapest idle cell that fits, of warm pool {pool}");
        cell.offered = Some(Offered { candidate: suited, reason });
        cell.share = share.unwrap_or(cell.share);
        cell.order = CellOrder::Waiting(sandbox.clone());
        cell.pod = Some(Pod::of_order(sandbox, &order.wanted));
        if let Some(filling) = self.pools.by_name.get_mut(&pool) {
            filling.hits += 1;
        }
        order.state = OrderState::Placed(id.clone());
        self.pools.hits += 1;
        self.timers.clear(&Timer::Warm(id.clone()));
        self.emit(&id, Effect::Log(Notice::Taken { sandbox: sandbox.clone(), pool }));
        self.apply(&id, CellEvent::Bind, now);
        true
    }

    /// Counts an order that gets a new cell although a pool suits it.
    pub(super) fn count_miss(&mut self, sandbox: &SandboxId) {
        let Some(order) = self.orders.get(sandbox) else { return };
        let parameters = &self.pools.parameters;
        let suits = |filling: &Filling| {
            let offers = order.offers_of(filling.provider);
            let alike = offers.filter(|it| {
                parameters
                    .get(it.provider)
                    .map_or(it.parameters.is_empty(), |own| *own == it.parameters)
            });
            let Some(choice) = alike.and_then(|it| it.choice.as_ref()) else { return false };
            filling.candidates.iter().any(|candidate| choice.suited(candidate).is_some())
        };
        let mut is_miss = false;
        for filling in self.pools.by_name.values_mut().filter(|filling| suits(filling)) {
            filling.misses += 1;
            is_miss = true;
        }
        self.pools.misses += u64::from(is_miss);
    }

    /// Ends a warm cell, because a pod has reached a limit. Cells end one at a time. Returns
    /// whether a cell of a pool ends.
    pub(super) fn give_way(&mut self, now: Now) -> bool {
        let of_pools = || self.cells.values().filter(|cell| cell.pool.is_some());
        if of_pools().any(|cell| cell.pod.is_none() && !cell.is_warm()) {
            return true;
        }
        let warm = of_pools().filter(|cell| cell.is_warm());
        let dearest = warm.max_by_key(|cell| (is_idle(cell), cell.limited_price()));
        let Some(id) = dearest.map(|cell| cell.id.clone()) else { return false };
        self.apply(&id, CellEvent::End(GAVE_WAY.into()), now);
        true
    }
}

/// Returns the candidates that were not refused lately.
fn not_refused(refusals: &Refusals, candidates: &[Candidate], now: Now) -> Vec<Candidate> {
    let refused = refusals.at(now.boot);
    let is_refused = |Offering { instance_type, zone, market }: &Offering| {
        refused.is_refused(instance_type, zone, *market)
    };
    let is_avoided = |it: &Offering| is_refused(it) || refused.is_over_quota(it);
    let left = candidates.iter().filter(|candidate| !is_avoided(&candidate.offering));
    left.cloned().collect()
}

pub(super) fn is_idle(cell: &Cell) -> bool {
    matches!(cell.state, State::Idle { .. })
}
