//! Pod annotations as a validated request for a cell.

use std::collections::BTreeMap;

use serde_json::Value;

use self::{
    architecture::architecture,
    gpu::gpu,
    healthy_timeout::healthy_timeout,
    instance_profile::instance_profile,
    instance_type::instance_type,
    launch_type::launch_type,
    max_price::max_price,
    misspelling::meant_by,
    network::{cloud_routes, security_groups},
    size::{cpu, memory, volume_size},
    text::boolean,
};
use kiyot_values::{
    cidr::Cidr,
    price::Price,
    problems::{Field, Problem, Problems, Report},
};

mod architecture;
mod gpu;
mod healthy_timeout;
mod identity;
mod instance_profile;
mod instance_type;
mod keys;
mod launch_type;
mod max_price;
mod misspelling;
mod network;
mod size;
mod text;
mod unknown_keys;

pub use architecture::Architecture;
pub use gpu::GpuRequest;
pub use healthy_timeout::HealthyTimeout;
pub use identity::identity;
pub use instance_type::InstanceType;
pub use keys::{
    ARCHITECTURE, CLOUD_ROUTE, CPU, GPU, HEALTHY_TIMEOUT, INSTANCE_PROFILE, INSTANCE_TYPE, KEYS,
    LAUNCH_TYPE, MAX_PRICE, MEMORY, PRIVATE_IP_ONLY, SECURITY_GROUPS, SPOT_INSTANCE, SUSTAINED_CPU,
    TARGET_RUNTIME, VOLUME_SIZE,
};
pub use launch_type::LaunchType;
pub use size::MAX_VOLUME_GIB;
pub use unknown_keys::shown_keys;

/// Misspelt keys that are reported.
const MAX_REPORTED_KEYS: usize = 8;

/// Request of a pod for its cell. The default is that of a pod without annotations.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CellRequest {
    /// Market of the instance.
    pub launch_type: LaunchType,
    /// Instance type. By default chosen by the pod's resources.
    pub instance_type: Option<InstanceType>,
    /// CPUs in thousandths, instead of the pod's own.
    pub milli_cpus: Option<u64>,
    /// Memory in bytes, instead of the pod's own.
    pub memory_bytes: Option<u64>,
    /// GPUs, instead of the pod's own.
    pub gpu: Option<GpuRequest>,
    /// Architecture of the processor.
    pub architecture: Option<Architecture>,
    /// Highest price of the instance at the choice. That of spot may rise later.
    pub max_price: Option<Price>,
    /// Set if burstable types count with all their vCPUs, at the price of the credits above their
    /// baseline. By default only their baseline counts.
    pub sustained_cpu: bool,
    /// Root volume in GiB, if larger than the default.
    pub volume_size_gib: Option<u64>,
    /// Requests of ephemeral storage in bytes; 0 without, or if unknown. From the Kubernetes API,
    /// not an annotation.
    pub storage_request: u64,
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
    /// Parses a pod's annotations, or returns all problems. A misspelt key is a problem; other
    /// unknown keys are ignored.
    pub fn parse<'a>(
        annotations: impl IntoIterator<Item = (&'a String, &'a String)>,
    ) -> Result<Self, Problems> {
        let (mut known, mut misspelt) = (BTreeMap::new(), BTreeMap::new());
        for (key, value) in annotations {
            if KEYS.contains(&key.as_str()) {
                known.insert(key.as_str(), value.as_str());
            } else if let Some(meant) = meant_by(key) {
                misspelt.insert(key.as_str(), meant);
                if misspelt.len() > MAX_REPORTED_KEYS {
                    misspelt.pop_last();
                }
            }
        }
        let report = Report::default();
        let field =
            |key: &str| known.get(key).map(|value| Field::new(key, Value::from(*value), &report));
        let request = Self {
            launch_type: launch_type(field(LAUNCH_TYPE), field(SPOT_INSTANCE), &report),
            instance_type: field(INSTANCE_TYPE).and_then(instance_type),
            milli_cpus: field(CPU).and_then(cpu),
            memory_bytes: field(MEMORY).and_then(memory),
            gpu: field(GPU).and_then(gpu),
            architecture: field(ARCHITECTURE).and_then(architecture),
            max_price: field(MAX_PRICE).and_then(max_price),
            sustained_cpu: field(SUSTAINED_CPU).and_then(boolean).unwrap_or_default(),
            volume_size_gib: field(VOLUME_SIZE).and_then(volume_size),
            storage_request: 0,
            private_ip_only: field(PRIVATE_IP_ONLY).and_then(boolean).unwrap_or_default(),
            security_groups: field(SECURITY_GROUPS).and_then(security_groups).unwrap_or_default(),
            instance_profile: field(INSTANCE_PROFILE).and_then(instance_profile),
            healthy_timeout: field(HEALTHY_TIMEOUT).and_then(healthy_timeout),
            cloud_routes: field(CLOUD_ROUTE).and_then(cloud_routes).unwrap_or_default(),
        };
        for (key, meant) in misspelt {
            // A key within a few letters of a known one is short.
            let at = key.escape_debug().to_string();
            report.add(Problem::new(at, format!("is unknown; did you mean {meant}?")));
        }
        report.finish("the pod's annotations", request)
    }
}

#[cfg(test)]
mod tests;
