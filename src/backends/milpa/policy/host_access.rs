//! What a pod may ask for of the node's, and what becomes of it.

use kiyot_proto::cri;

use crate::{
    backends::milpa::providers::Isolation,
    config::{MilpaBackend, OfNode, Policy, Privileged},
};

/// Something of the node's that a pod may ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asked {
    Network,
    Processes,
    Ipc,
    Users,
    Privileges,
}

/// What becomes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The policy refuses it.
    Refused,
    /// The policy gives the cell's own, and the provider's cells have none. Why ends the sentence
    /// "..., but ...".
    NotThere(&'static str),
    /// The pod runs on the node.
    KeptLocal,
    /// It is given: the cell's own, or what the policy allows at any rate.
    Given,
}

/// The policy, and what the provider's cells can do about it.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// What the configuration says.
    pub policy: Policy,
    /// What the provider declares of its cells.
    pub isolation: Isolation,
}

impl Asked {
    pub(super) const ALL: [Self; 5] =
        [Self::Network, Self::Processes, Self::Ipc, Self::Users, Self::Privileges];

    /// Its key in the policy.
    pub(super) const fn key(self) -> &'static str {
        match self {
            Self::Network => "host_network",
            Self::Processes => "host_pid",
            Self::Ipc => "host_ipc",
            Self::Users => "host_users",
            Self::Privileges => "privileged",
        }
    }

    /// Ends the sentence "the pod asks for ...".
    pub(super) const fn what(self) -> &'static str {
        match self {
            Self::Network => "the node's network (hostNetwork)",
            Self::Processes => "the node's processes (hostPID)",
            Self::Ipc => "the node's IPC (hostIPC)",
            Self::Users => "a user namespace of its own (hostUsers: false)",
            Self::Privileges => "all privileges (securityContext.privileged)",
        }
    }

    /// What it is given of the cell's own.
    pub(super) const fn given(self) -> &'static str {
        match self {
            Self::Network => {
                "the network of its cell: the pod's address is the cell's, and its hostPorts lead there from the node"
            }
            Self::Processes => "the processes of its cell",
            Self::Ipc => "the IPC of its cell",
            Self::Users => "the users of its cell, none of which is one of the node's",
            Self::Privileges => "all privileges within its cell",
        }
    }

    /// What of these a pod or a container asks for.
    pub(super) fn of(
        options: Option<&cri::NamespaceOption>,
        privileged: bool,
    ) -> impl Iterator<Item = Self> + '_ {
        use cri::NamespaceMode::{Node, Pod};
        Self::ALL.into_iter().filter(move |asked| match asked {
            Self::Network => options.is_some_and(|options| options.network() == Node),
            Self::Processes => options.is_some_and(|options| options.pid() == Node),
            Self::Ipc => options.is_some_and(|options| options.ipc() == Node),
            Self::Users => options
                .and_then(|options| options.userns_options.as_ref())
                .is_some_and(|userns| userns.mode() == Pod),
            Self::Privileges => privileged,
        })
    }
}

impl Rules {
    /// Those of a backend that is configured so.
    pub fn of(backend: &MilpaBackend) -> Self {
        Self { policy: backend.policy, isolation: Isolation::of(backend.provider) }
    }

    pub(super) fn outcome(&self, asked: Asked) -> Outcome {
        let policy = &self.policy;
        let of_node = |setting, there: bool, why| match setting {
            OfNode::Refuse => Outcome::Refused,
            OfNode::KeepLocal => Outcome::KeptLocal,
            OfNode::Cell if there => Outcome::Given,
            OfNode::Cell => Outcome::NotThere(why),
        };
        match asked {
            // Whatever makes cells, one has these for itself: it is one pod's.
            Asked::Network => of_node(policy.host_network, true, ""),
            Asked::Processes => of_node(policy.host_pid, true, ""),
            Asked::Ipc => of_node(policy.host_ipc, true, ""),
            Asked::Users => of_node(
                policy.host_users,
                self.isolation.users,
                "have the node's users: who is root in one is root to the node's kernel",
            ),
            Asked::Privileges => match policy.privileged {
                Privileged::Refuse => Outcome::Refused,
                Privileged::KeepLocal => Outcome::KeptLocal,
                Privileged::Allow => Outcome::Given,
                Privileged::Cell if self.isolation.privileges => Outcome::Given,
                Privileged::Cell => Outcome::NotThere(
                    "share the node's kernel and devices: a privileged container, or one with a capability that reaches the kernel, is root on the node",
                ),
            },
        }
    }

    /// Whether there are pods that run on the node by the policy.
    pub(crate) fn keeps_any(&self) -> bool {
        Asked::ALL.into_iter().any(|asked| self.outcome(asked) == Outcome::KeptLocal)
    }

    /// What the policy gives and the provider's cells don't have, one sentence each: such pods are
    /// refused.
    pub fn unmet(&self) -> Vec<String> {
        let unmet = |asked: Asked| match self.outcome(asked) {
            Outcome::NotThere(why) => Some(format!(
                "policy.{} is \"cell\", but cells of the provider {:?} {why}; such pods are refused",
                asked.key(),
                self.isolation.provider
            )),
            _ => None,
        };
        Asked::ALL.into_iter().filter_map(unmet).collect()
    }
}
