//! The contract between the engine and the providers of instances.

use std::{fmt, io, net::IpAddr, path::PathBuf, time::Duration};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use super::id::CellId;
use crate::config::ProviderKind;

pub mod netns;

/// The isolation of a provider's cells from the node. A pod gets no privilege in its cell that the
/// provider does not isolate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Isolation {
    /// The provider's name, for errors.
    pub provider: &'static str,
    /// Privileged processes are confined to the cell: the kernel and the devices are the cell's
    /// own.
    pub privileges: bool,
    /// Users of a cell are not users of the node: root in a cell is unprivileged on the node.
    pub users: bool,
}

impl Isolation {
    /// Returns the isolation of the configured kind of provider.
    pub fn of(provider: ProviderKind) -> Self {
        match provider {
            ProviderKind::Netns => netns::ISOLATION,
        }
    }
}

/// The provider's id of an instance.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InstanceId(pub String);

/// The parameters of a launch.
#[derive(Debug, Clone)]
pub struct LaunchSpec {
    /// The cell of the instance.
    pub cell: CellId,
    /// The content of the agent's bootstrap file, with which it connects to the gateway. Secret.
    pub bootstrap: kiyot_link::bootstrap::Bootstrap,
}

/// The registry configuration of new cells.
#[async_trait]
pub trait RegistryConfig: fmt::Debug + Send + Sync {
    /// Returns the directory of `HOST/hosts.toml` files, or several separated by colons
    /// (containerd's `config_path`), for a new cell; `None` for containerd's defaults.
    async fn config_path(&self) -> Option<PathBuf>;
}

/// A constant registry configuration.
#[async_trait]
impl RegistryConfig for Option<PathBuf> {
    async fn config_path(&self) -> Option<PathBuf> {
        self.clone()
    }
}

/// A listed instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// The provider's id of the instance.
    pub id: InstanceId,
    /// The cell of the instance, by its tags.
    pub cell: CellId,
    /// True while the instance runs; an ended instance may be listed until it is terminated.
    pub running: bool,
}

/// The parts of the node to which a pod's cell is attached: its network and its cgroup.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// The name of the pod, as CNI plugins get it.
    pub pod_name: String,
    /// See `pod_name`.
    pub pod_namespace: String,
    /// `metadata.uid` of the pod.
    pub pod_uid: String,
    /// The sandbox's id.
    pub sandbox: String,
    /// The host ports of the pod.
    pub ports: Vec<HostPort>,
    /// The pod's `cgroup_parent` in the kubelet's form.
    #[serde(default)]
    pub cgroup_parent: String,
}

/// The cgroup of a cell's containers beneath a pod's slice. containerd takes a `cgroup_parent` that
/// ends with `.slice` for a unit of systemd, whatever its own driver is (`getCgroupsPath`), and
/// reads the usage of a pod only from a clean path (containerd/cgroups, `VerifyGroupPath`).
pub const CGROUP_BENEATH_SLICE: &str = "kiyot";

/// Bounds the host ports of a pod: they are one firewall transaction, and are compared with the
/// ports of every other cell.
pub const MAX_HOST_PORTS: usize = 1000;

/// A host port of a pod (`hostPort`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostPort {
    /// The protocol of both ports.
    pub protocol: Protocol,
    /// The address on the node; `None` for all addresses.
    pub host_ip: Option<IpAddr>,
    /// The port on the node, not 0.
    pub host_port: u16,
    /// The port in the pod, not 0.
    pub container_port: u16,
}

/// The protocol of a port.
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
    /// Returns the name that CNI plugins and `iptables` use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }
}

impl HostPort {
    /// Returns true if a packet can match both ports.
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

/// The class of a provider's error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ErrorClass {
    /// An offering has no capacity; another may have.
    Capacity {
        /// The offering.
        offering: String,
    },
    /// Too many calls; retry later.
    Throttled,
    /// A quota of the account is reached.
    Quota,
    /// The credentials do not permit the call.
    Auth,
    /// The request is invalid and will always fail.
    Invalid,
    /// The instance does not exist.
    NotFound,
    /// A retry may succeed.
    Transient,
}

/// An error of a provider.
#[derive(Debug, thiserror::Error)]
#[error("{doing}")]
pub struct ProviderError {
    /// The class of the error.
    pub class: ErrorClass,
    /// The failed operation with the names of its objects.
    pub doing: String,
    /// The cause.
    #[source]
    pub source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl ProviderError {
    /// Returns an error with a cause.
    pub fn new(
        class: ErrorClass,
        doing: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self { class, doing: doing.into(), source: Some(source.into()) }
    }

    /// Returns the error of a call that exceeded its time limit.
    pub fn too_slow(doing: &str, limit: Duration) -> Self {
        Self {
            class: ErrorClass::Transient,
            doing: format!("{doing}: not done within {} s", limit.as_secs()),
            source: None,
        }
    }

    /// Returns a copy for another caller: the cause becomes part of the text.
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

    /// Returns true if a full disk is the cause.
    pub fn is_no_space(&self) -> bool {
        let source = self.source.as_deref().and_then(|source| source.downcast_ref::<io::Error>());
        source.is_some_and(|error| {
            matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        })
    }

    /// Returns an error that a retry may avoid.
    pub fn transient(
        doing: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self::new(ErrorClass::Transient, doing, source)
    }
}

/// The contract with providers of instances. All calls may be repeated; each bounds its own time.
#[async_trait]
pub trait Provider: fmt::Debug + Send + Sync + 'static {
    /// Returns the isolation of the provider's cells.
    fn isolation(&self) -> Isolation;
    /// Launches the instance of a cell. With the token of an earlier launch it returns the instance
    /// of that launch.
    async fn launch(&self, spec: &LaunchSpec, token: &str) -> Result<Instance, ProviderError>;
    /// Attaches an instance to the pod's network and returns its addresses, the pod's first. A
    /// repeated call returns the same addresses.
    async fn attach(
        &self,
        instance: &InstanceId,
        to: &Attachment,
    ) -> Result<Vec<IpAddr>, ProviderError>;
    /// Lists all instances of this owner, by their tags.
    async fn list_owned(&self) -> Result<Vec<Instance>, ProviderError>;
    /// Terminates instances, and returns when they and everything that they held (addresses,
    /// mounts, links, cgroups, processes) are gone. Files of their pods may be removed later, in
    /// the background. Unknown instances are fine.
    async fn terminate(&self, instances: &[InstanceId]) -> Result<(), ProviderError>;
    /// Returns the end of an instance's console output.
    async fn console(&self, instance: &InstanceId) -> Result<String, ProviderError>;
    /// Checks whether a launch can succeed; the error names what is missing.
    async fn check(&self) -> Result<(), ProviderError>;
}
