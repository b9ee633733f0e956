//! Block device mappings of images and launches, of which moto keeps only a part.

use std::ops::RangeInclusive;

use super::ApiError;
use crate::{
    query::Query,
    volume::{ImageVolume, Volume},
    xml::Element,
};

/// Ranges of gp3's options.
const GP3_OPTIONS: [(&str, RangeInclusive<u32>); 2] =
    [("Iops", 3000..=80_000), ("Throughput", 125..=2000)];
/// Range of the rate at which a volume is read from its snapshot, in MiB a second.
const INITIALIZATION_RATES: RangeInclusive<u32> = 100..=300;

/// Returns the volumes of a launch: the image's volumes with the launch's changes, and the launch's
/// own volumes. Refuses what EBS refuses.
pub(super) fn of_launch(query: &Query, image: &[ImageVolume]) -> Result<Vec<Volume>, ApiError> {
    let of_image = |own: &ImageVolume| Volume {
        device: own.device.clone(),
        gib: own.gib,
        encrypted: false,
        kms_key: String::new(),
        ends_with_instance: own.ends_with_instance,
    };
    let mut volumes: Vec<Volume> = image.iter().map(of_image).collect();
    for number in 1.. {
        let get = |key: &str| query.get(&format!("BlockDeviceMapping.{number}.{key}"));
        let device = get("DeviceName");
        if device.is_empty() {
            break;
        }
        let snapshot = image.iter().find(|own| own.device == device).map(|own| own.gib);
        let gib = get("Ebs.VolumeSize").parse().ok().or(snapshot).unwrap_or_default();
        if let Some(least) = snapshot.filter(|least| gib < *least) {
            return Err(ApiError::client(
                "InvalidBlockDeviceMapping",
                format!(
                    "Volume of size {gib}GB is smaller than snapshot 'snap-0123456789abcdef0', \
                     expect size >= {least}GB"
                ),
            ));
        }
        let kms_key = get("Ebs.KmsKeyId").to_owned();
        let encrypted = get("Ebs.Encrypted") == "true";
        if !kms_key.is_empty() && !encrypted {
            let message = "The parameter KmsKeyId requires the parameter Encrypted to be set.";
            return Err(ApiError::client("InvalidParameterDependency", message));
        }
        check_performance(&get)?;
        let position = volumes.iter().position(|volume| volume.device == device);
        let default = position.is_none_or(|at| volumes[at].ends_with_instance);
        let volume = Volume {
            device: device.to_owned(),
            gib,
            encrypted,
            kms_key,
            ends_with_instance: get("Ebs.DeleteOnTermination").parse().unwrap_or(default),
        };
        match position {
            Some(at) => volumes[at] = volume,
            None => volumes.push(volume),
        }
    }
    Ok(volumes)
}

/// Refuses options that a volume type lacks, and values out of range.
fn check_performance<'a>(get: &impl Fn(&str) -> &'a str) -> Result<(), ApiError> {
    let is_within = |option: &str, limits: &RangeInclusive<u32>| {
        let given = get(&format!("Ebs.{option}"));
        if given.is_empty() || given.parse().is_ok_and(|value| limits.contains(&value)) {
            return Ok(());
        }
        let (least, most) = (limits.start(), limits.end());
        let message = format!("Volume {option} of {given} is not between {least} and {most}");
        Err(ApiError::client("InvalidParameterValue", message))
    };
    for (option, limits) in &GP3_OPTIONS {
        if get("Ebs.VolumeType") != "gp3" && !get(&format!("Ebs.{option}")).is_empty() {
            let message = format!("The parameter {option} is not supported for these volumes.");
            return Err(ApiError::client("InvalidParameterCombination", message));
        }
        is_within(option, limits)?;
    }
    is_within("VolumeInitializationRate", &INITIALIZATION_RATES)
}

/// Returns the block devices of an image's description.
pub(super) fn described(image: &[ImageVolume]) -> Element {
    let item = |own: &ImageVolume| {
        let ebs = vec![
            Element::text("snapshotId", "snap-0123456789abcdef0"),
            Element::text("volumeSize", own.gib.to_string()),
            Element::text("deleteOnTermination", own.ends_with_instance.to_string()),
            Element::text("volumeType", "gp2"),
            Element::text("encrypted", "false"),
        ];
        let fields = vec![Element::text("deviceName", &own.device), Element::parent("ebs", ebs)];
        Element::parent("item", fields)
    };
    Element::parent("blockDeviceMapping", image.iter().map(item).collect())
}
