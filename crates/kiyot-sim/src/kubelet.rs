//! The kubelet of the simulated world: it runs, stops and replaces pods, and retries.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kiyot_engine::{
    OrderKey, Wanted,
    engine::{Event, JournalSandbox, Offers, OrderSpec, ProviderKey},
    id::{CellId, SandboxId},
    placement::{Candidate, Choice, Market, Needs, NoFit, Requested, rank},
    request::{Architecture, CellRequest, HealthyTimeout, LaunchType},
};
use kiyot_values::{error_chain::error_chain, names::DEFAULT_NAMESPACE};

use crate::{
    Workload, WorkloadPod, daemon,
    pools::PodKind,
    world::{Happening, World},
};

/// The kubelet repeats an unanswered stop after this time.
const STOP_TIMEOUT: Duration = Duration::from_secs(120);
/// The kubelet repeats an unanswered run after this time.
const RUN_TIMEOUT: Duration = Duration::from_secs(240);

/// The most seconds until a call ends early.
const GIVES_UP: u64 = 120;
/// Known pods without a cell are run again for this time after the arrival of the last known pod.
const PATIENCE: Duration = Duration::from_secs(4 * 3600);
/// The least and the most suitable offerings of a random pod.
const CANDIDATES: (usize, usize) = (2, 6);

/// A pod.
#[derive(Debug)]
pub(super) struct Pod {
    /// The pod's wishes for its cell. The pod's name is its uid.
    pub(super) wanted: Arc<Wanted>,
    /// The number of the next planned run.
    call: u64,
    /// The offerings that the pod accepts; `None`: all that fit its needs.
    candidates: Option<Vec<Candidate>>,
    /// The kind of a random pod.
    pub(super) kind: Option<PodKind>,
    /// The time of the pod's deletion.
    deleted: Duration,
    /// The time for which the pod runs, if known.
    life: Option<Duration>,
    /// The time of the pod's creation, until the pod has run.
    created: Option<Duration>,
    state: PodState,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum PodState {
    /// The pod has no sandbox.
    Waiting,
    /// A call is running the pod's sandbox.
    Starting,
    Running(CellId, SandboxId),
    Stopping(CellId, SandboxId),
    Done,
}

impl Pod {
    pub(super) fn is_done(&self) -> bool {
        self.state == PodState::Done
    }

    /// Returns the pod's uid.
    pub(super) fn uid(&self) -> &str {
        &self.wanted.key.pod_uid
    }
}

/// Returns the wishes of a pod, by its number.
fn wanted(
    number: usize,
    namespace: &str,
    needs: Arc<Needs>,
    healthy_timeout: Option<HealthyTimeout>,
) -> Arc<Wanted> {
    let (uid, namespace) = (format!("pod-{number}"), namespace.to_owned());
    let key = OrderKey { pod_uid: uid.clone(), namespace, name: uid, attempt: 0 };
    let request = CellRequest { healthy_timeout, ..CellRequest::default() };
    let identity = "first".to_owned();
    Arc::new(Wanted { key, identity, request, needs, ..Wanted::default() })
}

impl World<'_> {
    pub(super) fn create_pods(&mut self) {
        match self.options.workload.clone() {
            Workload::Random { pods, duration } => self.create_random_pods(pods, duration),
            Workload::Known { pods, .. } => self.create_known_pods(&pods),
        }
    }

    /// Creates the known pods, except those that no offering fits.
    fn create_known_pods(&mut self, pods: &[WorkloadPod]) {
        for pod in pods {
            let needs = Arc::new(self.node.needs(&pod.request));
            let providers = self.node.providers().into_iter();
            let choices = providers.map(|provider| self.node.choice(provider, &needs));
            let unfit = choices.map(|Choice { catalogue, needs, rules }| {
                let fits = !rank(&catalogue, &needs, &rules, &()).is_empty();
                (!fits).then(|| error_chain(&NoFit::new(&catalogue, &needs, &rules)))
            });
            if let Some(unfit) = unfit.collect::<Option<Vec<String>>>() {
                if self.meter.unplaced.0 == 0 {
                    self.meter.unplaced.1 = unfit.join("; ");
                }
                self.meter.unplaced.0 += 1;
                continue;
            }
            let number = self.pods.len();
            self.pods.push(Pod {
                wanted: wanted(number, &pod.namespace, needs, None),
                call: 0,
                candidates: None,
                kind: None,
                deleted: self.duration + PATIENCE,
                life: Some(pod.duration),
                created: Some(pod.arrival),
                state: PodState::Waiting,
            });
            self.plan_run(number, pod.arrival);
        }
    }

    fn create_random_pods(&mut self, pods: u32, duration: Duration) {
        for number in 0..pods {
            let created = self.rng.between(Duration::ZERO, duration);
            let life = self.rng.long_tailed(Duration::from_secs(1200), Duration::from_secs(5400));
            let (kind, needs) = self.random_kind();
            let candidates = Some(self.random_candidates(kind));
            let healthy_timeout = match self.rng.below(6) {
                0 => Some(HealthyTimeout::Never),
                1 => Some(HealthyTimeout::of_secs(30)),
                2 => Some(HealthyTimeout::of_secs(600)),
                _ => None,
            };
            self.pods.push(Pod {
                wanted: wanted(number as usize, DEFAULT_NAMESPACE, needs.into(), healthy_timeout),
                call: 0,
                candidates,
                kind: Some(kind),
                deleted: created + life,
                life: None,
                created: Some(created),
                state: PodState::Waiting,
            });
            self.plan_run(number as usize, created);
        }
    }

    /// Returns a kind and its needs for a random pod.
    fn random_kind(&mut self) -> (PodKind, Needs) {
        let (launch_type, markets): (_, &[Market]) = match self.rng.below(3) {
            0 => (LaunchType::OnDemand, &[Market::OnDemand]),
            1 => (LaunchType::Spot, &[Market::Spot]),
            _ => (LaunchType::SpotPreferred, &[Market::OnDemand, Market::Spot]),
        };
        let size = self.rng.below(3);
        let request = CellRequest {
            launch_type,
            milli_cpus: Some(1000 << size),
            architecture: Some(Architecture::Amd64),
            ..CellRequest::default()
        };
        let defaults = &self.node.rules.defaults;
        (PodKind { size, markets }, Needs::new(&request, &Requested::default(), defaults))
    }

    /// Returns some of the offerings that suit a pod, preferred first.
    fn random_candidates(&mut self, kind: PodKind) -> Vec<Candidate> {
        let mut candidates: Vec<Candidate> = self.node.catalogue.candidates().collect();
        candidates.retain(|candidate| kind.suits(&candidate.offering));
        self.rng.shuffle(&mut candidates);
        let (least, most) = CANDIDATES;
        candidates.truncate(least + self.rng.below(most - least + 1));
        candidates
    }

    /// Returns a provider's offerings for a pod that were not refused recently, preferred first.
    fn candidates(&self, pod: &Pod, provider: ProviderKey, choice: &Choice) -> Vec<Candidate> {
        let Some(daemon) = &self.daemon else { return Vec::new() };
        if let Some(candidates) = &pod.candidates {
            let is_own = |it: &&Candidate| self.node.provider_of(&it.offering) == provider;
            return candidates.iter().filter(is_own).cloned().collect();
        }
        let Choice { catalogue, needs, rules } = choice;
        let (machine, now) = (needs.machine(), self.time());
        let refusals = daemon.engine.refusals_for(provider, &BTreeMap::new(), &machine, now);
        rank(catalogue, needs, rules, &refusals.at(self.now))
    }

    /// Plans the next run of a pod's sandbox, and cancels an earlier plan.
    fn plan_run(&mut self, number: usize, wait: Duration) {
        let Some(pod) = self.pods.get_mut(number) else { return };
        pod.call += 1;
        let call = pod.call;
        self.after(wait, Happening::RunSandbox { pod: number, call });
    }

    fn retry_run(&mut self, pod: usize) {
        let wait = self.rng.seconds(10, 15);
        self.plan_run(pod, wait);
    }

    pub(super) fn run_sandbox(&mut self, number: usize, call: u64) {
        let (now, sandbox) = (self.now, self.sandbox_id());
        let Some(pod) = self.pods.get_mut(number) else { return };
        let is_wanted = matches!(pod.state, PodState::Waiting | PodState::Starting);
        if !is_wanted || pod.call != call {
            return;
        }
        if pod.deleted <= now {
            pod.state = PodState::Done;
            self.meter.unstarted += u64::from(pod.life.is_some());
            return self.log(format_args!("pod-{number} is deleted before it ran"));
        }
        if self.daemon.is_none() {
            return self.retry_run(number);
        }
        if self.strikes("changed_pod", self.faults().changed_pod) {
            self.log(format_args!("pod-{number} is changed"));
            let kind = self.pods.get(number).and_then(|pod| pod.kind);
            let changed = kind.map(|kind| self.random_candidates(kind));
            let Some(pod) = self.pods.get_mut(number) else { return };
            Arc::make_mut(&mut pod.wanted).identity = format!("changed at {}", now.as_secs());
            pod.candidates = changed.or(pod.candidates.take());
        }
        let Some(pod) = self.pods.get(number) else { return };
        let offers = self.node.providers().into_iter().map(|provider| {
            let choice = self.node.choice(provider, &pod.wanted.needs);
            Offers {
                provider,
                candidates: Ok(self.candidates(pod, provider, &choice)),
                parameters: BTreeMap::new(),
                choice: Some(choice),
            }
        });
        let offers: Vec<Offers> = offers.collect();
        let has_candidates = |offers: &Offers| offers.candidates.iter().any(|it| !it.is_empty());
        if !offers.iter().any(has_candidates) {
            self.log(format_args!("pod-{number} is refused all offerings"));
            return self.retry_run(number);
        }
        let Some(pod) = self.pods.get_mut(number) else { return };
        pod.state = PodState::Starting;
        let spec = OrderSpec {
            wanted: Arc::clone(&pod.wanted),
            sandbox,
            offers,
            timeout: None,
            is_joined: true,
        };
        self.log(format_args!("pod-{number} is run"));
        self.plan_run(number, RUN_TIMEOUT);
        if self.strikes("given_up", self.faults().given_up) {
            let wait = self.rng.seconds(1, GIVES_UP);
            self.after(wait, Happening::GivesUp { pod: number, call: call + 1 });
        }
        self.order(number, spec);
    }

    /// Ends the call that runs a sandbox: the pod is deleted, or run again.
    pub(super) fn give_up(&mut self, number: usize, call: u64) {
        let (now, is_deleted) = (self.now, self.rng.once_in(2));
        let Some(pod) = self.pods.get_mut(number) else { return };
        if pod.state != PodState::Starting || pod.call != call {
            return;
        }
        pod.state = PodState::Waiting;
        if is_deleted {
            pod.deleted = pod.deleted.min(now);
        }
        let key = pod.wanted.key.clone();
        self.log(format_args!("the call of pod-{number} leaves"));
        self.retry_run(number);
        self.handle(Event::Abandoned(key));
    }

    fn sandbox_id(&self) -> SandboxId {
        let mut random = [0_u8; SandboxId::RANDOM_BYTES];
        self.rng.fill(&mut random);
        SandboxId::from_random(&random)
    }

    /// Receives the result of a run: records the sandbox and starts its containers.
    pub(super) fn ran(&mut self, number: usize, bound: Option<(CellId, SandboxId)>) {
        let Some(pod) = self.pods.get_mut(number) else { return };
        let Some((cell, sandbox)) = bound else {
            if pod.state == PodState::Starting {
                pod.state = PodState::Waiting;
                self.meter.failed_calls += 1;
                self.retry_run(number);
            }
            return;
        };
        let record = JournalSandbox {
            id: sandbox.to_string(),
            cell: cell.to_string(),
            pod_uid: pod.uid().to_owned(),
            ports: None,
            created_unix_nanos: i64::try_from(daemon::unix(self.now).as_nanos()).unwrap_or(0),
        };
        pod.state = PodState::Running(cell.clone(), sandbox.clone());
        if let Some(life) = pod.life {
            pod.deleted = self.now + life;
        }
        if let Some(created) = pod.created.take() {
            let provider = self.daemon.as_ref().and_then(|it| it.engine.provider_of(&cell));
            let is_on_node = provider.is_some_and(|key| self.node.on_node_of(key).is_some());
            self.meter.started(&cell, self.now.saturating_sub(created), is_on_node);
        }
        self.meter.bound(&cell, self.now);
        let life = pod.deleted.saturating_sub(self.now).max(Duration::from_secs(1));
        self.sandboxes.insert(sandbox, record);
        self.pods_in_cells.insert(cell.clone(), number);
        self.pods_run += 1;
        self.log(format_args!("pod-{number} runs in {cell}"));
        self.start_containers(number, &cell);
        self.after(life, Happening::StopSandbox(number));
    }

    pub(super) fn stop_sandbox(&mut self, number: usize) {
        let Some(pod) = self.pods.get_mut(number) else { return };
        let (PodState::Running(cell, sandbox) | PodState::Stopping(cell, sandbox)) =
            pod.state.clone()
        else {
            return;
        };
        // The stop was planned for an earlier attempt.
        if pod.deleted > self.now && matches!(pod.state, PodState::Running(..)) {
            return;
        }
        let Some(daemon) = &mut self.daemon else {
            let wait = self.rng.seconds(2, 10);
            return self.after(wait, Happening::StopSandbox(number));
        };
        pod.state = PodState::Stopping(cell.clone(), sandbox);
        self.pods_in_cells.remove(&cell);
        if !daemon.engine.contains(&cell) {
            return self.stopped(number, true);
        }
        daemon.enders.insert(cell.clone(), number);
        self.log(format_args!("pod-{number} is stopped"));
        self.after(STOP_TIMEOUT, Happening::StopSandbox(number));
        self.handle(Event::Terminate { cell, reason: "its pod was stopped".into() });
    }

    /// Receives the result of a stop.
    pub(super) fn stopped(&mut self, number: usize, is_ok: bool) {
        let Some(pod) = self.pods.get_mut(number) else { return };
        let PodState::Stopping(_, sandbox) = pod.state.clone() else { return };
        if !is_ok {
            let wait = self.rng.seconds(10, 15);
            return self.after(wait, Happening::StopSandbox(number));
        }
        pod.state = PodState::Done;
        self.sandboxes.remove(&sandbox);
        self.log(format_args!("pod-{number} is stopped and removed"));
        self.check_stopped(number);
    }

    fn check_stopped(&mut self, number: usize) {
        if let Some(instance) = self.running_containers(number).cloned() {
            self.violation(format!(
                "pod-{number} reads as stopped, but its containers run on {instance}"
            ));
        }
    }

    /// Receives the end of a cell. Its pod gets the next attempt.
    pub(super) fn cell_ended(&mut self, cell: &CellId) {
        if let Some(number) = self.pods_in_cells.get(cell).copied() {
            self.replace(number);
        }
    }

    fn replace(&mut self, number: usize) {
        let Some(pod) = self.pods.get_mut(number) else { return };
        let PodState::Running(cell, sandbox) = pod.state.clone() else { return };
        Arc::make_mut(&mut pod.wanted).key.attempt += 1;
        pod.state = PodState::Waiting;
        self.sandboxes.remove(&sandbox);
        self.pods_in_cells.remove(&cell);
        self.log(format_args!("pod-{number} has lost {cell}"));
        self.check_stopped(number);
        let wait = self.rng.seconds(1, 3);
        self.plan_run(number, wait);
    }

    /// Continues after the daemon was killed: all open calls have failed.
    pub(super) fn daemon_crashed(&mut self) {
        let is_starting = |pod: &Pod| pod.state == PodState::Starting;
        let starting: Vec<usize> = (0..self.pods.len())
            .filter(|number| self.pods.get(*number).is_some_and(is_starting))
            .collect();
        for number in starting {
            self.ran(number, None);
        }
        for number in 0..self.pods.len() {
            let is_stopping = self
                .pods
                .get(number)
                .is_some_and(|pod| matches!(pod.state, PodState::Stopping(..)));
            if is_stopping {
                self.stopped(number, false);
            }
        }
    }

    /// Lists the pods after a start of the daemon. Sandboxes whose cell has ended read as NOTREADY.
    pub(super) fn relist(&mut self) {
        for number in 0..self.pods.len() {
            let is_lost = self.pods.get(number).is_some_and(|pod| {
                matches!(&pod.state, PodState::Running(cell, _)
                    if self.daemon.as_ref().is_some_and(|daemon| !daemon.engine.contains(cell)))
            });
            if is_lost {
                self.replace(number);
            }
        }
    }
}
