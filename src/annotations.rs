//! Pod annotations as a validated request for a cell.

use std::collections::BTreeMap;

use serde_json::Value;

use self::{
    healthy_timeout::healthy_timeout,
    instance_profile::instance_profile,
    instance_type::instance_type,
    launch_type::launch_type,
    network::{cloud_routes, security_groups},
    size::volume_size,
    text::boolean,
};
use crate::{
    config::Cidr,
    problems::{Field, Problems, Report},
};

mod healthy_timeout;
mod identity;
mod instance_profile;
mod instance_type;
mod keys;
mod launch_type;
mod network;
mod quantity;
mod size;
mod text;

pub use healthy_timeout::HealthyTimeout;
pub use identity::identity;
pub use instance_type::InstanceType;
pub use keys::{
    CLOUD_ROUTE, HEALTHY_TIMEOUT, INSTANCE_PROFILE, INSTANCE_TYPE, KEYS, LAUNCH_TYPE,
    PRIVATE_IP_ONLY, SECURITY_GROUPS, SPOT_INSTANCE, TARGET_RUNTIME, VOLUME_SIZE,
};
pub use launch_type::LaunchType;
pub use quantity::{NotAQuantity, Quantity};

/// Request of a pod for its cell. The default is that of a pod without annotations.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CellRequest {
    /// Market of the instance.
    pub launch_type: LaunchType,
    /// Instance type. By default chosen by the pod's resources.
    pub instance_type: Option<InstanceType>,
    /// Root volume in GiB, if larger than the default.
    pub volume_size_gib: Option<u64>,
    /// Set for a cell without a public address.
    pub private_ip_only: bool,
    /// Additional security groups.
    pub security_groups: Vec<String>,
    /// ARN of an IAM instance profile.
    pub instance_profile: Option<String>,
    /// Time that the cell may be unhealthy. `None` is the default.
    pub healthy_timeout: Option<HealthyTimeout>,
    /// Networks that the VPC routes to the cell.
    pub cloud_routes: Vec<Cidr>,
}

impl CellRequest {
    /// Parses a pod's annotations, or returns all problems. Annotations with other keys are
    /// ignored.
    pub fn parse<'a>(
        annotations: impl IntoIterator<Item = (&'a String, &'a String)>,
    ) -> Result<Self, Problems> {
        let mut ours: BTreeMap<&str, &str> =
            annotations.into_iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        ours.retain(|key, _| key.starts_with(keys::PREFIX));
        let report = Report::default();
        let field =
            |key: &str| ours.get(key).map(|value| Field::new(key, Value::from(*value), &report));
        let request = Self {
            launch_type: launch_type(field(LAUNCH_TYPE), field(SPOT_INSTANCE), &report),
            instance_type: field(INSTANCE_TYPE).and_then(instance_type),
            volume_size_gib: field(VOLUME_SIZE).and_then(volume_size),
            private_ip_only: field(PRIVATE_IP_ONLY).and_then(boolean).unwrap_or_default(),
            security_groups: field(SECURITY_GROUPS).and_then(security_groups).unwrap_or_default(),
            instance_profile: field(INSTANCE_PROFILE).and_then(instance_profile),
            healthy_timeout: field(HEALTHY_TIMEOUT).and_then(healthy_timeout),
            cloud_routes: field(CLOUD_ROUTE).and_then(cloud_routes).unwrap_or_default(),
        };
        report.finish("the pod's annotations", request)
    }

    /// Returns keys that begin as [`KEYS`] do but are unknown: probably misspelt.
    pub fn unknown_keys<'a>(
        annotations: impl IntoIterator<Item = (&'a String, &'a String)>,
    ) -> Vec<&'a str> {
        let keys = annotations.into_iter().map(|(key, _)| key.as_str());
        let mut unknown: Vec<_> =
            keys.filter(|key| key.starts_with(keys::PREFIX) && !KEYS.contains(key)).collect();
        unknown.sort_unstable();
        unknown
    }
}

#[cfg(test)]
mod tests;
