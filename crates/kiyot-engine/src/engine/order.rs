//! Orders: a pod needs a cell, until a cell is bound to it.
//!
//! An order waits while another cell of its pod may run containers. Then it is placed on a new or a
//! warm cell. It gets another cell if the launch fails for a reason that another launch may avoid.
//! A repeated call of the kubelet joins the order of the first call, even after a restart of the
//! daemon.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use kiyot_proto::store;
use kiyot_values::error_chain::error_chain;

use crate::{
    engine::{
        Boot, BootKind, CellError, CellEvent, CommitOf, Effect, Engine, LaunchCall, Notice, Now,
        Offers, ProviderKey, SILENT, State,
        cell::{Cell, CellLaunch, CellOrder, Pod, Token, earlier::EarlierLaunches, timeline},
        launch::{Launch, parameters_digest},
        providers::Provider,
        sha256,
        timers::Timer,
    },
    id::{CellId, SandboxId},
    placement::{Candidate, Choice, LaunchRefusal, Ranked},
    provider::{Attached, ErrorClass, LaunchSpec, PodNetwork, ProviderError},
    wanted::{OrderKey, Wanted},
};

pub(super) mod abandoned;
pub(super) mod market;
pub(super) mod start_times;
pub(super) mod starts;

/// The end reason of a cell that was not launched in time.
const NOT_LAUNCHED: &str = "its launch failed until its time limit passed";
/// The request counts as wrong if this many instance types are refused with the same code.
const MAX_REFUSED_TYPES: usize = 3;
/// Bounds the text of a failed launch in the error of its order, in characters.
const MAX_CAUSE_CHARS: usize = 1000;

/// A call's order: a cell for a pod.
#[derive(Debug, Clone)]
pub struct OrderSpec {
    /// The wishes of the pod.
    pub wanted: Arc<Wanted>,
    /// The id of the sandbox, unless the call joins another order.
    pub sandbox: SandboxId,
    /// The offers of the providers for the pod, in the configured order.
    pub offers: Vec<Offers>,
    /// The time that the caller has; bounded by `launch_timeout`.
    pub timeout: Option<Duration>,
    /// True while a call waits for the cell.
    pub is_joined: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum OrderState {
    /// Waiting: for the end of other cells of its pod, for a boot, or for a larger share.
    Waiting,
    /// Placed on a cell, which was launched for it or taken from a warm pool.
    Placed(CellId),
}

#[derive(Debug)]
pub(super) struct Order {
    pub(super) wanted: Arc<Wanted>,
    /// True once a call of this daemon has ordered the cell. Until then, an order of a previous
    /// daemon only continues its recorded launch.
    pub(super) is_wanted: bool,
    /// The offers of the providers for its pod, without the refused offerings.
    pub(super) offers: Vec<Offers>,
    pub(super) state: OrderState,
    /// The number of cells that were launched for it.
    pub(super) launches: u32,
    /// The errors of its failed launches.
    pub(super) causes: Vec<String>,
    /// The instance types that were refused, by the provider's code.
    pub(super) refused_types: BTreeMap<Arc<str>, BTreeSet<String>>,
    /// True if a launch that could have been on spot failed.
    pub(super) spot_failed: bool,
    /// The time at which the first call began.
    pub(super) began: Duration,
    /// The time since which its pod waits for a cell.
    pub(super) queued_since: Duration,
    /// The time since which its pod waits for spot, if it prefers spot.
    pub(super) spot_since: Duration,
    /// The time at which the last call gives up.
    pub(super) deadline: Duration,
    /// True while a call waits for the cell.
    pub(super) is_joined: bool,
}

/// A failed launch of an order.
struct FailedLaunch {
    cell: CellId,
    /// The provider; `None` if no provider looks in the cell's place.
    provider: Option<ProviderKey>,
    error: CellError,
    was_for_spot: bool,
    is_ended_by_caller: bool,
}

impl FailedLaunch {
    fn of(cell: &mut Cell, order: Option<&Order>, provider: Option<ProviderKey>) -> Self {
        Self {
            provider,
            error: failure_of(cell, order),
            cell: cell.id.clone(),
            was_for_spot: cell.was_for_spot(),
            is_ended_by_caller: cell.end.is_by_caller(),
        }
    }
}

impl OrderState {
    pub(super) fn cell(&self) -> Option<&CellId> {
        match self {
            Self::Waiting => None,
            Self::Placed(cell) => Some(cell),
        }
    }
}

impl Order {
    /// Counts the refusal of an instance type. Returns whether another type may be allowed. If
    /// several types are refused with the same code, the request is wrong.
    fn takes_another_type(&mut self, error: &ProviderError) -> bool {
        let Some(LaunchRefusal::Type { code, offerings }) = &error.refusal else { return false };
        let types = self.refused_types.entry(Arc::clone(code)).or_default();
        types.extend(offerings.iter().map(|offering| offering.instance_type.clone()));
        types.len() < MAX_REFUSED_TYPES
    }

    pub(super) fn stored(&self, sandbox: &SandboxId) -> store::Order {
        let Wanted { key, identity, .. } = &*self.wanted;
        store::Order {
            sandbox: sandbox.as_str().to_owned(),
            pod_uid: key.pod_uid.clone(),
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            attempt: key.attempt,
            identity: identity.clone(),
            cell: self.state.cell().map(ToString::to_string).unwrap_or_default(),
            launches: self.launches,
        }
    }
}

impl Engine {
    /// Adds an order, or joins the order of an earlier call for the same sandbox. The order is
    /// answered under the returned id of the sandbox.
    pub fn order(&mut self, spec: OrderSpec, now: Now) -> (SandboxId, super::Effects) {
        let timeout = self.config.launch_timeout;
        let timeout = spec.timeout.map_or(timeout, |wanted| wanted.min(timeout));
        let deadline = now.boot + timeout;
        let Wanted { key, identity, .. } = &*spec.wanted;
        let open = self.orders.iter().find(|(_, order)| order.wanted.key == *key);
        let open =
            open.map(|(sandbox, order)| (sandbox.clone(), order.wanted.identity == *identity));
        let sandbox = match open {
            Some((sandbox, true)) => {
                self.join(&sandbox, spec, deadline, now);
                sandbox
            }
            other => {
                if let Some((replaced, _)) = other {
                    self.replace(&replaced, now);
                }
                let sandbox = spec.sandbox.clone();
                let queued_since = self.places.take(&key.pod_uid, now.boot);
                let spot_since = self.spot_waits.take(&key.pod_uid, now.boot);
                let order = Order {
                    wanted: spec.wanted,
                    is_wanted: true,
                    offers: spec.offers,
                    state: OrderState::Waiting,
                    launches: 0,
                    causes: Vec::new(),
                    refused_types: BTreeMap::new(),
                    spot_failed: false,
                    began: now.boot,
                    queued_since,
                    spot_since,
                    deadline,
                    is_joined: spec.is_joined,
                };
                self.orders.insert(sandbox.clone(), order);
                self.timers.set(Timer::Deadline(sandbox.clone()), deadline);
                self.limit_abandoned(&sandbox, now);
                self.end_unordered_cells_of(&sandbox, now);
                self.place(&sandbox, now);
                if let Some(blocking) = self.waited_for(&sandbox) {
                    self.emit(&blocking, Effect::Log(Notice::Waits(sandbox.clone())));
                }
                sandbox
            }
        };
        let effects = self.handle(super::Event::Tick, now);
        (sandbox, effects)
    }

    /// Ends the order of a sandbox if its identity has changed and its cell is not being attached.
    pub fn end_changed_order(
        &mut self,
        key: &OrderKey,
        identity: &str,
        now: Now,
    ) -> super::Effects {
        let mut orders = self.orders.iter();
        let changed = orders
            .find(|(_, Order { wanted, .. })| wanted.key == *key && wanted.identity != identity);
        if let Some(sandbox) = changed.map(|(sandbox, _)| sandbox.clone()) {
            let cell = self.cell_of_order(&sandbox).and_then(|cell| self.cells.get(cell));
            if !cell.is_some_and(|cell| matches!(cell.state, State::Binding { .. })) {
                self.replace(&sandbox, now);
            }
        }
        self.handle(super::Event::Tick, now)
    }

    /// Returns whether a call for this sandbox would join an order.
    pub fn has_order(&self, Wanted { key, identity, .. }: &Wanted) -> bool {
        let mut ordered = self.orders.values().map(|order| &order.wanted);
        ordered.any(|ordered| ordered.key == *key && ordered.identity == *identity)
    }

    /// Returns the cell of an order.
    pub fn cell_of_order(&self, sandbox: &SandboxId) -> Option<&CellId> {
        self.orders.get(sandbox)?.state.cell()
    }

    /// Returns the cell whose end a waiting order waits for.
    fn waited_for(&self, sandbox: &SandboxId) -> Option<CellId> {
        let order = self.orders.get(sandbox)?;
        let waits = order.state == OrderState::Waiting;
        waits.then(|| self.blocking_cell(&order.wanted.key.pod_uid).cloned())?
    }

    fn join(&mut self, sandbox: &SandboxId, spec: OrderSpec, deadline: Duration, now: Now) {
        let Some(order) = self.orders.get_mut(sandbox) else { return };
        (order.wanted, order.is_wanted) = (spec.wanted, true);
        order.renew_offers(spec.offers);
        order.deadline = deadline;
        order.is_joined = spec.is_joined;
        self.timers.set(Timer::Deadline(sandbox.clone()), deadline);
        let cell = order.state.cell().cloned();
        self.limit_abandoned(sandbox, now);
        self.effects.push((cell.clone(), Effect::Log(Notice::Joined(sandbox.clone()))));
        if let Some(cell) = cell {
            self.apply(&cell, CellEvent::Bind, now);
        }
    }

    /// Ends an order whose pod has changed, and its cell.
    fn replace(&mut self, sandbox: &SandboxId, now: Now) {
        const REASON: &str = "its pod was changed while the cell was launched";
        let Some(cell) = self.cell_of_order(sandbox).cloned() else {
            return self.answer_order(None, sandbox, Err(CellError::Replaced(REASON)));
        };
        self.release(&cell, REASON, now);
    }

    /// Releases or ends the pod's unbound cells of earlier orders, and retries the termination of
    /// terminating cells.
    fn end_unordered_cells_of(&mut self, sandbox: &SandboxId, now: Now) {
        let Some(order) = self.orders.get(sandbox) else { return };
        let others: Vec<CellId> = self
            .cells
            .values()
            .filter(|cell| {
                is_of_pod(cell, &order.wanted.key.pod_uid)
                    && (cell.state.is_unbound() || matches!(cell.state, State::Terminating { .. }))
            })
            .map(|cell| cell.id.clone())
            .collect();
        for cell in others {
            const REASON: &str = "its pod gets another cell";
            if self.lacking_pool(&cell).is_some() {
                self.release(&cell, REASON, now);
            } else {
                self.apply(&cell, CellEvent::End(REASON.into()), now);
            }
        }
    }

    /// Takes a warm cell or launches a cell for an order, unless another cell of the pod may run
    /// containers or a limit is reached.
    pub(super) fn place(&mut self, sandbox: &SandboxId, now: Now) {
        let Some(order) = self.orders.get(sandbox) else { return };
        if order.state != OrderState::Waiting || !order.is_wanted {
            return;
        }
        if self.blocking_cell(&order.wanted.key.pod_uid).is_some() {
            return;
        }
        // The strays of other providers can't run a pod: without a record of the cell, no agent
        // enrols.
        let may_run_in_stray = self.providers.iter().any(|provider| {
            provider.capabilities.awaits_ends()
                && provider.evidence.may_run_in_stray(&order.wanted.key.pod_uid)
        });
        if may_run_in_stray {
            return;
        }
        if let Some(instance) = self.all_foreign() {
            let error = CellError::Foreign(instance.clone());
            return self.answer_order(None, sandbox, Err(error));
        }
        if self.take_warm_cell(sandbox, now) {
            return;
        }
        let Some(order) = self.orders.get(sandbox) else { return };
        let ranked = match self.launchable(&order.offers, now) {
            Ok(ranked) => self.of_resolved(&order.wanted.key.pod_uid, ranked),
            Err(error) => return self.answer_order(None, sandbox, Err(error)),
        };
        let ranked = self.of_market(&ranked, order.spot_since, now);
        let ranked = self.by_start(&order.wanted, ranked);
        let Some(preferred) = ranked.first().map(|ranked| ranked.provider) else { return };
        if self.cells.len() >= self.config.limits.max_cells {
            if self.give_way(now) {
                return;
            }
            let full = self.config.limits.full(&self.cells);
            return self.answer_order(None, sandbox, Err(full));
        }
        if !self.may_boot(preferred) {
            return;
        }
        let namespace = Some(order.wanted.key.namespace.as_str());
        let (limits, cells) = (self.config.limits, &self.cells);
        let affordable = limits.affordable(cells, namespace, &ranked);
        if affordable.is_err()
            && limits.affords_without_pools(cells, namespace, &ranked)
            && self.give_way(now)
        {
            return;
        }
        let launched = affordable
            .map_err(CellError::OverBudget)
            .and_then(|ranked| Ok(self.within_shares(sandbox, ranked)?));
        let launched = match launched {
            Ok(None) => return,
            Ok(Some(ranked)) => self.launch(sandbox, ranked, now),
            Err(error) => Err(error),
        };
        if let Err(error) = launched {
            self.answer_order(None, sandbox, Err(error));
        }
    }

    /// Returns a cell of a pod whose launch has no answer yet.
    fn unresolved(&self, pod_uid: &str) -> Option<&Cell> {
        let mut cells = self.cells.values();
        cells.find(|cell| is_of_pod(cell, pod_uid) && cell.state.has_open_launch())
    }

    /// Returns the offerings that may be launched for a pod: beside an unresolved launch, only
    /// offerings of its provider. Another provider is tried once the absence of an instance is
    /// proven.
    fn of_resolved(&self, pod_uid: &str, mut ranked: Vec<Ranked>) -> Vec<Ranked> {
        let unresolved = self.unresolved(pod_uid);
        if let Some(provider) = unresolved.and_then(|cell| self.providers.callee(cell)) {
            ranked.retain(|ranked| ranked.provider == provider.key());
        }
        ranked
    }

    fn launch(
        &mut self,
        sandbox: &SandboxId,
        mut ranked: Vec<Ranked>,
        now: Now,
    ) -> Result<(), CellError> {
        let Some(order) = self.orders.get(sandbox) else { return Ok(()) };
        let mut denied = Vec::new();
        while let Some((provider, candidates)) = Ranked::first_run(&ranked) {
            let within = order.wanted.request.start_within;
            let beyond = within.and_then(|it| Some((it, self.start_times.beyond(&ranked, it)?)));
            let Some(offers) = order.offers_of(provider) else { break };
            let denials = self.providers.get(provider).map(|provider| &provider.denials);
            let denial = denials.and_then(|it| it.of_kind(&offers.parameters, &candidates, now));
            if let Some(denial) = denial {
                denied.push((provider, denial.error(now)));
                ranked.retain(|ranked| ranked.provider != provider);
                continue;
            }
            let (wanted, parameters) = (Arc::clone(&order.wanted), offers.parameters.clone());
            let share = offers.choice.as_ref().and_then(Choice::share).unwrap_or_default();
            let kind = self.boot_kind(offers);
            let (cell, request) =
                self.new_cell(provider, candidates, parameters, kind, &wanted, now)?;
            self.count_miss(sandbox);
            let Some(order) = self.orders.get_mut(sandbox) else { return Ok(()) };
            order.launches += 1;
            order.state = OrderState::Placed(cell.id.clone());
            let cell = Cell {
                order: CellOrder::Waiting(sandbox.clone()),
                pod: Some(Pod::of_order(sandbox, &order.wanted)),
                earlier: EarlierLaunches::new(&order.causes, order.spot_failed),
                share,
                ..cell
            };
            if let Some((within, fastest)) = beyond {
                let notice = Notice::StartsLate { sandbox: sandbox.clone(), within, fastest };
                self.emit(&cell.id, Effect::Log(notice));
            }
            self.begin(cell, request, now);
            return Ok(());
        }
        CellError::of_providers(denied).map_or(Ok(()), Err)
    }

    /// Returns a cell that is not launched yet, and the request of its launch.
    pub(super) fn new_cell(
        &mut self,
        key: ProviderKey,
        candidates: Vec<Candidate>,
        parameters: BTreeMap<String, String>,
        kind: BootKind,
        wanted: &Wanted,
        now: Now,
    ) -> Result<(Cell, Arc<Launch>), CellError> {
        let id = self.cell_id()?;
        let (token, enrolment) = (self.token()?, self.token()?);
        let provider = self.providers.get(key);
        let is_remote = provider.is_some_and(|provider| provider.capabilities.remote);
        let bootstrap = self.seams.bootstrap(&id, &enrolment, is_remote);
        let bootstrap = bootstrap.ok_or(CellError::Starting)?;
        let has_tags = provider.is_some_and(|provider| provider.capabilities.has_tags);
        let place = provider.and_then(|provider| provider.place.clone());
        let tags = self.tags_for(&id, wanted, has_tags);
        let parameters_sha256 = parameters_digest(&parameters);
        let spec = LaunchSpec { cell: id.clone(), candidates, tags, bootstrap, parameters };
        let request = Arc::new(Launch { token, spec });
        let launch = CellLaunch {
            request: Some(Arc::clone(&request)),
            parameters_sha256,
            boot: Some(Boot::new(kind, now)),
            ..CellLaunch::default()
        };
        let cell = Cell {
            launch,
            provider: Some(key.into()),
            place,
            boot_id: self.config.boot_id.clone(),
            created_unix_nanos: timeline::nanos(now.unix),
            requested: Some(now.boot),
            token: Some(Token::new(sha256(enrolment.as_bytes()), self.config.token_ttl, now)),
            ..Cell::new(id, State::Requested)
        };
        Ok((cell, request))
    }

    /// Launches a new cell.
    pub(super) fn begin(&mut self, cell: Cell, request: Arc<Launch>, now: Now) {
        let id = cell.id.clone();
        self.cells.insert(id.clone(), cell);
        self.apply(&id, CellEvent::Created(request), now);
    }

    /// Returns a cell in which containers of a pod may run, or that holds parts of the node for the
    /// pod.
    pub(super) fn blocking_cell(&self, pod_uid: &str) -> Option<&CellId> {
        self.blocking_cells(pod_uid).next()
    }

    /// Returns the cells in which containers of a pod may run, or that hold parts of the node for
    /// the pod.
    pub fn blocking_cells(&self, pod_uid: &str) -> impl Iterator<Item = &CellId> {
        self.cells
            .values()
            .filter(move |cell| {
                is_of_pod(cell, pod_uid) && (self.awaits_end_of(cell) || !cell.state.is_released())
            })
            .map(|cell| &cell.id)
    }

    /// Binds an idle cell to the pod of its order. If no call waits for the cell, it joins a warm
    /// pool that lacks a cell, and a later call takes it from the pool.
    pub(super) fn on_idle(&mut self, id: &CellId, now: Now) {
        let order = self.cells.get(id).and_then(|cell| cell.order.waiting());
        let order = order.and_then(|order| self.orders.get(order));
        let order = order.filter(|order| order.is_wanted);
        if let Some(order) = order {
            if !order.is_joined && self.lacking_pool(id).is_some() {
                return self.release(id, "no call waits for the cell", now);
            }
            self.apply(id, CellEvent::Bind, now);
        } else {
            self.commit(id, CommitOf::State, now);
            self.on_warm(id, now);
        }
    }

    pub(super) fn on_bound(&mut self, id: &CellId, network: Option<PodNetwork>, now: Now) {
        let Some(cell) = self.cells.get_mut(id) else { return };
        let State::Bound { addresses, .. } = &cell.state else { return };
        let attached = Attached { addresses: addresses.clone(), network };
        let order = cell.order.part();
        cell.launch.request = None;
        if let Some(order) = order {
            self.answer_order(Some(id), &order, Ok(attached));
        }
        self.wake_waiting_orders(now);
    }

    /// Answers the order of a cell whose launch has failed and whose termination is not confirmed.
    pub(super) fn answer_order_of(&mut self, id: &CellId) {
        let Some(cell) = self.cells.get_mut(id) else { return };
        let Some(order) = cell.order.part() else { return };
        let error = failure_of(cell, self.orders.get(&order));
        self.answer_order(Some(id), &order, Err(error));
    }

    /// Places the order of an ended cell again, or answers the order.
    pub(super) fn on_cell_of_order_ended(&mut self, sandbox: &SandboxId, mut cell: Cell, now: Now) {
        let provider = self.providers.of(&cell).map(Provider::key);
        let failed = FailedLaunch::of(&mut cell, self.orders.get(sandbox), provider);
        self.on_launch_failed(sandbox, failed, now);
    }

    /// Places the order of a cell again, or answers the order, before the end of the instance is
    /// proven. The provider ends the instance, and the pod was never in it.
    pub(super) fn part_from_order(&mut self, id: &CellId, now: Now) {
        if self.cells.get(id).is_none_or(|cell| self.awaits_end_of(cell)) {
            return;
        }
        let Some(cell) = self.cells.get_mut(id) else { return };
        let Some(sandbox) = cell.order.part() else { return };
        let provider = self.providers.of(cell).map(Provider::key);
        // The commits of the order's next cell write its record.
        cell.order = CellOrder::None;
        let failed = FailedLaunch::of(cell, self.orders.get(&sandbox), provider);
        self.on_launch_failed(&sandbox, failed, now);
    }

    fn on_launch_failed(&mut self, sandbox: &SandboxId, failed: FailedLaunch, now: Now) {
        let FailedLaunch { cell, provider, error, was_for_spot, is_ended_by_caller } = failed;
        let launcher = provider.and_then(|key| self.providers.get(key));
        let max_launches = launcher.map_or(0, |provider| provider.max_launches);
        let Some(order) = self.orders.get_mut(sandbox) else { return };
        if order.state.cell() != Some(&cell) {
            return;
        }
        order.causes.push(cause_of(&error));
        order.spot_failed |= was_for_spot;
        let mut offers = order.offers.iter_mut().filter(|it| Some(it.provider) == provider);
        let mut own = offers.next().and_then(|offers| offers.candidates.as_mut().ok());
        let before = own.as_ref().map_or(0, |own| own.len());
        if let CellError::Provider(ProviderError { refusal: Some(refusal), .. }) = &error
            && let Some(own) = &mut own
        {
            own.retain(|candidate| !refusal.refuses(&candidate.offering));
        }
        // Each refusal leaves fewer offerings, which bounds the launches.
        let has_fewer = own.is_some_and(|own| own.len() < before);
        let is_launchers = matches!(
            error,
            CellError::Provider(_) | CellError::Silent { .. } | CellError::Ended(..)
        );
        let may_retry = match &error {
            CellError::Provider(refusal) => {
                // Another market has a quota of its own.
                use ErrorClass::{Capacity, Ended, Transient};
                matches!(refusal.class, Capacity | Ended | Transient)
                    || refusal.class == ErrorClass::Quota && has_fewer
                    || order.takes_another_type(refusal)
            }
            CellError::Silent { .. } => true,
            // The instance ended while it booted, unless a caller has ended the cell.
            CellError::Ended(..) => true,
            _ => false,
        };
        let tries_again = may_retry && (has_fewer || order.launches < max_launches);
        let is_other = |offers: &Offers| Some(offers.provider) != provider;
        let has_other =
            order.offers.iter().any(|offers| is_other(offers) && offers.has_candidates());
        // A provider that fails removes only its own offerings.
        let tries_other = !tries_again && is_launchers && has_other;
        if tries_other {
            order.offers.retain(is_other);
        }
        let places_again = (tries_again || tries_other)
            && !is_ended_by_caller
            && order.is_wanted
            && order.offers.iter().any(Offers::has_candidates)
            && now.boot < order.deadline;
        if places_again {
            order.state = OrderState::Waiting;
            self.place(sandbox, now);
        } else {
            self.answer_order(Some(&cell), sandbox, Err(error));
        }
    }

    /// Ends an order at its deadline.
    pub(super) fn on_order_deadline(&mut self, sandbox: &SandboxId, now: Now) {
        let Some(order) = self.orders.get(sandbox) else { return };
        let Some(id) = order.state.cell().cloned() else {
            let waited = order.deadline.saturating_sub(order.began).as_secs();
            if let Some(error) = self.queue_timeout(sandbox, now) {
                return self.answer_order(None, sandbox, Err(error));
            }
            if let Some(refusal) = self.share_timeout(sandbox, waited) {
                return self.answer_order(None, sandbox, Err(refusal.into()));
            }
            let Some(order) = self.orders.get(sandbox) else { return };
            let error = match self.blocking_cell(&order.wanted.key.pod_uid).cloned() {
                None if self.cells.len() >= self.config.limits.max_cells => {
                    self.config.limits.full(&self.cells)
                }
                blocking => {
                    // The order waits for the end of a warm cell.
                    let ranked = self.launchable(&order.offers, now).unwrap_or_default();
                    let ranked = self.of_market(&ranked, order.spot_since, now);
                    let namespace = Some(&*order.wanted.key.namespace);
                    let limits = &self.config.limits;
                    let over = limits.affordable(&self.cells, namespace, &ranked).err();
                    let unresolved = self.unresolved(&order.wanted.key.pod_uid);
                    match over.filter(|_| blocking.is_none()) {
                        Some(over) => CellError::OverBudget(over),
                        None => {
                            let cell = blocking.or(unresolved.map(|cell| cell.id.clone()));
                            CellError::Blocked { cell, seconds: waited }
                        }
                    }
                }
            };
            return self.answer_order(None, sandbox, Err(error));
        };
        if !order.is_wanted {
            return self.release(&id, "no call of the kubelet joined its launch", now);
        }
        let seconds = order.deadline.saturating_sub(order.began).as_secs();
        let cell = self.cells.get(&id);
        let (error, reason) = match cell.map(|cell| &cell.state) {
            Some(State::Launching { launch, .. }) => {
                let source = Box::new(launch.error.clone().unwrap_or_else(|| {
                    ProviderError::without_cause(ErrorClass::Unanswered, "launch: no answer yet")
                }));
                (CellError::NotLaunched { cell: id.clone(), seconds, source }, NOT_LAUNCHED)
            }
            Some(State::Binding { .. }) => {
                let reason = "its network was not attached in time";
                (CellError::Ended(id.clone(), reason.to_owned()), reason)
            }
            _ => {
                let console = String::new();
                (CellError::Silent { cell: id.clone(), seconds, console }, SILENT)
            }
        };
        self.fail(&id, error);
        self.apply(&id, CellEvent::End(reason.into()), now);
        // The answer of an open launch may come late, and the launch has no console to quote.
        if self.cells.get(&id).is_some_and(|cell| cell.state.has_open_launch()) {
            self.answer_order_of(&id);
        }
    }

    /// Fails the waiting orders of a pod whose last cell could not be terminated.
    pub(super) fn fail_orders_of_pod(&mut self, id: &CellId, error: &ProviderError) {
        let Some(cell) = self.cells.get(id) else { return };
        let waiting = self.waiting_orders(|order| is_of_pod(cell, &order.wanted.key.pod_uid));
        for sandbox in waiting {
            self.answer_order(None, &sandbox, Err(CellError::Provider(error.clone())));
        }
    }

    pub(super) fn waiting_orders(&self, wanted: impl Fn(&Order) -> bool) -> Vec<SandboxId> {
        self.orders
            .iter()
            .filter(|(_, order)| order.state == OrderState::Waiting && wanted(order))
            .map(|(sandbox, _)| sandbox.clone())
            .collect()
    }

    /// Removes an order, and answers its callers. `cell` is the cell of the order, if any.
    pub(super) fn answer_order(
        &mut self,
        cell: Option<&CellId>,
        sandbox: &SandboxId,
        outcome: Result<Attached, CellError>,
    ) {
        if let Some(order) = self.orders.remove(sandbox) {
            if let Err(CellError::NoShare(refusal)) = &outcome {
                self.count_refusal(refusal);
            }
            if outcome.is_err() {
                self.keep_spot_wait(&order);
            }
            let outcome = outcome.map_err(|last| with_causes(order.causes, last));
            self.timers.clear(&Timer::Deadline(sandbox.clone()));
            self.timers.clear(&Timer::Abandoned(sandbox.clone()));
            self.effects.push((cell.cloned(), Effect::AnswerOrder(sandbox.clone(), outcome)));
        }
    }

    /// Continues the launches of a previous daemon.
    pub fn start(&mut self, now: Now) -> super::Effects {
        self.start_health(now);
        self.start_pools(now);
        let cells: Vec<CellId> = self.cells.keys().cloned().collect();
        for cell in cells {
            let is_launching = self.cells.get(&cell).is_some_and(|cell| {
                matches!(cell.state, State::Launching { call: LaunchCall::Pending, .. })
            });
            if is_launching {
                self.emit(&cell, Effect::Log(Notice::Resumed));
            }
            self.apply(&cell, CellEvent::Resumed, now);
        }
        self.handle(super::Event::Tick, now)
    }
}

/// Returns the error of an order, with the errors of its earlier launches.
fn with_causes(mut causes: Vec<String>, last: CellError) -> CellError {
    let cause = cause_of(&last);
    if causes.last() != Some(&cause) {
        causes.push(cause);
    }
    if causes.len() < 2 {
        return last;
    }
    CellError::Launches { causes, last: Box::new(last) }
}

/// Returns the text of an error, shortened: the error of an order has the texts of several
/// launches.
fn cause_of(error: &CellError) -> String {
    error_chain(error).chars().take(MAX_CAUSE_CHARS).collect()
}

/// Returns whether the pod of a cell has this uid.
fn is_of_pod(cell: &Cell, pod_uid: &str) -> bool {
    !pod_uid.is_empty() && cell.pod_uid() == pod_uid
}

/// Returns the error of a failed launch.
fn failure_of(cell: &mut Cell, order: Option<&Order>) -> CellError {
    let console = cell.state.end_mut().and_then(|end| end.console.take()).unwrap_or_default();
    match cell.end.failure.take() {
        Some(CellError::Ended(id, reason)) if !console.is_empty() => {
            CellError::Ended(id, format!("{reason}; its console ends: {console}"))
        }
        Some(CellError::Silent { cell, seconds, .. }) => {
            CellError::Silent { cell, seconds, console }
        }
        Some(error) => error,
        None => {
            let seconds =
                order.map_or(0, |order| order.deadline.saturating_sub(order.began).as_secs());
            CellError::Silent { cell: cell.id.clone(), seconds, console }
        }
    }
}
