//! Agents of the simulated world: they enrol, run containers, and power off if they lose contact.

use std::time::Duration;

use kiyot_engine::{
    engine::{Event, RedeemRefusal},
    id::CellId,
    provider::InstanceId,
};
use kiyot_link::certificate::sha256;

use crate::world::{Happening, World};

/// An instance that has not enrolled within this time powers off.
const ENROL_LIMIT: Duration = Duration::from_secs(900);
/// An agent stops its pod after this time without contact.
pub(super) const ORPHAN_TIMEOUT: Duration = Duration::from_secs(900);
/// An agent has stopped its pod after this time without contact.
pub(super) const STOPPED_BY_ITSELF: Duration = Duration::from_secs(900 + 120);
/// The pause of an agent between two dials.
const REDIAL: Duration = Duration::from_secs(5);
/// The pause of an agent after a refusal.
const REFUSED_REDIAL: Duration = Duration::from_secs(30);
/// The daemon waits this long for the confirmation of a shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(60);
/// The time until the daemon notices that an agent has no network, in seconds.
const KEEPALIVE: (u64, u64) = (15, 20);
/// Cells fall silent together if they do within this time.
const TOGETHER: Duration = Duration::from_secs(60);
/// A silent cell is lost within this time after its limit, even with repeated probes.
const SILENCE_LIMIT: Duration = Duration::from_secs(600);

/// An agent.
#[derive(Debug)]
pub(super) struct Agent {
    pub(super) cell: CellId,
    token_sha256: String,
    key_sha256: String,
    /// The number of keys that the agent has made.
    keys: u32,
    enrolled: bool,
    connected: bool,
    /// The number of the agent's connections.
    connection: u64,
    /// The time since which the daemon knows that the agent is silent.
    silent_since: Option<Duration>,
    /// The pod whose containers the agent runs.
    containers: Option<usize>,
    /// True while the agent ends its containers.
    stops: bool,
    pub(super) started: Duration,
    last_contact: Duration,
    /// The start and the end of a pause.
    pub(super) paused: Option<(Duration, Duration)>,
    /// The end of the agent's network cut.
    pub(super) cut_until: Duration,
    /// True after the agent was killed for good. Its containers may still run.
    pub(super) is_dead: bool,
}

impl Agent {
    /// Returns the agent of an instance that starts at this time.
    pub(super) fn new(cell: CellId, token: &str, instance: &InstanceId, started: Duration) -> Self {
        Self {
            cell,
            token_sha256: sha256(token.as_bytes()),
            key_sha256: format!("key 0 of {instance}"),
            keys: 0,
            enrolled: false,
            connected: false,
            connection: 0,
            silent_since: None,
            containers: None,
            stops: false,
            started,
            last_contact: started,
            paused: None,
            cut_until: Duration::ZERO,
            is_dead: false,
        }
    }

    /// Shifts all times by a pause, during which the agent's clock stood still.
    pub(super) fn shift_clock(&mut self, by: Duration) {
        self.started += by;
        self.last_contact += by;
    }

    /// Drops the agent's memory. The agent's key is on disk after enrolment.
    pub(super) fn kill(&mut self, instance: &InstanceId, now: Duration) {
        self.stops = false;
        self.lose_contact(now);
        if !self.enrolled {
            self.keys += 1;
            self.key_sha256 = format!("key {} of {instance}", self.keys);
        }
    }

    /// Ends the contact. Returns whether the agent was connected.
    fn lose_contact(&mut self, now: Duration) -> bool {
        if self.connected {
            self.last_contact = now;
        }
        std::mem::take(&mut self.connected)
    }

    fn is_reachable(&self, now: Duration) -> bool {
        !self.is_dead && self.paused.is_none() && self.cut_until <= now
    }
}

impl World<'_> {
    /// Enrols or connects an agent, or powers its instance off.
    pub(super) fn agent_dials(&mut self, instance: &InstanceId) {
        if !self.runs(instance) {
            return self.agent_off(instance);
        }
        let wait = self.left_of_pause(instance);
        let Some(agent) = self.agents.get(instance) else { return };
        if agent.connected || agent.is_dead {
            return;
        }
        if let Some(wait) = wait {
            return self.after(wait, Happening::AgentDials(instance.clone()));
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
        if self.now < agent.cut_until {
            let wait = agent.cut_until.min(limit) - self.now;
            return self.after(wait, Happening::AgentDials(instance.clone()));
        }
        let (cell, key) = (agent.cell.clone(), agent.key_sha256.clone());
        let (enrolled, token) = (agent.enrolled, agent.token_sha256.clone());
        let Some(daemon) = &mut self.daemon else {
            return self.after(REDIAL, Happening::AgentDials(instance.clone()));
        };
        if !enrolled {
            daemon.redemption += 1;
            let redemption = daemon.redemption;
            daemon.redemptions.insert(redemption, (instance.clone(), key.clone()));
            let event = Event::Redeem { cell, token_sha256: token, key_sha256: key, redemption };
            self.after(REFUSED_REDIAL, Happening::AgentDials(instance.clone()));
            return self.handle(event);
        }
        if daemon.engine.admitted_key(&cell) == Some(key.as_str()) {
            self.log(format_args!("{instance} connects"));
            if let Some(agent) = self.agents.get_mut(instance) {
                agent.connected = true;
                agent.connection += 1;
                agent.silent_since = None;
                agent.last_contact = self.now;
            }
            self.handle(Event::Connected(cell.clone()));
            self.start_late_containers(instance, &cell);
        } else {
            let wait = REFUSED_REDIAL.min(limit - self.now);
            self.after(wait, Happening::AgentDials(instance.clone()));
        }
    }

    /// Receives the reply to a redemption.
    pub(super) fn redeemed(
        &mut self,
        instance: &InstanceId,
        key: &str,
        outcome: &Result<(), RedeemRefusal>,
    ) {
        let Some(agent) = self.agents.get_mut(instance) else { return };
        if !agent.is_reachable(self.now) || agent.key_sha256 != key {
            return self.log(format_args!("the answer of a redemption does not reach {instance}"));
        }
        match outcome {
            Ok(()) => {
                agent.enrolled = true;
                agent.last_contact = self.now;
                self.after(Duration::from_millis(50), Happening::AgentDials(instance.clone()));
            }
            // The agent tries again: the daemon may have failed to record the redemption.
            Err(refusal) => self.log(format_args!("redemption of {instance} refused: {refusal:?}")),
        }
    }

    /// Returns the remaining time of an instance's pause.
    pub(super) fn left_of_pause(&self, instance: &InstanceId) -> Option<Duration> {
        let (_, until) = self.agents.get(instance)?.paused?;
        Some(until.saturating_sub(self.now) + Duration::from_millis(1))
    }

    /// Breaks an agent's connection.
    pub(super) fn lose_contact(&mut self, instance: &InstanceId) {
        let now = self.now;
        if let Some(agent) = self.agents.get_mut(instance)
            && agent.lose_contact(now)
        {
            let noticed = self.rng.seconds(KEEPALIVE.0, KEEPALIVE.1);
            self.link_ends(instance, noticed);
            let wait = self.rng.seconds(1, 5);
            self.after(wait, Happening::AgentDials(instance.clone()));
        }
    }

    /// Makes the daemon notice after some time that a connection has ended.
    pub(super) fn link_ends(&mut self, instance: &InstanceId, noticed: Duration) {
        if let Some(agent) = self.agents.get(instance) {
            let (run, connection) = (self.run, agent.connection);
            let ends = Happening::LinkEnds { run, instance: instance.clone(), connection };
            self.after(noticed, ends);
        }
    }

    pub(super) fn link_ended(&mut self, instance: &InstanceId, connection: u64) {
        let Some(agent) = self.agents.get_mut(instance) else { return };
        if agent.connected || agent.connection != connection || agent.silent_since.is_some() {
            return;
        }
        agent.silent_since = Some(self.now);
        let cell = agent.cell.clone();
        self.log(format_args!("{instance} of {cell} is silent"));
        self.handle(Event::Disconnected(cell));
    }

    /// Marks all agents as silent from now on, at a start of the daemon.
    pub(super) fn agents_are_silent(&mut self) {
        let now = self.now;
        for agent in self.agents.values_mut() {
            agent.silent_since = (!agent.connected).then_some(now);
        }
    }

    /// Returns the limit of a cell's silence; `None`: no limit.
    fn silence_limit(&self, cell: &CellId) -> Option<Duration> {
        let pod = self.pods_in_cells.get(cell).and_then(|pod| self.pods.get(*pod));
        match pod.and_then(|pod| pod.wanted.request.healthy_timeout) {
            Some(own) => own.limit(),
            None => self.node.healthy_timeout,
        }
    }

    /// Checks that a cell that the engine considers lost is silent, and not with many others.
    pub(super) fn check_lost(&mut self, cell: &CellId) {
        let Some(daemon) = &self.daemon else { return };
        let silent_since = |cell: &CellId| {
            let of_cell = self.agents.values().filter(|agent| agent.cell == *cell);
            of_cell.map(|agent| agent.silent_since).min().unwrap_or(Some(Duration::ZERO))
        };
        let watched: Vec<_> =
            daemon.engine.watched_cells().chain([cell]).map(silent_since).collect();
        let since = watched.iter().flatten();
        let together = |first: &Duration| {
            let others = since.clone().filter(|other| **other >= *first);
            others.filter(|other| **other - *first <= TOGETHER).count()
        };
        let (silent, all) = (since.clone().map(together).max().unwrap_or_default(), watched.len());
        let of_cell = self.agents.values().find(|agent| agent.cell == *cell);
        let since = of_cell.and_then(|agent| agent.silent_since);
        let limit = self.silence_limit(cell);
        let silence = since.map(|since| self.now - since);
        self.log(format_args!("{cell} is lost, silent for {silence:?}"));
        if silence.zip(limit).is_none_or(|(silence, limit)| silence < limit) {
            self.violation(format!("{cell} is lost after {silence:?}, but its limit is {limit:?}"));
        }
        let has_stopped = silence.is_some_and(|silence| silence >= STOPPED_BY_ITSELF);
        if silent >= 3 && silent * 3 >= all && !has_stopped {
            self.violation(format!("{cell} is lost, although {silent} of {all} are silent"));
        }
        self.lost.insert(cell.clone());
    }

    /// Checks that the engine considers no connected cell silent, and that a pod does not read as
    /// running long after its cell fell silent.
    pub(super) fn check_silence(&mut self) {
        let Some(daemon) = &self.daemon else { return };
        if daemon.engine.is_cut_off() {
            self.last_cut_off = self.now;
        }
        let can_tell = daemon.started.max(self.last_outage).max(self.last_cut_off);
        let mut violations = Vec::new();
        for (instance, agent) in &self.agents {
            let cell = &agent.cell;
            if agent.connected && daemon.engine.is_silent(cell) && self.runs(instance) {
                violations.push(format!("{cell} counts as silent, but its agent is connected"));
            }
            let (Some(since), Some(limit)) = (agent.silent_since, self.silence_limit(cell)) else {
                continue;
            };
            let is_ready = self.pods_in_cells.contains_key(cell) && !self.lost.contains(cell);
            let is_bound = daemon.engine.watched_cells().any(|bound| bound == cell);
            let silence = self.now.saturating_sub(since.max(can_tell));
            if is_ready && is_bound && !self.outage && silence > limit + SILENCE_LIMIT {
                violations.push(format!(
                    "a pod reads as running in {cell}, which is silent since {since:?}"
                ));
            }
        }
        for violation in violations {
            self.violation(violation);
        }
    }

    /// Breaks the connections of all agents, or of a single cell's agent.
    pub(super) fn disconnect(&mut self, cell: Option<&CellId>) {
        let broken: Vec<InstanceId> = self
            .agents
            .iter()
            .filter(|(_, agent)| agent.connected && cell.is_none_or(|cell| agent.cell == *cell))
            .map(|(instance, _)| instance.clone())
            .collect();
        for instance in broken {
            self.lose_contact(&instance);
        }
    }

    /// Starts containers that had to wait until the agent connected again.
    fn start_late_containers(&mut self, instance: &InstanceId, cell: &CellId) {
        let has_none = self.agents.get(instance).is_some_and(|agent| agent.containers.is_none());
        if has_none && let Some(pod) = self.pods_in_cells.get(cell).copied() {
            self.start_containers(pod, cell);
        }
    }

    /// Starts the containers of a pod in its cell.
    pub(super) fn start_containers(&mut self, pod: usize, cell: &CellId) {
        let uid = self.pods.get(pod).map(|pod| pod.uid().to_owned()).unwrap_or_default();
        let other = self
            .agents
            .iter()
            .find(|(instance, agent)| agent.containers == Some(pod) && self.runs(instance));
        if let Some((other, _)) = other {
            let text = format!("containers of pod {uid} run on {other} and in {cell}");
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
    }

    /// Returns an instance that runs containers of a pod.
    pub(super) fn running_containers(&self, pod: usize) -> Option<&InstanceId> {
        let mut running = self
            .agents
            .iter()
            .filter(|(instance, agent)| agent.containers == Some(pod) && self.runs(instance));
        running.next().map(|(instance, _)| instance)
    }

    /// Shuts down the pod of a cell for the daemon.
    pub(super) fn shut_down(&mut self, cell: &CellId) {
        let (run, deaf_agent) = (self.run, self.faults().deaf_agent);
        let agent = self.agents.iter().find(|(instance, agent)| {
            agent.cell == *cell && agent.connected && self.runs(instance)
        });
        let instance = agent.map(|(instance, _)| instance.clone());
        let hears = instance.filter(|_| !self.strikes("deaf_agent", deaf_agent));
        match hears {
            Some(instance) => {
                if let Some(agent) = self.agents.get_mut(&instance) {
                    agent.stops = true;
                }
                let wait = self.rng.seconds(1, 10);
                let stopped = Happening::AgentStopped { run, cell: cell.clone(), instance };
                self.after(wait, stopped);
            }
            None => self.fail_shutdown(run, cell),
        }
    }

    fn fail_shutdown(&mut self, run: u64, cell: &CellId) {
        self.log(format_args!("no agent of {cell} confirms a shutdown"));
        let event = Box::new(Event::ShutDown(cell.clone(), false));
        self.after(SHUTDOWN_TIMEOUT, Happening::Deliver { run, event });
    }

    /// Ends the containers after a shutdown, and confirms the shutdown to the daemon that requested
    /// it.
    pub(super) fn agent_stopped(&mut self, run: u64, cell: CellId, instance: &InstanceId) {
        if let Some(wait) = self.left_of_pause(instance) {
            if run == self.run {
                self.fail_shutdown(run, &cell);
            }
            let stopped = Happening::AgentStopped { run: 0, cell, instance: instance.clone() };
            return self.after(wait, stopped);
        }
        if !self.runs(instance) {
            self.agent_off(instance);
        }
        let is_confirmed = self.agents.get_mut(instance).is_some_and(|agent| {
            let stops = std::mem::take(&mut agent.stops);
            if stops {
                agent.containers = None;
            }
            stops && agent.connected
        });
        // Only the run that requested the shutdown gets the confirmation.
        if run == self.run {
            if is_confirmed {
                self.handle(Event::ShutDown(cell, true));
            } else {
                self.fail_shutdown(run, &cell);
            }
        }
    }

    pub(super) fn agent_off(&mut self, instance: &InstanceId) {
        self.link_ends(instance, Duration::from_millis(50));
        if let Some(agent) = self.agents.get_mut(instance) {
            agent.containers = None;
            agent.connected = false;
            agent.stops = false;
        }
    }
}
