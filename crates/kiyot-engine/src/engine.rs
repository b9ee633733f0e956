//! The engine of cells: all orders and cells, without input or output.
//!
//! Events come in with the time, and effects come out: `(engine, event, now) -> effects`. The
//! daemon and the simulator run the same engine; they differ in who carries out the effects. A
//! daemon that is killed between two effects finds the journal as the first left it.

use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

use kiyot_link::{bootstrap::Bootstrap, certificate::sha256};

use crate::{
    id::{CellId, NoRandomness, SandboxId},
    placement::{LaunchRefusal, NodeShare, Refusal, Refusals},
    provider::{Attachment, ErrorClass, Instance, ProviderError},
};

mod breaker;
mod calendar;
mod cell;
mod config;
mod costs;
mod effect;
mod ends;
mod error;
mod evidence;
mod histogram;
mod launch;
mod limits;
mod machine;
mod metrics;
mod offers;
mod order;
mod pools;
mod providers;
mod records;
mod recovery;
mod room;
mod time;
mod timers;
mod type_usage;
mod view;

#[cfg(test)]
mod tests;

pub use crate::id::ProviderKey;
pub use cell::ports::PodPorts;
pub use cell::ports::PortTaken;
pub use cell::state::State;
pub use cell::timeline::{Step, Timeline};
pub use config::EngineConfig;
pub use costs::Account;
pub use effect::{Change, CommitOf, Effect, Event, Notice, RedeemNumber, RedeemRefusal};
pub use error::CellError;
pub use histogram::Histogram;
pub use launch::Launch;
pub use limits::budgets::{
    BudgetFigures, BudgetRefusal, NamespaceNeed, OrderNeed, RecordedShare, Spent,
};
pub use limits::{Limits, OverBudget};
pub use metrics::{BudgetMetrics, Metrics};
pub use offers::Offers;
pub use order::OrderSpec;
pub use pools::Pool;
pub use providers::{ProviderSetup, ProviderState, ProviderView};
pub use recovery::{Journal, JournalSandbox, Unusable};
pub use room::Room;
pub use time::Now;
pub use type_usage::{TypeKey, TypeUsage};
pub use view::{CellView, OrderView, PoolView};

use breaker::{Boot, BootKind, Breaker};
use cell::health::Health;
use cell::state::{CellEffect, CellEvent, EndStep, LaunchCall};
use cell::tags::ReportedPods;
use cell::tombstones::Tombstones;
use cell::{Cell, EndCallers};
use costs::Costs;
use evidence::Evidence;
use limits::Places;
use limits::budgets::Budgets;
use order::Order;
pub use order::start_times::StartTimes;
use order::starts::AllStarts;
use pools::Pools;
use providers::Providers;
use records::Unwritten;
use timers::{Timer, Timers};
use type_usage::EndedTypes;

/// The reason of a cell whose instance has ended.
const INSTANCE_ENDED: &str = "its instance ended";
/// The reason of a cell whose token was used with a second key.
const OTHER_KEY: &str = "its token was spent by another key";
/// The reason of a cell whose launch the provider refused; an earlier line has the provider's.
const REFUSED: &str = "its launch was refused";
/// The reason of a cell of which no instance was ever found.
const NO_INSTANCE: &str = "its launch had no answer, and made no instance";
/// The reason of a cell whose agent did not connect.
const SILENT: &str = "its agent did not connect in time";

/// The sources of what an engine can't compute.
pub trait Seams: fmt::Debug + Send {
    /// Fills a buffer with random bytes.
    fn random(&mut self, buffer: &mut [u8]) -> Result<(), NoRandomness>;
    /// Returns the boot data of the agent of a cell, perhaps on another machine; `None` while the
    /// daemon starts or stops.
    fn bootstrap(&self, cell: &CellId, token: &str, is_remote: bool) -> Option<Bootstrap>;
}

/// Effects with their cells; without a cell they depend on no other effect.
pub type Effects = Vec<(Option<CellId>, Effect)>;

/// The cells whose end is not proven.
type Cells = BTreeMap<CellId, Cell>;

/// All orders and cells.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    providers: Providers,
    seams: Box<dyn Seams>,
    cells: Cells,
    orders: BTreeMap<SandboxId, Order>,
    timers: Timers,
    health: Health,
    tombstones: Tombstones,
    costs: Costs,
    ended_types: EndedTypes,
    starts: AllStarts,
    start_times: StartTimes,
    places: Places,
    /// The pods that wait for spot since an earlier order.
    spot_waits: Places,
    pools: Pools,
    /// True while no cell is launched, because an operator wants it.
    is_cordoned: bool,
    /// The pods whose labels that are no tags were reported.
    reported: ReportedPods,
    /// The boots that never enrolled lately.
    breaker: Breaker,
    budgets: Budgets,
    /// The requests of the pods on the node that are not in cells.
    node_pods: NodeShare,
    unwritten: Unwritten,
    effects: Effects,
}

impl Engine {
    /// Returns an engine without cells. The providers are in the order in which equal offerings are
    /// preferred.
    pub fn new(config: EngineConfig, providers: Vec<ProviderSetup>, seams: Box<dyn Seams>) -> Self {
        Self {
            config,
            providers: Providers::new(providers),
            seams,
            cells: Cells::new(),
            orders: BTreeMap::new(),
            timers: Timers::default(),
            health: Health::default(),
            tombstones: Tombstones::default(),
            costs: Costs::default(),
            ended_types: EndedTypes::default(),
            starts: AllStarts::default(),
            start_times: StartTimes::default(),
            places: Places::default(),
            spot_waits: Places::default(),
            pools: Pools::default(),
            is_cordoned: false,
            reported: ReportedPods::default(),
            breaker: Breaker::default(),
            budgets: Budgets::default(),
            node_pods: NodeShare::default(),
            unwritten: Unwritten::default(),
            effects: Effects::new(),
        }
    }

    /// Handles an event, and returns its effects.
    pub fn handle(&mut self, event: Event, now: Now) -> Effects {
        match event {
            Event::CommitFailed { cell, of, changes, error, skipped } => match of {
                CommitOf::State => self.on_record_failed(&cell, error, skipped, now),
                CommitOf::Redeem(redemption) => {
                    let redeemed = self.cells.get_mut(&cell);
                    if let Some(token) = redeemed.and_then(|cell| cell.token.as_mut()) {
                        token.spent_by = None;
                    }
                    let refusal = RedeemRefusal::Store(error);
                    self.emit(&cell, Effect::AnswerRedeem(redemption, Err(refusal)));
                }
                CommitOf::Information => self.write_later(&cell, changes, now),
            },
            Event::Launched(cell, outcome) => self.on_launched(&cell, outcome, now),
            Event::Attached(cell, Ok(attached)) => {
                self.apply(&cell, CellEvent::Attached(attached), now);
            }
            Event::Attached(cell, Err(error)) => {
                let reason = reason_of(&error);
                self.fail(&cell, CellError::Provider(error));
                self.apply(&cell, CellEvent::AttachFailed(reason), now);
            }
            Event::ShutDown(cell, ended) => {
                let event = if ended { CellEvent::Shutdown } else { CellEvent::ShutdownFailed };
                self.apply(&cell, event, now);
            }
            Event::Detached(cell, Ok(())) => {
                self.on_detach_answered(&cell);
                self.apply(&cell, CellEvent::Detached, now);
            }
            Event::Detached(cell, Err(error)) => {
                self.on_detach_answered(&cell);
                self.refuse_end(&cell, error);
                self.apply(&cell, CellEvent::DetachFailed, now);
            }
            Event::Terminated { cell, outcome, console } => {
                self.on_terminated(&cell, outcome, console, now);
            }
            Event::Described(cell, outcome) => {
                let probe = outcome.clone();
                self.on_described(&cell, outcome, now);
                self.on_probed(&cell, &probe, now);
            }
            Event::Listed { provider, began, instances } => {
                self.on_listed(provider, began, instances, now);
            }
            Event::StraysEnded { provider, accepted, failed } => {
                self.on_strays_ended(provider, accepted, &failed, now);
            }
            Event::Connected(cell) => {
                self.on_connected(&cell, now);
                self.apply(&cell, CellEvent::Connected, now);
            }
            Event::Running(cell, time) => self.on_running(&cell, time, now),
            Event::Disconnected(cell) => self.on_disconnected(&cell, now),
            Event::Redeem { cell, token_sha256, key_sha256, redemption } => {
                self.on_redeem(&cell, &token_sha256, key_sha256, redemption, now);
            }
            Event::Reached(cell, step) => self.on_reached(&cell, step, now),
            Event::Terminate { cell, reason } => self.on_terminate(&cell, reason, now),
            Event::Joined(order) => self.on_joined(&order),
            Event::Abandoned(order) => self.on_abandoned(&order, now),
            Event::Tick => {}
        }
        while let Some(timer) = self.timers.pop_due(now.boot) {
            self.on_timer(timer, now);
        }
        self.fill_pools(now);
        self.release_providers();
        std::mem::take(&mut self.effects)
    }

    /// Returns the offerings of a provider that were refused lately, by [`Now::boot`].
    pub fn refusals(&self, key: ProviderKey) -> Refusals {
        self.providers.get(key).map(|provider| provider.refusals.clone()).unwrap_or_default()
    }

    /// Returns the time of the next timer, by [`Now::boot`].
    pub fn next_timer(&self) -> Option<Duration> {
        self.timers.next()
    }

    /// Applies an event to a cell's state machine, and its effects. Events of an unknown cell are
    /// ignored.
    fn apply(&mut self, id: &CellId, event: CellEvent, now: Now) {
        let Some(cell) = self.cells.get_mut(id) else { return };
        let before = std::mem::replace(&mut cell.state, State::Requested);
        let (state, effects) = before.on(event);
        cell.state = state;
        for effect in effects {
            self.perform(id, effect, now);
        }
        self.settle(id, now);
    }

    fn perform(&mut self, id: &CellId, effect: CellEffect, now: Now) {
        let Some(cell) = self.cells.get_mut(id) else { return };
        match effect {
            CellEffect::Record => {
                if matches!(cell.state, State::Bound { .. }) {
                    cell.was_bound = true;
                    self.reach(id, Step::Bound, now);
                }
                self.commit(id, CommitOf::State, now);
            }
            CellEffect::RecordIfPossible => self.commit(id, CommitOf::Information, now),
            CellEffect::Launch => {
                if let Some(request) = cell.state.open_launch().map(|it| Arc::clone(&it.request)) {
                    self.emit(id, Effect::Launch(request));
                }
            }
            CellEffect::Attach => {
                let Some(sandbox) = cell.order.waiting().cloned() else { return };
                let order = self.orders.get(&sandbox).filter(|order| order.is_wanted);
                let wanted = order.map(|order| Arc::clone(&order.wanted));
                if let (Some(instance), Some(wanted)) = (cell.state.instance().cloned(), wanted) {
                    let tags = self.tags_at_bind(id, &sandbox);
                    if let Some(pod) = self.cells.get_mut(id).and_then(|cell| cell.pod.as_mut()) {
                        pod.ports = wanted.pod_ports().map(Box::new);
                    }
                    let attachment = Box::new(Attachment::of(&wanted, &sandbox, tags));
                    self.emit(id, Effect::Attach(instance, attachment));
                }
            }
            CellEffect::ShutDown => self.emit(id, Effect::ShutDown),
            CellEffect::Detach => {
                // The answer to a call that has not ended serves as well.
                if let Some(instance) = cell.state.instance().cloned()
                    && let Some(end) = cell.state.end_mut()
                    && !std::mem::replace(&mut end.is_detaching, true)
                {
                    self.emit(id, Effect::Detach(instance));
                }
            }
            CellEffect::Terminate => {
                let instance = cell.state.instance().cloned();
                // The error of a failed launch has the end of the console.
                let with_console = cell.end.failure.is_some();
                let awaits_end = self.cells.get(id).is_some_and(|cell| self.awaits_end_of(cell));
                if instance.is_none() && !awaits_end {
                    // Only the listing can name it.
                    if let Some(State::Terminating(_, step)) =
                        self.cells.get_mut(id).map(|cell| &mut cell.state)
                    {
                        *step = EndStep::Lost;
                    }
                    return;
                }
                self.emit(id, Effect::Terminate { instance, with_console });
            }
            CellEffect::StartRetryTimer => {
                // The calls of another machine's provider are counted and paid for.
                let is_paced =
                    self.providers.of(cell).is_none_or(|provider| provider.capabilities.remote);
                let (attempts, grows) = match &mut cell.state {
                    State::Stopping(end, ..) | State::Terminating(end, EndStep::Backoff(_)) => {
                        (&mut end.failed_attempts, is_paced)
                    }
                    _ => (&mut cell.launch.replays, true),
                };
                let doublings = if grows { *attempts } else { 0 };
                *attempts = attempts.saturating_add(1);
                let pause = self.config.pause_after(doublings);
                self.timers.set(Timer::Retry(id.clone()), now.boot + pause);
            }
            CellEffect::PublishConnected => self.emit(id, Effect::PublishConnected),
            CellEffect::ReportIdle => self.on_idle(id, now),
            CellEffect::AnswerBound(network) => self.on_bound(id, network, now),
            CellEffect::AnswerNotTerminated => self.on_not_terminated(id),
            CellEffect::PublishEnded => self.on_ended(id, now),
        }
    }

    /// Sets and clears what depends on a cell's state, after each event.
    fn settle(&mut self, id: &CellId, now: Now) {
        let Some(cell) = self.cells.get(id) else { return };
        // No call of the launch had an effect: a replay would make an instance for nothing.
        if let State::Terminating(_, EndStep::Launching(call, launch)) = &cell.state
            && *call != LaunchCall::Pending
            && !launch.may_have_effect
        {
            return self.apply(id, CellEvent::NothingLaunched(NO_INSTANCE.into()), now);
        }
        if cell.state.awaits_replay() {
            let deadline = cell.token.as_ref().map_or(now.boot, |token| token.deadline);
            self.timers.set_once(Timer::Token(id.clone()), deadline);
        } else {
            self.timers.clear(&Timer::Token(id.clone()));
        }
        self.settle_health(id, now);
        let Some(cell) = self.cells.get(id) else { return };
        let capabilities = self.providers.of(cell).map(|provider| provider.capabilities);
        let awaits_end = self.awaits_end_of(cell);
        if cell.state.is_confirming()
            && let Some(provider) = self.providers.callee(cell)
        {
            let at = now.boot + provider.capabilities.listing_period;
            self.timers.set_once(Timer::Confirm(id.clone()), at);
        }
        if !awaits_end && cell.state.is_released() {
            // The pod has ended, and its instance ends behind it.
            if cell.end.callers == EndCallers::Waiting {
                self.answer_end(id, Ok(()));
            }
            self.wake_waiting_orders(now);
        } else if !awaits_end
            && capabilities.is_some_and(|capabilities| capabilities.orphan_timeout_is_proof())
            && matches!(cell.state, State::Terminating(..))
        {
            let at = now.boot + self.config.orphan_timeout;
            if self.timers.set_once(Timer::Orphan(id.clone()), at) {
                self.emit(id, Effect::Disconnect);
            }
        }
    }

    fn on_timer(&mut self, timer: Timer, now: Now) {
        match timer {
            Timer::Deadline(order) => self.on_order_deadline(&order, now),
            Timer::Abandoned(order) => self.on_abandoned_timeout(&order, now),
            Timer::Retry(cell) => self.apply(&cell, CellEvent::RetryDue, now),
            Timer::Token(cell) => self.apply(&cell, CellEvent::TokenExpired, now),
            Timer::Orphan(cell) => self.apply(&cell, CellEvent::OrphanTimeout, now),
            Timer::Health => self.check_health(now),
            Timer::Warm(cell) => self.on_warm_timer(&cell, now),
            // The pools are filled after each event.
            Timer::Pools => {}
            Timer::Rewrite => self.rewrite(now),
            Timer::Confirm(id) => {
                let cell = self.cells.get(&id).filter(|cell| cell.state.is_confirming());
                if let Some(instance) = cell.and_then(|cell| cell.state.instance().cloned()) {
                    self.emit(&id, Effect::Describe(instance));
                }
            }
        }
    }

    fn on_launched(&mut self, id: &CellId, outcome: Result<Instance, ProviderError>, now: Now) {
        let mut error = match outcome {
            Ok(instance) => return self.on_instance(id, &instance, now),
            Err(error) => error,
        };
        let launch = self.cells.get(id).and_then(|cell| cell.state.open_launch());
        let request = launch.map(|launch| Arc::clone(&launch.request));
        if let Some(request) = &request
            && error.class == ErrorClass::Quota
            && error.refusal.is_none()
        {
            // A quota is not of a single offering.
            let offerings = request.spec.offerings().cloned().collect();
            error.refusal = Some(LaunchRefusal::Offerings(offerings));
        }
        match error.class {
            // What the pod asked for is refused, and not the offerings of others.
            ErrorClass::Capacity | ErrorClass::Quota | ErrorClass::Invalid
                if error.is_of_request => {}
            // The account: other offerings would be refused, too.
            ErrorClass::Auth | ErrorClass::Quota if error.stops_launches() => {
                let until = now.boot + self.config.refusal_pause;
                let provider = self.cells.get(id).and_then(|cell| self.providers.of_mut(cell));
                if let (Some(request), Some(provider)) = (request, provider) {
                    provider.denials.add(&request.spec, error.clone(), until);
                }
            }
            ErrorClass::Capacity | ErrorClass::Quota | ErrorClass::Invalid => {
                self.avoid_refused(id, &error, now);
            }
            _ => {}
        }
        let is_local = self.cells.get(id).is_some_and(|cell| self.awaits_end_of(cell));
        let launch = self.cells.get_mut(id).and_then(|cell| cell.state.open_launch_mut());
        let Some(launch) = launch else { return };
        launch.may_have_effect |= error.class == ErrorClass::Unanswered;
        launch.error = Some(error.clone());
        let is_refusal = matches!(
            error.class,
            ErrorClass::Capacity | ErrorClass::Quota | ErrorClass::Auth | ErrorClass::Invalid
        );
        let may_be_launched = launch.may_have_effect && !is_local;
        let has_answer = match error.class {
            ErrorClass::Unanswered | ErrorClass::Throttled => false,
            ErrorClass::Ended => true,
            _ => is_local || (is_refusal && !may_be_launched),
        };
        if !has_answer {
            // The same call is repeated: with its token it makes one instance at most. A refusal
            // does not say what became of an earlier call without an answer.
            return self.apply(id, CellEvent::LaunchUnanswered, now);
        }
        // A local provider may leave parts of an instance.
        let event = if is_local {
            CellEvent::LaunchFailed(reason_of(&error))
        } else {
            CellEvent::NothingLaunched(REFUSED.into())
        };
        self.fail(id, CellError::Provider(error));
        self.apply(id, event, now);
    }

    /// Avoids what a cell's provider refuses by an error, for a while.
    fn avoid_refused(&mut self, id: &CellId, error: &ProviderError, now: Now) {
        let until = now.boot + self.config.refusal_pause;
        let provider = self.cells.get(id).and_then(|cell| self.providers.of_mut(cell));
        if let (Some(refused), Some(provider)) = (&error.refusal, provider) {
            let refusal = Refusal { until, reason: reason_of(error) };
            provider.refusals.add(refused, now.boot, &refusal);
        }
    }

    /// Takes the instance of a launch: the provider's answer or its list has it.
    fn on_instance(&mut self, id: &CellId, instance: &Instance, now: Now) {
        let Some(cell) = self.cells.get_mut(id) else { return };
        cell.instance_known = Some(now.boot);
        cell.bill.from = Some(now.boot);
        let order = cell.order.waiting().and_then(|sandbox| self.orders.get(sandbox));
        let types = order.and_then(Order::types);
        let offers = order.zip(cell.provider.as_deref()).and_then(|(it, key)| it.offers_of(key));
        let choice = offers.and_then(|offers| offers.choice.as_ref());
        let catalogue = choice.map(|choice| &*choice.catalogue);
        if !cell.launched(&instance.offering, types, catalogue)
            && let Some(candidate) = cell.offering().cloned()
        {
            self.emit(id, Effect::Log(Notice::NotRequested(candidate)));
        }
        self.reach(id, Step::Launched, now);
        self.count_enrolled_boot(id);
        self.apply(id, CellEvent::Launched(instance.id.clone()), now);
    }

    /// Takes the time for which a cell's PID 1 has run: from it follows when the cell booted. The
    /// cell is not older than its order, whatever its agent says.
    fn on_running(&mut self, id: &CellId, time: Duration, now: Now) {
        let Some(cell) = self.cells.get(id) else { return };
        if !cell.state.is_unbound() {
            return;
        }
        let created = u64::try_from(cell.created_unix_nanos).map_or(now.unix, Duration::from_nanos);
        let ago = time.min(now.unix.saturating_sub(created));
        self.reach(id, Step::Booted, now.earlier(ago));
    }

    /// Takes a step of a pod's start. The first container ends the timeline, and records it.
    fn on_reached(&mut self, id: &CellId, step: Step, now: Now) {
        let Some(cell) = self.cells.get_mut(id) else { return };
        let is_started = cell.timeline.at(Step::FirstContainer).is_some();
        // The cell of an older daemon has no timeline.
        if is_started || cell.timeline.at(Step::Bound).is_none() {
            return;
        }
        self.reach(id, step, now);
        if step == Step::FirstContainer {
            let Some(cell) = self.cells.get(id) else { return };
            let steps = cell.timeline.since(cell.created_unix_nanos).collect();
            self.emit(id, Effect::Log(Notice::Started(steps)));
            self.commit(id, CommitOf::Information, now);
        }
    }

    fn on_redeem(
        &mut self,
        id: &CellId,
        token_sha256: &str,
        key_sha256: String,
        redemption: RedeemNumber,
        now: Now,
    ) {
        if let Err(refusal) = self.check_redemption(id, token_sha256, Some(&key_sha256), now) {
            let is_alarm = matches!(refusal, RedeemRefusal::OtherKey);
            self.effects.push((None, Effect::AnswerRedeem(redemption, Err(refusal))));
            if is_alarm && self.cells.get(id).is_some_and(|cell| cell.state.is_unbound()) {
                self.fail(id, CellError::Ended(id.clone(), OTHER_KEY.to_owned()));
                self.apply(id, CellEvent::End(OTHER_KEY.into()), now);
            }
            return;
        }
        if let Some(token) = self.cells.get_mut(id).and_then(|cell| cell.token.as_mut())
            && token.spent_by.is_none()
        {
            token.spent_by = Some(key_sha256);
            self.reach(id, Step::Enrolled, now);
            self.count_enrolled_boot(id);
            self.commit(id, CommitOf::Redeem(redemption), now);
        }
        self.emit(id, Effect::AnswerRedeem(redemption, Ok(())));
    }

    /// Records the cause of a failed launch; the first stays.
    fn fail(&mut self, id: &CellId, failure: CellError) {
        if let Some(cell) = self.cells.get_mut(id)
            && cell.state.is_unbound()
            && cell.end.failure.is_none()
        {
            cell.note_failed_boot(&failure);
            cell.end.failure = Some(failure);
        }
    }

    fn emit(&mut self, id: &CellId, effect: Effect) {
        self.effects.push((Some(id.clone()), effect));
    }

    /// Commits the records of a cell and of its order.
    fn commit(&mut self, id: &CellId, of: CommitOf, now: Now) {
        let is_ended = self.cells.get(id).is_some_and(|cell| cell.state.is_ended());
        let cost = is_ended.then(|| self.settle_cost(id, now)).flatten();
        let mut changes: Vec<Change> = cost.into_iter().collect();
        let settled = self.cells.get_mut(id).and_then(|cell| cell.bill.settled.take());
        changes.extend(settled);
        let Some(cell) = self.cells.get(id) else { return };
        match &cell.state {
            State::Ended(_) if !cell.was_bound => changes.push(Change::Cell(id.clone(), None)),
            State::Ended(end) => {
                changes.push(Change::Cell(id.clone(), Some(Box::new(cell.stored()))));
                let dropped = self.tombstones.add(id.clone(), end.reason.to_string());
                changes.extend(dropped.into_iter().map(|cell| Change::Cell(cell, None)));
            }
            _ => changes.push(Change::Cell(id.clone(), Some(Box::new(cell.stored())))),
        }
        if let Some(sandbox) = cell.order.recorded() {
            let order = self
                .orders
                .get(sandbox)
                .filter(|order| order.state.cell() == Some(id) && cell.state.is_unbound());
            let record = order.map(|order| Box::new(order.stored(sandbox)));
            changes.push(Change::Order(sandbox.clone(), record));
        }
        self.emit(id, Effect::Commit { changes, of });
    }

    /// Returns the id of a new cell.
    fn cell_id(&mut self) -> Result<CellId, NoRandomness> {
        let mut random = [0_u8; CellId::RANDOM_BYTES];
        self.seams.random(&mut random)?;
        Ok(CellId::from_random(&random))
    }

    /// Returns a new token: 256 random bits in hexadecimal.
    fn token(&mut self) -> Result<String, NoRandomness> {
        let mut bytes = [0_u8; 32];
        self.seams.random(&mut bytes)?;
        Ok(hex::encode(bytes))
    }
}

fn reason_of(error: &ProviderError) -> Arc<str> {
    error.text().into()
}
