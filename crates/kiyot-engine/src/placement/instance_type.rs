//! Instance types: the machines that a provider makes.

use crate::request::Architecture;

/// Memory that the kernel of an instance keeps, in MiB, beside a share of the whole. A Debian
/// kernel 6.1 in a VM keeps 49 MiB of 512 MiB and 58 MiB of 1 GiB: 40 MiB and a 57th.
const KERNEL_MIB: u64 = 40;
/// Kernel and firmware keep one of this many parts: more than the kernel's 57th.
const KERNEL_PART: u64 = 40;

/// An instance type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceType {
    /// The provider's name, such as `t4g.nano`.
    pub name: String,
    /// Thousandths of a vCPU.
    pub milli_cpus: u64,
    /// Memory in MiB by the provider's list; processes have [`InstanceType::usable_mib`].
    pub memory_mib: u64,
    /// The architectures of programs that it runs.
    pub architectures: Vec<Architecture>,
    /// The baseline of a burstable type, in thousandths of a vCPU; `None` for other types.
    pub baseline_milli_cpus: Option<u64>,
    /// Its GPUs.
    pub gpus: Option<Gpus>,
    /// True for a whole machine, which boots for many minutes.
    pub is_bare_metal: bool,
    /// True for AWS's Nitro System, whose latest console output can be read.
    pub is_nitro: bool,
    /// True for the provider's current generation. Previous generations are slow for their price,
    /// or lack what images need, such as NVMe.
    pub is_current: bool,
}

/// The GPUs of an instance type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpus {
    /// Their number; not 0.
    pub count: u32,
    /// The manufacturer, such as `NVIDIA`, if known.
    pub manufacturer: Option<String>,
    /// The name, such as `T4`, if known.
    pub name: Option<String>,
}

impl InstanceType {
    /// Returns the least memory of a type whose processes can use `usable_mib`, in MiB.
    pub fn memory_for(usable_mib: u64) -> u64 {
        let with_kernel = usable_mib.saturating_add(KERNEL_MIB);
        // The share is of the whole memory: `KERNEL_PART - 1` of `KERNEL_PART` parts are left.
        with_kernel.saturating_add(with_kernel.div_ceil(KERNEL_PART - 1))
    }

    /// Returns the memory that processes can use, in MiB.
    pub fn usable_mib(&self) -> u64 {
        self.memory_mib.saturating_sub(KERNEL_MIB + self.memory_mib.div_ceil(KERNEL_PART))
    }
}
