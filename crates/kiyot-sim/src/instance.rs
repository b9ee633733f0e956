//! Instances of the simulated world: they boot, and may end without a call.

use std::time::Duration;

use kiyot_engine::provider::InstanceId;

use crate::{
    agent::Agent,
    rng::Quantiles,
    world::{Happening, World},
};

/// A pod on an ended instance must not read as running after this time.
const READY_LIMIT: Duration = Duration::from_secs(600);
/// The boot times by instance type. The last entry is for all other types.
const BOOT: [(&str, Quantiles); 3] = [
    ("small", Quantiles::new(12, 25, 45, 110, 240)),
    ("medium", Quantiles::new(18, 35, 60, 130, 270)),
    ("large", Quantiles::new(25, 50, 90, 180, 400)),
];
/// The duration of a slow boot.
const SLOW_BOOT: Quantiles = Quantiles::new(240, 420, 900, 1200, 1500);

impl World<'_> {
    /// Boots a new instance.
    pub(super) fn boot(&mut self, instance: &InstanceId) {
        let Some(launched) = self.cloud.instances().get(instance) else { return };
        let (cell, token) = (launched.spec.cell.clone(), launched.spec.bootstrap.token.clone());
        let closed = self.closed_zones.get(launched.offering.zone.as_str());
        let is_closed = closed.is_some_and(|until| self.now < *until);
        let faults = self.faults();
        let (_, of_type) = BOOT
            .iter()
            .find(|(name, _)| *name == launched.offering.instance_type)
            .unwrap_or(&BOOT[BOOT.len() - 1]);
        let usual = self.node.boot_of(&launched.offering).unwrap_or(*of_type);
        let mut boot = self.rng.time_of(&usual);
        if self.strikes("slow_boot", faults.slow_boot) {
            boot = self.rng.time_of(&SLOW_BOOT);
            self.log(format_args!("{instance} boots for {} s", boot.as_secs()));
        }
        let agent = Agent::new(cell, &token, instance, self.now + boot);
        self.agents.insert(instance.clone(), agent);
        if is_closed {
            self.log(format_args!("{instance} has no way out of its zone"));
        } else if self.strikes("dead_boot", faults.dead_boot) {
            self.log(format_args!("{instance} never boots"));
        } else {
            self.after(boot, Happening::AgentDials(instance.clone()));
        }
        self.plan_disruptions(instance);
    }

    pub(super) fn runs(&self, instance: &InstanceId) -> bool {
        self.cloud.instances().get(instance).is_some_and(|launched| launched.runs(self.now))
    }

    /// Powers off an instance without an agent.
    pub(super) fn power_off_unsupervised(&mut self, instance: &InstanceId) {
        if let Some(wait) = self.left_of_pause(instance) {
            return self.after(wait, Happening::PowersOff(instance.clone()));
        }
        if self.runs(instance) {
            self.log(format_args!("{instance} powers off without an agent"));
            self.power_off(instance);
        }
    }

    pub(super) fn power_off(&mut self, instance: &InstanceId) {
        self.end_by_itself(instance, Duration::ZERO);
        self.agent_off(instance);
    }

    /// Ends an instance without a call. Its containers may run until then.
    pub(super) fn end_by_itself(&mut self, instance: &InstanceId, takes: Duration) {
        self.cloud.end_within(instance, self.now, takes);
        self.after(takes, Happening::InstanceEnded(instance.clone()));
        self.after(takes + READY_LIMIT, Happening::CheckReady(instance.clone()));
    }

    /// Ends the agent of an ended instance. The daemon notices the missing keepalive.
    pub(super) fn instance_ended(&mut self, instance: &InstanceId) {
        if !self.runs(instance) {
            self.lose_contact(instance);
        }
    }

    /// Checks that no pod reads as running on an ended instance.
    pub(super) fn check_ready(&mut self, instance: &InstanceId) {
        let Some(agent) = self.agents.get(instance) else { return };
        // Only a running daemon can know of the end, and not during an outage.
        let cell = agent.cell.clone();
        let may_know = self.daemon.as_ref().is_some_and(|daemon| {
            self.now.saturating_sub(daemon.started.max(self.last_outage)) >= READY_LIMIT
        });
        if self.outage || !may_know {
            return self.after(READY_LIMIT, Happening::CheckReady(instance.clone()));
        }
        if self.pods_in_cells.contains_key(&cell) {
            self.violation(format!("a pod reads as running in {cell}, whose {instance} has ended"));
        }
    }
}
