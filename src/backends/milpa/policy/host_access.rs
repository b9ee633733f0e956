//! Host access that a pod requests, and its outcome by the policy.

use kiyot_config::{HostAccessPolicy, MilpaBackend, Policy, Privileged, ProviderKind};
use kiyot_engine::provider::Capabilities;
use kiyot_proto::cri;

use crate::backends::milpa::providers::capabilities_of;

/// Access to the node that a pod may request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HostAccess {
    Network,
    Processes,
    Ipc,
    Users,
    Privileges,
}

/// The outcome of a request for host access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AccessOutcome {
    Refused,
    /// The policy grants the cell's own resource, but the provider's cells share the node's. The
    /// reason ends the sentence "..., but ...".
    Unsupported(&'static str),
    /// The pod runs on the node.
    KeptLocal,
    /// The pod has the cell's own resource, or the node's if the policy allows it.
    Granted,
}

/// The policy of a backend, and the capabilities of one of its providers.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// The policy of the configuration.
    pub policy: Policy,
    /// The capabilities of the provider's cells.
    pub capabilities: Capabilities,
}

impl HostAccess {
    pub(super) const ALL: [Self; 5] =
        [Self::Network, Self::Processes, Self::Ipc, Self::Users, Self::Privileges];

    /// Returns its key in the policy.
    pub(super) const fn key(self) -> &'static str {
        match self {
            Self::Network => "host_network",
            Self::Processes => "host_pid",
            Self::Ipc => "host_ipc",
            Self::Users => "host_users",
            Self::Privileges => "privileged",
        }
    }

    /// Returns the end of the sentence "the pod asks for ...".
    pub(super) const fn what(self) -> &'static str {
        match self {
            Self::Network => "the node's network (hostNetwork)",
            Self::Processes => "the node's processes (hostPID)",
            Self::Ipc => "the node's IPC (hostIPC)",
            Self::Users => "a user namespace of its own (hostUsers: false)",
            Self::Privileges => "all privileges (securityContext.privileged)",
        }
    }

    /// Returns the end of the sentence "the pod gets ...".
    pub(super) const fn granted(self) -> &'static str {
        match self {
            Self::Network => {
                "the network of its cell: the pod's address is the cell's, and its hostPorts lead \
                 there from the node"
            }
            Self::Processes => "the processes of its cell",
            Self::Ipc => "the IPC of its cell",
            Self::Users => {
                "the users of its cell without a mapping: no user of the cell is a user of the node"
            }
            Self::Privileges => "all privileges within its cell",
        }
    }

    /// Returns the access that a pod or a container requests.
    pub(super) fn of(
        options: Option<&cri::NamespaceOption>,
        privileged: bool,
    ) -> impl Iterator<Item = Self> + '_ {
        use cri::NamespaceMode::Node;
        Self::ALL.into_iter().filter(move |access| match access {
            Self::Network => options.is_some_and(|options| options.network() == Node),
            Self::Processes => options.is_some_and(|options| options.pid() == Node),
            Self::Ipc => options.is_some_and(|options| options.ipc() == Node),
            Self::Users => options
                .and_then(|options| options.userns_options.as_ref())
                .is_some_and(|userns| userns.mode() != Node),
            Self::Privileges => privileged,
        })
    }
}

impl Rules {
    /// Returns the rules of the providers of a configured backend, in order.
    pub fn of(backend: &MilpaBackend) -> Vec<Self> {
        let rules = |provider: &ProviderKind| Self {
            policy: backend.policy,
            capabilities: capabilities_of(*provider),
        };
        backend.providers.iter().map(rules).collect()
    }

    pub(super) fn outcome(&self, access: HostAccess) -> AccessOutcome {
        let policy = &self.policy;
        let outcome = |setting, there: bool, why| match setting {
            HostAccessPolicy::Refuse => AccessOutcome::Refused,
            HostAccessPolicy::KeepLocal => AccessOutcome::KeptLocal,
            HostAccessPolicy::Cell if there => AccessOutcome::Granted,
            HostAccessPolicy::Cell => AccessOutcome::Unsupported(why),
        };
        match access {
            // Each cell has its own, because it belongs to a single pod.
            HostAccess::Network => outcome(policy.host_network, true, ""),
            HostAccess::Processes => outcome(policy.host_pid, true, ""),
            HostAccess::Ipc => outcome(policy.host_ipc, true, ""),
            HostAccess::Users => outcome(
                policy.host_users,
                self.capabilities.own_users,
                "have the node's users: root in a cell is root to the node's kernel",
            ),
            HostAccess::Privileges => match policy.privileged {
                Privileged::Refuse => AccessOutcome::Refused,
                Privileged::KeepLocal => AccessOutcome::KeptLocal,
                Privileged::Allow => AccessOutcome::Granted,
                Privileged::Cell if self.capabilities.confines_privileges() => {
                    AccessOutcome::Granted
                }
                Privileged::Cell => AccessOutcome::Unsupported(
                    "share the node's kernel and devices: a privileged container, or one with a \
                     capability that reaches the kernel, is root on the node",
                ),
            },
        }
    }

    /// Returns whether the policy keeps any pods on the node.
    pub(crate) fn keeps_any_local(&self) -> bool {
        HostAccess::ALL.into_iter().any(|access| self.outcome(access) == AccessOutcome::KeptLocal)
    }

    /// Returns a sentence for each access that the policy grants but the provider's cells don't
    /// have: pods that request it are refused.
    pub fn unmet(&self) -> Vec<String> {
        let unmet = |access: HostAccess| match self.outcome(access) {
            AccessOutcome::Unsupported(why) => Some(format!(
                "policy.{} is \"cell\", but cells of the provider {:?} {why}; pods that request \
                 it are refused",
                access.key(),
                self.capabilities.provider
            )),
            _ => None,
        };
        HostAccess::ALL.into_iter().filter_map(unmet).collect()
    }
}
