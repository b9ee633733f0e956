//! The contract between the engine of cells and the providers of instances.
//!
//! The engine decides: it ranks offerings, records each launch first, and judges the answers of
//! providers. A provider makes single calls. Every call may be repeated and bounds its own time,
//! and pods on the node wait for no call.

use std::{collections::BTreeMap, fmt, net::IpAddr, time::Duration};

use async_trait::async_trait;
use kiyot_link::bootstrap::Bootstrap;
use serde::{Deserialize, Serialize};

mod capabilities;
mod error;
mod instance;
mod network;
pub mod owner;
mod tags;

pub use crate::wanted::{HostPort, MAX_HOST_PORTS, Protocol};
pub use capabilities::Capabilities;
pub use error::{ErrorClass, ProviderError};
pub use instance::{Instance, InstanceId, InstanceNames, InstanceState};
pub use network::{Attached, DeviceAddress, Neighbour, PodNetwork, Route};
pub use owner::Owner;
pub use tags::{InstanceTags, LeftOut, LeftOutReason, TagRules};

use crate::{
    id::{CellId, SandboxId},
    placement::{Candidate, Catalogue, Offering},
    wanted::Wanted,
};

/// The parameters of a launch. A replay of the launch has the same parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchSpec {
    /// The cell of the instance.
    pub cell: CellId,
    /// The offerings that may be launched, the preferred first. Not empty.
    pub candidates: Vec<Candidate>,
    /// The tags of the instance, of its volumes and network interfaces ([`Owner::tags`]).
    pub tags: BTreeMap<String, String>,
    /// The boot data, with which the agent connects to the gateway. Secret.
    pub bootstrap: Bootstrap,
    /// The provider's own parameters, such as image or volume size.
    pub parameters: BTreeMap<String, String>,
}

impl LaunchSpec {
    /// Returns the offerings of the candidates, the preferred first.
    pub fn offerings(&self) -> impl Iterator<Item = &Offering> {
        self.candidates.iter().map(|candidate| &candidate.offering)
    }
}

/// The parts of the node to which a pod's cell is attached: its network and its cgroup.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// The name of the pod, as CNI plugins get it.
    pub pod_name: String,
    /// The namespace of the pod, as CNI plugins get it.
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
    /// The networks that the pod wants to have routed to its instance.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cloud_routes: Vec<String>,
    /// True if the pod asked for an instance profile: the metadata service gives it the
    /// credentials.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_instance_profile: bool,
    /// The pod's tags that the instance lacks because it was launched for a warm pool. The provider
    /// sets them in the background, because the pod can run without them. Empty unless
    /// [`Capabilities::has_tags`].
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tags: BTreeMap<String, String>,
}

impl Attachment {
    /// Returns the attachment of an instance that lacks these tags of its pod.
    pub(crate) fn of(wanted: &Wanted, sandbox: &SandboxId, tags: BTreeMap<String, String>) -> Self {
        Self {
            pod_name: wanted.key.name.clone(),
            pod_namespace: wanted.key.namespace.clone(),
            pod_uid: wanted.key.pod_uid.clone(),
            sandbox: sandbox.to_string(),
            ports: wanted.ports.clone(),
            cgroup_parent: wanted.cgroup_parent.clone(),
            cloud_routes: wanted.cloud_routes(),
            has_instance_profile: wanted.request.instance_profile.is_some(),
            tags,
        }
    }
}

/// The cgroup of a cell's containers beneath a pod's slice. containerd treats a `cgroup_parent`
/// that ends with `.slice` as a systemd unit, whatever its own cgroup driver (`getCgroupsPath`),
/// and reads the usage of a pod only from a clean path (containerd/cgroups, `VerifyGroupPath`).
pub const CGROUP_BENEATH_SLICE: &str = "kiyot";

/// An attachment that a previous daemon made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The instance.
    pub instance: InstanceId,
    /// The addresses of the pod.
    pub addresses: Vec<IpAddr>,
    /// The host ports of the pod.
    pub ports: Vec<HostPort>,
}

/// The place of the providers whose instances are on the node: each sees the other's instances.
pub const THIS_NODE: &str = "this node (netns or qemu)";

/// Bounds the time in which a provider returns its catalogue. The provider gives each of its lists
/// less time, so that it can do without a slow list.
pub const CATALOGUE_TIMEOUT: Duration = Duration::from_secs(30);

/// The progress of a termination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Termination {
    /// The instance has ended, and nothing that it held (addresses, mounts, links, cgroups,
    /// processes) is left. Files of its pod may be removed later.
    Confirmed,
    /// The instance will end. Its state or its absence proves the end later.
    Accepted,
}

/// The outcome of a termination by instance.
pub type Terminations = BTreeMap<InstanceId, Result<Termination, ProviderError>>;

/// The contract with providers of instances.
#[async_trait]
pub trait Provider: fmt::Debug + Send + Sync + 'static {
    /// Returns the provider's capabilities, which never change.
    fn capabilities(&self) -> Capabilities;
    /// Returns the place in which the provider looks for instances: [`THIS_NODE`], or a region and
    /// an endpoint; `None` if all configurations have the same place. An instance of another place
    /// is not found, which does not prove its end.
    fn place(&self) -> Option<String> {
        None
    }
    /// Returns the instance types that can be launched, with their current prices.
    async fn catalogue(&self) -> Result<Catalogue, ProviderError>;
    /// Returns the provider's own parameters of a launch for a pod ([`LaunchSpec::parameters`]). A
    /// pod whose parameters differ from those of [`Wanted::default`] gets no warm cell.
    async fn parameters(
        &self,
        _wanted: &Wanted,
    ) -> Result<BTreeMap<String, String>, ProviderError> {
        Ok(BTreeMap::new())
    }
    /// Launches an instance of the first candidate that has capacity. A provider may try only the
    /// first candidate. With the token of an earlier launch it returns the instance of that launch.
    /// An error lists every refused offering.
    async fn launch(&self, spec: &LaunchSpec, token: &str) -> Result<Instance, ProviderError>;
    /// Attaches an instance to the pod's network. A repeated call has the same outcome.
    async fn attach(
        &self,
        instance: &InstanceId,
        to: &Attachment,
    ) -> Result<Attached, ProviderError>;
    /// Returns the public address and the names of an instance that are known without a call.
    fn names(&self, _instance: &InstanceId) -> InstanceNames {
        InstanceNames::default()
    }
    /// Releases the parts of the node that an attached instance shares: host ports, routes. Does
    /// nothing for an unknown instance, or if the termination releases them.
    async fn detach(&self, instance: &InstanceId) -> Result<(), ProviderError>;
    /// Takes over the attachments that a previous daemon made. Called before any other call.
    fn adopt(&self, _held: Vec<Held>) {}
    /// Restores the parts of the node that adopted attachments lack after a reboot. Does nothing
    /// for an instance that was detached since. May be repeated.
    async fn restore(&self) -> Result<(), ProviderError> {
        Ok(())
    }
    /// Creates absent cgroups of running pods on the node, by their `cgroup_parent`: the kubelet
    /// kills a running pod without a cgroup. Does nothing if instances end with the node.
    async fn restore_cgroups(&self, _parents: &[String]) -> Result<(), ProviderError> {
        Ok(())
    }
    /// Lists all instances of this daemon's owner, by their tags. The list may be some time old.
    async fn list_owned(&self) -> Result<Vec<Instance>, ProviderError>;
    /// Returns the place in which the provider finds the instances of other nodes, if it is known
    /// without a call. It contains everything on which [`Self::has_instances_of`] depends: that
    /// answer proves nothing about another place. `None` if instances end with their node.
    fn shared_place(&self) -> Option<String> {
        None
    }
    /// Returns whether another node has instances in [`Self::shared_place`] that cost something, or
    /// may do so later. Returns false only after a complete list.
    async fn has_instances_of(&self, node: &str) -> Result<bool, ProviderError> {
        let doing = format!("list the instances of node {node}: they end with it");
        Err(ProviderError::without_cause(ErrorClass::Invalid, doing))
    }
    /// Returns an instance by its id; [`ErrorClass::NotFound`] if the provider does not know it.
    async fn describe(&self, instance: &InstanceId) -> Result<Instance, ProviderError>;
    /// Terminates instances. The outcome has an entry for each; the termination of an unknown
    /// instance is [`ErrorClass::NotFound`], unless absence proves its end.
    async fn terminate(&self, instances: &[InstanceId]) -> Terminations;
    /// Returns the end of an instance's console output.
    async fn console(&self, instance: &InstanceId) -> Result<String, ProviderError>;
    /// Checks whether a launch can succeed; the error names what is missing.
    async fn check(&self) -> Result<(), ProviderError>;
}
