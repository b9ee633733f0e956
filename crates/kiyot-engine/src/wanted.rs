//! The wishes of a pod for its cell, from the kubelet's call to the provider.

use std::{collections::BTreeMap, sync::Arc};

use crate::{id::ProviderKey, placement::Needs, request::CellRequest};

mod host_port;

pub use host_port::{HostPort, MAX_HOST_PORTS, Protocol};

/// The identity of a pod sandbox: the fields of its CRI metadata.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct OrderKey {
    /// `metadata.uid` of the pod.
    pub pod_uid: String,
    /// `metadata.namespace` of the pod.
    pub namespace: String,
    /// `metadata.name` of the pod.
    pub name: String,
    /// `metadata.attempt` of the sandbox.
    pub attempt: u32,
}

impl OrderKey {
    /// Returns whether this pod has the key's uid and another namespace or name. An empty uid never
    /// matches.
    pub fn is_other_with_uid(&self, uid: &str, namespace: &str, name: &str) -> bool {
        !uid.is_empty()
            && self.pod_uid == uid
            && (&*self.namespace, &*self.name) != (namespace, name)
    }

    /// Returns namespace and name of the pod.
    pub fn pod(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

/// The wishes of a pod for its cell. The default is for a warm cell without a pod.
#[derive(Debug, Clone, Default)]
pub struct Wanted {
    /// The pod.
    pub key: OrderKey,
    /// The digest of the annotations that choose the machine: a call with another digest does not
    /// join the order.
    pub identity: String,
    /// The labels of the pod, for the tags of its instance.
    pub labels: BTreeMap<String, String>,
    /// The pod's annotations, from which the provider takes its own parameters.
    pub request: CellRequest,
    /// The size and the kind of the cell.
    pub needs: Arc<Needs>,
    /// The providers in whose cells the pod can't run, with the reasons.
    pub refused_by: BTreeMap<ProviderKey, Arc<str>>,
    /// The host ports of the pod.
    pub ports: Vec<HostPort>,
    /// The pod's `cgroup_parent` in the kubelet's form.
    pub cgroup_parent: String,
}

impl Wanted {
    /// Returns the networks that the cloud routes to the cell.
    pub(crate) fn cloud_routes(&self) -> Vec<String> {
        self.request.cloud_routes.iter().map(ToString::to_string).collect()
    }
}
