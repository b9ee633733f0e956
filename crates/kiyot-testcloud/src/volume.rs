//! Volumes of images and instances.

/// A block device of the image that instances are launched of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageVolume {
    /// Device, such as `/dev/xvda`.
    pub device: String,
    /// Size of its snapshot in GiB.
    pub gib: u32,
    /// Set if its volume ends with the instance.
    pub ends_with_instance: bool,
}

/// A volume of an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// Device, such as `/dev/xvda`.
    pub device: String,
    /// Size in GiB.
    pub gib: u32,
    /// Set if it is encrypted.
    pub encrypted: bool,
    /// Key that encrypts it; empty for that of the account.
    pub kms_key: String,
    /// Set if it ends with the instance. Others stay, and cost.
    pub ends_with_instance: bool,
}
