//! Sizes: instance types made for a pod, such as `2cpu-704mib`.

use std::fmt;

use crate::{
    placement::{InstanceType, Needs},
    request::{Architecture, LaunchType},
};

/// Memory is a multiple of this, in MiB, so that warm cells suit pods of nearly the same size.
const MEMORY_STEP_MIB: u64 = 64;

/// The size of an instance that is made for a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Size {
    /// The vCPUs; not 0.
    pub cpus: u32,
    /// The memory in MiB, that of the instance's kernel included.
    pub memory_mib: u64,
}

impl Size {
    /// Returns the smallest size that a pod fits.
    pub fn of(needs: &Needs) -> Self {
        let cpus = needs.milli_cpus.value.div_ceil(1000).max(1);
        let memory = needs.memory_mib.value.saturating_add(needs.overhead_mib);
        Self {
            cpus: u32::try_from(cpus).unwrap_or(u32::MAX),
            memory_mib: InstanceType::memory_for(memory)
                .div_ceil(MEMORY_STEP_MIB)
                .saturating_mul(MEMORY_STEP_MIB),
        }
    }

    /// Returns the largest size within these CPUs and this memory.
    pub fn within(cpus: u32, memory_mib: u64) -> Self {
        Self { cpus, memory_mib: memory_mib / MEMORY_STEP_MIB * MEMORY_STEP_MIB }
    }

    /// Returns the size with a name; `None` for other names.
    pub fn parse(name: &str) -> Option<Self> {
        let (cpus, memory) = name.strip_suffix("mib")?.split_once("cpu-")?;
        let size = Self { cpus: cpus.parse().ok()?, memory_mib: memory.parse().ok()? };
        (size.cpus > 0 && size.to_string() == name).then_some(size)
    }

    /// Returns the size as an instance type.
    pub(super) fn instance_type(self, name: String, architecture: Architecture) -> InstanceType {
        InstanceType {
            name,
            milli_cpus: u64::from(self.cpus) * 1000,
            memory_mib: self.memory_mib,
            architectures: vec![architecture],
            baseline_milli_cpus: None,
            gpus: None,
            is_bare_metal: false,
            is_nitro: false,
            is_current: true,
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}cpu-{}mib", self.cpus, self.memory_mib)
    }
}

impl Needs {
    /// Returns the needs that an instance of any size must meet: without instance type, market and
    /// price, which it does not have.
    pub(super) fn of_size(&self) -> Self {
        Self {
            instance_type: None,
            launch_type: LaunchType::OnDemand,
            max_price: None,
            ..self.clone()
        }
    }
}
