//! Disruptions of instances in the simulated world, of a single instance or a whole zone.

use std::time::Duration;

use kiyot_engine::{placement::Market, provider::InstanceId};

use crate::{
    cloud::ZONES,
    rng::Quantiles,
    world::{Happening, World},
};

/// The time from a launch to a disruption, in seconds.
const DISRUPTED_AFTER: (u64, u64) = (1, 1800);
/// The time from an interruption to the instance's end.
const INTERRUPTION: Quantiles = Quantiles::new(1, 30, 120, 180, 300);
/// The duration of a pause.
const PAUSE: Quantiles = Quantiles::new(30, 900, 3600, 7200, 10_800);
/// The duration of an instance's network cut.
const NETWORK_CUT: Quantiles = Quantiles::new(20, 300, 1500, 3000, 3600);
/// The duration of the node's network cut, in seconds.
const NODE_CUT: (u64, u64) = (120, 600);
/// The duration of a zone's outage, in seconds.
const ZONE_OUTAGE: (u64, u64) = (600, 3000);
/// The time until instances end in a zone without power, in seconds.
const POWER_LOSS: (u64, u64) = (0, 120);
/// The time until a killed agent starts again, in seconds.
const AGENT_RESTART: (u64, u64) = (1, 30);
/// The time until an instance without an agent powers off, in seconds.
const AGENT_GIVEN_UP: (u64, u64) = (30, 300);

/// A disruption of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Disruption {
    /// The provider reclaims the instance.
    Interruption,
    /// The whole instance, with its clock, stands still and continues later.
    Pause,
    /// The instance has no network for some time.
    NetworkCut,
    /// The agent is killed.
    KilledAgent,
}

impl World<'_> {
    /// Chooses whether the provider's instances can be paused, and whether pods have power over
    /// agents.
    pub(super) fn choose_provider(&mut self) {
        let faults = self.options.faults;
        if faults.pause > 0 || faults.killed_agent > 0 {
            match self.rng.below(3) {
                0 => self.capabilities.can_be_paused = true,
                1 => self.capabilities.pods_control_agent = true,
                _ => {}
            }
        }
        let capabilities = self.capabilities;
        self.log(format_args!(
            "provider: can be paused: {}, pods control agents: {}",
            capabilities.can_be_paused, capabilities.pods_control_agent
        ));
    }

    /// Plans the disruptions of a new instance.
    pub(super) fn plan_disruptions(&mut self, instance: &InstanceId) {
        let faults = self.faults();
        let is_spot = self
            .cloud
            .instances()
            .get(instance)
            .is_some_and(|launched| launched.offering.market == Market::Spot);
        let plans = [
            (is_spot, faults.interruption, Disruption::Interruption),
            (self.capabilities.can_be_paused, faults.pause, Disruption::Pause),
            (true, faults.network_cut, Disruption::NetworkCut),
            (true, faults.killed_agent, Disruption::KilledAgent),
        ];
        for (applies, frequency, disruption) in plans {
            if applies && self.rng.once_in(frequency) {
                let wait = self.rng.seconds(DISRUPTED_AFTER.0, DISRUPTED_AFTER.1);
                self.after(wait, Happening::Disrupts(instance.clone(), disruption));
            }
        }
    }

    /// Disrupts an instance.
    pub(super) fn disrupt(&mut self, instance: &InstanceId, disruption: Disruption) {
        if self.is_calm() || !self.runs(instance) {
            return;
        }
        match disruption {
            Disruption::Interruption => {
                let takes = self.rng.time_of(&INTERRUPTION);
                self.count("interruption");
                self.log(format_args!("{instance} is taken back in {} s", takes.as_secs()));
                self.cloud.interrupt(instance);
                self.end_by_itself(instance, takes);
            }
            Disruption::Pause => self.pause(instance),
            Disruption::NetworkCut => {
                let lasts = self.rng.time_of(&NETWORK_CUT);
                self.count("network_cut");
                self.log(format_args!("{instance} has no network for {} s", lasts.as_secs()));
                self.cut_network(instance, self.now + lasts);
            }
            Disruption::KilledAgent => self.kill_agent(instance),
        }
    }

    fn pause(&mut self, instance: &InstanceId) {
        let (now, lasts) = (self.now, self.rng.time_of(&PAUSE));
        let Some(agent) = self.agents.get_mut(instance) else { return };
        if agent.paused.is_some() {
            return;
        }
        agent.paused = Some((now, now + lasts));
        self.count("pause");
        self.log(format_args!("{instance} is paused for {} s", lasts.as_secs()));
        self.lose_contact(instance);
        self.after(lasts, Happening::Resumes(instance.clone()));
    }

    /// Continues a paused instance. Its clock stood still.
    pub(super) fn resume(&mut self, instance: &InstanceId) {
        let (now, runs) = (self.now, self.runs(instance));
        let Some(agent) = self.agents.get_mut(instance) else { return };
        let Some((began, _)) = agent.paused.take() else { return };
        agent.shift_clock(now - began);
        if runs {
            self.log(format_args!("{instance} goes on"));
        }
    }

    fn cut_network(&mut self, instance: &InstanceId, until: Duration) {
        if let Some(agent) = self.agents.get_mut(instance) {
            agent.cut_until = agent.cut_until.max(until);
            self.lose_contact(instance);
        }
    }

    /// Kills an agent. The instance's supervisor restarts the agent or powers the instance off,
    /// unless the pod has power over both.
    fn kill_agent(&mut self, instance: &InstanceId) {
        let now = self.now;
        let Some(agent) = self.agents.get_mut(instance) else { return };
        if agent.is_dead || agent.paused.is_some() || now < agent.started {
            return;
        }
        agent.kill(instance, now);
        self.link_ends(instance, Duration::from_millis(50));
        self.count("killed_agent");
        if self.capabilities.pods_control_agent && self.rng.once_in(2) {
            self.log(format_args!("the agent of {instance} is killed for good"));
            self.agent_dies(instance);
        } else if self.rng.once_in(3) {
            self.log(format_args!("the agent of {instance} is killed, and can't start again"));
            self.agent_dies(instance);
            let wait = self.rng.seconds(AGENT_GIVEN_UP.0, AGENT_GIVEN_UP.1);
            self.after(wait, Happening::PowersOff(instance.clone()));
        } else {
            self.log(format_args!("the agent of {instance} is killed, and starts again"));
            let wait = self.rng.seconds(AGENT_RESTART.0, AGENT_RESTART.1);
            self.after(wait, Happening::AgentDials(instance.clone()));
        }
    }

    fn agent_dies(&mut self, instance: &InstanceId) {
        if let Some(agent) = self.agents.get_mut(instance) {
            agent.is_dead = true;
        }
    }

    pub(super) fn plan_zone_outages(&mut self) {
        let hours = self.duration.as_secs() / 3600;
        for hour in 0..hours {
            if self.rng.once_in(self.options.faults.node_cut) {
                let begin = Duration::from_secs(hour * 3600) + self.rng.seconds(0, 3000);
                let lasts = self.rng.seconds(NODE_CUT.0, NODE_CUT.1);
                self.after(begin, Happening::NodeCutOff { lasts });
            }
            if self.rng.once_in(self.options.faults.zone_outage) {
                let begin = Duration::from_secs(hour * 3600) + self.rng.seconds(0, 1800);
                let lasts = self.rng.seconds(ZONE_OUTAGE.0, ZONE_OUTAGE.1);
                let zone = self.random_zone();
                self.after(begin, Happening::ZoneFails { zone, lasts });
            }
            if self.rng.once_in(self.options.faults.closed_zone) {
                let begin = Duration::from_secs(hour * 3600) + self.rng.seconds(0, 1800);
                let lasts = self.rng.seconds(ZONE_OUTAGE.0, ZONE_OUTAGE.1);
                let zone = self.random_zone();
                self.after(begin, Happening::ZoneCloses { zone, lasts });
            }
        }
    }

    fn random_zone(&mut self) -> &'static str {
        ZONES.get(self.rng.below(ZONES.len())).copied().unwrap_or_default()
    }

    /// Cuts the way of a zone's new instances to the daemon.
    pub(super) fn zone_closes(&mut self, zone: &'static str, lasts: Duration) {
        self.count("closed_zone");
        self.log(format_args!("{zone} has no way out for {} s", lasts.as_secs()));
        let until = self.closed_zones.entry(zone).or_default();
        *until = (self.now + lasts).max(*until);
    }

    /// Cuts the network of the node. The node then reaches neither agents nor the provider.
    pub(super) fn cut_node_off(&mut self, lasts: Duration) {
        self.count("node_cut");
        self.log(format_args!("the node has no network for {} s", lasts.as_secs()));
        (self.outage, self.last_outage) = (true, self.now);
        self.after(lasts, Happening::Outage(false));
        let until = self.now + lasts;
        let instances: Vec<InstanceId> = self.agents.keys().cloned().collect();
        for instance in instances {
            self.cut_network(&instance, until);
        }
    }

    /// Closes a zone. The zone's instances end, or lose their network.
    pub(super) fn zone_fails(&mut self, zone: &'static str, lasts: Duration) {
        let (now, until, loses_power) = (self.now, self.now + lasts, self.rng.once_in(3));
        self.count("zone_outage");
        let effect = if loses_power { "end" } else { "lose their network" };
        let seconds = lasts.as_secs();
        self.log(format_args!("{zone} fails for {seconds} s: its instances {effect}"));
        self.cloud.set_zone_open(zone, false);
        let failed = self.failed_zones.entry(zone).or_default();
        *failed = until.max(*failed);
        self.after(lasts, Happening::ZoneRecovers(zone));
        let instances: Vec<InstanceId> = self
            .cloud
            .instances()
            .iter()
            .filter(|(_, instance)| instance.offering.zone == zone && instance.runs(now))
            .map(|(id, _)| id.clone())
            .collect();
        for instance in instances {
            if loses_power {
                let takes = self.rng.seconds(POWER_LOSS.0, POWER_LOSS.1);
                self.end_by_itself(&instance, takes);
            } else {
                self.cut_network(&instance, until);
            }
        }
    }

    pub(super) fn zone_recovers(&mut self, zone: &'static str) {
        if self.failed_zones.get(zone).is_some_and(|until| *until <= self.now) {
            self.log(format_args!("{zone} recovers"));
            self.failed_zones.remove(zone);
            self.cloud.set_zone_open(zone, true);
        }
    }
}
