//! Agents of the simulated world: they enrol, run containers, and power off without contact.

use std::time::Duration;

use kiyot_link::certificate::sha256;

use super::world::{Happening, World};
use crate::backends::milpa::{
    cells::engine::{ClaimRefusal, Event},
    id::CellId,
    providers::InstanceId,
};

/// The time without enrolment after which an instance powers off.
const ENROL_LIMIT: Duration = Duration::from_secs(900);
/// The time without contact after which an agent stops its pod.
pub(super) const ORPHAN_TIMEOUT: Duration = Duration::from_secs(900);
/// The pause of an agent between two attempts to connect.
const REDIAL: Duration = Duration::from_secs(5);
/// The time after which a pod on an ended instance must not read as running any more.
const READY_LIMIT: Duration = Duration::from_secs(600);

/// An agent.
#[derive(Debug)]
pub(super) struct Agent {
    cell: CellId,
    token_sha256: String,
    key_sha256: String,
    enrolled: bool,
    pub(super) connected: bool,
    /// The pod whose containers run.
    pub(super) containers: Option<usize>,
    /// True if it confirms no shutdown.
    pub(super) deaf: bool,
    started: Duration,
    last_contact: Duration,
    /// True once the instance has ended by itself.
    pub(super) interrupted: bool,
}

impl World<'_> {
    /// Boots a new instance.
    pub(super) fn boot(&mut self, instance: &InstanceId) {
        let Some(launched) = self.cloud.instances().get(instance) else { return };
        let (cell, token) = (launched.spec.cell.clone(), launched.spec.bootstrap.token.clone());
        let faults = self.faults();
        let boot = self.rng.long_tailed(Duration::from_secs(60), Duration::from_secs(240));
        let agent = Agent {
            cell,
            token_sha256: sha256(token.as_bytes()),
            key_sha256: format!("key of {instance}"),
            enrolled: false,
            connected: false,
            containers: None,
            deaf: self.rng.once_in(faults.deaf_agent),
            started: self.now + boot,
            last_contact: self.now + boot,
            interrupted: false,
        };
        self.agents.insert(instance.clone(), agent);
        if self.rng.once_in(faults.dead_boot) {
            self.log(format_args!("{instance} never boots"));
        } else {
            self.after(boot, Happening::AgentDials(instance.clone()));
        }
    }

    fn runs(&self, instance: &InstanceId) -> bool {
        self.cloud.instances().get(instance).is_some_and(|launched| launched.runs(self.now))
    }

    /// Enrols or connects, or gives up.
    pub(super) fn agent_dials(&mut self, instance: &InstanceId) {
        if !self.runs(instance) {
            return self.agent_off(instance);
        }
        let Some(agent) = self.agents.get(instance) else { return };
        if agent.connected {
            return;
        }
        let limit = if agent.enrolled {
            agent.last_contact + ORPHAN_TIMEOUT
        } else {
            agent.started + ENROL_LIMIT
        };
        if self.now >= limit {
            self.log(format_args!("{instance} powers off without contact"));
            return self.power_off(instance);
        }
        let (cell, key) = (agent.cell.clone(), agent.key_sha256.clone());
        let (enrolled, token) = (agent.enrolled, agent.token_sha256.clone());
        let Some(daemon) = &mut self.daemon else {
            return self.after(REDIAL, Happening::AgentDials(instance.clone()));
        };
        if !enrolled {
            daemon.claim += 1;
            let claim = daemon.claim;
            daemon.claims.insert(claim, instance.clone());
            let event = Event::Claim { cell, token_sha256: token, key_sha256: key, claim };
            self.after(REDIAL * 6, Happening::AgentDials(instance.clone()));
            return self.handle(event);
        }
        if daemon.engine.admitted_key(&cell) == Some(key.as_str()) {
            self.log(format_args!("{instance} connects"));
            if let Some(agent) = self.agents.get_mut(instance) {
                agent.connected = true;
                agent.last_contact = self.now;
            }
            self.handle(Event::Connected(cell));
        } else {
            self.after(REDIAL, Happening::AgentDials(instance.clone()));
        }
    }

    /// Receives the answer of a claim.
    pub(super) fn claimed(&mut self, instance: &InstanceId, outcome: &Result<(), ClaimRefusal>) {
        let Some(agent) = self.agents.get_mut(instance) else { return };
        match outcome {
            Ok(()) => {
                agent.enrolled = true;
                agent.last_contact = self.now;
                self.after(Duration::from_millis(50), Happening::AgentDials(instance.clone()));
            }
            // It tries again: the daemon may have failed to record the claim.
            Err(refusal) => self.log(format_args!("claim of {instance} refused: {refusal:?}")),
        }
    }

    /// Breaks the connections of all agents, or of those of a cell.
    pub(super) fn disconnect(&mut self, cell: Option<&CellId>) {
        let now = self.now;
        let mut broken = Vec::new();
        for (instance, agent) in &mut self.agents {
            if agent.connected && cell.is_none_or(|cell| agent.cell == *cell) {
                agent.connected = false;
                agent.last_contact = now;
                broken.push(instance.clone());
            }
        }
        for instance in broken {
            let wait = self.rng.seconds(1, 5);
            self.after(wait, Happening::AgentDials(instance));
        }
    }

    /// Starts the containers of a pod in its cell.
    pub(super) fn start_containers(&mut self, pod: usize, cell: &CellId) {
        let uid = self.pods.get(pod).map(|pod| pod.uid.clone()).unwrap_or_default();
        let other = self
            .agents
            .iter()
            .find(|(instance, agent)| agent.containers == Some(pod) && self.runs(instance));
        if let Some((other, _)) = other {
            let text = format!("two of pod {uid}: its containers run on {other}, and in {cell}");
            self.violation(text);
        }
        let instance = self
            .agents
            .iter()
            .find(|(instance, agent)| agent.cell == *cell && agent.connected && self.runs(instance))
            .map(|(instance, _)| instance.clone());
        let Some(instance) = instance else { return };
        if let Some(agent) = self.agents.get_mut(&instance) {
            agent.containers = Some(pod);
        }
        if self.rng.once_in(self.faults().interruption) {
            let wait = self.rng.seconds(1, 600);
            self.after(wait, Happening::Interruption(instance));
        }
    }

    /// Returns an instance that runs containers of a pod.
    pub(super) fn running_containers(&self, pod: usize) -> Option<&InstanceId> {
        let mut running = self
            .agents
            .iter()
            .filter(|(instance, agent)| agent.containers == Some(pod) && self.runs(instance));
        running.next().map(|(instance, _)| instance)
    }

    /// Shuts the pod of a cell down, on behalf of the daemon.
    pub(super) fn shut_down(&mut self, cell: &CellId) {
        let run = self.run;
        let agent = self.agents.iter().find(|(instance, agent)| {
            agent.cell == *cell && agent.connected && self.runs(instance)
        });
        let hears = agent.filter(|(_, agent)| !agent.deaf).map(|(instance, _)| instance.clone());
        match hears {
            Some(instance) => {
                let wait = self.rng.seconds(1, 10);
                let stopped = Happening::AgentStopped { run, cell: cell.clone(), instance };
                self.after(wait, stopped);
            }
            None => {
                let event = Box::new(Event::ShutDown(cell.clone(), false));
                self.after(Duration::from_secs(60), Happening::Deliver { run, event });
            }
        }
    }

    /// Ends the containers after a shutdown, and confirms it to the daemon that asked.
    pub(super) fn agent_stopped(&mut self, run: u64, cell: CellId, instance: &InstanceId) {
        if !self.runs(instance) {
            self.agent_off(instance);
        } else if let Some(agent) = self.agents.get_mut(instance) {
            agent.containers = None;
        }
        if run == self.run {
            self.handle(Event::ShutDown(cell, true));
        }
    }

    /// Ends an instance by itself.
    pub(super) fn interrupt(&mut self, instance: &InstanceId) {
        if self.runs(instance) {
            self.log(format_args!("{instance} is interrupted"));
            self.power_off(instance);
        }
    }

    fn power_off(&mut self, instance: &InstanceId) {
        self.cloud.end(instance, self.now);
        self.agent_off(instance);
        if let Some(agent) = self.agents.get_mut(instance) {
            agent.interrupted = true;
        }
        self.after(READY_LIMIT, Happening::CheckReady(instance.clone()));
    }

    fn agent_off(&mut self, instance: &InstanceId) {
        if let Some(agent) = self.agents.get_mut(instance) {
            agent.containers = None;
            agent.connected = false;
        }
    }

    /// Checks that no pod reads as running on an ended instance.
    pub(super) fn check_ready(&mut self, instance: &InstanceId) {
        let Some(agent) = self.agents.get(instance) else { return };
        // Nothing can be known of the provider during an outage, nor without a daemon.
        let cell = agent.cell.clone();
        let may_know = self.daemon.as_ref().is_some_and(|daemon| {
            self.now.saturating_sub(daemon.started.max(self.last_outage)) >= READY_LIMIT
        });
        if self.outage || !may_know {
            return self.after(READY_LIMIT, Happening::CheckReady(instance.clone()));
        }
        let reads_running = self.pods.iter().any(|pod| pod.runs_in(&cell));
        if reads_running {
            self.violation(format!("a pod reads as running in {cell}, whose {instance} has ended"));
        }
    }
}
