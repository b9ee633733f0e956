//! The world of a simulation: time, the journal, the cloud, and the queue of events.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use kiyot_engine::{
    engine::{Event, JournalSandbox, ProviderKey},
    id::{CellId, SandboxId},
    placement::Offering,
    provider::{Capabilities, InstanceId},
};
use kiyot_proto::store;

use crate::{
    SimulationOptions, SimulationReport,
    agent::Agent,
    calls::ProviderCall,
    cloud::{self as sim, SimCloud},
    daemon::Daemon,
    disruptions::Disruption,
    faults::Faults,
    kubelet::Pod,
    node::Node,
    rng::Rng,
    trace::Trace,
    usage::Meter,
};

/// The longest time without faults at the end. All pods and cells must end within it.
const CALM: Duration = Duration::from_secs(5 * 3600);
/// A simulation ends after this time with nothing left. Late calls arrive earlier.
const REST: Duration = Duration::from_secs(600);
/// The duration of an outage of the provider.
pub(super) const OUTAGE: Duration = Duration::from_secs(30 * 60);
/// The fingerprint of the simulated daemon.
pub(super) const FINGERPRINT: &str = "fingerprint";
/// The most reported violations.
const MAX_VIOLATIONS: usize = 20;

/// An event of the world.
#[derive(Debug, Clone)]
pub(super) enum Happening {
    /// The kubelet runs a pod's sandbox, perhaps again, unless a later call was planned.
    RunSandbox { pod: usize, call: u64 },
    /// The call that runs a pod's sandbox ends early, unless a later call was planned.
    GivesUp { pod: usize, call: u64 },
    /// The kubelet stops a pod's sandbox, perhaps again.
    StopSandbox(usize),
    /// The daemon carries out the next effect of a cell.
    Effect { run: u64, cell: CellId },
    /// The daemon receives an event.
    Deliver { run: u64, event: Box<Event> },
    /// The daemon lists the instances.
    List { run: u64 },
    /// A timer of the engine is due.
    Timer { run: u64 },
    /// The daemon starts.
    DaemonStarts,
    /// A call reaches the provider.
    Arrives { run: u64, call: Box<ProviderCall>, replies: bool },
    /// An outage of the provider begins or ends.
    Outage(bool),
    /// The daemon has read the offerings of its pools.
    PoolsRead { run: u64 },
    /// The configured pools change.
    PoolsChange,
    /// An agent enrols or connects.
    AgentDials(InstanceId),
    /// An agent stops its pod after a shutdown.
    AgentStopped { run: u64, cell: CellId, instance: InstanceId },
    /// An instance is disrupted.
    Disrupts(InstanceId, Disruption),
    /// A paused instance continues.
    Resumes(InstanceId),
    /// An instance has ended without a call, and its agent's connection has ended too.
    InstanceEnded(InstanceId),
    /// An instance without an agent powers off.
    PowersOff(InstanceId),
    /// An outage of a zone begins.
    ZoneFails { zone: &'static str, lasts: Duration },
    /// An outage of a zone ends.
    ZoneRecovers(&'static str),
    /// The new instances of a zone can't reach the daemon from now on.
    ZoneCloses { zone: &'static str, lasts: Duration },
    /// The daemon notices that a connection has ended.
    LinkEnds { run: u64, instance: InstanceId, connection: u64 },
    /// The node loses its network.
    NodeCutOff { lasts: Duration },
    /// The capacities of offerings change.
    CapacityChanges,
    /// The pod of an ended instance must not read as running any more.
    CheckReady(InstanceId),
}

/// The world of a simulation.
#[derive(Debug)]
pub(super) struct World<'a> {
    pub(super) options: SimulationOptions,
    pub(super) rng: Rng,
    pub(super) trace: Trace<'a>,
    pub(super) now: Duration,
    queue: BTreeMap<(Duration, u64), Happening>,
    sequence: u64,
    pub(super) cloud: SimCloud,
    /// The node with the configuration of its daemon.
    pub(super) node: Node,
    /// The provider's offerings.
    pub(super) offerings: Vec<Offering>,
    /// The time in which pods are created.
    pub(super) duration: Duration,
    /// The capabilities of the provider.
    pub(super) capabilities: Capabilities,
    /// The failed zones, with the ends of their outages.
    pub(super) failed_zones: BTreeMap<&'static str, Duration>,
    /// The zones whose new instances can't reach the daemon, with the ends of these times.
    pub(super) closed_zones: BTreeMap<&'static str, Duration>,
    /// The offerings that were refused to open orders.
    pub(super) refused: BTreeMap<SandboxId, BTreeSet<Offering>>,
    pub(super) outage: bool,
    /// The provider of the last outage; `None`: all providers.
    pub(super) outage_of: Option<ProviderKey>,
    /// The end of the last outage.
    pub(super) last_outage: Duration,
    /// The last time at which the engine considered the node cut off.
    pub(super) last_cut_off: Duration,
    /// The cells that were lost.
    pub(super) lost: BTreeSet<CellId>,
    pub(super) cells: BTreeMap<CellId, store::Cell>,
    /// All cells that were launched, or that a starting daemon found recorded.
    pub(super) tried: BTreeSet<CellId>,
    /// All cells that were recorded.
    pub(super) recorded: BTreeSet<CellId>,
    pub(super) orders: BTreeMap<SandboxId, store::Order>,
    pub(super) costs: BTreeMap<String, store::NamespaceCost>,
    pub(super) sandboxes: BTreeMap<SandboxId, JournalSandbox>,
    pub(super) daemon: Option<Daemon>,
    /// The number of the daemon's run.
    pub(super) run: u64,
    pub(super) pods: Vec<Pod>,
    /// The pods to which cells were attached.
    pub(super) attached: BTreeMap<CellId, String>,
    /// The pods that read as running, by their cells.
    pub(super) pods_in_cells: BTreeMap<CellId, usize>,
    pub(super) agents: BTreeMap<InstanceId, Agent>,
    pub(super) pods_run: u64,
    pub(super) instances: u64,
    pub(super) most_instances: u64,
    pub(super) meter: Meter,
    /// The time since which nothing is left, at the end.
    nothing_left: Option<Duration>,
    /// The number of times that each fault happened.
    played: BTreeMap<&'static str, u64>,
    violations: Vec<String>,
}

impl<'a> World<'a> {
    pub(super) fn new(options: &SimulationOptions, trace: Trace<'a>) -> Self {
        let rng = Rng::new(options.seed);
        let node = Node::of(&options.workload, &rng);
        let duration = options.workload.duration();
        Self {
            options: options.clone(),
            rng,
            trace,
            now: Duration::from_secs(1),
            queue: BTreeMap::new(),
            sequence: 0,
            cloud: SimCloud::default(),
            offerings: node.catalogue.offerings().collect(),
            node,
            duration,
            capabilities: sim::CAPABILITIES,
            failed_zones: BTreeMap::new(),
            closed_zones: BTreeMap::new(),
            refused: BTreeMap::new(),
            outage: false,
            outage_of: None,
            last_outage: Duration::ZERO,
            last_cut_off: Duration::ZERO,
            lost: BTreeSet::new(),
            cells: BTreeMap::new(),
            tried: BTreeSet::new(),
            recorded: BTreeSet::new(),
            orders: BTreeMap::new(),
            costs: BTreeMap::new(),
            sandboxes: BTreeMap::new(),
            daemon: None,
            run: 0,
            pods: Vec::new(),
            attached: BTreeMap::new(),
            pods_in_cells: BTreeMap::new(),
            agents: BTreeMap::new(),
            pods_run: 0,
            instances: 0,
            most_instances: 0,
            meter: Meter::new(duration),
            nothing_left: None,
            played: BTreeMap::new(),
            violations: Vec::new(),
        }
    }

    /// Runs the simulation.
    pub(super) fn run(mut self) -> SimulationReport {
        self.choose_provider();
        self.limit_tries();
        self.create_pods();
        self.plan_outages();
        self.plan_zone_outages();
        self.plan_pools();
        self.after(Duration::ZERO, Happening::CapacityChanges);
        self.after(Duration::ZERO, Happening::DaemonStarts);
        let end = self.duration + CALM;
        while let Some(((at, _), happening)) = self.queue.pop_first() {
            if at > end || self.is_over() {
                break;
            }
            self.now = at;
            self.happen(happening);
        }
        for left in self.left() {
            self.violation(left);
        }
        let usage = self.usage();
        SimulationReport {
            pods_run: self.pods_run,
            instances: self.instances,
            most_instances: self.most_instances,
            crashes: self.played.get("crash").copied().unwrap_or_default(),
            events: self.trace.lines,
            faults: self.played,
            usage,
            violations: self.violations,
            trace_sha256: self.trace.sha256(),
        }
    }

    /// Returns the current faults: no faults at the end.
    pub(super) fn faults(&self) -> Faults {
        if self.is_calm() { Faults::NONE } else { self.options.faults }
    }

    /// Returns whether the faults have ended.
    pub(super) fn is_calm(&self) -> bool {
        self.now > self.duration
    }

    /// Returns whether a fault happens, once in `frequency` times on average.
    pub(super) fn strikes(&mut self, fault: &'static str, frequency: u32) -> bool {
        let strikes = self.rng.once_in(frequency);
        if strikes {
            self.count(fault);
        }
        strikes
    }

    /// Counts a fault that happens.
    pub(super) fn count(&mut self, fault: &'static str) {
        *self.played.entry(fault).or_default() += 1;
    }

    pub(super) fn after(&mut self, wait: Duration, happening: Happening) {
        self.sequence += 1;
        self.queue.insert((self.now + wait, self.sequence), happening);
    }

    pub(super) fn log(&mut self, text: std::fmt::Arguments<'_>) {
        self.trace.line(self.now, text);
    }

    /// Reports a violation of an invariant.
    pub(super) fn violation(&mut self, text: String) {
        self.log(format_args!("VIOLATION {text}"));
        if self.violations.len() < MAX_VIOLATIONS {
            self.violations.push(format!("at {:.3} s: {text}", self.now.as_secs_f64()));
        }
    }

    fn plan_outages(&mut self) {
        let hours = self.duration.as_secs() / 3600;
        for hour in 0..hours {
            if self.rng.once_in(self.options.faults.outage) {
                let begin = Duration::from_secs(hour * 3600) + self.rng.seconds(0, 1800);
                self.after(begin, Happening::Outage(true));
                self.after(begin + OUTAGE, Happening::Outage(false));
            }
        }
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::RunSandbox { pod, call } => self.run_sandbox(pod, call),
            Happening::GivesUp { pod, call } => self.give_up(pod, call),
            Happening::StopSandbox(pod) => self.stop_sandbox(pod),
            Happening::Effect { run, cell } if run == self.run => self.next_effect(&cell),
            Happening::Deliver { run, event } if run == self.run => self.handle(*event),
            Happening::List { run } if run == self.run => self.list(),
            Happening::Timer { run } if run == self.run => self.timer(),
            Happening::PoolsRead { run } if run == self.run => self.pools_read(),
            Happening::LinkEnds { run, instance, connection } if run == self.run => {
                self.link_ended(&instance, connection);
            }
            Happening::Effect { .. }
            | Happening::Deliver { .. }
            | Happening::List { .. }
            | Happening::Timer { .. }
            | Happening::PoolsRead { .. }
            | Happening::LinkEnds { .. } => {}
            Happening::NodeCutOff { lasts } => self.cut_node_off(lasts),
            Happening::PoolsChange => self.pools_change(),
            Happening::DaemonStarts => self.start_daemon(),
            Happening::Arrives { run, call, replies } => self.arrive(run, *call, replies),
            Happening::Outage(begins) => {
                self.log(format_args!("outage {}", if begins { "begins" } else { "ends" }));
                if begins {
                    self.count("outage");
                    // A single one of two providers, or both.
                    let providers = self.node.providers();
                    let failed = self.rng.below(providers.len() + 1);
                    self.outage_of = providers.get(failed).copied();
                }
                self.outage = begins;
                self.last_outage = self.now;
            }
            Happening::AgentDials(instance) => self.agent_dials(&instance),
            Happening::AgentStopped { run, cell, instance } => {
                self.agent_stopped(run, cell, &instance);
            }
            Happening::Disrupts(instance, disruption) => self.disrupt(&instance, disruption),
            Happening::Resumes(instance) => self.resume(&instance),
            Happening::InstanceEnded(instance) => self.instance_ended(&instance),
            Happening::PowersOff(instance) => self.power_off_unsupervised(&instance),
            Happening::ZoneFails { zone, lasts } => self.zone_fails(zone, lasts),
            Happening::ZoneCloses { zone, lasts } => self.zone_closes(zone, lasts),
            Happening::ZoneRecovers(zone) => self.zone_recovers(zone),
            Happening::CapacityChanges => self.change_capacity(),
            Happening::CheckReady(instance) => self.check_ready(&instance),
        }
    }

    /// Records since when nothing is left, in the time without faults.
    pub(super) fn look_for_rest(&mut self) {
        if !self.is_calm() || !self.left().is_empty() {
            self.nothing_left = None;
        } else if self.nothing_left.is_none() {
            self.nothing_left = Some(self.now);
        }
    }

    /// Returns whether nothing has been left for so long that no late call can arrive.
    fn is_over(&self) -> bool {
        self.nothing_left.is_some_and(|since| self.now.saturating_sub(since) > REST)
    }

    /// Returns a description of everything that is left of the simulation.
    fn left(&self) -> Vec<String> {
        let mut left = Vec::new();
        let running: Vec<String> = self
            .cloud
            .instances()
            .iter()
            .filter(|(_, instance)| instance.runs(self.now))
            .map(|(id, instance)| format!("{id} of {}", instance.spec.cell))
            .collect();
        if !running.is_empty() {
            left.push(format!("leaked instances: {running:?}"));
        }
        let open: Vec<&str> =
            self.pods.iter().filter(|pod| !pod.is_done()).map(|pod| pod.uid()).collect();
        if !open.is_empty() {
            left.push(format!("pods that never ended: {open:?}"));
        }
        match &self.daemon {
            None => left.push("the daemon does not run".to_owned()),
            Some(daemon) => {
                let cells: Vec<String> = daemon.engine.ids().map(ToString::to_string).collect();
                if !cells.is_empty() {
                    left.push(format!("cells that never ended: {cells:?}"));
                }
            }
        }
        if !self.orders.is_empty() {
            left.push(format!("orders are left in the journal: {:?}", self.orders.keys()));
        }
        let records: Vec<String> = self
            .cells
            .iter()
            .filter(|(_, cell)| cell.phase() != store::CellPhase::Gone)
            .map(|(id, _)| id.to_string())
            .collect();
        if !records.is_empty() {
            left.push(format!("records of cells are left in the journal: {records:?}"));
        }
        left
    }
}
