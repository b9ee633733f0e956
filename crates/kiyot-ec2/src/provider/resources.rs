//! Subnets and images of launches, as EC2 describes them.

use std::collections::BTreeMap;

use kiyot_engine::{
    provider::{ErrorClass, ProviderError},
    request::Architecture,
};

use crate::{
    CallError, Image, Subnet,
    provider::{error_codes::classify, node_subnet::UnknownSubnet, parameters::BootImage},
};

/// The subnets and images of launches.
#[derive(Debug)]
pub(super) struct Resources {
    /// The VPC of the subnets.
    pub(super) vpc: String,
    /// The subnets, by their zone.
    pub(super) subnets: BTreeMap<String, String>,
    pub(super) images: BTreeMap<Architecture, BootImage>,
}

/// Reason why subnets and images are unknown.
#[derive(Debug, Clone, thiserror::Error)]
pub(super) enum ResourcesError {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Subnet(#[from] UnknownSubnet),
    #[error(transparent)]
    Image(#[from] UnknownImage),
}

/// EC2 has no image for instances, or no image for the architecture of the agent that they
/// download.
#[derive(Debug, Clone, thiserror::Error)]
#[error("ec2.image: EC2 has no available image of this id or name{}", downloading(*.0))]
pub(super) struct UnknownImage(pub(super) Option<Architecture>);

/// Returns the part of an error about the architecture of the agent that instances download.
fn downloading(architecture: Option<Architecture>) -> String {
    let of = |it: Architecture| format!(" for {it}, the architecture of gateway.agent");
    architecture.map(of).unwrap_or_default()
}

impl From<ResourcesError> for ProviderError {
    fn from(error: ResourcesError) -> Self {
        let class = match &error {
            ResourcesError::Call(error) => classify(error).0,
            ResourcesError::Subnet(_) | ResourcesError::Image(_) => ErrorClass::Invalid,
        };
        Self::new(class, "read subnets and images", error)
    }
}

/// Returns the first of these subnets in each zone.
pub(super) fn by_zone(ids: &[String], described: &[Subnet]) -> BTreeMap<String, String> {
    let mut subnets = BTreeMap::new();
    for id in ids {
        if let Some(subnet) = described.iter().find(|subnet| subnet.id == *id) {
            subnets.entry(subnet.zone.clone()).or_insert_with(|| id.clone());
        }
    }
    subnets
}

/// Returns the newest image of each architecture.
pub(super) fn newest(images: Vec<Image>) -> BTreeMap<Architecture, BootImage> {
    let mut newest: BTreeMap<Architecture, Image> = BTreeMap::new();
    for image in images {
        let Some(architecture) = Architecture::named(&image.architecture) else { continue };
        let key = |image: &Image| (image.created.clone(), image.id.clone());
        let is_newer = newest.get(&architecture).is_none_or(|other| key(&image) > key(other));
        if is_newer {
            newest.insert(architecture, image);
        }
    }
    let boot = |image: Image| {
        let Image { id, root_device, volumes, .. } = image;
        let (root, further_volumes): (Vec<_>, _) =
            volumes.into_iter().partition(|volume| volume.device == root_device);
        let root_gib = root.first().map(|volume| volume.gib);
        BootImage { id, root_device, root_gib, further_volumes }
    };
    newest.into_iter().map(|(architecture, image)| (architecture, boot(image))).collect()
}
