//! Pod annotations as a validated request for a cell.

use std::{collections::BTreeMap, time::Duration};

use ring::digest::{Context, SHA256};
use serde_json::Value;

use crate::{
    config::Cidr,
    problems::{Field, Problem, Problems, Report},
};

mod quantity;

pub use quantity::{NotAQuantity, Quantity};

/// `kiyot`: the pod runs in a cell. Routing reads it, with the backends' declarations.
pub const TARGET_RUNTIME: &str = "kubernetes.io/target-runtime";
/// `Spot` or `On-Demand`, in any case.
pub const LAUNCH_TYPE: &str = "pod.elotl.co/launch-type";
/// Boolean. Deprecated: [`LAUNCH_TYPE`].
pub const SPOT_INSTANCE: &str = "pod.elotl.co/spot-instance";
/// Instance type, or a glob of instance types.
pub const INSTANCE_TYPE: &str = "pod.elotl.co/instance-type";
/// Quantity of bytes.
pub const VOLUME_SIZE: &str = "pod.elotl.co/volume-size";
/// Boolean.
pub const PRIVATE_IP_ONLY: &str = "pod.elotl.co/private-ip-only";
/// Security groups, separated by commas.
pub const SECURITY_GROUPS: &str = "pod.elotl.co/security-groups";
/// ARN.
pub const INSTANCE_PROFILE: &str = "pod.elotl.co/instance-profile";
/// Seconds; 0 is never.
pub const HEALTHY_TIMEOUT: &str = "pod.elotl.co/healthcheck-healthy-timeout";
/// CIDRs, separated by white space.
pub const CLOUD_ROUTE: &str = "pod.elotl.co/cloud-route";

/// Keys that a [`CellRequest`] is read from.
pub const KEYS: [&str; 9] = [
    LAUNCH_TYPE,
    SPOT_INSTANCE,
    INSTANCE_TYPE,
    VOLUME_SIZE,
    PRIVATE_IP_ONLY,
    SECURITY_GROUPS,
    INSTANCE_PROFILE,
    HEALTHY_TIMEOUT,
    CLOUD_ROUTE,
];

/// Returns a digest of the annotations that a [`CellRequest`] is read from: equal for pods that
/// request equal cells.
pub fn identity<'a>(annotations: impl IntoIterator<Item = (&'a String, &'a String)>) -> String {
    let ours: BTreeMap<&str, &str> = annotations
        .into_iter()
        .filter(|(key, _)| KEYS.contains(&key.as_str()))
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect();
    let mut hash = Context::new(&SHA256);
    for (key, value) in ours {
        for text in [key, value] {
            hash.update(&(text.len() as u64).to_be_bytes());
            hash.update(text.as_bytes());
        }
    }
    hex::encode(hash.finish())
}

/// Prefix of all [`KEYS`].
const PREFIX: &str = "pod.elotl.co/";

/// Largest root volume, in GiB: EC2's limit.
const MAX_VOLUME_GIB: u64 = 64 * 1024;
/// Security groups of an interface, without the cell's own: EC2's limit.
const MAX_SECURITY_GROUPS: usize = 5;
/// Longest name of an instance type or security group, in characters.
const NAME_CHARS: usize = 255;
/// Longest timeout, in seconds: a week.
const MAX_HEALTHY_TIMEOUT_SECS: u64 = 7 * 24 * 60 * 60;
/// Routes of a cell: a VPC's route table has 50 by default.
const MAX_CLOUD_ROUTES: usize = 50;

/// Market of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LaunchType {
    /// On-demand: at the list price, without interruption.
    #[default]
    OnDemand,
    /// Spot: at the market's price, until EC2 reclaims it.
    Spot,
}

impl std::fmt::Display for LaunchType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::OnDemand => "On-Demand",
            Self::Spot => "Spot",
        })
    }
}

/// Choice of an instance type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstanceType {
    /// This type, whatever the pod's resources are.
    Exact(String),
    /// The cheapest fitting type whose name matches (`*`, `?`).
    Glob(String),
}

/// Time that a cell may be unhealthy before its pod's containers are reported failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthyTimeout {
    /// No limit.
    Never,
    /// This time.
    After(Duration),
}

/// Request of a pod for its cell. The default is that of a pod without annotations.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CellRequest {
    /// Market of the instance.
    pub launch_type: LaunchType,
    /// Instance type. By default chosen by the pod's resources.
    pub instance_type: Option<InstanceType>,
    /// Root volume in GiB, if larger than the default.
    pub volume_size_gib: Option<u64>,
    /// Set for a cell without a public address.
    pub private_ip_only: bool,
    /// Additional security groups.
    pub security_groups: Vec<String>,
    /// ARN of an IAM instance profile.
    pub instance_profile: Option<String>,
    /// Time that the cell may be unhealthy. `None` is the default.
    pub healthy_timeout: Option<HealthyTimeout>,
    /// Networks that the VPC routes to the cell.
    pub cloud_routes: Vec<Cidr>,
}

impl CellRequest {
    /// Parses a pod's annotations, or returns all problems. Annotations with other keys are
    /// ignored.
    pub fn parse<'a>(
        annotations: impl IntoIterator<Item = (&'a String, &'a String)>,
    ) -> Result<Self, Problems> {
        let mut ours: BTreeMap<&str, &str> =
            annotations.into_iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        ours.retain(|key, _| key.starts_with(PREFIX));
        let report = Report::default();
        let field =
            |key: &str| ours.get(key).map(|value| Field::new(key, Value::from(*value), &report));
        let request = Self {
            launch_type: launch_type(field(LAUNCH_TYPE), field(SPOT_INSTANCE), &report),
            instance_type: field(INSTANCE_TYPE).and_then(instance_type),
            volume_size_gib: field(VOLUME_SIZE).and_then(volume_size),
            private_ip_only: field(PRIVATE_IP_ONLY).and_then(boolean).unwrap_or_default(),
            security_groups: field(SECURITY_GROUPS).and_then(security_groups).unwrap_or_default(),
            instance_profile: field(INSTANCE_PROFILE).and_then(instance_profile),
            healthy_timeout: field(HEALTHY_TIMEOUT).and_then(healthy_timeout),
            cloud_routes: field(CLOUD_ROUTE).and_then(cloud_routes).unwrap_or_default(),
        };
        report.finish("the pod's annotations", request)
    }

    /// Returns keys that begin as [`KEYS`] do but are unknown: probably misspelt.
    pub fn unknown_keys<'a>(
        annotations: impl IntoIterator<Item = (&'a String, &'a String)>,
    ) -> Vec<&'a str> {
        let keys = annotations.into_iter().map(|(key, _)| key.as_str());
        let mut unknown: Vec<_> =
            keys.filter(|key| key.starts_with(PREFIX) && !KEYS.contains(key)).collect();
        unknown.sort_unstable();
        unknown
    }
}

fn launch_type(kind: Option<Field<'_>>, spot: Option<Field<'_>>, report: &Report) -> LaunchType {
    let kind = kind.and_then(|field| {
        field.read("Spot or On-Demand", |text| match text.to_ascii_lowercase().as_str() {
            "spot" => Some(LaunchType::Spot),
            "on-demand" => Some(LaunchType::OnDemand),
            _ => None,
        })
    });
    let spot = spot
        .and_then(boolean)
        .map(|spot| if spot { LaunchType::Spot } else { LaunchType::OnDemand });
    if let (Some(kind), Some(spot)) = (kind, spot)
        && kind != spot
    {
        report.add(Problem::new(
            SPOT_INSTANCE,
            format!("says {spot} where {LAUNCH_TYPE} says {kind}; allowed: {LAUNCH_TYPE} alone"),
        ));
    }
    kind.or(spot).unwrap_or_default()
}

/// Parses a boolean as Go's `strconv.ParseBool` does.
fn boolean(field: Field<'_>) -> Option<bool> {
    field.read("\"true\" or \"false\"", |text| match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    })
}

fn is_name(text: &str, more: &[char]) -> bool {
    (1..=NAME_CHARS).contains(&text.len())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || more.contains(&c))
}

fn instance_type(field: Field<'_>) -> Option<InstanceType> {
    field.read("an instance type such as p3.2xlarge, or a glob such as c5*", |text| {
        if is_name(text, &['.', '-', '_']) {
            Some(InstanceType::Exact(text.to_owned()))
        } else {
            is_name(text, &['.', '-', '_', '*', '?']).then(|| InstanceType::Glob(text.to_owned()))
        }
    })
}

fn volume_size(field: Field<'_>) -> Option<u64> {
    let size = |text: &str| {
        text.parse::<Quantity>()
            .ok()
            .map(Quantity::gib)
            .filter(|gib| (1..=MAX_VOLUME_GIB).contains(gib))
    };
    field.read(
        &format!("a quantity of bytes such as 20Gi, more than 0 and at most {MAX_VOLUME_GIB}Gi"),
        size,
    )
}

fn security_groups(field: Field<'_>) -> Option<Vec<String>> {
    let allowed = format!(
        "1 to {MAX_SECURITY_GROUPS} different security groups such as sg-0123456789abcdef0, \
         separated by commas"
    );
    field.read(&allowed, |text| {
        // One more than allowed: each is compared with all others, and a pod's annotations may have
        // hundreds of thousands.
        let groups: Vec<String> = text
            .split(',')
            .take(MAX_SECURITY_GROUPS + 1)
            .map(|group| group.trim().to_owned())
            .collect();
        let fit = groups.len() <= MAX_SECURITY_GROUPS
            && groups.iter().all(|group| is_name(group, &['.', '-', '_']));
        let different =
            groups.iter().enumerate().all(|(index, group)| !groups[..index].contains(group));
        (fit && different).then_some(groups)
    })
}

fn instance_profile(field: Field<'_>) -> Option<String> {
    field.read(
        "the ARN of an instance profile such as arn:aws:iam::123456789012:instance-profile/name",
        |text| {
            let [arn, partition, service, region, account, resource] =
                text.splitn(6, ':').collect::<Vec<_>>().try_into().ok()?;
            let account_fits =
                account.len() == 12 && account.bytes().all(|byte| byte.is_ascii_digit());
            let partition_fits =
                partition == "aws" || (partition.starts_with("aws-") && is_name(partition, &['-']));
            let name = resource.strip_prefix("instance-profile/")?;
            // The characters of IAM names and their paths.
            let name_fits =
                !name.ends_with('/') && is_name(name, &['/', '+', '=', ',', '.', '@', '_', '-']);
            (arn == "arn"
                && partition_fits
                && service == "iam"
                && region.is_empty()
                && account_fits
                && name_fits)
                .then(|| text.to_owned())
        },
    )
}

fn healthy_timeout(field: Field<'_>) -> Option<HealthyTimeout> {
    field.read(&format!("whole seconds from 0 (never) to {MAX_HEALTHY_TIMEOUT_SECS}"), |text| {
        match text.parse().ok()? {
            0 => Some(HealthyTimeout::Never),
            seconds => (seconds <= MAX_HEALTHY_TIMEOUT_SECS)
                .then_some(HealthyTimeout::After(Duration::from_secs(seconds))),
        }
    })
}

fn cloud_routes(field: Field<'_>) -> Option<Vec<Cidr>> {
    let allowed = format!(
        "1 to {MAX_CLOUD_ROUTES} networks such as 172.16.0.0/12, separated by white space, \
         without host bits"
    );
    field.read(&allowed, |text| {
        let routes: Vec<Cidr> =
            text.split_whitespace().map(|route| route.parse().ok()).collect::<Option<_>>()?;
        (1..=MAX_CLOUD_ROUTES).contains(&routes.len()).then_some(routes)
    })
}

#[cfg(test)]
mod tests;
