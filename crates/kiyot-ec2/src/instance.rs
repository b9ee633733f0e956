//! Instances, as EC2 describes them.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

/// An instance (`Instance` of the API).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceDescription {
    /// The id, such as `i-0123456789abcdef0`.
    pub id: String,
    /// The client token of its launch; empty without.
    pub client_token: String,
    /// The instance type.
    pub instance_type: String,
    /// The availability zone.
    pub zone: String,
    /// True if it is a spot instance (`InstanceLifecycle`).
    pub is_spot: bool,
    /// The state.
    pub state: InstanceStateName,
    /// The subnet, until it is terminated; otherwise empty.
    pub subnet: String,
    /// The VPC, until it is terminated; otherwise empty.
    pub vpc: String,
    /// The private address, until it is terminated.
    pub private_address: Option<IpAddr>,
    /// The public address.
    pub public_address: Option<IpAddr>,
    /// The time of its launch since 1970 (`LaunchTime`).
    pub launched: Option<Duration>,
    /// The ids of its volumes; absent in the answer to a launch.
    pub volumes: Vec<String>,
    /// The ids of its network interfaces.
    pub interfaces: Vec<String>,
    /// The tags.
    pub tags: BTreeMap<String, String>,
}

/// The state of an instance (`InstanceState.Name`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InstanceStateName {
    /// Being launched, or starting again.
    Pending,
    /// Running.
    Running,
    /// Being terminated.
    ShuttingDown,
    /// Terminated.
    Terminated,
    /// Being stopped.
    Stopping,
    /// Stopped: it can be started again.
    Stopped,
}

impl InstanceStateName {
    /// Returns the state with a name of the API.
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "pending" => Self::Pending,
            "running" => Self::Running,
            "shutting-down" => Self::ShuttingDown,
            "terminated" => Self::Terminated,
            "stopping" => Self::Stopping,
            "stopped" => Self::Stopped,
            _ => return None,
        })
    }
}
