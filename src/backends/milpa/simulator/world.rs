//! The world of a simulation: time, the journal, the cloud, and what happens in which order.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use kiyot_proto::store;

use super::{
    SimulationOptions, SimulationReport, agent::Agent, calls::Call, daemon::Daemon, faults::Faults,
    kubelet::Pod, rng::Rng, trace::Trace,
};
use crate::backends::milpa::{
    cells::engine::{Event, JournalSandbox},
    id::{CellId, SandboxId},
    providers::{InstanceId, sim::SimCloud},
};

/// The time without faults at the end, in which everything must end.
const CALM: Duration = Duration::from_secs(5 * 3600);
/// The duration of an outage of the provider.
pub(super) const OUTAGE: Duration = Duration::from_secs(30 * 60);
/// The fingerprint of the simulated daemon.
pub(super) const FINGERPRINT: &str = "fingerprint";
/// The most violations that are reported.
const MAX_VIOLATIONS: usize = 20;

/// Something that happens.
#[derive(Debug, Clone)]
pub(super) enum Happening {
    /// The kubelet runs the sandbox of a pod, perhaps again.
    RunSandbox(usize),
    /// The kubelet stops the sandbox of a pod, perhaps again.
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
    Arrives { run: u64, call: Box<Call>, replies: bool },
    /// An outage of the provider begins or ends.
    Outage(bool),
    /// An agent enrols or connects.
    AgentDials(InstanceId),
    /// An agent stops its pod after a shutdown.
    AgentStopped { run: u64, cell: CellId, instance: InstanceId },
    /// An instance ends by itself.
    Interruption(InstanceId),
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
    pub(super) outage: bool,
    /// The end of the last outage.
    pub(super) last_outage: Duration,
    pub(super) cells: BTreeMap<CellId, store::Cell>,
    /// All cells that were ever recorded.
    pub(super) recorded: BTreeSet<CellId>,
    pub(super) orders: BTreeMap<SandboxId, store::Order>,
    pub(super) sandboxes: BTreeMap<SandboxId, JournalSandbox>,
    pub(super) daemon: Option<Daemon>,
    /// The number of the daemon's run.
    pub(super) run: u64,
    pub(super) pods: Vec<Pod>,
    pub(super) agents: BTreeMap<InstanceId, Agent>,
    pub(super) pods_run: u64,
    pub(super) instances: u64,
    pub(super) most_instances: u64,
    pub(super) crashes: u64,
    violations: Vec<String>,
}

impl<'a> World<'a> {
    pub(super) fn new(options: &SimulationOptions, trace: Trace<'a>) -> Self {
        Self {
            options: options.clone(),
            rng: Rng::new(options.seed),
            trace,
            now: Duration::from_secs(1),
            queue: BTreeMap::new(),
            sequence: 0,
            cloud: SimCloud::default(),
            outage: false,
            last_outage: Duration::ZERO,
            cells: BTreeMap::new(),
            recorded: BTreeSet::new(),
            orders: BTreeMap::new(),
            sandboxes: BTreeMap::new(),
            daemon: None,
            run: 0,
            pods: Vec::new(),
            agents: BTreeMap::new(),
            pods_run: 0,
            instances: 0,
            most_instances: 0,
            crashes: 0,
            violations: Vec::new(),
        }
    }

    /// Runs the simulation.
    pub(super) fn run(mut self) -> SimulationReport {
        if self.faults().dead_boot > 0 {
            // The first choice is often full.
            for offering in SimCloud::offerings().into_iter().take(1) {
                self.cloud.set_capacity(offering, 5);
            }
        }
        self.create_pods();
        self.plan_outages();
        self.after(Duration::ZERO, Happening::DaemonStarts);
        let end = self.options.duration + CALM;
        while let Some(((at, _), happening)) = self.queue.pop_first() {
            if at > end {
                break;
            }
            self.now = at;
            self.happen(happening);
        }
        self.now = end;
        self.check_end();
        SimulationReport {
            pods_run: self.pods_run,
            instances: self.instances,
            most_instances: self.most_instances,
            crashes: self.crashes,
            events: self.trace.lines,
            violations: self.violations,
            trace_sha256: self.trace.sha256(),
        }
    }

    /// Returns the faults of this time: none at the end.
    pub(super) fn faults(&self) -> Faults {
        if self.now > self.options.duration { Faults::NONE } else { self.options.faults }
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
        let hours = self.options.duration.as_secs() / 3600;
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
            Happening::RunSandbox(pod) => self.run_sandbox(pod),
            Happening::StopSandbox(pod) => self.stop_sandbox(pod),
            Happening::Effect { run, cell } if run == self.run => self.next_effect(&cell),
            Happening::Deliver { run, event } if run == self.run => self.handle(*event),
            Happening::List { run } if run == self.run => self.list(),
            Happening::Timer { run } if run == self.run => self.timer(),
            Happening::Effect { .. }
            | Happening::Deliver { .. }
            | Happening::List { .. }
            | Happening::Timer { .. } => {}
            Happening::DaemonStarts => self.start_daemon(),
            Happening::Arrives { run, call, replies } => self.arrive(run, *call, replies),
            Happening::Outage(begins) => {
                self.log(format_args!("outage {}", if begins { "begins" } else { "ends" }));
                self.outage = begins;
                self.last_outage = self.now;
            }
            Happening::AgentDials(instance) => self.agent_dials(&instance),
            Happening::AgentStopped { run, cell, instance } => {
                self.agent_stopped(run, cell, &instance);
            }
            Happening::Interruption(instance) => self.interrupt(&instance),
            Happening::CheckReady(instance) => self.check_ready(&instance),
        }
    }

    /// Checks that nothing is left.
    fn check_end(&mut self) {
        let running: Vec<String> = self
            .cloud
            .instances()
            .iter()
            .filter(|(_, instance)| instance.runs(self.now))
            .map(|(id, instance)| format!("{id} of {}", instance.spec.cell))
            .collect();
        if !running.is_empty() {
            self.violation(format!("leaked instances: {running:?}"));
        }
        let open: Vec<&str> =
            self.pods.iter().filter(|pod| !pod.is_done()).map(|pod| pod.uid.as_str()).collect();
        if !open.is_empty() {
            let text = format!("pods that never ended: {open:?}");
            self.violation(text);
        }
        let Some(daemon) = &self.daemon else {
            return self.violation("the daemon does not run".to_owned());
        };
        let cells: Vec<String> = daemon.engine.ids().map(ToString::to_string).collect();
        if !cells.is_empty() {
            self.violation(format!("cells that never ended: {cells:?}"));
        }
        if !self.orders.is_empty() {
            let text = format!("orders are left in the journal: {:?}", self.orders.keys());
            self.violation(text);
        }
        let records: Vec<String> = self
            .cells
            .iter()
            .filter(|(_, cell)| cell.phase() != store::CellPhase::Gone)
            .map(|(id, _)| id.to_string())
            .collect();
        if !records.is_empty() {
            self.violation(format!("records of cells are left in the journal: {records:?}"));
        }
    }
}
