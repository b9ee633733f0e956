//! Random sequences of events. The invariants hold for all answers of the provider, the agents and
//! the store, in any order.

use std::collections::BTreeSet;

use proptest::{prelude::*, sample::Index};

use crate::engine::tests::{pools::taking, *};

/// A step of a sequence. An index chooses a cell that was ever launched.
#[derive(Debug, Clone)]
enum Step {
    Order { pod: u8, attempt: u32, identity: bool, takes: bool },
    Pool(usize),
    Call { pod: u8, attempt: u32, waits: bool },
    Cell(Index, Kind),
    List { absent: Vec<Index>, terminated: Option<Index>, strays: bool, foreign: bool },
    Pass(u64),
    Restart,
    Configure(bool),
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Launched(Option<ErrorClass>),
    Attached(bool),
    ShutDown(bool),
    Detached(bool),
    Terminated(Result<Termination, ErrorClass>),
    Described(Result<InstanceState, ErrorClass>),
    Connected,
    Disconnected,
    Redeem,
    Terminate,
}

fn classes() -> impl Strategy<Value = ErrorClass> {
    prop::sample::select(vec![
        ErrorClass::Capacity,
        ErrorClass::Throttled,
        ErrorClass::Auth,
        ErrorClass::NotFound,
        ErrorClass::Ended,
        ErrorClass::Transient,
        ErrorClass::Unanswered,
    ])
}

fn kinds() -> impl Strategy<Value = Kind> {
    prop_oneof![
        3 => Just(Kind::Launched(None)),
        2 => classes().prop_map(|class| Kind::Launched(Some(class))),
        3 => Just(Kind::Connected),
        2 => Just(Kind::Disconnected),
        1 => Just(Kind::Redeem),
        3 => prop::bool::weighted(0.8).prop_map(Kind::Attached),
        2 => any::<bool>().prop_map(Kind::ShutDown),
        2 => any::<bool>().prop_map(Kind::Detached),
        1 => Just(Kind::Terminated(Ok(Termination::Confirmed))),
        1 => Just(Kind::Terminated(Ok(Termination::Accepted))),
        1 => classes().prop_map(|class| Kind::Terminated(Err(class))),
        1 => prop::sample::select(vec![InstanceState::Running, InstanceState::Terminated])
            .prop_map(|state| Kind::Described(Ok(state))),
        1 => classes().prop_map(|class| Kind::Described(Err(class))),
        3 => Just(Kind::Terminate),
    ]
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..2_u8, 0..2_u32, any::<bool>(), any::<bool>()).prop_map(
            |(pod, attempt, identity, takes)| Step::Order { pod, attempt, identity, takes }
        ),
        1 => (0..3_usize).prop_map(Step::Pool),
        2 => (0..2_u8, 0..2_u32, any::<bool>()).prop_map(
            |(pod, attempt, waits)| Step::Call { pod, attempt, waits }
        ),
        16 => (any::<Index>(), kinds()).prop_map(|(cell, kind)| Step::Cell(cell, kind)),
        2 => (
            prop::collection::vec(any::<Index>(), 0..3),
            prop::option::of(any::<Index>()),
            any::<bool>(),
            any::<bool>(),
        ).prop_map(|(absent, terminated, strays, foreign)| {
            Step::List { absent, terminated, strays, foreign }
        }),
        3 => prop::sample::select(vec![1, 30, 120, 700, 1200]).prop_map(Step::Pass),
        1 => Just(Step::Restart),
        1 => any::<bool>().prop_map(Step::Configure),
    ]
}

/// A call to the provider or the agent: each has one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Call {
    Launch,
    Attach,
    ShutDown,
    Detach,
    Terminate,
}

/// The test's model of a cell.
#[derive(Debug, Default)]
struct Model {
    /// The pod that it was launched for, and later attached to.
    pod: String,
    is_attached: bool,
    instance: Option<InstanceId>,
    known: Duration,
    /// True from the answer of its order until it is proven that no container runs.
    may_run: bool,
    /// The calls without an answer.
    pending: BTreeSet<Call>,
    disconnected: Option<Duration>,
    /// The end of its control connection, or the start of the daemon.
    silent_since: Option<Duration>,
}

/// The engine, with the model of its cells, its journal and the time.
struct Harness {
    engine: Engine,
    capabilities: Capabilities,
    now: Now,
    restarts: u64,
    models: BTreeMap<CellId, Model>,
    cells: BTreeMap<CellId, store::Cell>,
    orders: BTreeMap<SandboxId, store::Order>,
    costs: BTreeMap<String, store::NamespaceCost>,
    /// The listings that showed a stray.
    sightings: u32,
    fails_commits: bool,
    /// The orders without an answer.
    waiting: BTreeSet<SandboxId>,
    /// The count of the warm pool.
    pool: usize,
    /// False while the provider is removed.
    is_configured: bool,
    /// False once the engine has released the provider.
    is_held: bool,
}

impl Harness {
    fn new(capabilities: Capabilities) -> Self {
        Self {
            engine: engine(capabilities),
            capabilities,
            now: at(1),
            restarts: 0,
            models: BTreeMap::new(),
            cells: BTreeMap::new(),
            orders: BTreeMap::new(),
            costs: BTreeMap::new(),
            sightings: 0,
            fails_commits: false,
            waiting: BTreeSet::new(),
            pool: 0,
            is_configured: true,
            is_held: true,
        }
    }

    fn set_pool(&mut self) {
        let candidates = Some(["a", "b"].map(candidate).to_vec());
        let ttl = Duration::from_secs(900);
        let further = vec![candidate("c")];
        let (name, machine, count) = ("warm".into(), String::new(), self.pool);
        let (provider, share) = (ONLY, NodeShare::default());
        let pool = Pool { name, provider, machine, share, count, ttl, candidates, further };
        let effects = self.engine.set_pools(vec![pool], self.now);
        self.perform(effects);
    }

    fn cell(&self, index: &Index) -> Option<CellId> {
        let ids: Vec<&CellId> = self.models.keys().collect();
        (!ids.is_empty()).then(|| (*index.get(&ids)).clone())
    }

    fn step(&mut self, step: &Step) {
        self.now.boot += Duration::from_millis(100);
        match step {
            Step::Pool(count) => {
                self.pool = *count;
                self.set_pool();
            }
            Step::Order { pod, attempt, identity, takes } => {
                let pod = format!("pod-{pod}");
                let mut spec = if *takes { taking(&pod) } else { spec(&pod) };
                spec = with(spec, |wanted| {
                    wanted.key.attempt = *attempt;
                    wanted.identity = identity.to_string();
                });
                let (sandbox, effects) = self.engine.order(spec, self.now);
                self.waiting.insert(sandbox);
                self.perform(effects);
            }
            Step::Call { pod, attempt, waits } => {
                let key = OrderKey { attempt: *attempt, ..key(&format!("pod-{pod}")) };
                self.handle(if *waits { Event::Joined(key) } else { Event::Abandoned(key) });
            }
            Step::Cell(index, kind) => {
                if let Some(cell) = self.cell(index) {
                    self.event(cell, *kind);
                }
            }
            Step::List { absent, terminated, strays, foreign } => {
                self.list(absent, terminated.as_ref(), *strays, *foreign);
            }
            Step::Pass(seconds) => {
                let until = self.now.boot + Duration::from_secs(*seconds);
                while let Some(next) = self.engine.next_timer().filter(|next| *next < until) {
                    self.pass(next.max(self.now.boot));
                }
                self.pass(until);
            }
            Step::Restart => self.restart(),
            Step::Configure(is_configured) => self.configure(*is_configured),
        }
        self.now.unix = NOON + self.now.boot;
    }

    /// Adds the provider, or removes it.
    fn configure(&mut self, is_configured: bool) {
        self.is_configured = is_configured;
        self.is_held |= is_configured;
        let providers = if is_configured { only(self.capabilities) } else { Vec::new() };
        let effects = self.engine.set_providers(providers, self.now);
        self.perform(effects);
    }

    fn pass(&mut self, until: Duration) {
        self.now.boot = until;
        for model in self.models.values_mut() {
            let orphaned = |since| until >= since + config().orphan_timeout;
            model.may_run &= !model.disconnected.is_some_and(orphaned);
        }
        self.handle(Event::Tick);
    }

    fn event(&mut self, id: CellId, kind: Kind) {
        let Some(model) = self.models.get_mut(&id) else { return };
        let call = match kind {
            Kind::Launched(_) => Some(Call::Launch),
            Kind::Attached(_) => Some(Call::Attach),
            Kind::ShutDown(_) => Some(Call::ShutDown),
            Kind::Detached(_) => Some(Call::Detach),
            Kind::Terminated(_) => Some(Call::Terminate),
            Kind::Described(_)
            | Kind::Connected
            | Kind::Disconnected
            | Kind::Redeem
            | Kind::Terminate => None,
        };
        if call.is_some_and(|call| !model.pending.remove(&call)) {
            return;
        }
        let error = |class| ProviderError::without_cause(class, "a call");
        let is_believed = |class, model: &Model| {
            class == ErrorClass::NotFound
                && self.now.boot.saturating_sub(model.known)
                    >= self.capabilities.not_found_believed_after
        };
        let event = match kind {
            Kind::Launched(None) => {
                let instance = InstanceId(format!("i-{id}"));
                model.known = self.now.boot;
                model.instance = Some(instance.clone());
                Event::Launched(id.clone(), Ok(launched_as(&instance.0, &id)))
            }
            Kind::Launched(Some(class)) => Event::Launched(id, Err(error(class))),
            Kind::Attached(true) => Event::Attached(id, Ok(Attached::default())),
            Kind::Attached(false) => Event::Attached(id, Err(error(ErrorClass::Transient))),
            Kind::ShutDown(ended) => {
                model.may_run &= !ended;
                Event::ShutDown(id, ended)
            }
            Kind::Detached(true) => Event::Detached(id, Ok(())),
            Kind::Detached(false) => Event::Detached(id, Err(error(ErrorClass::Transient))),
            Kind::Terminated(outcome) => {
                model.may_run &= match outcome {
                    Ok(Termination::Confirmed) => false,
                    Ok(Termination::Accepted) => true,
                    Err(class) => !is_believed(class, model),
                };
                let outcome = outcome.map_err(error);
                Event::Terminated { cell: id, outcome, console: String::new() }
            }
            Kind::Described(outcome) => {
                model.may_run &= match outcome {
                    Ok(state) => state != InstanceState::Terminated,
                    Err(class) => !is_believed(class, model),
                };
                let described = |state| Instance { state, ..instance("i", &id, "ours") };
                let outcome = outcome.map(described).map_err(error);
                Event::Described(id, outcome)
            }
            Kind::Connected => {
                model.silent_since = None;
                Event::Connected(id)
            }
            Kind::Disconnected => {
                model.silent_since.get_or_insert(self.now.boot);
                Event::Disconnected(id)
            }
            Kind::Redeem => {
                let token_sha256 = self.cells.get(&id).map(|record| record.token_sha256.clone());
                let (token_sha256, key_sha256) = (token_sha256.unwrap_or_default(), "key".into());
                Event::Redeem { cell: id, token_sha256, key_sha256, redemption: 1 }
            }
            Kind::Terminate => Event::Terminate { cell: id, reason: "stopped".into() },
        };
        self.handle(event);
    }

    fn list(&mut self, absent: &[Index], terminated: Option<&Index>, strays: bool, foreign: bool) {
        let absent: BTreeSet<CellId> = absent.iter().filter_map(|cell| self.cell(cell)).collect();
        let terminated = terminated.and_then(|cell| self.cell(cell));
        let mut instances = Vec::new();
        for (id, model) in &mut self.models {
            let Some(of_cell) = model.instance.clone().filter(|_| !absent.contains(id)) else {
                continue;
            };
            let is_terminated = terminated.as_ref() == Some(id);
            model.may_run &= !is_terminated;
            let state =
                if is_terminated { InstanceState::Terminated } else { InstanceState::Running };
            instances.push(Instance { state, ..instance(&of_cell.0, id, "ours") });
        }
        self.sightings = if strays { self.sightings + 1 } else { 0 };
        let other = || CellId::parse("cell-zzzzzzzzzzzz").unwrap();
        if strays {
            instances.push(instance("stray", &other(), "ours"));
        }
        if foreign {
            instances.push(instance("foreign", &other(), "theirs"));
        }
        self.handle(Event::Listed { provider: ONLY, began: self.now.boot, instances });
    }

    /// Kills the daemon, and starts another from the journal.
    fn restart(&mut self) {
        self.restarts += 1;
        let sandboxes = self.models.iter().filter(|(_, model)| model.may_run);
        let journal = Journal {
            cells: self.cells.iter().map(|(id, cell)| (id.to_string(), cell.clone())).collect(),
            orders: self.orders.iter().map(|(id, it)| (id.to_string(), it.clone())).collect(),
            sandboxes: sandboxes
                .map(|(id, model)| {
                    let (id, pod_uid) = (id.to_string(), model.pod.clone());
                    sandbox_of(&store::Cell { id, pod_uid, ..store::Cell::default() })
                })
                .collect(),
            costs: self.costs.clone().into_iter().collect(),
        };
        let seams = Box::new(Counting(self.restarts << 32));
        let (engine, changes, unusable) =
            Engine::recover(config(), only(self.capabilities), seams, journal, self.now);
        (self.is_configured, self.is_held) = (true, true);
        assert_eq!(unusable, []);
        self.engine = engine;
        self.sightings = 0;
        self.waiting.clear();
        self.apply(changes);
        for model in self.models.values_mut() {
            // The timer of the previous daemon is forgotten.
            model.disconnected = None;
            model.silent_since = Some(self.now.boot);
            model.pending.clear();
        }
        let effects = self.engine.start(self.now);
        self.perform(effects);
        self.set_pool();
    }

    fn handle(&mut self, event: Event) {
        let effects = self.engine.handle(event, self.now);
        self.perform(effects);
    }

    fn apply(&mut self, changes: Vec<Change>) {
        for change in changes {
            match change {
                Change::Cell(id, Some(record)) => drop(self.cells.insert(id, *record)),
                Change::Cell(id, None) => drop(self.cells.remove(&id)),
                Change::Order(id, Some(record)) => drop(self.orders.insert(id, *record)),
                Change::Order(id, None) => drop(self.orders.remove(&id)),
                Change::Cost(namespace, cost) => {
                    let micros = cost.micros;
                    let before = self.costs.insert(namespace, cost);
                    assert!(before.is_none_or(|before| before.micros <= micros));
                }
            }
        }
    }

    fn perform(&mut self, effects: Effects) {
        let mut failed = Vec::<(CellId, CommitOf, Vec<Change>, Vec<Effect>)>::new();
        for (cell, effect) in effects {
            let mut before = failed.iter_mut().filter(|(id, ..)| cell.as_ref() == Some(id));
            if let Some((.., skipped)) = before.find(|(_, of, ..)| of.skips(&effect)) {
                skipped.push(effect);
                continue;
            }
            if let Effect::AnswerOrder(sandbox, _) = &effect {
                self.waiting.remove(sandbox);
            }
            match (cell, effect) {
                (Some(cell), Effect::Commit { changes, of }) if self.fails_commits => {
                    failed.push((cell, of, changes, Vec::new()));
                }
                (_, Effect::Commit { changes, .. }) => self.apply(changes),
                (Some(cell), effect) => self.check(&cell, &effect),
                (None, Effect::EndStrays(_, instances)) => {
                    for stray in instances {
                        assert_ne!(stray.0, "foreign");
                        assert!(stray.0 != "stray" || self.sightings >= 2, "one sighting");
                        let mut bound = self.models.values().filter(|model| model.may_run);
                        assert!(!bound.any(|model| model.instance.as_ref() == Some(&stray)));
                    }
                }
                (None, Effect::ReleaseProvider(_)) => {
                    assert!(self.is_held && !self.is_configured, "it is released once");
                    self.is_held = false;
                    let mut bound = self.models.values().filter(|model| model.may_run);
                    assert!(bound.next().is_none(), "a cell of the provider runs");
                }
                (None, _) => {}
            }
        }
        self.fails_commits = false;
        for (cell, of, changes, skipped) in failed {
            let error = Arc::new(crate::StoreError::closed());
            self.handle(Event::CommitFailed { cell, of, changes, error, skipped });
        }
    }

    /// Checks an effect of a cell against the invariants, and updates the model.
    fn check(&mut self, id: &CellId, effect: &Effect) {
        match effect {
            Effect::Launch(launch) => {
                let record = &self.cells[id];
                let recorded = record.launch.as_ref().expect("a launch is recorded");
                assert_eq!(recorded.token, launch.token);
                assert_eq!(Launch::from_stored(id, recorded).as_ref(), Some(launch.as_ref()));
                if !self.models.contains_key(id) {
                    assert!(self.is_configured, "a removed provider launches {id}");
                    self.assert_no_other_runs(id, &record.pod_uid);
                    let model = Model { pod: record.pod_uid.clone(), ..Model::default() };
                    self.models.insert(id.clone(), model);
                }
                self.call(id, Call::Launch);
            }
            Effect::AnswerOrder(_, Ok(_)) => {
                let pod = self.models[id].pod.clone();
                self.assert_no_other_runs(id, &pod);
                self.model(id).may_run = true;
            }
            Effect::Attach(..) => {
                // A cell of a pool has its pod from now on, even if it was launched for another
                // pod.
                let pod = self.cells[id].pod_uid.clone();
                let model = self.model(id);
                assert!(!model.is_attached || model.pod == pod, "{id} has two pods");
                (model.pod, model.is_attached) = (pod, true);
                self.call(id, Call::Attach);
            }
            Effect::ShutDown => self.call(id, Call::ShutDown),
            Effect::Detach(_) => self.call(id, Call::Detach),
            Effect::Terminate { .. } => self.call(id, Call::Terminate),
            Effect::Disconnect => {
                let now = self.now.boot;
                self.model(id).disconnected.get_or_insert(now);
            }
            Effect::Log(Notice::Lost { .. }) => {
                let since = self.models[id].silent_since.expect("a connected cell is lost");
                assert!(self.now.boot >= since + config().healthy_timeout.unwrap());
            }
            Effect::AnswerEnd(Ok(())) | Effect::PublishEnded(_) => {
                let may_run = self.models.get(id).is_some_and(|model| model.may_run);
                assert!(!may_run, "the end of {id} is answered without proof");
            }
            _ => {}
        }
    }

    fn call(&mut self, id: &CellId, call: Call) {
        let is_first = self.model(id).pending.insert(call);
        assert!(is_first, "{call:?} of {id} is called twice at a time");
    }

    fn model(&mut self, id: &CellId) -> &mut Model {
        self.models.get_mut(id).unwrap()
    }

    /// Checks that each waiting caller has an order, and each waiting cell a pending call.
    fn assert_nothing_hangs(&self) {
        for sandbox in &self.waiting {
            assert!(self.engine.orders.contains_key(sandbox), "{sandbox} has no answer");
        }
        for cell in self.engine.cells.values() {
            let State::Terminating(_, step) = &cell.state else { continue };
            use EndStep::{Attaching, Launching};
            if !matches!(step, Launching(LaunchCall::Pending, _) | Attaching(_)) {
                continue;
            }
            let pending = self.models.get(&cell.id).map(|model| &model.pending);
            let is_awaited = |call: &Call| matches!(call, Call::Launch | Call::Attach);
            let has_call = pending.is_some_and(|pending| pending.iter().any(is_awaited));
            assert!(has_call, "{} awaits no call", cell.id);
        }
    }

    fn assert_no_other_runs(&self, id: &CellId, pod: &str) {
        let mut others =
            self.models.iter().filter(|(other, model)| *other != id && model.pod == pod);
        assert!(!others.any(|(_, model)| model.may_run), "{id} is a second cell of {pod}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Verifies P15, P17, P19.
    #[test]
    fn invariants_hold_for_random_sequences_of_events(
        steps in prop::collection::vec((steps(), prop::bool::weighted(0.05)), 1..80),
        provider in 0..4,
    ) {
        let capabilities = match provider {
            0 => capabilities::LOCAL,
            1 => Capabilities { can_be_paused: true, ..capabilities::CLOUD },
            _ => capabilities::CLOUD,
        };
        let mut harness = Harness::new(capabilities);
        for (step, fails_commits) in &steps {
            harness.fails_commits = *fails_commits;
            harness.step(step);
            harness.assert_nothing_hangs();
            let warm = harness.engine.cells.values().filter(|cell| cell.is_warm()).count();
            prop_assert!(warm <= harness.pool, "{} warm cells of {}", warm, harness.pool);
        }
    }
}
