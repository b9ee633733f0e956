//! The engine after a start of the daemon: records become cells and orders.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use kiyot_proto::store::{self, CellPhase};

use crate::{
    engine::{
        Change, EndStep, Engine, EngineConfig, LaunchCall, Now, Offers, ProviderKey, ProviderSetup,
        Seams, State, Timeline,
        cell::{
            Bill, Cell, CellEnd, CellLaunch, CellOrder, End, Offered, OpenLaunch, Pod, Token,
            earlier::EarlierLaunches, known, place::ELSEWHERE, ports::PodPorts, state::StopStep,
        },
        costs::Costs,
        launch::Launch,
        order::{Order, OrderState},
        providers::Provider,
        timers::Timer,
    },
    id::{CellId, SandboxId},
    placement::NodeShare,
    provider::InstanceId,
    request::{CellRequest, HealthyTimeout},
    wanted::{OrderKey, Wanted},
};

/// Bounds the time in which the kubelet's retry joins the launch of a previous daemon. A kubelet
/// retries a failed sandbox after 10 to 15 s (`backOffPeriod` with jitter).
const JOIN_TIMEOUT: Duration = Duration::from_secs(60);
/// The end reason of a cell whose launch was cut off by the end of the daemon. The kubelet retries.
const UNFINISHED: &str = "the daemon was restarted while the cell was launched";
/// The end reason of a bound cell without a sandbox record: its caller never got an answer.
const ORPHANED: &str = "no pod sandbox was recorded for the cell";
/// The end reason of a cell without a readable record: its agent can't be authenticated.
const LOST: &str = "its record could not be read";
/// The end reason of a cell that was launched before a reboot.
const REBOOTED: &str = "the node was rebooted";

/// The parts of a recorded sandbox that its cell needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalSandbox {
    /// The id of the sandbox.
    pub id: String,
    /// The id of its cell.
    pub cell: String,
    /// `metadata.uid` of its pod.
    pub pod_uid: String,
    /// The host ports and networks of its pod; `None` if the pod has neither.
    pub ports: Option<Box<PodPorts>>,
    /// The time of its creation.
    pub created_unix_nanos: i64,
}

/// The records of a previous daemon.
#[derive(Debug, Clone, Default)]
pub struct Journal {
    /// The cells.
    pub cells: Vec<(String, store::Cell)>,
    /// The orders.
    pub orders: Vec<(String, store::Order)>,
    /// The sandboxes.
    pub sandboxes: Vec<JournalSandbox>,
    /// The costs of ended cells by namespace.
    pub costs: Vec<(String, store::NamespaceCost)>,
}

/// An unusable record, for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unusable {
    /// A sandbox whose cell has no record: the cell ends.
    NoCellRecord(JournalSandbox),
    /// A record whose key is not a cell's id: it is removed.
    CellKey(String),
}

impl Engine {
    /// Returns the engine of a journal, the changes that make the journal consistent, and the
    /// unusable records. A bound cell continues, unless the node was rebooted or its sandbox is
    /// unknown; a launch continues until the kubelet's retry joins it; every other cell ends.
    pub fn recover(
        config: EngineConfig,
        providers: Vec<ProviderSetup>,
        seams: Box<dyn Seams>,
        journal: Journal,
        now: Now,
    ) -> (Self, Vec<Change>, Vec<Unusable>) {
        let mut engine = Self::new(config, providers, seams);
        let (mut changes, mut unusable) = (Vec::new(), Vec::new());
        let Journal { cells, orders, sandboxes, costs } = journal;
        engine.costs = Costs::from_stored(costs, now);
        let known: BTreeSet<&str> = cells.iter().map(|(key, _)| key.as_str()).collect();
        for sandbox in sandboxes.iter().filter(|sandbox| !known.contains(sandbox.cell.as_str())) {
            // Without the cell's record, its agent can't connect. The pod keeps its state until the
            // cell's end is proven.
            if let Ok(id) = CellId::parse(&sandbox.cell) {
                unusable.push(Unusable::NoCellRecord(sandbox.clone()));
                engine.cells.insert(id.clone(), lost(id, sandbox, now));
            }
        }
        let with_sandbox: BTreeMap<&str, &JournalSandbox> =
            sandboxes.iter().map(|sandbox| (sandbox.cell.as_str(), sandbox)).collect();
        let mut gone = Vec::new();
        for (key, record) in &cells {
            let Ok(id) = CellId::parse(key) else {
                unusable.push(Unusable::CellKey(key.clone()));
                continue;
            };
            let order = orders.iter().find(|(_, order)| order.cell == *key);
            let order =
                order.and_then(|(sandbox, order)| Some((SandboxId::parse(sandbox).ok()?, order)));
            let sandbox = with_sandbox.get(key.as_str()).copied();
            let cell = engine.resumed(id.clone(), record, order, sandbox, now);
            match &cell.state {
                State::Ended(end) if cell.was_bound => {
                    gone.push((cell.created_unix_nanos, id, end.reason.to_string()));
                }
                State::Ended(_) => changes.push(Change::Cell(id, None)),
                _ => {
                    engine.cells.insert(id, cell);
                }
            }
        }
        gone.sort();
        for (_, id, reason) in gone {
            let dropped = engine.tombstones.add(id, reason);
            changes.extend(dropped.into_iter().map(|cell| Change::Cell(cell, None)));
        }
        for (key, _) in &orders {
            if let Ok(sandbox) = SandboxId::parse(key)
                && !engine.orders.contains_key(&sandbox)
            {
                changes.push(Change::Order(sandbox, None));
            }
        }
        (engine, changes, unusable)
    }

    /// Returns the cell of a record, and adds its order if the launch continues.
    fn resumed(
        &mut self,
        id: CellId,
        record: &store::Cell,
        order: Option<(SandboxId, &store::Order)>,
        sandbox: Option<&JournalSandbox>,
        now: Now,
    ) -> Cell {
        let instance = known(&record.instance).map(InstanceId);
        let launch = record.launch.as_ref().and_then(|launch| Launch::from_stored(&id, launch));
        let request = launch.map(Arc::new);
        let open = request.clone().filter(|_| instance.is_none()).map(OpenLaunch::resumed);
        // The clock may have been set: it can only shorten the validity of a token.
        let left = u64::try_from(record.token_expires_unix).unwrap_or_default();
        let left = Duration::from_secs(left).saturating_sub(now.unix).min(self.config.token_ttl);
        let is_expired = left.is_zero();
        // A pool's cell without a pod goes on without an order.
        let is_wanted = order.is_some() || (!record.pool.is_empty() && record.sandbox.is_empty());
        let place = known(&record.place).map(Arc::from);
        let recorded = known(&record.provider);
        let provider = self.providers.of_launch(recorded.as_deref(), place.as_ref());
        let is_elsewhere = provider.is_none();
        let key = provider.map(Provider::key);
        // An instance of another place may be on another machine.
        let rebooted = provider.is_some_and(|provider| provider.capabilities.ends_with_node)
            && record.boot_id != self.config.boot_id;
        // No container runs in a cell before it is bound.
        let is_fresh =
            matches!(record.phase(), CellPhase::Launching | CellPhase::Booting | CellPhase::Idle);
        let to_end = |reason: &str| {
            let stopped = record.containers_ended || is_fresh && is_elsewhere;
            // Only the answer of a launch names its instance. In another place, a replay would make
            // another instance.
            let step = match open.clone() {
                Some(launch) if is_expired || is_elsewhere => {
                    EndStep::Launching(LaunchCall::Searching, launch)
                }
                Some(launch) => EndStep::Launching(LaunchCall::Backoff, launch),
                None => EndStep::Backoff(instance.clone()),
            };
            State::Terminating(End::new(reason.into(), stopped), step)
        };
        let state = match (record.phase(), &instance, &open) {
            (CellPhase::Gone, ..) => State::Ended(End::new(record.reason.as_str().into(), true)),
            (CellPhase::Terminating, ..) => to_end(&record.reason),
            _ if rebooted => to_end(REBOOTED),
            _ if is_fresh && is_elsewhere => to_end(ELSEWHERE),
            (CellPhase::Bound, Some(instance), _) if sandbox.is_some() => {
                let addresses =
                    record.addresses.iter().filter_map(|address| address.parse().ok()).collect();
                State::Bound { instance: instance.clone(), addresses }
            }
            (CellPhase::Bound, ..) => to_end(ORPHANED),
            (CellPhase::Stopping, Some(instance), _) => State::Stopping(
                End::new(record.reason.as_str().into(), record.containers_ended),
                instance.clone(),
                if record.containers_ended { StopStep::Backoff } else { StopStep::Shutdown },
            ),
            (CellPhase::Launching, _, Some(launch)) if is_wanted => {
                let call = if is_expired { LaunchCall::Searching } else { LaunchCall::Pending };
                State::Launching { connected: false, call, launch: launch.clone() }
            }
            // An idle cell's agent connects again.
            (CellPhase::Booting | CellPhase::Idle, Some(instance), _) if is_wanted => {
                State::Booting { instance: instance.clone() }
            }
            _ => to_end(UNFINISHED),
        };
        let order = order.filter(|_| state.is_unbound()).map(|(sandbox, order)| {
            let launch = request.as_deref().zip(key);
            self.resume_order(sandbox.clone(), order, (&id, record), launch, now);
            sandbox
        });
        let timeline = record.timeline.as_ref().map(Timeline::from_stored).unwrap_or_default();
        let lost_unix_nanos = Some(record.lost_unix_nanos).filter(|nanos| *nanos != 0);
        Cell {
            launch: CellLaunch {
                request,
                parameters_sha256: known(&record.parameters_sha256),
                ..CellLaunch::default()
            },
            provider: recorded.map(Arc::from),
            share: NodeShare {
                milli_cpus: record.node_milli_cpus,
                memory_mib: record.node_memory_mib,
            },
            place,
            order: order.map_or(CellOrder::None, CellOrder::Waiting),
            pool: known(&record.pool).map(Arc::from),
            pod: Pod::from_stored(record, sandbox),
            boot_id: record.boot_id.clone(),
            created_unix_nanos: record.created_unix_nanos,
            offered: Offered::from_stored(record),
            earlier: EarlierLaunches::from_stored(record),
            timeline,
            bill: Bill::resumed(&timeline, now),
            token: Token::from_stored(record, now.boot + left),
            end: CellEnd { lost_unix_nanos, ..CellEnd::default() },
            was_bound: sandbox.is_some(),
            instance_known: Some(now.boot),
            ..Cell::new(id, state)
        }
    }

    fn resume_order(
        &mut self,
        sandbox: SandboxId,
        order: &store::Order,
        (cell, record): (&CellId, &store::Cell),
        launch: Option<(&Launch, ProviderKey)>,
        now: Now,
    ) {
        let deadline = now.boot + self.config.launch_timeout.min(JOIN_TIMEOUT);
        self.timers.set(Timer::Deadline(sandbox.clone()), deadline);
        let wanted = Wanted {
            key: OrderKey {
                pod_uid: order.pod_uid.clone(),
                namespace: order.namespace.clone(),
                name: order.name.clone(),
                attempt: order.attempt,
            },
            identity: order.identity.clone(),
            request: CellRequest {
                healthy_timeout: record.healthy_timeout_secs.map(HealthyTimeout::of_secs),
                ..CellRequest::default()
            },
            ..Wanted::default()
        };
        let offers = launch.map(|(Launch { spec, .. }, provider)| Offers {
            provider,
            candidates: Ok(spec.candidates.clone()),
            parameters: spec.parameters.clone(),
            choice: None,
        });
        let order = Order {
            wanted: Arc::new(wanted),
            is_wanted: false,
            offers: offers.into_iter().collect(),
            state: OrderState::Placed(cell.clone()),
            launches: order.launches,
            causes: record.last_failures.clone(),
            refused_types: BTreeMap::new(),
            spot_failed: record.spot_failed,
            began: now.boot,
            queued_since: now.boot,
            spot_since: now.boot,
            deadline,
            is_joined: true,
        };
        self.orders.insert(sandbox, order);
    }
}

/// Returns the cell of a sandbox whose cell has no record, in a state that ends the cell.
fn lost(id: CellId, sandbox: &JournalSandbox, now: Now) -> Cell {
    let state = State::Terminating(End::new(LOST.into(), false), EndStep::Backoff(None));
    Cell {
        pod: Some(Pod::of_sandbox(sandbox)),
        created_unix_nanos: sandbox.created_unix_nanos,
        was_bound: true,
        instance_known: Some(now.boot),
        bill: Bill::resumed(&Timeline::default(), now),
        ..Cell::new(id, state)
    }
}
