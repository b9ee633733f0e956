//! The request of a launch.

use std::{collections::BTreeMap, fmt};

use kiyot_config::{VolumePerformance, VolumeType};

use crate::ImageVolume;

/// The request of a launch (RunInstances) of one instance. Equal requests are equal on the wire, so
/// a repeated request has the parameters that belong to its client token.
///
/// Every launch has these settings: metadata service version 2 with a hop limit of 1 and without
/// tags, termination at shutdown, and encrypted volumes that end with the instance.
/// Volumes and network interfaces get the instance's tags.
#[derive(Clone, PartialEq, Eq)]
pub struct RunInstances {
    /// The token by which EC2 recognises a repeated launch: at most 64 ASCII characters.
    pub client_token: String,
    /// The image.
    pub image: String,
    /// The device of the image's root volume.
    pub root_device: String,
    /// The instance type.
    pub instance_type: String,
    /// The subnet, which decides the zone.
    pub subnet: String,
    /// The security groups.
    pub security_groups: Vec<String>,
    /// True for a spot instance, which is not requested again when it ends.
    pub is_spot: bool,
    /// True if the instance gets a public address.
    pub public_address: bool,
    /// The name or the ARN of an instance profile.
    pub instance_profile: Option<String>,
    /// The name of a key pair.
    pub key_name: Option<String>,
    /// The size of the root volume in GiB.
    pub volume_gib: i32,
    /// The type of the root volume.
    pub volume_type: VolumeType,
    /// The performance of the root volume.
    pub performance: VolumePerformance,
    /// The other volumes of the image.
    pub further_volumes: Vec<ImageVolume>,
    /// The KMS key that encrypts all volumes, in place of the account's.
    pub kms_key: Option<String>,
    /// The credits of a burstable type; `None` for other types, because they refuse the option.
    pub credits: Option<CpuCredits>,
    /// The tags of instance, volume and network interface.
    pub tags: BTreeMap<String, String>,
    /// The user data. Contains a secret.
    pub user_data: String,
}

impl fmt::Debug for RunInstances {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunInstances")
            .field("image", &self.image)
            .field("instance_type", &self.instance_type)
            .field("subnet", &self.subnet)
            .field("is_spot", &self.is_spot)
            .field("tags", &self.tags)
            .finish_non_exhaustive()
    }
}

/// The credits of a burstable instance type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CpuCredits {
    /// The processor is slowed to the baseline when the earned credits are used up.
    Standard,
    /// Further credits cost money.
    Unlimited,
}

impl CpuCredits {
    /// Returns the name of the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Standard => "standard",
            Self::Unlimited => "unlimited",
        }
    }
}
