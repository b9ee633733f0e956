//! The needs of a pod: the size and the kind of its cell.

use std::fmt;

use kiyot_config::{WarmKind, WarmLaunchType, WarmPool};
use kiyot_proto::cri;
use kiyot_values::price::Price;

use crate::{
    placement::{Defaults, fit::Cpus},
    request::{Architecture, CellRequest, GpuRequest, InstanceType as TypeChoice, LaunchType},
};

/// The CPU shares of a container without a CPU request: the kubelet's minimum.
const LEAST_SHARES: i64 = 2;
/// The CPU shares of a CPU.
const SHARES_OF_CPU: u64 = 1024;

/// The source of an amount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// An annotation of the pod.
    Annotation,
    /// The limits of its containers.
    Limits,
    /// The requests of its containers.
    Requests,
    /// The configured default.
    Default,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Annotation => "annotation",
            Self::Limits => "limits",
            Self::Requests => "requests",
            Self::Default => "default",
        })
    }
}

/// An amount, with its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Amount {
    /// The amount.
    pub value: u64,
    /// Its source.
    pub source: Source,
}

impl Amount {
    /// Returns whether an instance type must have the amount. Only an annotated amount binds an
    /// exact type.
    pub(super) fn is_binding(self, is_exact: bool) -> bool {
        !is_exact || self.source == Source::Annotation
    }
}

/// The known resources of a pod's containers.
///
/// Separates [`Needs`] from the sources of a pod's size. CRI has CPU requests and limits, and the
/// sum of the memory limits that are set (`LinuxPodSandboxConfig.resources`). The Kubernetes API
/// has all requests and limits ([`Self::with_api`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Requested {
    /// Thousandths of a CPU.
    pub milli_cpus: Option<Amount>,
    /// Memory in MiB.
    pub memory_mib: Option<Amount>,
    /// The overhead of the pod's RuntimeClass, in MiB.
    pub overhead_mib: u64,
    /// Ephemeral storage in bytes; 0 without requests, or if they are not known.
    pub storage_bytes: u64,
}

/// The needs of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needs {
    /// Thousandths of a CPU.
    pub milli_cpus: Amount,
    /// Memory in MiB, without that of the cell's own processes.
    pub memory_mib: Amount,
    /// Memory of the cell's own processes, in MiB.
    pub overhead_mib: u64,
    /// Ephemeral storage in bytes; 0 without requests, or if they are not known.
    pub storage_bytes: u64,
    /// GPUs.
    pub gpus: Option<GpuRequest>,
    /// The architecture of the pod's programs.
    pub architecture: Architecture,
    /// The instance type that the pod names, or the types that it accepts.
    pub instance_type: Option<TypeChoice>,
    /// The market.
    pub launch_type: LaunchType,
    /// The highest price at the time of the choice. The provider may bill a higher spot price
    /// later.
    pub max_price: Option<Price>,
    /// True if burstable types count with all their CPUs, at the price of CPU above their baseline.
    pub is_sustained: bool,
}

impl fmt::Display for Needs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} CPU ({}), {} MiB of memory ({}) and {} MiB for the cell, {}, {}",
            Cpus(self.milli_cpus.value),
            self.milli_cpus.source,
            self.memory_mib.value,
            self.memory_mib.source,
            self.overhead_mib,
            self.architecture,
            self.launch_type,
        )?;
        self.gpus.iter().try_for_each(|gpus| write!(f, ", {gpus}"))?;
        self.instance_type.iter().try_for_each(|choice| write!(f, ", instance type {choice}"))?;
        self.max_price.iter().try_for_each(|price| write!(f, ", at most {price} an hour"))
    }
}

impl Requested {
    /// Returns the resources of a pod by its CRI request.
    pub fn of_sandbox(config: &cri::PodSandboxConfig) -> Self {
        let Some(linux) = &config.linux else { return Self::default() };
        let resources = linux.resources.clone().unwrap_or_default();
        let overhead = linux.overhead.clone().unwrap_or_default();
        // The kubelet sums the limits that are set: a container without a limit makes the sum too
        // small.
        let limit =
            milli_cpu_limit(&resources).map(|value| Amount { value, source: Source::Limits });
        let request =
            milli_cpu_request(&resources).map(|value| Amount { value, source: Source::Requests });
        let milli_cpus = match (limit, request) {
            (Some(limit), Some(request)) if request.value > limit.value => Some(request),
            (limit, request) => limit.or(request),
        };
        let memory_mib = mib(resources.memory_limit_in_bytes)
            .map(|value| Amount { value, source: Source::Limits });
        let overhead_mib = mib(overhead.memory_limit_in_bytes).unwrap_or_default();
        Self { milli_cpus, memory_mib, overhead_mib, storage_bytes: 0 }
    }
}

/// Returns the CPU limit, in thousandths rounded up.
pub(super) fn milli_cpu_limit(resources: &cri::LinuxContainerResources) -> Option<u64> {
    let (quota, period) = (resources.cpu_quota, resources.cpu_period);
    (quota > 0 && period > 0).then(|| {
        let thousandths = i128::from(quota) * 1000;
        let milli = thousandths.unsigned_abs().div_ceil(period.unsigned_abs().into());
        u64::try_from(milli).unwrap_or(u64::MAX)
    })
}

/// Returns the CPU request by the CPU shares, in thousandths rounded up.
pub(super) fn milli_cpu_request(resources: &cri::LinuxContainerResources) -> Option<u64> {
    (resources.cpu_shares > LEAST_SHARES).then(|| {
        let milli = resources.cpu_shares.unsigned_abs().saturating_mul(1000);
        milli.div_ceil(SHARES_OF_CPU)
    })
}

/// Returns bytes in MiB, rounded up; `None` for no bytes.
fn mib(bytes: i64) -> Option<u64> {
    (bytes > 0).then(|| bytes.unsigned_abs().div_ceil(1 << 20))
}

impl Default for Needs {
    fn default() -> Self {
        Self::new(&CellRequest::default(), &Requested::default(), &Defaults::default())
    }
}

impl Needs {
    /// Returns the requested architecture and instance types as text, without the size.
    pub fn machine(&self) -> String {
        let types = self.instance_type.as_ref().map(|types| format!(" {types}"));
        format!("{}{}", self.architecture, types.unwrap_or_default())
    }

    /// Returns the needs of the cells of a warm pool.
    pub fn of_pool(pool: &WarmPool, defaults: &Defaults) -> Self {
        let mut request = CellRequest {
            launch_type: match pool.launch_type {
                WarmLaunchType::OnDemand => LaunchType::OnDemand,
                WarmLaunchType::Spot => LaunchType::Spot,
                WarmLaunchType::SpotPreferred => LaunchType::SpotPreferred,
            },
            ..CellRequest::default()
        };
        match &pool.kind {
            WarmKind::Default => {}
            WarmKind::Offering(name) => {
                request.instance_type = Some(TypeChoice::Exact(name.clone()));
            }
            WarmKind::Size { milli_cpus, memory } => {
                request.milli_cpus = Some(*milli_cpus);
                request.memory_bytes = Some(*memory);
            }
        }
        Self::new(&request, &Requested::default(), defaults)
    }

    /// Returns the needs of a pod: by its annotations, otherwise by the resources of its
    /// containers, otherwise the defaults.
    pub fn new(request: &CellRequest, requested: &Requested, defaults: &Defaults) -> Self {
        let annotated =
            |value: Option<u64>| value.map(|value| Amount { value, source: Source::Annotation });
        let default = |value| Amount { value, source: Source::Default };
        let memory = request.memory_bytes.map(|bytes| bytes.div_ceil(1 << 20));
        Self {
            milli_cpus: annotated(request.milli_cpus)
                .or(requested.milli_cpus)
                .unwrap_or_else(|| default(defaults.milli_cpus)),
            memory_mib: annotated(memory)
                .or(requested.memory_mib)
                .unwrap_or_else(|| default(defaults.memory_mib)),
            overhead_mib: requested.overhead_mib.max(defaults.overhead_mib),
            storage_bytes: requested.storage_bytes,
            gpus: request.gpu.clone().filter(|gpus| gpus.count > 0),
            architecture: request.architecture.unwrap_or(defaults.architecture),
            instance_type: request.instance_type.clone(),
            launch_type: request.launch_type,
            max_price: request.max_price,
            is_sustained: request.sustained_cpu,
        }
    }
}
