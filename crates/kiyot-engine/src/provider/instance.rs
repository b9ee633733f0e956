//! Instances, as a provider reports them.

use std::{fmt, net::IpAddr, time::Duration};

use crate::{id::CellId, placement::Offering};

/// The provider's id of an instance.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InstanceId(pub String);

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The state of an instance, in EC2's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InstanceState {
    /// Being made.
    Pending,
    /// Running.
    Running,
    /// Paused. It may resume, with its processes.
    Paused,
    /// Stopped or stopping, with resources left. It must be terminated.
    Stopped,
    /// Ended for good. It may be listed for a while.
    Terminated,
}

impl InstanceState {
    /// Returns whether the instance runs, will run, or may resume.
    pub fn is_alive(self) -> bool {
        matches!(self, Self::Pending | Self::Running | Self::Paused)
    }
}

/// An instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// The provider's id of the instance.
    pub id: InstanceId,
    /// The cell that it was launched for, by its tags.
    pub cell: CellId,
    /// The token of its launch, by its tags, if the provider keeps it.
    pub token: Option<String>,
    /// The fingerprint of the certificate authority of the daemon that launched it, by its tags;
    /// `None` if the provider keeps none, because only this daemon can have instances of it.
    pub fingerprint: Option<String>,
    /// `metadata.uid` of the pod that it is attached to, if the provider keeps it.
    pub pod_uid: Option<String>,
    /// Its offering.
    pub offering: Offering,
    /// Its addresses that are known before it is attached.
    pub addresses: Vec<IpAddr>,
    /// Its state.
    pub state: InstanceState,
    /// The provider's reason for the end, such as `Client.VolumeLimitExceeded: ...` of a launch
    /// that failed after its answer. Short, without control characters; `None` if unknown, and
    /// while the instance is alive.
    pub end_reason: Option<String>,
    /// True if it has ended because its offering lacks capacity.
    pub lacks_capacity: bool,
    /// The time of its launch by the provider's clock, since 1970; `None` if the provider does not
    /// keep it.
    pub since: Option<Duration>,
}

/// The public address and the DNS names of an instance, as far as they are known.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct InstanceNames {
    /// The name of the private address.
    pub private_name: Option<String>,
    /// The public address.
    pub public_address: Option<IpAddr>,
    /// The name of the public address.
    pub public_name: Option<String>,
}

impl Instance {
    /// Returns an instance without any other known values.
    pub fn new(id: InstanceId, cell: CellId, offering: Offering, state: InstanceState) -> Self {
        Self {
            id,
            cell,
            token: None,
            fingerprint: None,
            pod_uid: None,
            offering,
            addresses: Vec::new(),
            state,
            end_reason: None,
            lacks_capacity: false,
            since: None,
        }
    }
}
