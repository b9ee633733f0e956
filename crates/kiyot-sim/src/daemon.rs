//! The daemon of the simulated world. It carries out the engine's effects, and can be killed
//! between two effects.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use kiyot_engine::{
    StoreError,
    engine::{
        Change, CommitOf, Effect, Effects, Engine, EngineConfig, Event, Journal, Notice, Now,
        OrderSpec, ProviderKey, ProviderSetup, Seams,
    },
    id::{CellId, NoRandomness, SandboxId},
    provider::{Attached, Capabilities, ErrorClass, InstanceId, Owner, ProviderError, TagRules},
};
use kiyot_link::bootstrap::{Bootstrap, GatewayAddress};

#[cfg(test)]
use crate::bug::{Bug, planted};
use crate::{
    agent::{ORPHAN_TIMEOUT, STOPPED_BY_ITSELF},
    calls::Call,
    world::{FINGERPRINT, Happening, World},
};

/// The date of the simulation's start.
const EPOCH: Duration = Duration::from_secs(1_800_000_000);

/// The limit of silence for pods without their own limit.
pub(super) const HEALTHY_TIMEOUT: Duration = Duration::from_secs(90);

/// A run of the daemon.
#[derive(Debug)]
pub(super) struct Daemon {
    pub(super) engine: Engine,
    pub(super) started: Duration,
    /// The queued effects of each cell, with the numbers of their events.
    queues: BTreeMap<CellId, VecDeque<(u64, Effect)>>,
    event: u64,
    /// The time of the next queued timer.
    timer: Option<Duration>,
    pub(super) redemption: u64,
    /// The instances and keys of pending redemptions.
    pub(super) redemptions: BTreeMap<u64, (InstanceId, String)>,
    /// The pods whose runs wait for an order, by sandbox.
    orders: BTreeMap<SandboxId, usize>,
    /// The pods whose stops wait for a cell's end, by cell.
    pub(super) enders: BTreeMap<CellId, usize>,
}

/// The dependencies of a simulated engine.
#[derive(Debug)]
struct SimSeams(fastrand::Rng);

impl Seams for SimSeams {
    fn random(&mut self, buffer: &mut [u8]) -> Result<(), NoRandomness> {
        self.0.fill(buffer);
        Ok(())
    }

    fn bootstrap(&self, cell: &CellId, token: &str, _: bool) -> Option<Bootstrap> {
        Some(Bootstrap {
            cell: cell.to_string(),
            gateway: GatewayAddress::Unix("/simulated".into()),
            ca_sha256: FINGERPRINT.to_owned(),
            token: token.to_owned(),
            orphan_timeout_secs: ORPHAN_TIMEOUT.as_secs(),
            agent: None,
        })
    }
}

/// Returns the time since 1970.
pub(super) fn unix(now: Duration) -> Duration {
    EPOCH + now
}

impl World<'_> {
    pub(super) fn time(&self) -> Now {
        Now { boot: self.now, unix: unix(self.now) }
    }

    pub(super) fn start_daemon(&mut self) {
        self.run += 1;
        let run = self.run;
        self.log(format_args!("daemon starts"));
        self.tried.extend(self.cells.keys().cloned());
        let config = EngineConfig {
            limits: self.node.limits,
            launch_timeout: self.node.launch_timeout,
            token_ttl: Duration::from_secs(600),
            boot_id: "simulated".to_owned(),
            refusal_pause: Duration::from_secs(180),
            retry_pause: Duration::from_secs(3),
            spot_deadline: self.node.spot_deadline,
            orphan_timeout: STOPPED_BY_ITSELF,
            healthy_timeout: self.node.healthy_timeout,
            owner: Owner { fingerprint: FINGERPRINT.to_owned(), ..Owner::default() },
            tag_rules: TagRules::default(),
            take_over: false,
        };
        let mut seed = [0_u8; 8];
        self.rng.fill(&mut seed);
        let random = fastrand::Rng::with_seed(u64::from_le_bytes(seed));
        let capabilities = self.capabilities;
        #[cfg(test)]
        let capabilities = planted(self.options.bug, capabilities, Bug::on_capabilities);
        let setup = |provider| ProviderSetup {
            capabilities: Capabilities { provider, ..capabilities },
            place: None,
            max_launches: 3,
            boots: None,
            machine: self.node.on_node_of(provider).and_then(|on_node| on_node.machine),
        };
        let setups = self.node.providers().into_iter().map(setup).collect();
        let journal = Journal {
            cells: self.cells.iter().map(|(id, cell)| (id.to_string(), cell.clone())).collect(),
            orders: self.orders.iter().map(|(id, order)| (id.to_string(), order.clone())).collect(),
            sandboxes: self.sandboxes.values().cloned().collect(),
            costs: self.costs.clone().into_iter().collect(),
        };
        let seams = Box::new(SimSeams(random));
        let (mut engine, changes, unusable) =
            Engine::recover(config, setups, seams, journal, self.time());
        if !unusable.is_empty() {
            self.violation(format!("records can't be used: {unusable:?}"));
        }
        self.write(changes);
        self.agents_are_silent();
        let effects = engine.start(self.time());
        self.daemon = Some(Daemon {
            engine,
            started: self.now,
            queues: BTreeMap::new(),
            event: 0,
            timer: None,
            redemption: 0,
            redemptions: BTreeMap::new(),
            orders: BTreeMap::new(),
            enders: BTreeMap::new(),
        });
        self.dispatch(effects);
        self.start_pools();
        self.after(Duration::from_millis(10), Happening::List { run });
        self.relist();
    }

    /// Kills the daemon.
    fn crash(&mut self) {
        self.log(format_args!("daemon is killed"));
        self.daemon = None;
        self.refused.clear();
        // No event of this run reaches the next run.
        self.run += 1;
        self.disconnect(None);
        self.daemon_crashed();
        let wait = self.rng.long_tailed(Duration::from_secs(5), Duration::from_secs(120));
        self.after(wait, Happening::DaemonStarts);
    }

    /// Kills the daemon sometimes. Returns whether it is dead.
    fn may_crash(&mut self) -> bool {
        if self.strikes("crash", self.faults().crash) {
            self.crash();
        }
        self.daemon.is_none()
    }

    /// Passes an event to the engine.
    pub(super) fn handle(&mut self, event: Event) {
        let refusal = Self::refusal(&event);
        #[cfg(test)]
        let event = planted(self.options.bug, event, |bug, event| {
            let is_silent = match (&*event, &self.daemon) {
                (Event::Connected(cell), Some(daemon)) => daemon.engine.is_silent(cell),
                _ => false,
            };
            bug.on_event(event, is_silent);
        });
        let time = self.time();
        let Some(daemon) = &mut self.daemon else { return };
        let effects = daemon.engine.handle(event, time);
        if daemon.engine.is_cut_off() {
            self.last_cut_off = self.now;
        }
        // Another launch of the order may follow.
        let refusal = refusal.filter(|(cell, _)| !daemon.engine.contains(cell));
        self.dispatch(effects);
        if let Some((cell, offerings)) = refusal {
            self.refused(&cell, offerings);
        }
    }

    /// Returns the pod whose run waits for an order.
    pub(super) fn pod_of_order(&self, sandbox: &SandboxId) -> Option<usize> {
        self.daemon.as_ref().and_then(|daemon| daemon.orders.get(sandbox)).copied()
    }

    /// Passes an order to the engine.
    pub(super) fn order(&mut self, pod: usize, spec: OrderSpec) {
        let time = self.time();
        #[cfg(test)]
        let spec = planted(self.options.bug, spec, Bug::on_order);
        let Some(daemon) = &mut self.daemon else { return };
        let (sandbox, effects) = daemon.engine.order(spec, time);
        daemon.orders.insert(sandbox.clone(), pod);
        // The call has new candidates.
        self.refused.remove(&sandbox);
        self.dispatch(effects);
    }

    pub(super) fn dispatch(&mut self, effects: Effects) {
        let run = self.run;
        #[cfg(test)]
        let effects = planted(self.options.bug, effects, |bug, effects| {
            bug.on_effects(effects, self.trace.lines);
        });
        let Some(daemon) = &mut self.daemon else { return };
        daemon.event += 1;
        let event = daemon.event;
        let is_lost = |effect: &Effect| matches!(effect, Effect::Log(Notice::Lost { .. }));
        let lost: Vec<CellId> = effects
            .iter()
            .filter_map(|(cell, effect)| cell.clone().filter(|_| is_lost(effect)))
            .collect();
        let (mut at_once, mut begin) = (Vec::new(), BTreeSet::new());
        for (cell, effect) in effects {
            let Some(cell) = cell else {
                at_once.push(effect);
                continue;
            };
            let queue = daemon.queues.entry(cell.clone()).or_default();
            if queue.is_empty() {
                begin.insert(cell);
            }
            queue.push_back((event, effect));
        }
        let next = daemon
            .engine
            .next_timer()
            .filter(|next| daemon.timer.is_none_or(|queued| *next < queued));
        if next.is_some() {
            daemon.timer = next;
        }
        for cell in lost {
            self.check_lost(&cell);
        }
        for cell in begin {
            let wait = self.rng.millis(1, 3);
            self.after(wait, Happening::Effect { run, cell });
        }
        if let Some(next) = next {
            self.after(next.saturating_sub(self.now), Happening::Timer { run });
        }
        for effect in at_once {
            self.perform(None, effect);
        }
    }

    pub(super) fn timer(&mut self) {
        let now = self.now;
        let is_due = self.daemon.as_mut().is_some_and(|daemon| {
            let is_next = daemon.timer.is_some_and(|queued| queued <= now);
            if is_next {
                daemon.timer = None;
            }
            is_next
        });
        if is_due {
            self.handle(Event::Tick);
        }
    }

    /// Carries out the next effect of a cell.
    pub(super) fn next_effect(&mut self, cell: &CellId) {
        if self.may_crash() {
            return;
        }
        let Some(daemon) = &mut self.daemon else { return };
        let Some(queue) = daemon.queues.get_mut(cell) else { return };
        let Some((event, effect)) = queue.front().cloned() else { return };
        match effect {
            Effect::Commit { changes, of } if self.strikes("commit", self.faults().commit) => {
                self.log(format_args!("{cell}: commit fails"));
                self.commit_failed(cell, event, of, changes);
            }
            Effect::Commit { changes, .. } => self.write(changes),
            effect => self.perform(Some(cell), effect),
        }
        if self.may_crash() {
            return;
        }
        let run = self.run;
        let Some(queue) = self.daemon.as_mut().and_then(|daemon| daemon.queues.get_mut(cell))
        else {
            return;
        };
        queue.pop_front();
        if queue.is_empty() {
            if let Some(daemon) = &mut self.daemon {
                daemon.queues.remove(cell);
            }
        } else {
            let wait = self.rng.millis(1, 3);
            self.after(wait, Happening::Effect { run, cell: cell.clone() });
        }
    }

    /// Skips the effects that depend on a failed commit. The commit itself stays first in the queue
    /// until its outcome was handled.
    fn commit_failed(&mut self, cell: &CellId, event: u64, of: CommitOf, changes: Vec<Change>) {
        let queue = self.daemon.as_mut().and_then(|daemon| daemon.queues.get_mut(cell));
        let mut skipped = Vec::new();
        if let Some(queue) = queue {
            let mut first = true;
            queue.retain(|(number, effect)| {
                let is_kept = std::mem::take(&mut first) || *number != event || !of.skips(effect);
                if !is_kept {
                    skipped.push(effect.clone());
                }
                is_kept
            });
        }
        let error = Arc::new(StoreError::closed());
        self.handle(Event::CommitFailed { cell: cell.clone(), of, changes, error, skipped });
    }

    fn write(&mut self, changes: Vec<Change>) {
        for change in changes {
            match change {
                Change::Cell(id, Some(record)) => {
                    self.log(format_args!("record {id} {:?}", record.phase()));
                    if self.recorded.insert(id.clone()) {
                        self.check_limit(&id);
                    }
                    self.cells.insert(id, *record);
                }
                Change::Cell(id, None) => {
                    self.log(format_args!("remove {id}"));
                    self.attached.remove(&id);
                    self.cells.remove(&id);
                }
                Change::Order(id, Some(record)) => {
                    self.orders.insert(id, *record);
                }
                Change::Order(id, None) => {
                    self.orders.remove(&id);
                }
                Change::Cost(namespace, cost) => {
                    self.costs.insert(namespace, cost);
                }
            }
        }
    }

    fn provider_of(&self, cell: &CellId) -> Option<ProviderKey> {
        self.daemon.as_ref()?.engine.provider_of(cell)
    }

    fn perform(&mut self, cell: Option<&CellId>, effect: Effect) {
        let run = self.run;
        match (effect, cell) {
            (Effect::Launch(launch), Some(cell)) => {
                self.check_candidates(&launch);
                let Some(provider) = self.provider_of(cell) else { return };
                self.check_unresolved(cell, provider);
                self.call(provider, Call::Launch(launch));
            }
            (Effect::Terminate { instance: Some(instance), .. }, Some(cell)) => {
                let Some(provider) = self.provider_of(cell) else { return };
                self.call(provider, Call::Terminate(cell.clone(), instance));
            }
            (Effect::Describe(instance), Some(cell)) => {
                #[cfg(test)]
                if self.options.bug == Some(Bug::AbsenceIsEnd) {
                    let error = ProviderError::without_cause(ErrorClass::NotFound, "absent");
                    let event = Box::new(Event::Described(cell.clone(), Err(error)));
                    return self.after(Duration::ZERO, Happening::Deliver { run, event });
                }
                let Some(provider) = self.provider_of(cell) else { return };
                self.call(provider, Call::Describe(cell.clone(), instance));
            }
            (Effect::EndStrays(provider, instances), _) => {
                self.log(format_args!("strays {instances:?}"));
                self.call(provider, Call::EndStrays(instances));
            }
            // Attach and detach on the node itself need no network.
            (Effect::Attach(_, attachment), Some(cell)) => {
                self.check_attached(cell, &attachment.pod_uid);
                let outcome = if self.strikes("failed", self.faults().failed) {
                    self.log(format_args!("{cell}: attach fails"));
                    Err(ProviderError::without_cause(ErrorClass::Transient, "attach"))
                } else {
                    Ok(Attached::default())
                };
                let event = Box::new(Event::Attached(cell.clone(), outcome));
                let wait = self.rng.millis(50, 300);
                self.after(wait, Happening::Deliver { run, event });
            }
            (Effect::Detach(_), Some(cell)) => {
                let outcome = if self.strikes("failed", self.faults().failed) {
                    self.log(format_args!("{cell}: detach fails"));
                    Err(ProviderError::without_cause(ErrorClass::Transient, "detach"))
                } else {
                    Ok(())
                };
                let event = Box::new(Event::Detached(cell.clone(), outcome));
                let wait = self.rng.millis(10, 50);
                self.after(wait, Happening::Deliver { run, event });
            }
            (Effect::ShutDown, Some(cell)) => self.shut_down(cell),
            (Effect::Disconnect, Some(cell)) => self.disconnect(Some(cell)),
            (Effect::AnswerRedeem(redemption, outcome), _) => {
                let redemption =
                    self.daemon.as_mut().and_then(|daemon| daemon.redemptions.remove(&redemption));
                if let Some((instance, key)) = redemption {
                    self.redeemed(&instance, &key, &outcome);
                }
            }
            (Effect::AnswerOrder(sandbox, outcome), cell) => {
                let pod = self.daemon.as_mut().and_then(|daemon| daemon.orders.remove(&sandbox));
                let was_refused = self.refused.remove(&sandbox).is_some();
                let error = outcome.as_ref().err().map(ToString::to_string);
                self.log(format_args!(
                    "order of {pod:?} {}",
                    error.as_deref().unwrap_or("is bound")
                ));
                if let (true, Ok(_), Some(cell)) = (was_refused, &outcome, cell) {
                    self.log(format_args!("{cell} has its next candidate"));
                }
                if let Some(error) = error {
                    self.meter.error = error;
                }
                if let Some(pod) = pod {
                    let bound = outcome.ok().and_then(|_| Some((cell?.clone(), sandbox)));
                    self.ran(pod, bound);
                }
            }
            (Effect::AnswerEnd(outcome), Some(cell)) => {
                let pod = self.daemon.as_mut().and_then(|daemon| daemon.enders.remove(cell));
                if let Some(pod) = pod {
                    self.stopped(pod, outcome.is_ok());
                }
            }
            (Effect::PublishEnded(reason), Some(cell)) => {
                self.log(format_args!("{cell} has ended: {reason}"));
                self.check_ended(cell, &reason);
                self.cell_ended(cell);
            }
            (Effect::Log(Notice::Taken { sandbox, pool }), Some(cell)) => {
                self.log(format_args!("{cell} of {pool} is taken"));
                self.check_taken(cell, &sandbox);
            }
            (Effect::Log(Notice::InstanceEnded(_)), Some(cell)) => {
                self.log(format_args!("the instance of {cell} has ended"));
                self.check_instance_ended(cell);
            }
            (effect, cell) => self.log(format_args!("{cell:?} {effect:?}")),
        }
    }

    /// Checks that a cell's instance has ended when the engine ends the cell.
    fn check_ended(&mut self, cell: &CellId, reason: &str) {
        let now = self.now;
        let running = self
            .cloud
            .instances()
            .iter()
            .find(|(_, instance)| instance.spec.cell == *cell && instance.runs(now))
            .map(|(id, _)| id.clone());
        if let Some(instance) = running {
            self.violation(format!("{cell} has ended ({reason}), but its {instance} runs"));
        }
    }

    /// Checks that the instance of a cell ends if the engine considers it ended.
    fn check_instance_ended(&mut self, cell: &CellId) {
        let mut of_cell = self.cloud.instances().iter().filter(|(_, of)| of.spec.cell == *cell);
        if let Some((instance, _)) = of_cell.find(|(_, of)| of.ending.is_none()) {
            let text = format!("{cell} is ended because its instance ended, but {instance} runs");
            self.violation(text);
        }
    }
}
