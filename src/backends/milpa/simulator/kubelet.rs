//! The kubelet of the simulated world: it runs, stops and replaces pods, and retries.

use std::{collections::BTreeMap, time::Duration};

use super::{
    daemon,
    world::{Happening, World},
};
use crate::{
    annotations::HealthyTimeout,
    backends::milpa::{
        cells::engine::{Event, JournalSandbox, OrderKey, OrderSpec},
        id::{CellId, SandboxId},
        placement::{Candidate, Offering},
        providers::Attachment,
    },
    price::Price,
};

/// The time after which the kubelet repeats a stop that is not answered.
const STOP_TIMEOUT: Duration = Duration::from_secs(120);
/// The price of all offerings.
const PRICE: Price = Price::from_micros(100_000);
/// The time after which the kubelet repeats a run that is not answered.
const RUN_TIMEOUT: Duration = Duration::from_secs(240);

/// A pod.
#[derive(Debug)]
pub(super) struct Pod {
    pub(super) uid: String,
    attempt: u32,
    /// The digest of its annotations.
    identity: String,
    /// The offerings that suit it, by their numbers.
    candidates: Vec<usize>,
    /// The limit of its agent's silence, if it has its own.
    pub(super) healthy_timeout: Option<HealthyTimeout>,
    /// The time at which it is deleted.
    deleted: Duration,
    state: PodState,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum PodState {
    /// Without a sandbox.
    Waiting,
    /// A call runs its sandbox; the number tells its calls apart.
    Starting(u64),
    Running(CellId, SandboxId),
    Stopping(CellId, SandboxId),
    Done,
}

/// Returns the candidate of an offering at the price of all offerings.
fn priced(offering: &Offering) -> Candidate {
    Candidate { offering: offering.clone(), price: PRICE, is_at_most: false }
}

impl Pod {
    pub(super) fn is_done(&self) -> bool {
        self.state == PodState::Done
    }
}

impl World<'_> {
    pub(super) fn create_pods(&mut self) {
        for number in 0..self.options.pods {
            let created = self.rng.between(Duration::ZERO, self.options.duration);
            let life = self.rng.long_tailed(Duration::from_secs(1200), Duration::from_secs(5400));
            let candidates = self.candidates();
            let healthy_timeout = match self.rng.below(6) {
                0 => Some(HealthyTimeout::Never),
                1 => Some(HealthyTimeout::of_secs(30)),
                2 => Some(HealthyTimeout::of_secs(600)),
                _ => None,
            };
            self.pods.push(Pod {
                uid: format!("pod-{number}"),
                attempt: 0,
                identity: "first".to_owned(),
                candidates,
                healthy_timeout,
                deleted: created + life,
                state: PodState::Waiting,
            });
            self.after(created, Happening::RunSandbox(number as usize));
        }
    }

    fn retry_run(&mut self, pod: usize) {
        let wait = self.rng.seconds(10, 15);
        self.after(wait, Happening::RunSandbox(pod));
    }

    pub(super) fn run_sandbox(&mut self, number: usize) {
        let (now, sandbox) = (self.now, self.sandbox_id());
        let Some(pod) = self.pods.get_mut(number) else { return };
        let again = match pod.state {
            PodState::Waiting => true,
            PodState::Starting(began) => {
                now.as_millis() as u64 - began >= RUN_TIMEOUT.as_millis() as u64
            }
            _ => false,
        };
        if !again {
            return;
        }
        if pod.deleted <= now {
            pod.state = PodState::Done;
            return self.log(format_args!("pod-{number} is deleted before it ran"));
        }
        if self.daemon.is_none() {
            return self.retry_run(number);
        }
        if self.strikes("changed_pod", self.faults().changed_pod) {
            self.log(format_args!("pod-{number} is changed"));
            let candidates = self.candidates();
            let Some(pod) = self.pods.get_mut(number) else { return };
            pod.identity = format!("changed at {}", now.as_secs());
            pod.candidates = candidates;
        }
        let Some(pod) = self.pods.get_mut(number) else { return };
        let candidates =
            pod.candidates.iter().filter_map(|number| self.offerings.get(*number).map(priced));
        pod.state = PodState::Starting(now.as_millis() as u64);
        let spec = OrderSpec {
            key: OrderKey {
                pod_uid: pod.uid.clone(),
                namespace: "default".to_owned(),
                name: pod.uid.clone(),
                attempt: pod.attempt,
            },
            identity: pod.identity.clone(),
            attachment: Attachment {
                pod_uid: pod.uid.clone(),
                sandbox: sandbox.to_string(),
                ..Attachment::default()
            },
            labels: BTreeMap::new(),
            sandbox,
            candidates: Ok(candidates.collect()),
            choice: None,
            healthy_timeout: pod.healthy_timeout,
            timeout: None,
        };
        self.log(format_args!("pod-{number} is run"));
        self.after(RUN_TIMEOUT, Happening::RunSandbox(number));
        self.order(number, spec);
    }

    fn sandbox_id(&self) -> SandboxId {
        let mut random = [0_u8; SandboxId::RANDOM_BYTES];
        self.rng.fill(&mut random);
        SandboxId::from_random(&random)
    }

    /// Receives the answer of a run: the sandbox is recorded, and its containers are started.
    pub(super) fn ran(&mut self, number: usize, bound: Option<(CellId, SandboxId)>) {
        let Some(pod) = self.pods.get_mut(number) else { return };
        let Some((cell, sandbox)) = bound else {
            if matches!(pod.state, PodState::Starting(_)) {
                pod.state = PodState::Waiting;
                self.retry_run(number);
            }
            return;
        };
        let record = JournalSandbox {
            id: sandbox.to_string(),
            cell: cell.to_string(),
            pod_uid: pod.uid.clone(),
            created_unix_nanos: i64::try_from(daemon::unix(self.now).as_nanos()).unwrap_or(0),
        };
        pod.state = PodState::Running(cell.clone(), sandbox.clone());
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
        // A stop of an earlier attempt.
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

    /// Receives the answer of a stop.
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
                "pod-{number} reads as stopped, and its containers run on {instance}"
            ));
        }
    }

    /// Receives the end of a cell: its pod gets the next attempt.
    pub(super) fn cell_ended(&mut self, cell: &CellId) {
        if let Some(number) = self.pods_in_cells.get(cell).copied() {
            self.replace(number);
        }
    }

    fn replace(&mut self, number: usize) {
        let Some(pod) = self.pods.get_mut(number) else { return };
        let PodState::Running(cell, sandbox) = pod.state.clone() else { return };
        pod.attempt += 1;
        pod.state = PodState::Waiting;
        self.sandboxes.remove(&sandbox);
        self.pods_in_cells.remove(&cell);
        self.log(format_args!("pod-{number} has lost {cell}"));
        self.check_stopped(number);
        let wait = self.rng.seconds(1, 3);
        self.after(wait, Happening::RunSandbox(number));
    }

    /// Continues after the end of the daemon: all open calls have failed.
    pub(super) fn daemon_crashed(&mut self) {
        let is_starting = |pod: &Pod| matches!(pod.state, PodState::Starting(_));
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

    /// Lists the pods after a start of the daemon: sandboxes whose cell has ended read as NOTREADY.
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
