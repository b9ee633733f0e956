//! `[backends.NAME.ec2]`: cells that are instances of Amazon EC2.

use std::{collections::BTreeMap, time::Duration};

use kiyot_values::{
    cidr::Cidr,
    problems::{Field, Problem, Report, Table},
};

mod image;
mod volume;

pub use image::ImageFilter;
pub use volume::{VolumePerformance, VolumeType};

use super::{
    read,
    tags::{
        AWS_TAG_PREFIX, MAX_CONFIGURED_TAGS, MAX_TAG_KEY_BYTES, MAX_TAG_VALUE_BYTES, MAX_TAGS,
        NAME_TAG, OWN_TAG_PREFIX, check_tag_key, check_tag_value,
    },
};

/// Most subnets: a region has six zones at most.
const MAX_SUBNETS: usize = 32;
/// Security groups of an interface: EC2's default limit.
const SECURITY_GROUPS: usize = 5;
/// Range of the limit of security groups: EC2 raises it to 16 at most.
const SECURITY_GROUPS_RANGE: std::ops::RangeInclusive<usize> = 1..=16;
/// Longest text of a key, in bytes.
const MAX_TEXT_BYTES: usize = 255;
/// Longest URL, in bytes.
const MAX_URL_BYTES: usize = 2048;
/// Most networks of the cluster: services and pods in both address families.
const MAX_CLUSTER_NETWORKS: usize = 8;
/// Most networks of `cloud_routes`.
const MAX_CLOUD_ROUTES: usize = 16;
/// Shortest prefix of a network in `cloud_routes`, so that no pod attracts a default route.
const MIN_CLOUD_ROUTE_PREFIX: u8 = 8;
/// Most globs of labels: as many as an instance can have tags.
const MAX_LABEL_GLOBS: usize = MAX_TAGS;
const LISTING_PERIOD: Duration = Duration::from_secs(30);
/// Range of the period of lists.
const LISTING_PERIODS: std::ops::RangeInclusive<Duration> =
    Duration::from_secs(1)..=Duration::from_secs(10 * 60);
/// Memory overheads, measured on a stock Debian 12
/// (docs/reports/2026-11-30-memory-of-ec2-instances.md): while apt installs containerd, and with a
/// running pod.
const INSTALLING_MEMORY_OVERHEAD: u64 = 256 << 20;
const MEMORY_OVERHEAD: u64 = 192 << 20;
const VOLUME_SIZE: u64 = 10 << 30;
/// Range of a root volume: at least an image of a distribution, and the largest volume of EBS.
const VOLUME_BYTES: std::ops::RangeInclusive<u64> = 1 << 30..=16 << 40;
/// Range of the IOPS of gp3. Its size allows [`IOPS_OF_GIB`] for each GiB.
const VOLUME_IOPS: std::ops::RangeInclusive<i32> = 3000..=80_000;
/// IOPS that each GiB of gp3 allows.
const IOPS_OF_GIB: u64 = 500;
/// Range of the throughput of gp3 in MiB a second. Each MiB needs [`IOPS_OF_MIB`].
const VOLUME_THROUGHPUTS: std::ops::RangeInclusive<i32> = 125..=2000;
/// IOPS that gp3 needs for each MiB a second.
const IOPS_OF_MIB: i32 = 4;
/// Range of the rate in MiB a second at which EBS reads a volume from its snapshot.
const INITIALIZATION_RATES: std::ops::RangeInclusive<i32> = 100..=300;
/// Longest id or alias of a KMS key, in bytes.
const MAX_KEY_BYTES: usize = 256;

/// Cells that are instances of Amazon EC2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ec2 {
    /// Region; empty if not set. The provider `ec2` needs it.
    pub region: String,
    /// Subnets in whose zones cells are launched. The first subnet of a zone is used. Empty for the
    /// node's subnet.
    pub subnets: Vec<String>,
    /// Security groups of every cell.
    pub security_groups: Vec<String>,
    /// Limit of the security groups of a cell, including those of its pod.
    pub max_security_groups: usize,
    /// Image of cells. Of several matches the newest is used.
    pub image: Option<ImageFilter>,
    /// Set if the image has the agent and its service; otherwise cells install them when they boot.
    pub image_has_agent: bool,
    /// Memory in bytes that the image's processes need beside a pod. [`Ec2::memory_overhead()`] has
    /// the default.
    pub memory_overhead: Option<u64>,
    /// Name or ARN of the instance profile of cells whose pod does not name one.
    pub instance_profile: Option<String>,
    /// Name of a key pair.
    pub key_name: Option<String>,
    /// Size of the root volume in bytes.
    pub volume_size: u64,
    /// Type of the root volume.
    pub volume_type: VolumeType,
    /// Performance of the root volume.
    pub volume_performance: VolumePerformance,
    /// Id, alias or ARN of the KMS key that encrypts all volumes; by default the account's.
    pub kms_key_id: Option<String>,
    /// Set if cells get a public address, unless their pod refuses it.
    pub public_address: bool,
    /// Tags of all instances.
    pub tags: BTreeMap<String, String>,
    /// Networks of the cluster that cells reach through the node: services, and pods that the VPC
    /// does not route.
    pub cluster_networks: Vec<Cidr>,
    /// Networks that pods may have routed to their instances; empty for none.
    pub cloud_routes: Vec<Cidr>,
    /// Globs of pod labels that become tags, in the order of the globs.
    pub label_tags: Vec<String>,
    /// Period of the lists that show the state of all instances.
    pub listing_period: Duration,
    /// URL of the endpoint; by default that of the region.
    pub endpoint_url: Option<String>,
    /// Source of on-demand prices.
    pub prices: PriceSource,
    /// URL of the endpoint of the price list; by default that of the nearest region with an
    /// endpoint.
    pub pricing_endpoint_url: Option<String>,
}

/// Source of on-demand prices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PriceSource {
    /// AWS's price list; the built-in prices until it is read, and for types that it lacks.
    #[default]
    Live,
    /// The built-in prices.
    BuiltIn,
}

/// A network that pods may not have routed to their instances.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "pod.elotl.co/cloud-route = {network}: is not allowed; allowed: networks in ec2.cloud_routes \
     ({})",
    shown(allowed)
)]
pub struct RefusedRoute {
    network: Cidr,
    allowed: Vec<Cidr>,
}

/// Too many security groups: those of every cell, and those of the pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "pod.elotl.co/security-groups: makes {wanted} security groups with ec2.security_groups; \
     allowed: {allowed} (ec2.max_security_groups)"
)]
pub struct TooManyGroups {
    wanted: usize,
    allowed: usize,
}

fn shown(allowed: &[Cidr]) -> String {
    match allowed {
        [] => "empty".to_owned(),
        allowed => allowed.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    }
}

impl Default for Ec2 {
    fn default() -> Self {
        Self {
            region: String::new(),
            subnets: Vec::new(),
            security_groups: Vec::new(),
            max_security_groups: SECURITY_GROUPS,
            image: None,
            image_has_agent: false,
            memory_overhead: None,
            instance_profile: None,
            key_name: None,
            volume_size: VOLUME_SIZE,
            volume_type: VolumeType::default(),
            volume_performance: VolumePerformance::default(),
            kms_key_id: None,
            public_address: false,
            tags: BTreeMap::new(),
            cluster_networks: Vec::new(),
            cloud_routes: Vec::new(),
            label_tags: ["app", "run", "app.kubernetes.io/*"].map(str::to_owned).to_vec(),
            listing_period: LISTING_PERIOD,
            endpoint_url: None,
            prices: PriceSource::default(),
            pricing_endpoint_url: None,
        }
    }
}

impl Ec2 {
    pub(super) fn read(mut table: Table<'_>) -> Self {
        let mut ec2 = Self::default();
        table.set("region", &mut ec2.region, |field| {
            field.read("the name of a region, such as \"us-east-1\"", |text| {
                let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
                (is_text(text) && text.bytes().all(is_allowed)).then(|| text.to_owned())
            })
        });
        table.set("subnets", &mut ec2.subnets, |field| {
            ids(field, "subnet-", MAX_SUBNETS, "the id of a subnet such as \"subnet-0123456789\"")
        });
        table.set("max_security_groups", &mut ec2.max_security_groups, |field| {
            field.number(SECURITY_GROUPS_RANGE)
        });
        let max_security_groups = ec2.max_security_groups;
        table.set("security_groups", &mut ec2.security_groups, |field| {
            let allowed = "the id of a security group such as \"sg-0123456789\"";
            ids(field, "sg-", max_security_groups, allowed)
        });
        table.set("image", &mut ec2.image, |field| field.table().and_then(image).map(Some));
        table.set("image_has_agent", &mut ec2.image_has_agent, Field::flag);
        table.set("memory_overhead", &mut ec2.memory_overhead, |field| {
            read::memory_overhead(field).map(Some)
        });
        table.set("instance_profile", &mut ec2.instance_profile, |field| {
            name(field, "the name or the ARN of an instance profile").map(Some)
        });
        table.set("key_name", &mut ec2.key_name, |field| {
            name(field, "the name of a key pair").map(Some)
        });
        table.set("volume_size", &mut ec2.volume_size, |field| {
            read::bytes_in(field, "from 1Gi to 16Ti", VOLUME_BYTES)
        });
        table.set("volume_type", &mut ec2.volume_type, |field| {
            field.choice(&[("gp3", VolumeType::Gp3), ("gp2", VolumeType::Gp2)])
        });
        let performance = &mut ec2.volume_performance;
        table
            .set("volume_iops", &mut performance.iops, |field| field.number(VOLUME_IOPS).map(Some));
        table.set("volume_throughput", &mut performance.throughput, |field| {
            field.number(VOLUME_THROUGHPUTS).map(Some)
        });
        let rate = &mut performance.initialization_rate;
        table.set("volume_initialization_rate", rate, |field| {
            field.number(INITIALIZATION_RATES).map(Some)
        });
        table.set("kms_key_id", &mut ec2.kms_key_id, |field| {
            let allowed = "the id, the alias (\"alias/NAME\") or the ARN of a KMS key";
            field.read(allowed, |text| is_kms_key(text).then(|| text.to_owned())).map(Some)
        });
        table.set("public_address", &mut ec2.public_address, Field::flag);
        table.set("tags", &mut ec2.tags, |field| Some(tags(field)));
        table.set("cluster_networks", &mut ec2.cluster_networks, |field| {
            let allowed = "a network such as 10.96.0.0/12, without host bits";
            let items = bounded(field.items(), MAX_CLUSTER_NETWORKS)?;
            items.into_iter().map(|item| item.read(allowed, |text| text.parse().ok())).collect()
        });
        table.set("cloud_routes", &mut ec2.cloud_routes, |field| {
            let allowed = "an IPv4 network of at least 8 bits such as 10.8.0.0/16, without host \
                           bits";
            let items = bounded(field.items(), MAX_CLOUD_ROUTES)?;
            let read = |text: &str| {
                let network: Cidr = text.parse().ok()?;
                let is_allowed =
                    network.address.is_ipv4() && network.prefix >= MIN_CLOUD_ROUTE_PREFIX;
                is_allowed.then_some(network)
            };
            items.into_iter().map(|item| item.read(allowed, read)).collect()
        });
        table.set("label_tags", &mut ec2.label_tags, label_globs);
        table.set("listing_period", &mut ec2.listing_period, |field| {
            read::duration(field, LISTING_PERIODS)
        });
        table.set("endpoint_url", &mut ec2.endpoint_url, url);
        table.set("prices", &mut ec2.prices, |field| {
            field.choice(&[("live", PriceSource::Live), ("built-in", PriceSource::BuiltIn)])
        });
        table.set("pricing_endpoint_url", &mut ec2.pricing_endpoint_url, url);
        table.finish();
        ec2
    }

    /// Returns the memory in bytes that the image's processes need beside a pod.
    pub fn memory_overhead(&self) -> u64 {
        self.memory_overhead.unwrap_or(match self.image_has_agent {
            true => MEMORY_OVERHEAD,
            false => INSTALLING_MEMORY_OVERHEAD,
        })
    }

    /// Checks the networks that a pod wants to have routed to its instance.
    pub fn check_cloud_routes(&self, wanted: &[Cidr]) -> Result<(), RefusedRoute> {
        let is_allowed = |wanted: &Cidr| self.cloud_routes.iter().any(|it| it.covers(wanted));
        match wanted.iter().find(|wanted| !is_allowed(wanted)) {
            Some(network) => {
                Err(RefusedRoute { network: *network, allowed: self.cloud_routes.clone() })
            }
            None => Ok(()),
        }
    }

    /// Returns the security groups of a cell: those of every cell, then those of its pod.
    pub fn security_groups_with(&self, of_pod: &[String]) -> Result<Vec<String>, TooManyGroups> {
        let mut groups = self.security_groups.clone();
        groups.extend(of_pod.iter().filter(|id| !self.security_groups.contains(id)).cloned());
        let (wanted, allowed) = (groups.len(), self.max_security_groups);
        if wanted > allowed { Err(TooManyGroups { wanted, allowed }) } else { Ok(groups) }
    }

    /// Returns a warning if some cells can't reach the networks of the cluster.
    pub fn warning(&self) -> Option<String> {
        let (networks, subnets) = (self.cluster_networks.len(), self.subnets.len());
        (networks > 0 && subnets > 1).then(|| {
            format!(
                "ec2.subnets: only the node's subnet, one of {subnets}, reaches \
                 cluster_networks; cells in the others don't"
            )
        })
    }

    /// Returns the keys whose values EBS would refuse together with those of other keys, with the
    /// reason.
    fn wrong_performance(&self) -> Vec<(&'static str, i32, String)> {
        let VolumePerformance { iops, throughput, .. } = self.volume_performance;
        let (volume_iops, volume_throughput) = ("volume_iops", "volume_throughput");
        if self.volume_type != VolumeType::Gp3 {
            let given = [(volume_iops, iops), (volume_throughput, throughput)].into_iter();
            let of_other = |(key, value): (_, Option<i32>)| {
                Some((key, value?, "needs volume_type \"gp3\"".to_owned()))
            };
            return given.filter_map(of_other).collect();
        }
        let most = i32::try_from((self.volume_size >> 30) * IOPS_OF_GIB).unwrap_or(i32::MAX);
        let most = most.max(*VOLUME_IOPS.start());
        let too_many = iops.filter(|iops| *iops > most);
        let too_many = too_many.map(|iops| {
            (volume_iops, iops, format!("is more than volume_size allows; allowed: {most}"))
        });
        let most = iops.unwrap_or(*VOLUME_IOPS.start()) / IOPS_OF_MIB;
        let too_fast = throughput.filter(|throughput| *throughput > most);
        let too_fast = too_fast.map(|throughput| {
            (
                volume_throughput,
                throughput,
                format!("is more than volume_iops allows; allowed: {most}"),
            )
        });
        too_many.into_iter().chain(too_fast).collect()
    }

    /// Reports keys that the provider needs. `at` is the table's path. `knows_node` is true if the
    /// node's address is known.
    pub(super) fn check(&self, at: &str, knows_node: bool, report: &Report) {
        let missing = [
            ("region", self.region.is_empty(), "a region, such as \"us-east-1\""),
            (
                "subnets",
                self.subnets.is_empty() && !knows_node,
                "ids of subnets, one or more, where gateway has no IPv4 address of the node",
            ),
            ("security_groups", self.security_groups.is_empty(), "ids of security groups"),
            (
                "image",
                self.image.is_none(),
                "{ id = \"ami-…\" }, or { owner = \"…\", name = \"…\" }",
            ),
        ];
        for (key, _, allowed) in missing.into_iter().filter(|(_, is_missing, _)| *is_missing) {
            report.add(Problem::new(
                format!("{at}.{key}"),
                format!("is missing; the provider \"ec2\" needs {allowed}"),
            ));
        }
        for (key, value, rule) in self.wrong_performance() {
            report.add(Problem::with_value(format!("{at}.{key}"), value.to_string(), rule));
        }
        for (index, network) in self.cloud_routes.iter().enumerate() {
            if let Some(other) = self.cluster_networks.iter().find(|it| it.overlaps(network)) {
                report.add(Problem::with_value(
                    format!("{at}.cloud_routes[{index}]"),
                    format!("\"{network}\""),
                    format!("overlaps {other} of cluster_networks, which lead to the node"),
                ));
            }
        }
    }
}

/// Returns whether a text can name a KMS key.
fn is_kms_key(text: &str) -> bool {
    let Some(arn) = text.strip_prefix("arn:") else {
        return is_key_id(text) || is_key_alias(text);
    };
    // PARTITION:kms:REGION:ACCOUNT:key/ID or PARTITION:kms:REGION:ACCOUNT:alias/NAME
    match *arn.splitn(5, ':').collect::<Vec<_>>() {
        [partition, "kms", region, account, name] => {
            partition.starts_with("aws")
                && !region.is_empty()
                && !account.is_empty()
                && account.bytes().all(|byte| byte.is_ascii_digit())
                && (name.strip_prefix("key/").is_some_and(is_key_id) || is_key_alias(name))
        }
        _ => false,
    }
}

/// Returns whether a text is the id of a KMS key, including a multi-Region key.
fn is_key_id(text: &str) -> bool {
    let is_hex = |part: &str| part.bytes().all(|byte| byte.is_ascii_hexdigit());
    match text.strip_prefix("mrk-") {
        Some(id) => id.len() == 32 && is_hex(id),
        None => text.split('-').map(str::len).eq([8, 4, 4, 4, 12]) && text.split('-').all(is_hex),
    }
}

fn is_key_alias(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"/_-".contains(&byte);
    text.strip_prefix("alias/").is_some_and(|name| {
        (1..=MAX_KEY_BYTES).contains(&name.len()) && name.bytes().all(is_allowed)
    })
}

/// Reads an image: an id, or an owner with a name.
fn image(mut table: Table<'_>) -> Option<ImageFilter> {
    let id = table.take("id");
    let (owner, named) = (table.take("owner"), table.take("name"));
    let filter = match (id, owner, named) {
        (Some(id), None, None) => {
            let allowed = "the id of an image such as \"ami-0123456789\"";
            id.read(allowed, |text| is_id(text, "ami-").then(|| text.to_owned()))
                .map(ImageFilter::Id)
        }
        (None, Some(owner), Some(named)) => {
            let allowed = "the id of an account, \"self\" or \"amazon\"";
            let owner = name(owner, allowed);
            let named = name(named, "the name of an image, with * and ?");
            owner.zip(named).map(|(owner, name)| ImageFilter::Named { owner, name })
        }
        _ => {
            let rule = "is incomplete; allowed: { id = \"ami-…\" }, or both owner and name";
            table.report().add(Problem::new(table.at(), rule));
            None
        }
    };
    table.finish();
    filter
}

/// Reads the URL of an endpoint.
#[expect(clippy::option_option, reason = "the URL of a key that may be absent")]
fn url(field: Field<'_>) -> Option<Option<String>> {
    let allowed = "a URL that begins with \"https://\" or \"http://\"";
    field
        .read(allowed, |text| {
            let rest = text.strip_prefix("https://").or(text.strip_prefix("http://"))?;
            let fits = text.len() <= MAX_URL_BYTES
                && !rest.is_empty()
                && !rest.contains(|c: char| c.is_whitespace() || c.is_control() || c == '@');
            fits.then(|| text.to_owned())
        })
        .map(Some)
}

/// Reads ids of resources. Refuses repeated ids, with which EC2 would refuse launches.
fn ids(field: Field<'_>, prefix: &str, most: usize, allowed: &str) -> Option<Vec<String>> {
    let mut seen: Vec<String> = Vec::new();
    for item in bounded(field.items(), most)? {
        let id = item.read(&format!("{allowed}, each once"), |text| {
            let is_new = !seen.iter().any(|earlier| earlier == text);
            (is_id(text, prefix) && is_new).then(|| text.to_owned())
        })?;
        seen.push(id);
    }
    Some(seen)
}

fn bounded(mut items: Vec<Field<'_>>, most: usize) -> Option<Vec<Field<'_>>> {
    if items.len() > most {
        let given = items.len();
        items.swap_remove(0).refuse(format!("is one of {given}; allowed: {most}"));
        return None;
    }
    Some(items)
}

/// Reads tags. Refuses keys of the daemon's own tags, and keys that EC2 reserves.
fn tags(field: Field<'_>) -> BTreeMap<String, String> {
    let Some(entries) = bounded_entries(field) else { return BTreeMap::new() };
    let mut tags = BTreeMap::new();
    for (key, value) in entries {
        if check_tag_key(&key).is_err() {
            let rule = format!(
                "has a key that is not allowed; allowed: 1 to {MAX_TAG_KEY_BYTES} bytes, other \
                 than {NAME_TAG:?}, that do not begin with {AWS_TAG_PREFIX:?} or {OWN_TAG_PREFIX:?}"
            );
            value.refuse(rule);
            continue;
        }
        let allowed = format!("a text of at most {MAX_TAG_VALUE_BYTES} bytes");
        let text =
            value.read(&allowed, |text| check_tag_value(text).ok().map(|()| text.to_owned()));
        if let Some(text) = text {
            tags.insert(key, text);
        }
    }
    tags
}

fn bounded_entries(field: Field<'_>) -> Option<Vec<(String, Field<'_>)>> {
    let mut entries = field.entries();
    if entries.len() > MAX_CONFIGURED_TAGS {
        let given = entries.len();
        let rule = format!("is one of {given} tags; allowed: {MAX_CONFIGURED_TAGS}");
        entries.swap_remove(0).1.refuse(rule);
        return None;
    }
    Some(entries)
}

/// Reads globs of labels; without any, no label becomes a tag.
fn label_globs(field: Field<'_>) -> Option<Vec<String>> {
    let allowed = "the key of a label such as \"app\", or a glob such as \"app.kubernetes.io/*\"";
    let globs = bounded(field.items(), MAX_LABEL_GLOBS)?.into_iter();
    let read = |item: Field<'_>| {
        item.read(allowed, |text| {
            let may_have = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./*?".contains(&byte);
            let fits = (1..=MAX_TEXT_BYTES).contains(&text.len()) && text.bytes().all(may_have);
            fits.then(|| text.to_owned())
        })
    };
    Some(globs.filter_map(read).collect())
}

fn name(field: Field<'_>, allowed: &str) -> Option<String> {
    field.read(allowed, |text| is_text(text).then(|| text.to_owned()))
}

fn is_text(text: &str) -> bool {
    (1..=MAX_TEXT_BYTES).contains(&text.len())
        && !text.contains(|c: char| c.is_whitespace() || c.is_control())
}

fn is_id(text: &str, prefix: &str) -> bool {
    let digits = text.strip_prefix(prefix).unwrap_or_default();
    (1..=MAX_TEXT_BYTES).contains(&digits.len())
        && digits.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

#[cfg(test)]
mod tests;
