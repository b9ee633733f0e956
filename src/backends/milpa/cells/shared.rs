//! The engine with the callers that wait for it, and the tasks that carry out its effects.
//!
//! The effects of a cell are carried out one after the other by a task, which ends after the last
//! effect: an idle cell has no task. A call to the provider or the agent is a separate task, whose
//! outcome is the next event.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use futures::future::OptionFuture;
use kiyot_engine::{
    OrderKey, StoreError,
    engine::{
        CellError, Change, CommitOf, Effect, Effects, Engine, Event, Notice, Now, ProviderKey,
        RedeemRefusal,
    },
    id::{CellId, SandboxId},
    placement::Candidate,
    provider::{Attached, Provider, Termination},
};
use kiyot_link::log_limit::LogLimits;
use rustix::time::{ClockId, clock_gettime};
use tokio::{
    sync::{Notify, broadcast, oneshot},
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::Instrument;

use super::{
    super::{
        gateway::CellLink,
        store::{Batch, Store, Table},
    },
    CellEvent, Links,
    history::History,
    provider_calls,
    providers::{CellSource, CellSources, Configured},
};
use crate::metrics::Launches;

/// The capacity of the event channel, in events; a slower receiver lags and rereads everything.
const EVENT_CAPACITY: usize = 1024;

/// Callers that wait for an outcome.
type Waiters<T> = Vec<oneshot::Sender<Result<T, CellError>>>;
/// A bound cell, with its attachment to the pod's network.
type Bound = (CellId, Attached);

/// State shared by all tasks of cells.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) store: Store,
    pub(super) sources: CellSources,
    /// Counters of launches.
    pub(super) launches: Arc<Launches>,
    pub(super) links: Arc<OnceLock<Arc<dyn Links>>>,
    pub(super) core: Mutex<Core>,
    pub(super) events: broadcast::Sender<CellEvent>,
    /// The recent events, for operators.
    pub(super) history: History,
    /// Limits the connect events of each cell.
    connects: LogLimits<CellId>,
    /// Signals that an order asks for a larger share of a budget.
    pub(super) share_asked: Notify,
    /// Signals that the next timer has changed.
    timers_changed: Notify,
    pub(super) tasks: TaskTracker,
    pub(super) stop: CancellationToken,
}

/// The engine, and the callers and queues of its effects. Locked for short, synchronous steps only.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) engine: Engine,
    /// The effects of each cell that has a task, with the numbers of their events.
    queues: HashMap<CellId, VecDeque<(u64, Effect)>>,
    /// The number of the last event.
    event: u64,
    /// The number of the last redemption.
    redemption: u64,
    timer: Option<Duration>,
    pub(super) links: HashMap<CellId, CellLink>,
    pub(super) orders: HashMap<SandboxId, Waiters<Bound>>,
    pub(super) enders: HashMap<CellId, Waiters<()>>,
    redemptions: HashMap<u64, oneshot::Sender<Result<(), RedeemRefusal>>>,
    /// The number of calls that wait for the cell of an order, bounded by the calls that the CRI
    /// socket admits.
    pub(super) callers: HashMap<OrderKey, usize>,
    /// The time of each cell's launch by this daemon.
    launched: HashMap<CellId, Instant>,
    /// The providers of cells with effects: the engine may have dropped such a cell already.
    providers: HashMap<CellId, ProviderKey>,
}

impl Core {
    /// Returns the state of an engine without callers.
    pub(super) fn new(engine: Engine) -> Self {
        Self {
            engine,
            queues: HashMap::new(),
            event: 0,
            redemption: 0,
            timer: None,
            links: HashMap::new(),
            orders: HashMap::new(),
            enders: HashMap::new(),
            redemptions: HashMap::new(),
            callers: HashMap::new(),
            launched: HashMap::new(),
            providers: HashMap::new(),
        }
    }
}

impl Shared {
    /// Returns the state of a daemon's cells.
    pub(super) fn new(
        store: Store,
        providers: Vec<Configured>,
        links: Arc<OnceLock<Arc<dyn Links>>>,
        engine: Engine,
    ) -> Self {
        let stop = CancellationToken::new();
        Self {
            store,
            sources: CellSources::new(providers, stop.child_token()),
            launches: Arc::default(),
            links,
            core: Mutex::new(Core::new(engine)),
            events: broadcast::channel(EVENT_CAPACITY).0,
            history: History::default(),
            connects: LogLimits::default(),
            share_asked: Notify::new(),
            timers_changed: Notify::new(),
            tasks: TaskTracker::new(),
            stop,
        }
    }

    pub(super) fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes an event to the engine, and starts its effects.
    pub(super) fn handle(self: &Arc<Self>, event: Event) {
        self.with_core(|core, now| {
            if let Event::Terminated { cell, outcome: Ok(Termination::Accepted), .. } = &event
                && let Some(source) = self.source_of(core, cell)
            {
                source.list_soon.notify_one();
            }
            // With this lock, readers of the history see the event and its change of the cell
            // together.
            self.history.of_outcome(&event);
            ((), core.engine.handle(event, now))
        });
    }

    /// Calls the engine, and starts the effects under the same lock: the effects of a cell are
    /// queued in the order of its events.
    pub(super) fn with_core<T>(
        self: &Arc<Self>,
        call: impl FnOnce(&mut Core, Now) -> (T, Effects),
    ) -> T {
        let mut core = self.core();
        let (value, effects) = call(&mut core, now());
        self.dispatch(&mut core, effects);
        value
    }

    /// Spends a token for a key, and waits until the spent token is recorded.
    pub(super) async fn redeem(
        self: &Arc<Self>,
        cell: CellId,
        token_sha256: String,
        key_sha256: String,
    ) -> Result<(), RedeemRefusal> {
        let (answer, answered) = oneshot::channel();
        self.with_core(|core, now| {
            core.redemption += 1;
            let redemption = core.redemption;
            core.redemptions.insert(redemption, answer);
            let event = Event::Redeem { cell, token_sha256, key_sha256, redemption };
            ((), core.engine.handle(event, now))
        });
        answered.await.unwrap_or(Err(RedeemRefusal::Unknown))
    }

    fn dispatch(self: &Arc<Self>, core: &mut Core, effects: Effects) {
        core.event += 1;
        let event = core.event;
        for (cell, effect) in effects {
            let Some(cell) = cell else {
                self.perform_at_once(core, None, effect);
                continue;
            };
            if let Some(provider) = core.engine.provider_of(&cell) {
                core.providers.insert(cell.clone(), provider);
            }
            if let Some(queue) = core.queues.get_mut(&cell) {
                queue.push_back((event, effect));
                continue;
            }
            core.queues.insert(cell.clone(), VecDeque::from([(event, effect)]));
            self.spawn(&cell, Arc::clone(self).perform_all(cell.clone()));
        }
        if core.engine.has_new_ask() {
            self.share_asked.notify_one();
        }
        let timer = core.engine.next_timer();
        if timer != core.timer {
            core.timer = timer;
            self.timers_changed.notify_one();
        }
    }

    /// Runs a cell's work until it is done or the daemon stops.
    fn spawn(&self, cell: &CellId, work: impl Future<Output = ()> + Send + 'static) {
        let (stop, work) = (self.stop.clone(), Box::pin(work));
        // Only at debug level: at other levels, events name the cell themselves.
        let span = tracing::debug_span!(parent: None, "cell", %cell);
        let task = async move {
            stop.run_until_cancelled_owned(work).await;
        };
        self.tasks.spawn(task.instrument(span));
    }

    /// Runs a call to the provider or the agent, whose outcome is an event.
    fn call(self: &Arc<Self>, cell: &CellId, call: impl Future<Output = Event> + Send + 'static) {
        let shared = Arc::clone(self);
        self.spawn(cell, async move {
            let event = call.await;
            provider_calls::log(&event);
            shared.handle(event);
        });
    }

    /// Carries out the effects of a cell until its queue is empty.
    async fn perform_all(self: Arc<Self>, cell: CellId) {
        loop {
            let (event, effect) = {
                let mut core = self.core();
                let next = core.queues.get_mut(&cell).and_then(VecDeque::pop_front);
                let Some(next) = next else {
                    core.queues.remove(&cell);
                    return;
                };
                next
            };
            let Effect::Commit { changes, of } = effect else {
                self.perform_at_once(&mut self.core(), Some(&cell), effect);
                continue;
            };
            if let Err(error) = self.commit(&changes).await {
                self.on_commit_failed(&cell, event, of, changes, error);
            }
        }
    }

    /// Skips the effects that depend on a failed commit.
    fn on_commit_failed(
        self: &Arc<Self>,
        cell: &CellId,
        event: u64,
        of: CommitOf,
        changes: Vec<Change>,
        error: StoreError,
    ) {
        let log: &dyn std::error::Error = &error;
        match of {
            CommitOf::State => {
                tracing::error!(%cell, error = log, "cell state not recorded, cell ends");
            }
            CommitOf::Redeem(_) => {
                tracing::error!(%cell, error = log, "spent token of a cell not recorded");
            }
            CommitOf::Information => {
                tracing::error!(%cell, error = log, "end of cell not recorded");
            }
        }
        self.with_core(|core, now| {
            let mut skipped = Vec::new();
            if let Some(queue) = core.queues.get_mut(cell) {
                let depends =
                    |(number, effect): &mut (u64, Effect)| *number == event && of.skips(effect);
                while let Some((_, effect)) = queue.pop_front_if(depends) {
                    skipped.push(effect);
                }
            }
            let error = Arc::new(error);
            let failed = Event::CommitFailed { cell: cell.clone(), of, changes, error, skipped };
            ((), core.engine.handle(failed, now))
        });
    }

    pub(super) async fn commit(&self, changes: &[Change]) -> Result<(), StoreError> {
        let mut batch = Batch::default();
        for change in changes {
            match change {
                Change::Cell(id, Some(record)) => {
                    batch.put(Table::Cells, id.as_str(), record.as_ref())
                }
                Change::Cell(id, None) => batch.remove(Table::Cells, id.as_str()),
                Change::Order(id, Some(record)) => {
                    batch.put(Table::Orders, id.as_str(), record.as_ref())
                }
                Change::Order(id, None) => batch.remove(Table::Orders, id.as_str()),
                Change::Cost(namespace, cost) => batch.put(Table::Costs, namespace, cost),
            };
        }
        self.store.commit(batch).await
    }

    /// Creates the link of a cell, if it has none.
    pub(super) fn ensure_link(&self, core: &mut Core, cell: &CellId) {
        if let Some(links) = self.links.get() {
            core.links.entry(cell.clone()).or_insert_with(|| links.link(cell));
        }
    }

    /// Returns the provider of a cell, if it is configured.
    pub(super) fn source_of(&self, core: &Core, cell: &CellId) -> Option<Arc<CellSource>> {
        self.sources.get(core.engine.provider_of(cell)?)
    }

    /// Carries out an effect that needs no waiting, or starts its call.
    fn perform_at_once(self: &Arc<Self>, core: &mut Core, cell: Option<&CellId>, effect: Effect) {
        let key = cell.and_then(|cell| core.providers.get(cell));
        let source = key.and_then(|key| self.sources.get(key));
        let provider = source.map(|source| Arc::clone(&source.provider));
        match (effect, cell) {
            (Effect::AnswerRedeem(redemption, outcome), _) => {
                if let Some(answer) = core.redemptions.remove(&redemption) {
                    let _closed = answer.send(outcome);
                }
            }
            (Effect::AnswerOrder(order, outcome), cell) => {
                self.answer_order(core, cell, &order, &outcome);
            }
            (Effect::EndStrays(key, instances), _) => {
                let Some(source) = self.sources.get(key) else { return };
                tracing::warn!(provider = key, ?instances, "terminating stray instances");
                let (shared, provider) = (Arc::clone(self), Arc::clone(&source.provider));
                let stop = source.stop.clone();
                self.tasks.spawn(async move {
                    let ending = provider_calls::end_strays(provider, instances);
                    if let Some(event) = stop.run_until_cancelled_owned(ending).await {
                        shared.handle(event);
                    }
                });
            }
            (Effect::ReleaseProvider(key), _) => {
                tracing::info!(provider = key, "removed provider has no cells any more");
                self.sources.release(key);
            }
            (Effect::Log(notice), cell) => {
                if let (Notice::Taken { .. }, Some(cell)) = (&notice, cell) {
                    core.launched.insert(cell.clone(), Instant::now());
                }
                self.history.of_notice(cell, &notice);
                log(cell, &notice);
            }
            (
                effect @ (Effect::Launch(_)
                | Effect::Attach(..)
                | Effect::Detach(_)
                | Effect::Terminate { .. }
                | Effect::Describe(_)),
                Some(cell),
            ) => match provider {
                Some(provider) => self.call_provider(core, cell, provider, effect),
                None => self.call(cell, provider_calls::unconfigured(cell.clone(), effect)),
            },
            (Effect::ShutDown, Some(cell)) => {
                let (links, cell_of_call) = (self.links.get().cloned(), cell.clone());
                self.call(cell, async move {
                    let ended = match links {
                        Some(links) => links.shut_down(&cell_of_call).await,
                        None => false,
                    };
                    Event::ShutDown(cell_of_call, ended)
                });
            }
            (Effect::AnswerEnd(outcome), Some(cell)) => {
                for ender in core.enders.remove(cell).unwrap_or_default() {
                    let _closed = ender.send(outcome.clone().map_err(CellError::Provider));
                }
            }
            (Effect::Disconnect, Some(cell)) => {
                if let Some(links) = self.links.get() {
                    links.forget(cell);
                }
            }
            (Effect::PublishConnected, Some(cell)) => {
                // A cell that reconnects endlessly would push out the events of all others.
                if self.connects.admit(cell).is_some() {
                    self.history.of_cell(cell, "Connected", "");
                }
                self.publish(CellEvent::Connected(cell.clone()));
            }
            (Effect::PublishWarm, Some(cell)) => self.publish(CellEvent::Warm(cell.clone())),
            (Effect::PublishEnded(reason), Some(cell)) => {
                tracing::info!(%cell, %reason, "cell ended");
                self.history.of_cell(cell, "Ended", &reason);
                core.links.remove(cell);
                core.launched.remove(cell);
                core.providers.remove(cell);
                if let Some(links) = self.links.get() {
                    links.forget(cell);
                }
                self.publish(CellEvent::Gone { cell: cell.clone(), reason: reason.to_string() });
            }
            // The queue awaits commits, and every other effect has a cell.
            (_, _) => {}
        }
    }

    /// Starts a call to the provider of a cell.
    fn call_provider(
        self: &Arc<Self>,
        core: &mut Core,
        cell: &CellId,
        provider: Arc<dyn Provider>,
        effect: Effect,
    ) {
        let id = cell.clone();
        match effect {
            Effect::Launch(launch) => {
                self.ensure_link(core, cell);
                self.history.of_cell(cell, "Launching", "");
                core.launched.entry(id).or_insert_with(Instant::now);
                let launches = Arc::clone(&self.launches);
                self.call(cell, provider_calls::launch(provider, launch, launches));
            }
            Effect::Attach(instance, attachment) => {
                let peer = self.links.get().and_then(|links| links.peer_address(cell));
                let call = provider_calls::attach(provider, id, instance, attachment, peer);
                self.call(cell, call);
            }
            Effect::Detach(instance) => {
                self.call(cell, provider_calls::detach(provider, id, instance));
            }
            Effect::Terminate { instance, with_console } => {
                let call = provider_calls::terminate(provider, id, instance, with_console);
                self.call(cell, call);
            }
            Effect::Describe(instance) => {
                self.call(cell, provider_calls::describe(provider, id, instance));
            }
            // No other effect calls a provider.
            _ => {}
        }
    }

    fn answer_order(
        &self,
        core: &mut Core,
        cell: Option<&CellId>,
        order: &SandboxId,
        outcome: &Result<Attached, CellError>,
    ) {
        let waiters = core.orders.remove(order).unwrap_or_default();
        if let (Ok(Attached { addresses, .. }), Some(cell)) = (outcome, cell) {
            let elapsed = core.launched.remove(cell).map(|launched| launched.elapsed());
            let elapsed_ms = elapsed.unwrap_or_default().as_millis();
            tracing::info!(%cell, ?addresses, elapsed_ms, "cell bound");
            let named: Vec<_> = addresses.iter().map(ToString::to_string).collect();
            self.history.of_cell(cell, "Bound", &named.join(", "));
            if waiters.iter().all(oneshot::Sender::is_closed) {
                tracing::info!(%cell, "cell bound without a caller");
            }
        }
        for waiter in waiters {
            let outcome = match (outcome, cell) {
                (Ok(attached), Some(cell)) => Ok((cell.clone(), attached.clone())),
                (Ok(_), None) => continue,
                (Err(error), _) => Err(error.clone()),
            };
            let _closed = waiter.send(outcome);
        }
    }

    fn publish(&self, event: CellEvent) {
        let _nobody_listens = self.events.send(event);
    }

    /// Wakes the engine at its timers, until the daemon stops.
    pub(super) async fn run_timers(self: Arc<Self>) {
        loop {
            let next = self.core().engine.next_timer();
            let wait = next.map(|next| next.saturating_sub(now().boot));
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = self.timers_changed.notified() => {}
                Some(()) = OptionFuture::from(wait.map(tokio::time::sleep)) => {
                    self.handle(Event::Tick);
                }
            }
        }
    }
}

/// Returns the current time by the node's clocks.
pub(super) fn now() -> Now {
    let boot = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(boot.tv_sec).unwrap_or_default();
    let nanos = u32::try_from(boot.tv_nsec).unwrap_or_default();
    Now {
        boot: Duration::new(seconds, nanos),
        unix: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
    }
}

fn log(cell: Option<&CellId>, notice: &Notice) {
    let cell = cell.map(tracing::field::display);
    match notice {
        Notice::InstanceEnded(reason) => {
            let reason = reason.as_deref().unwrap_or_default();
            tracing::warn!(cell, reason, "cell instance ended");
        }
        Notice::Joined(order) => {
            tracing::info!(cell, sandbox = %order, "call joins the launch of its pod's cell");
        }
        Notice::Waits(order) => {
            tracing::info!(
                cell,
                sandbox = %order,
                "cell launch waits for the end of the pod's previous cell"
            );
        }
        Notice::StartsLate { sandbox, within, fastest } => {
            tracing::warn!(
                cell,
                %sandbox,
                within_s = within.as_secs(),
                fastest_s = fastest.as_secs_f64(),
                "no offering is known to start within the time that the pod asks for"
            );
        }
        Notice::Warm(pool) => tracing::info!(cell, %pool, "cell waits in its warm pool"),
        Notice::JoinedPool(pool) => {
            tracing::info!(cell, %pool, "cell without a caller joins a warm pool");
        }
        Notice::Taken { sandbox, pool } => {
            tracing::info!(cell, %sandbox, %pool, "pod takes a cell of a warm pool");
        }
        Notice::PoolFailed { pool, reason, seconds } => {
            tracing::warn!(cell, %pool, reason, retry_s = seconds, "warm pool not filled");
        }
        Notice::LaunchesPaused { reason, seconds } => {
            tracing::warn!(cell, %reason, pause_s = seconds, "launches of cells pause in a zone");
        }
        Notice::NotRequested(Candidate { offering, price, .. }) => {
            tracing::warn!(cell, %offering, %price, "provider launched what was not requested");
        }
        Notice::Resumed => tracing::info!(cell, "launch of a cell resumed after a restart"),
        Notice::Started(steps) => {
            let steps = steps.iter().map(|(step, millis)| format!("{step}={millis}ms"));
            let steps = steps.collect::<Vec<_>>().join(" ");
            tracing::info!(cell, steps, "first container of a cell started");
        }
        Notice::Outage { absent, expected, cluster, node } => {
            tracing::warn!(
                absent,
                expected,
                cluster,
                node,
                "many instances not found, taken for an outage"
            );
        }
        Notice::Lost { seconds } => {
            tracing::warn!(
                cell,
                silent_s = seconds,
                "cell agent silent for too long, cell is lost"
            );
        }
        Notice::CutOff { silent, all } => {
            tracing::warn!(
                silent,
                all,
                "many cells silent, taken for a node that is cut off, no cell is lost"
            );
        }
        Notice::CutOffOver => tracing::info!("mass silence is over"),
        Notice::LabelsLeftOut { pod, left_out } => {
            tracing::warn!(cell, pod, labels = %left_out, "labels left out of the cell's tags");
        }
        Notice::Foreign(instance) => {
            tracing::error!(
                %instance,
                "instance of this owner was launched by another daemon, no cell is launched"
            );
        }
    }
}
