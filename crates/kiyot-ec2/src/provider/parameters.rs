//! Provider's own parameters of a launch, as recorded in the journal. They have everything that a
//! replay of RunInstances needs, so a changed configuration changes no replay.

use std::collections::BTreeMap;

use kiyot_config::{VolumePerformance, VolumeType};
use kiyot_engine::{
    provider::{ErrorClass, ProviderError},
    request::Architecture,
};
use kiyot_values::cidr::Cidr;

use crate::{CpuCredits, ImageVolume};

const IMAGE: &str = "image:";
const ROOT_DEVICE: &str = "root-device:";
const ROOT_GIB: &str = "root-gib:";
const FURTHER_VOLUMES: &str = "further-volumes:";
const SUBNET: &str = "subnet:";
const SECURITY_GROUPS: &str = "security-groups";
const INSTANCE_PROFILE: &str = "instance-profile";
const KEY_NAME: &str = "key-name";
const VOLUME_GIB: &str = "volume-gib";
const VOLUME_TYPE: &str = "volume-type";
const VOLUME_IOPS: &str = "volume-iops";
const VOLUME_THROUGHPUT: &str = "volume-throughput";
const INITIALIZATION_RATE: &str = "volume-initialization-rate";
const KMS_KEY: &str = "kms-key";
const PUBLIC_ADDRESS: &str = "public-address";
const CREDITS: &str = "credits";
const HAS_AGENT: &str = "image-has-agent";
const PAUSE_IMAGE: &str = "pause-image";
const POWER_OFF_AFTER: &str = "power-off-after-secs";
const CLUSTER_NETWORKS: &str = "cluster-networks";
const CLOUD_ROUTES: &str = "cloud-routes";

/// Keys of parameters that a pod chooses and that do not affect a boot.
pub(super) const WITHOUT_EFFECT_ON_BOOTS: &[&str] = &[VOLUME_GIB, CREDITS, CLOUD_ROUTES];

/// An image with its volumes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BootImage {
    pub(super) id: String,
    pub(super) root_device: String,
    /// The smallest size of its root volume.
    pub(super) root_gib: Option<i32>,
    /// Its other volumes.
    pub(super) further_volumes: Vec<ImageVolume>,
}

/// The provider's own parameters of a launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Parameters {
    /// The images, by the architecture of the instance type.
    pub(super) images: BTreeMap<Architecture, BootImage>,
    /// The subnets, by their zone.
    pub(super) subnets: BTreeMap<String, String>,
    pub(super) security_groups: Vec<String>,
    pub(super) instance_profile: Option<String>,
    pub(super) key_name: Option<String>,
    pub(super) volume_gib: i32,
    pub(super) volume_type: VolumeType,
    pub(super) performance: VolumePerformance,
    pub(super) kms_key: Option<String>,
    pub(super) public_address: bool,
    /// The credits of burstable types.
    pub(super) credits: CpuCredits,
    /// True if the image has the agent.
    pub(super) image_has_agent: bool,
    /// The image of pod sandboxes.
    pub(super) pause_image: String,
    /// The time in seconds after its boot at which an instance powers off unless it has enrolled.
    pub(super) power_off_after_secs: u64,
    /// The networks that the cell reaches through the node.
    pub(super) cluster_networks: Vec<Cidr>,
    /// The networks that the VPC routes to the instance. No warm cell has such parameters.
    pub(super) cloud_routes: Vec<Cidr>,
}

impl Parameters {
    /// Returns the parameters in the journal's form.
    pub(super) fn stored(&self) -> BTreeMap<String, String> {
        let mut stored = BTreeMap::new();
        let mut put = |key: String, value: &str| stored.insert(key, value.to_owned());
        for (architecture, image) in &self.images {
            put(format!("{IMAGE}{architecture}"), &image.id);
            put(format!("{ROOT_DEVICE}{architecture}"), &image.root_device);
            if let Some(gib) = image.root_gib {
                put(format!("{ROOT_GIB}{architecture}"), &gib.to_string());
            }
            if !image.further_volumes.is_empty() {
                let shown = |it: &ImageVolume| format!("{}={}", it.device, it.gib);
                let volumes: Vec<String> = image.further_volumes.iter().map(shown).collect();
                put(format!("{FURTHER_VOLUMES}{architecture}"), &volumes.join(","));
            }
        }
        for (zone, subnet) in &self.subnets {
            put(format!("{SUBNET}{zone}"), subnet);
        }
        put(SECURITY_GROUPS.into(), &self.security_groups.join(","));
        if let Some(profile) = &self.instance_profile {
            put(INSTANCE_PROFILE.into(), profile);
        }
        if let Some(key_name) = &self.key_name {
            put(KEY_NAME.into(), key_name);
        }
        put(VOLUME_GIB.into(), &self.volume_gib.to_string());
        put(VOLUME_TYPE.into(), self.volume_type.name());
        let VolumePerformance { iops, throughput, initialization_rate } = self.performance;
        for (key, value) in [
            (VOLUME_IOPS, iops),
            (VOLUME_THROUGHPUT, throughput),
            (INITIALIZATION_RATE, initialization_rate),
        ] {
            if let Some(value) = value {
                put(key.into(), &value.to_string());
            }
        }
        if let Some(key) = &self.kms_key {
            put(KMS_KEY.into(), key);
        }
        put(PUBLIC_ADDRESS.into(), &self.public_address.to_string());
        put(CREDITS.into(), self.credits.name());
        put(HAS_AGENT.into(), &self.image_has_agent.to_string());
        put(PAUSE_IMAGE.into(), &self.pause_image);
        put(POWER_OFF_AFTER.into(), &self.power_off_after_secs.to_string());
        for (key, networks) in
            [(CLUSTER_NETWORKS, &self.cluster_networks), (CLOUD_ROUTES, &self.cloud_routes)]
        {
            if !networks.is_empty() {
                let networks: Vec<String> = networks.iter().map(ToString::to_string).collect();
                put(key.into(), &networks.join(","));
            }
        }
        stored
    }

    /// Parses the parameters of a journal; the error has the missing or invalid key.
    pub(super) fn from_stored(stored: &BTreeMap<String, String>) -> Result<Self, ProviderError> {
        let wrong = |key: &str| {
            let doing = format!("parameter {key:?} of the recorded launch is missing or invalid");
            ProviderError::without_cause(ErrorClass::Invalid, doing)
        };
        let get = |key: &str| stored.get(key).ok_or_else(|| wrong(key));
        let prefixed = |prefix: &'static str| {
            stored.iter().filter_map(move |(key, value)| {
                Some((key.strip_prefix(prefix)?.to_owned(), value.clone()))
            })
        };
        let number = |key: &str| -> Result<Option<i32>, ProviderError> {
            stored.get(key).map(|text| text.parse().map_err(|_| wrong(key))).transpose()
        };
        let mut images = BTreeMap::new();
        for (name, id) in prefixed(IMAGE) {
            let architecture = Architecture::named(&name).ok_or_else(|| wrong(IMAGE))?;
            let root_device = get(&format!("{ROOT_DEVICE}{name}"))?.clone();
            let root_gib = number(&format!("{ROOT_GIB}{name}"))?;
            let key = format!("{FURTHER_VOLUMES}{name}");
            let listed = stored.get(&key).into_iter().flat_map(|volumes| volumes.split(','));
            let further_volumes =
                listed.map(|volume| further_volume(volume).ok_or_else(|| wrong(&key)));
            let further_volumes = further_volumes.collect::<Result<_, _>>()?;
            images.insert(architecture, BootImage { id, root_device, root_gib, further_volumes });
        }
        let networks = |key: &str| -> Result<Vec<Cidr>, ProviderError> {
            let listed = stored.get(key).into_iter().flat_map(|networks| networks.split(','));
            listed.map(|network| network.parse().map_err(|_| wrong(key))).collect()
        };
        let flag = |key: &str| get(key)?.parse().map_err(|_| wrong(key));
        Ok(Self {
            images,
            subnets: prefixed(SUBNET).collect(),
            security_groups: get(SECURITY_GROUPS)?.split(',').map(ToOwned::to_owned).collect(),
            instance_profile: stored.get(INSTANCE_PROFILE).cloned(),
            key_name: stored.get(KEY_NAME).cloned(),
            volume_gib: get(VOLUME_GIB)?.parse().map_err(|_| wrong(VOLUME_GIB))?,
            volume_type: [VolumeType::Gp3, VolumeType::Gp2]
                .into_iter()
                .find(|it| stored.get(VOLUME_TYPE).is_some_and(|name| name == it.name()))
                .ok_or_else(|| wrong(VOLUME_TYPE))?,
            performance: VolumePerformance {
                iops: number(VOLUME_IOPS)?,
                throughput: number(VOLUME_THROUGHPUT)?,
                initialization_rate: number(INITIALIZATION_RATE)?,
            },
            kms_key: stored.get(KMS_KEY).cloned(),
            public_address: flag(PUBLIC_ADDRESS)?,
            credits: [CpuCredits::Standard, CpuCredits::Unlimited]
                .into_iter()
                .find(|it| stored.get(CREDITS).is_some_and(|name| name == it.name()))
                .ok_or_else(|| wrong(CREDITS))?,
            image_has_agent: flag(HAS_AGENT)?,
            pause_image: get(PAUSE_IMAGE)?.clone(),
            power_off_after_secs: get(POWER_OFF_AFTER)?
                .parse()
                .map_err(|_| wrong(POWER_OFF_AFTER))?,
            cluster_networks: networks(CLUSTER_NETWORKS)?,
            cloud_routes: networks(CLOUD_ROUTES)?,
        })
    }
}

/// Returns the volume of a text such as `/dev/sdb=5`.
fn further_volume(text: &str) -> Option<ImageVolume> {
    let (device, gib) = text.rsplit_once('=')?;
    Some(ImageVolume { device: device.to_owned(), gib: gib.parse().ok()? })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn parameters() -> Parameters {
        Parameters {
            images: [(
                Architecture::Amd64,
                BootImage {
                    id: "ami-1".into(),
                    root_device: "/dev/xvda".into(),
                    root_gib: Some(8),
                    further_volumes: [("/dev/sdb", 5), ("/dev/sdc", 6)]
                        .map(|(device, gib)| ImageVolume { device: device.into(), gib })
                        .into(),
                },
            )]
            .into(),
            subnets: [("us-east-1a".to_owned(), "subnet-a".to_owned())].into(),
            security_groups: vec!["sg-1".into(), "sg-2".into()],
            instance_profile: Some("cells".into()),
            key_name: Some("ops".into()),
            volume_gib: 10,
            volume_type: VolumeType::Gp3,
            performance: VolumePerformance {
                iops: Some(4000),
                throughput: Some(500),
                initialization_rate: Some(200),
            },
            kms_key: Some("alias/cells".into()),
            public_address: false,
            credits: CpuCredits::Standard,
            image_has_agent: false,
            pause_image: "registry.k8s.io/pause:3.9".into(),
            power_off_after_secs: 1200,
            cluster_networks: vec!["10.96.0.0/12".parse().unwrap(), "fd00::/108".parse().unwrap()],
            cloud_routes: vec!["10.8.0.0/16".parse().unwrap()],
        }
    }

    #[test]
    fn parameters_survive_the_journal() {
        let least = Parameters {
            instance_profile: None,
            key_name: None,
            volume_type: VolumeType::Gp2,
            performance: VolumePerformance::default(),
            kms_key: None,
            credits: CpuCredits::Unlimited,
            public_address: true,
            image_has_agent: true,
            cluster_networks: Vec::new(),
            cloud_routes: Vec::new(),
            ..parameters()
        };
        for parameters in [parameters(), least] {
            assert_eq!(Parameters::from_stored(&parameters.stored()).unwrap(), parameters);
        }
    }

    #[test]
    fn missing_and_invalid_parameters_are_named() {
        for key in [SECURITY_GROUPS, VOLUME_GIB, VOLUME_TYPE, CREDITS, HAS_AGENT, PAUSE_IMAGE] {
            let mut stored = parameters().stored();
            stored.remove(key);
            let error = Parameters::from_stored(&stored).unwrap_err().text();
            assert!(error.contains(key), "{error}");
        }
        let mut stored = parameters().stored();
        stored.insert(VOLUME_GIB.into(), "many".into());
        assert!(Parameters::from_stored(&stored).unwrap_err().text().contains(VOLUME_GIB));
    }
}
