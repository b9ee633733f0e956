//! Root volumes of EC2 instances.

/// The performance of a volume; `None` for EBS's default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VolumePerformance {
    /// The IOPS of gp3.
    pub iops: Option<i32>,
    /// The throughput of gp3 in MiB a second.
    pub throughput: Option<i32>,
    /// The rate in MiB a second at which the volume is read from its snapshot
    /// (`VolumeInitializationRate`).
    pub initialization_rate: Option<i32>,
}

/// The type of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum VolumeType {
    /// General purpose, third generation.
    #[default]
    Gp3,
    /// General purpose, second generation.
    Gp2,
}

impl VolumeType {
    /// Returns the name in the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gp3 => "gp3",
            Self::Gp2 => "gp2",
        }
    }
}
