//! The request of a pod for its cell, by its annotations and its routing rule.

use std::time::Duration;

use kiyot_config::ProviderKind;
use kiyot_values::{cidr::Cidr, price::Price};

use self::keys::PROVIDER;

mod architecture;
mod gpu;
mod healthy_timeout;
mod instance_type;
mod isolation;
pub mod keys;
mod launch_type;
mod rule_providers;

pub use architecture::Architecture;
pub use gpu::GpuRequest;
pub use healthy_timeout::HealthyTimeout;
pub use instance_type::InstanceType;
pub use isolation::Isolation;
pub use launch_type::LaunchType;
pub use rule_providers::RuleProviders;

/// Largest root volume, in GiB: EC2's limit.
pub const MAX_VOLUME_GIB: u64 = 64 * 1024;

/// Request of a pod for its cell. The default is for a pod without annotations.
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
    /// Highest price of the instance at the time of the choice. A spot price may rise later.
    pub max_price: Option<Price>,
    /// Set if burstable types count with all their vCPUs, at the price of the credits above their
    /// baseline. By default only their baseline counts.
    pub sustained_cpu: bool,
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
    /// Provider of the cell. By default any.
    pub provider: Option<ProviderKind>,
    /// Least isolation of the cell from the node. By default none.
    pub isolation: Option<Isolation>,
    /// Time within which the cell should start. By default the price alone ranks offerings.
    pub start_within: Option<Duration>,
    /// Providers that the pod's routing rule allows. By default all.
    pub rule: Option<RuleProviders>,
}

impl CellRequest {
    /// Returns why no provider is allowed: the routing rule excludes the provider that the pod
    /// names.
    pub fn contradiction(&self) -> Option<String> {
        let (wanted, rule) = (self.provider?.name(), self.rule.as_ref()?);
        (!rule.allows(wanted)).then(|| format!("{PROVIDER} asks for {wanted:?}, and the {rule}"))
    }
}
