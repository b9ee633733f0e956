//! Volumes of images and instances.

/// A block device of the image from which instances are launched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageVolume {
    /// Device, such as `/dev/xvda`.
    pub device: String,
    /// Size of its snapshot in GiB.
    pub gib: u32,
    /// True if its volume ends with the instance.
    pub ends_with_instance: bool,
}

/// A volume of an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// Device, such as `/dev/xvda`.
    pub device: String,
    /// Size in GiB.
    pub gib: u32,
    /// True if the volume is encrypted.
    pub encrypted: bool,
    /// Key that encrypts the volume; empty: the account's default key.
    pub kms_key: String,
    /// True if the volume ends with the instance. Other volumes stay, and cost.
    pub ends_with_instance: bool,
}
