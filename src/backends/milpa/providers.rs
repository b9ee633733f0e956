//! What makes and destroys cells.

use std::{fmt, io, net::IpAddr, path::PathBuf, time::Duration};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use super::id::CellId;
use crate::config::ProviderKind;

pub mod netns;

/// What of a cell does not reach the node. A pod is given no right in its cell that its provider
/// does not keep there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Isolation {
    /// The provider's name, for errors.
    pub provider: &'static str,
    /// A privileged process stays in its cell: the kernel and the devices that it has power over
    /// are the cell's own.
    pub privileges: bool,
    /// The users of a cell are none of the node's: who is root in a cell is nobody on the node.
    pub users: bool,
}

impl Isolation {
    /// As this kind of provider declares it.
    pub fn of(provider: ProviderKind) -> Self {
        match provider {
            ProviderKind::Netns => netns::ISOLATION,
        }
    }
}

/// A provider's name of an instance.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InstanceId(pub String);

/// An instance that is to be.
#[derive(Debug, Clone)]
pub struct LaunchSpec {
    /// The cell that it is.
    pub cell: CellId,
    /// What the agent needs to call home: the bootstrap file's content. Secret.
    pub bootstrap: kiyot_link::bootstrap::Bootstrap,
}

/// Says how cells reach registries.
#[async_trait]
pub trait RegistryConfig: fmt::Debug + Send + Sync {
    /// A directory of `HOST/hosts.toml` files, or several with colons between them (containerd's
    /// `config_path`), for a cell that is made now; `None`: containerd's defaults.
    async fn config_path(&self) -> Option<PathBuf>;
}

/// Always the same.
#[async_trait]
impl RegistryConfig for Option<PathBuf> {
    async fn config_path(&self) -> Option<PathBuf> {
        self.clone()
    }
}

/// An instance that is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// The provider's name of it.
    pub id: InstanceId,
    /// The cell that it is, by its tags.
    pub cell: CellId,
    /// Whether it runs; one that has ended may be listed until it is terminated.
    pub running: bool,
}

/// The parts of the node that a pod's cell is attached to: its network and its cgroup.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// Name and namespace of the pod and id of its sandbox, as a CNI plugin is told them.
    pub pod_name: String,
    /// See `pod_name`.
    pub pod_namespace: String,
    /// `metadata.uid` of the pod.
    pub pod_uid: String,
    /// The sandbox's id.
    pub sandbox: String,
    /// Ports of the node that lead to the pod.
    pub ports: Vec<HostPort>,
    /// The pod's `cgroup_parent`, as the kubelet names it.
    #[serde(default)]
    pub cgroup_parent: String,
}

/// The most ports of the node that lead to one pod: they are one transaction of the firewall, and
/// are compared with those of every other cell.
pub const MAX_HOST_PORTS: usize = 1000;

/// A port of the node that leads to a pod (`hostPort`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostPort {
    /// Of both ports.
    pub protocol: Protocol,
    /// The address of the node; `None` for all of them.
    pub host_ip: Option<IpAddr>,
    /// On the node, not 0.
    pub host_port: u16,
    /// In the pod, not 0.
    pub container_port: u16,
}

/// What a port is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl Protocol {
    /// As CNI plugins and `iptables` call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }
}

impl HostPort {
    /// Whether a packet may be for both.
    pub fn overlaps(&self, other: &Self) -> bool {
        let same_address =
            self.host_ip.is_none() || other.host_ip.is_none() || self.host_ip == other.host_ip;
        self.protocol == other.protocol && self.host_port == other.host_port && same_address
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hostPort {}/{}", self.host_port, self.protocol.name())?;
        self.host_ip.map_or(Ok(()), |ip| write!(f, " of {ip}"))
    }
}

/// What a provider's failure means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ErrorClass {
    /// None left of an offering; another may have some.
    Capacity {
        /// The offering.
        offering: String,
    },
    /// Too many calls; later.
    Throttled,
    /// A limit of the account.
    Quota,
    /// Not allowed.
    Auth,
    /// It would never work as it was asked.
    Invalid,
    /// No such instance.
    NotFound,
    /// It may work the next time.
    Transient,
}

/// A provider's failure.
#[derive(Debug, thiserror::Error)]
#[error("{doing}")]
pub struct ProviderError {
    /// What it means.
    pub class: ErrorClass,
    /// What was being done, with the names of what it was done to.
    pub doing: String,
    /// Why it failed.
    #[source]
    pub source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl ProviderError {
    /// A failure that came from another.
    pub fn new(
        class: ErrorClass,
        doing: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self { class, doing: doing.into(), source: Some(source.into()) }
    }

    /// A provider that did not answer in its time.
    pub fn too_slow(doing: &str, limit: Duration) -> Self {
        Self {
            class: ErrorClass::Transient,
            doing: format!("{doing}: not done within {} s", limit.as_secs()),
            source: None,
        }
    }

    /// The same failure for one more caller: what it came from becomes part of its words.
    pub fn again(&self) -> Self {
        let mut doing = self.doing.clone();
        let mut source = self.source.as_deref().map(|source| source as &dyn std::error::Error);
        while let Some(cause) = source {
            doing.push_str(": ");
            doing.push_str(&cause.to_string());
            source = cause.source();
        }
        Self { class: self.class.clone(), doing, source: None }
    }

    /// Whether a disk is full.
    pub fn is_no_space(&self) -> bool {
        let source = self.source.as_deref().and_then(|source| source.downcast_ref::<io::Error>());
        source.is_some_and(|error| {
            matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        })
    }

    /// One that may not come again.
    pub fn transient(
        doing: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self::new(ErrorClass::Transient, doing, source)
    }
}

/// What makes and destroys cells. All calls may be repeated; each bounds its own time.
#[async_trait]
pub trait Provider: fmt::Debug + Send + Sync + 'static {
    /// What of its cells does not reach the node.
    fn isolation(&self) -> Isolation;
    /// Makes the instance of a cell. With the token of an earlier launch it returns what that one
    /// made.
    async fn launch(&self, spec: &LaunchSpec, token: &str) -> Result<Instance, ProviderError>;
    /// Gives an instance the pod's network, and returns its addresses, the pod's first. Again it
    /// returns the same.
    async fn attach(
        &self,
        instance: &InstanceId,
        to: &Attachment,
    ) -> Result<Vec<IpAddr>, ProviderError>;
    /// All instances of this owner, by their tags.
    async fn list_owned(&self) -> Result<Vec<Instance>, ProviderError>;
    /// Ends instances, and returns when they and all that they held (addresses, mounts, links,
    /// cgroups, processes) are gone. Files that their pods left may be removed later, which no end
    /// waits for. Unknown ones are fine.
    async fn terminate(&self, instances: &[InstanceId]) -> Result<(), ProviderError>;
    /// The last of what an instance printed, for a human.
    async fn console(&self, instance: &InstanceId) -> Result<String, ProviderError>;
    /// Whether a launch could work now: says what is missing.
    async fn check(&self) -> Result<(), ProviderError>;
}
