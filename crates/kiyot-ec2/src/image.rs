//! Machine images.

/// A machine image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// The id, such as `ami-0123456789abcdef0`.
    pub id: String,
    /// The name.
    pub name: String,
    /// The architecture, such as `x86_64`.
    pub architecture: String,
    /// The time of its creation, in ISO 8601, so that texts sort by time.
    pub created: String,
    /// The device of its root volume, such as `/dev/xvda`.
    pub root_device: String,
    /// The volumes that its instances get, including the root volume.
    pub volumes: Vec<ImageVolume>,
}

/// A volume of a machine image (`BlockDeviceMapping` with `Ebs`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageVolume {
    /// The device, such as `/dev/xvda`.
    pub device: String,
    /// The size of its snapshot in GiB, the smallest size of the volume.
    pub gib: i32,
}
