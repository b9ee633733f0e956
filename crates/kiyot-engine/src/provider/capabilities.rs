//! Capabilities of a provider, as data.

use std::time::Duration;

use crate::request::{
    CellRequest, Isolation,
    keys::{ISOLATION, PROVIDER},
};

/// The capabilities of a provider's instances. They decide what a pod may do in a cell, and which
/// evidence proves the end of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// The provider's name, for errors.
    pub provider: &'static str,
    /// The cell has its own kernel.
    pub own_kernel: bool,
    /// Users of a cell are not users of the node: root in a cell is unprivileged on the node.
    pub own_users: bool,
    /// The cell has its own devices.
    pub own_devices: bool,
    /// The cell is on another machine than the daemon: its agent dials the gateway over TCP.
    pub remote: bool,
    /// The cell sees the files of the node's root file system, at the same paths.
    pub sees_node_files: bool,
    /// The link to the agent is a channel that the pod can't cut.
    pub separate_link: bool,
    /// An instance may be paused and resumed. The clock of its agent stands still meanwhile.
    pub can_be_paused: bool,
    /// A pod may be able to stop its agent, or to change the agent's clock.
    pub pods_control_agent: bool,
    /// Instances end with the node, at the latest when it reboots.
    pub ends_with_node: bool,
    /// The time within which a termination is confirmed. `StopPodSandbox` awaits the confirmation
    /// if this is at most [`Self::MAX_AWAITED_END`].
    pub ends_confirmed_within: Duration,
    /// The age from which the provider's "not found", by id, proves the end of an instance. The
    /// provider may not know a younger instance yet.
    pub not_found_believed_after: Duration,
    /// The period at which a listing of all instances is worthwhile.
    pub listing_period: Duration,
    /// Instances have tags, which can also be set after the launch.
    pub has_tags: bool,
    /// The keys of [`LaunchSpec::parameters`] that do not affect boots, such as that of a size.
    ///
    /// [`LaunchSpec::parameters`]: super::LaunchSpec::parameters
    pub parameters_without_effect_on_boots: &'static [&'static str],
}

impl Capabilities {
    /// The longest time for which the end of a pod awaits the end of its instance.
    pub const MAX_AWAITED_END: Duration = Duration::from_secs(60);

    /// The least default limit of concurrent boots: a boot that hangs delays the others little.
    const MIN_DEFAULT_BOOTS: usize = 4;

    /// Returns why the cells do not suit a pod's request or its rule; `None` if they do.
    pub fn refusal_of(&self, request: &CellRequest) -> Option<String> {
        let own = self.provider;
        if let Some(contradiction) = request.contradiction() {
            return Some(contradiction);
        }
        if let Some(rule) = request.rule.as_ref().filter(|rule| !rule.allows(own)) {
            return Some(format!("the {rule}"));
        }
        if let Some(wanted) = request.provider.filter(|wanted| wanted.name() != own) {
            return Some(format!("{PROVIDER} asks for {:?}", wanted.name()));
        }
        let isolation = request.isolation?;
        let is_isolated = match isolation {
            Isolation::Machine => self.own_kernel,
            Isolation::Instance => self.remote,
        };
        let lacks = match isolation {
            Isolation::Machine => "share the node's kernel",
            Isolation::Instance => "are on the node",
        };
        (!is_isolated)
            .then(|| format!("{ISOLATION} asks for \"{isolation}\", and its cells {lacks}"))
    }

    /// Returns whether privileged processes are confined to the cell.
    pub fn confines_privileges(&self) -> bool {
        self.own_kernel && self.own_devices
    }

    /// Returns whether the launch of an instance needs the node's processors.
    pub fn launches_on_node(&self) -> bool {
        !self.remote
    }

    /// Returns the default limit of concurrent boots. Boots on the node compete for its processors:
    /// many at once take longer in total than a few at a time.
    pub fn default_boots(&self, processors: usize) -> Option<usize> {
        self.launches_on_node().then_some(processors.max(Self::MIN_DEFAULT_BOOTS))
    }

    /// Returns whether the end of a pod awaits the confirmed end of its instance.
    pub fn awaits_ends(&self) -> bool {
        self.ends_confirmed_within <= Self::MAX_AWAITED_END
    }

    /// Returns whether an agent without contact reliably stops its pod in time.
    pub fn orphan_timeout_is_proof(&self) -> bool {
        !self.can_be_paused && !self.pods_control_agent
    }
}
