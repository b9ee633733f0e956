//! Instance types, their zones, and spot prices.

/// Instance type in a zone that offers it (`InstanceTypeOffering`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TypeInZone {
    /// The instance type.
    pub instance_type: String,
    /// The availability zone.
    pub zone: String,
}

/// The spot price of an instance type in a zone (`SpotPrice`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpotPrice {
    /// The instance type.
    pub instance_type: String,
    /// The availability zone.
    pub zone: String,
    /// Price in dollars an hour, as a decimal number.
    pub price: String,
}

/// An instance type (`InstanceTypeInfo`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TypeDescription {
    /// The name.
    pub name: String,
    /// The default number of vCPUs.
    pub vcpus: i64,
    /// Memory in MiB.
    pub memory_mib: i64,
    /// The architectures, such as `x86_64`.
    pub architectures: Vec<String>,
    /// True if the type has credits and a baseline. EC2 does not show the baseline.
    pub is_burstable: bool,
    /// True for a whole machine.
    pub is_bare_metal: bool,
    /// True for the current generation.
    pub is_current: bool,
    /// The GPUs of the first kind; `None` for a type without GPUs.
    pub gpus: Option<TypeGpus>,
    /// True if it can be launched on demand.
    pub has_on_demand: bool,
    /// True if it can be launched on spot.
    pub has_spot: bool,
}

/// The GPUs of an instance type (`GpuDeviceInfo`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TypeGpus {
    /// Their number.
    pub count: i64,
    /// The manufacturer.
    pub manufacturer: Option<String>,
    /// The name.
    pub name: Option<String>,
}
