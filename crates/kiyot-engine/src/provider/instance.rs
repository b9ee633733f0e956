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
    /// Standing still: it may go on, and what it runs goes on with it.
    Paused,
    /// Not running, or ending, but something of it is left: it must be terminated.
    Stopped,
    /// Ended for good: nothing of it runs. It may be listed for a while.
    Terminated,
}

impl InstanceState {
    /// Returns true while the instance runs, will run, or may go on.
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
    /// The token of its launch, by its tags; empty if the provider keeps none.
    pub token: String,
    /// The fingerprint of the certificate authority of the daemon that launched it, by its tags;
    /// empty if the provider keeps none, because its instances can't be another daemon's.
    pub fingerprint: String,
    /// `metadata.uid` of the pod that it is attached to; empty before, and if it is not kept.
    pub pod_uid: String,
    /// Its offering.
    pub offering: Offering,
    /// Its addresses, as far as they are known before it is attached.
    pub addresses: Vec<IpAddr>,
    /// Its state.
    pub state: InstanceState,
    /// The provider's reason for the end, such as `Client.VolumeLimitExceeded: ...` of a launch
    /// that failed after its answer. Short, without control characters; empty while it is alive,
    /// and if none is known.
    pub end_reason: String,
    /// True if it has ended because its offering lacks capacity.
    pub lacks_capacity: bool,
    /// The time of its launch by the provider's clock, since 1970; `None` if it is not kept.
    pub since: Option<Duration>,
}

/// The public address of an instance, and its names in the DNS, as far as they are known; names may
/// be empty.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct InstanceNames {
    /// The name of the private address.
    pub private_name: String,
    /// The public address.
    pub public_address: Option<IpAddr>,
    /// The name of the public address.
    pub public_name: String,
}

impl Instance {
    /// Returns an instance of which nothing else is known.
    pub fn new(id: InstanceId, cell: CellId, offering: Offering, state: InstanceState) -> Self {
        Self {
            id,
            cell,
            token: String::new(),
            fingerprint: String::new(),
            pod_uid: String::new(),
            offering,
            addresses: Vec::new(),
            state,
            end_reason: String::new(),
            lacks_capacity: false,
            since: None,
        }
    }
}
