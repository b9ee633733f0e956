//! Provider ec2: cells that are instances of Amazon EC2.
//!
//! A launch is one RunInstances with the launch's token. Its request is a pure function of the
//! record (`launch`, `parameters`), so a replay is the same request. All other state of EC2 is read
//! by lists, for all cells at once.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use kiyot_config::{self as config, ImageFilter};
use kiyot_engine::{
    Wanted,
    id::CellId,
    placement::{Catalogue, CatalogueFile, LaunchRefusal, Market, Offering, root_volume},
    provider::{
        Attached, Attachment, Capabilities, ErrorClass, Held, Instance, InstanceId, InstanceNames,
        InstanceState, LaunchSpec, Owner, Provider, ProviderError, owner,
    },
    request::{Architecture, CellRequest},
};
use kiyot_local::{Forwarding, PauseImage, pod_cgroup};
use tokio::time::{Instant, timeout};

use crate::{
    CallError, CpuCredits, Ec2Api, Failure, InstanceDescription, InstanceFilter, InstanceStateName,
    RunInstances, StateReason, Subnet, TypeInZone, cached::Cached,
};

mod absence;
mod added_types;
mod cloud_routes;
mod error_codes;
#[cfg(test)]
mod fake_api;
mod launch;
pub mod live_check;
mod market_data;
mod metadata_fence;
mod node_subnet;
mod on_demand;
mod paced_api;
mod pacing;
mod parameters;
pub mod price_list;
mod quotas;
mod resources;
mod spot;
mod tagging;
mod terminations;
#[cfg(test)]
mod tests;
mod user_data;

use added_types::AddedType;
use cloud_routes::CloudRoutes;
use error_codes::{
    Refused, SERVICE_LINKED_ROLE, classify, depends_on_volume, lacks_capacity, lacks_image,
    usual_cause,
};
use market_data::Types;
use metadata_fence::MetadataFence;
use node_subnet::UnknownSubnet;
use on_demand::OnDemand;
pub use paced_api::{Counter, PacedApi};
use parameters::Parameters;
use resources::{Resources, ResourcesError, UnknownImage, by_zone, newest};
use spot::Spot;
use tagging::{Tagged, Tagging};
use terminations::Terminations;

/// The capabilities of EC2 cells. A privileged pod has power over the agent. EC2 may not know an
/// instance for minutes after its launch ("Eventual consistency in the Amazon EC2 API").
pub const CAPABILITIES: Capabilities = Capabilities {
    provider: "ec2",
    own_kernel: true,
    own_users: true,
    own_devices: true,
    remote: true,
    sees_node_files: false,
    separate_link: false,
    can_be_paused: false,
    pods_control_agent: true,
    ends_with_node: false,
    ends_confirmed_within: Duration::from_secs(600),
    not_found_believed_after: Duration::from_secs(600),
    listing_period: Duration::from_secs(30),
    has_tags: true,
    parameters_without_effect_on_boots: parameters::WITHOUT_EFFECT_ON_BOOTS,
};

/// The addresses of the metadata service of an instance, IPv4 and IPv6.
const METADATA_ADDRESSES: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
];

/// The time after which instance types and zones are read again.
const ZONES_MAX_AGE: Duration = Duration::from_secs(12 * 3600);
/// The time after which subnets and the newest image are read again.
const NETWORK_MAX_AGE: Duration = Duration::from_secs(3600);
/// The pause after a failed reading of types, zones, subnets and images.
const RETRY_PAUSE: Duration = Duration::from_secs(60);
/// The pause after a denied list that the policy need not permit, for example the price list.
const DENIED_PAUSE: Duration = Duration::from_secs(3600);
/// Time limit of a list that every launch needs, with all its pages.
const LIST_TIMEOUT: Duration = Duration::from_secs(20);
/// The code of a launch whose token belongs to other parameters.
const PARAMETER_MISMATCH: &str = "IdempotentParameterMismatch";

/// The parts of the last description of an instance that are used again.
#[derive(Debug, Clone, Default)]
struct Seen {
    instance_type: String,
    /// The private address.
    address: Option<IpAddr>,
    /// The public address, and the names of both.
    names: InstanceNames,
    tagged: Tagged,
    /// The cell for which the instance was launched, by the last tag that was seen.
    cell: Option<CellId>,
    /// `metadata.uid` of the pod for which the instance was launched; empty in a warm pool.
    pod_uid: String,
    /// True while the instance is known as pending or running.
    is_alive: bool,
    /// True once its termination was requested.
    is_ending: bool,
    /// True once the removal of its tags was logged.
    is_untagged: bool,
    /// The time at which EC2 last showed it.
    shown: Option<Instant>,
}

impl Seen {
    /// Returns whether the instance belongs to the pod, now or after its boot.
    fn is_live_of(&self, pod_uid: &str) -> bool {
        self.is_alive && !self.is_ending && !pod_uid.is_empty() && self.pod_uid == pod_uid
    }
}

/// The provider of cells that are instances of EC2.
#[derive(Debug)]
pub struct Ec2 {
    api: Arc<dyn Ec2Api>,
    config: config::Ec2,
    /// The architecture of the agent program that the gateway serves, if it is known.
    agent_architecture: Option<Architecture>,
    /// The node's address, by which its subnet is found.
    node_address: Option<Ipv4Addr>,
    owner: Owner,
    pause_image: Arc<PauseImage>,
    power_off_after: Duration,
    /// Sizes and built-in prices.
    types: Catalogue,
    terminations: Terminations,
    tagging: Tagging,
    resources: Cached<Resources, ResourcesError>,
    in_zones: Cached<Vec<TypeInZone>, CallError>,
    added_types: Cached<Vec<AddedType>, CallError>,
    spot: Spot,
    on_demand: OnDemand,
    forwarding: Forwarding,
    routes: CloudRoutes,
    metadata: MetadataFence,
    /// True once the absence of the account's role for spot instances was logged.
    lacks_spot_role: AtomicBool,
    /// The instances that were launched or listed.
    seen: Mutex<BTreeMap<String, Seen>>,
}

impl Ec2 {
    /// Returns the configured provider with a pause image for its cells. Makes no call.
    pub fn new(
        config: &config::MilpaBackend,
        owner: Owner,
        api: Arc<dyn Ec2Api>,
        pause_image: Arc<PauseImage>,
    ) -> Self {
        Self {
            terminations: Terminations::new(Arc::clone(&api)),
            tagging: Tagging::new(Arc::clone(&api)),
            routes: CloudRoutes::new(
                Arc::clone(&api),
                !config.ec2.cloud_routes.is_empty(),
                config.gateway.advertised().map(|gateway| gateway.ip()),
            ),
            on_demand: OnDemand::new(Arc::clone(&api), config.ec2.prices, &config.ec2.region),
            metadata: MetadataFence::new(Arc::clone(&api)),
            spot: Spot::new(Arc::clone(&api)),
            api,
            config: config.ec2.clone(),
            agent_architecture: None,
            node_address: config.gateway.node_address(),
            owner,
            pause_image,
            power_off_after: config.token_ttl,
            types: CatalogueFile::built_in_for(&config.ec2.region),
            resources: Cached::new("subnets and images", NETWORK_MAX_AGE, RETRY_PAUSE),
            in_zones: Cached::new("instance types by zone", ZONES_MAX_AGE, RETRY_PAUSE),
            added_types: Cached::new("added instance types", ZONES_MAX_AGE, RETRY_PAUSE)
                .with_longer_pause(pause_of_denied),
            forwarding: Forwarding::new(!config.ec2.cluster_networks.is_empty()),
            lacks_spot_role: AtomicBool::new(false),
            seen: Mutex::default(),
        }
    }

    /// Restricts instances that download the agent to its architecture: other instances can't run
    /// it.
    pub fn with_agent_for(self, architecture: Option<Architecture>) -> Self {
        Self { agent_architecture: architecture, ..self }
    }

    async fn resources(&self) -> Result<Arc<Resources>, ProviderError> {
        Ok(self.resources.get(|| self.read_resources()).await?)
    }

    /// Returns the ids of the configured subnets, or otherwise of the node's subnet.
    async fn subnet_ids(&self) -> Result<Vec<String>, ResourcesError> {
        if !self.config.subnets.is_empty() {
            return Ok(self.config.subnets.clone());
        }
        let address = self.node_address.ok_or(UnknownSubnet::NoAddress)?;
        let filter = InstanceFilter::PrivateAddress(address);
        let instances = self.api.describe_instances(&filter);
        let listed = within(LIST_TIMEOUT, "DescribeInstances", instances).await?;
        Ok(vec![node_subnet::find(address, listed)?.subnet])
    }

    /// Returns the ids of the subnets, and the subnets that EC2 shows.
    async fn described_subnets(&self) -> Result<(Vec<String>, Vec<Subnet>), ResourcesError> {
        let ids = self.subnet_ids().await?;
        let described = within(LIST_TIMEOUT, "DescribeSubnets", self.api.subnets(&ids)).await?;
        Ok((ids, described))
    }

    async fn read_resources(&self) -> Result<Resources, ResourcesError> {
        let images = async {
            let image = self.image();
            let images = within(LIST_TIMEOUT, "DescribeImages", self.api.images(&image)).await?;
            Ok::<_, ResourcesError>(images)
        };
        let ((ids, described), images) = tokio::try_join!(self.described_subnets(), images)?;
        let vpc = described.first().map(|subnet| subnet.vpc.clone()).unwrap_or_default();
        let subnets = by_zone(&ids, &described);
        let mut images = newest(images);
        if let Some(downloaded) = self.downloaded_agent() {
            images.retain(|architecture, _| *architecture == downloaded);
        }
        if images.is_empty() {
            // The error is not cached, because the image may be published later.
            return Err(UnknownImage(self.downloaded_agent()).into());
        }
        Ok(Resources { vpc, subnets, images })
    }

    /// Returns the architecture of the agent that instances download; `None` if they download no
    /// agent or it is unknown.
    fn downloaded_agent(&self) -> Option<Architecture> {
        self.agent_architecture.filter(|_| !self.config.image_has_agent)
    }

    /// Returns the configured image.
    fn image(&self) -> ImageFilter {
        self.config.image.clone().unwrap_or(ImageFilter::Id(String::new()))
    }

    /// Returns the filter of this node's instances.
    fn own_instances(&self) -> InstanceFilter {
        self.instances_of(&self.owner.node)
    }

    /// Returns the filter of a node's instances.
    fn instances_of(&self, node: &str) -> InstanceFilter {
        let tags = [
            (owner::CLUSTER.to_owned(), self.owner.cluster.clone()),
            (owner::NODE.to_owned(), node.to_owned()),
        ];
        InstanceFilter::Tags(tags.into())
    }

    /// Returns the parameters of a launch for a pod.
    fn parameters_with(
        &self,
        resources: &Resources,
        Wanted { request, needs, .. }: &Wanted,
    ) -> Result<Parameters, ProviderError> {
        let security_groups = self.config.security_groups_with(&request.security_groups);
        let security_groups = security_groups.map_err(|refused| {
            ProviderError::without_cause(ErrorClass::Invalid, refused.to_string())
        })?;
        let volume_gib = self.volume_gib();
        let of_image = resources.images.values().filter_map(|image| image.root_gib).max();
        let of_image = u64::try_from(of_image.unwrap_or_default()).unwrap_or_default();
        let for_storage = root_volume::size(needs.storage_bytes, of_image).map_err(|refused| {
            ProviderError::without_cause(ErrorClass::Invalid, refused.to_string())
        })?;
        let of_pod = request.volume_size_gib.max(for_storage);
        let volume_gib = volume_gib.max(of_pod.unwrap_or_default());
        let volume_gib = i32::try_from(volume_gib).map_err(|_| {
            let what = format!("volume of {volume_gib} GiB; allowed: at most {} GiB", i32::MAX);
            ProviderError::without_cause(ErrorClass::Invalid, what)
        })?;
        let profile = request.instance_profile.clone();
        Ok(Parameters {
            images: resources.images.clone(),
            subnets: resources.subnets.clone(),
            security_groups,
            instance_profile: profile.or_else(|| self.config.instance_profile.clone()),
            key_name: self.config.key_name.clone(),
            volume_gib,
            volume_type: self.config.volume_type,
            performance: self.config.volume_performance,
            kms_key: self.config.kms_key_id.clone(),
            public_address: self.config.public_address && !request.private_ip_only,
            credits: match request.sustained_cpu {
                true => CpuCredits::Unlimited,
                false => CpuCredits::Standard,
            },
            image_has_agent: self.config.image_has_agent,
            pause_image: self.pause_image.current(),
            power_off_after_secs: self.power_off_after.as_secs(),
            cluster_networks: self.config.cluster_networks.clone(),
            cloud_routes: request.cloud_routes.clone(),
        })
    }

    /// Returns the request of a launch of the first candidate.
    async fn request(&self, spec: &LaunchSpec, token: &str) -> Result<RunInstances, ProviderError> {
        let name = spec.offerings().next().map(|offering| offering.instance_type.clone());
        let own = match name {
            Some(name) => self.instance_type(&name).await?,
            None => None,
        };
        let is_burstable = own.as_ref().is_some_and(|own| own.baseline_milli_cpus.is_some());
        let architectures = own.map(|own| own.architectures).unwrap_or_default();
        launch::request(spec, token, &architectures, is_burstable)
    }

    /// Returns the instance of an earlier launch with a token.
    async fn launched_with(
        &self,
        spec: &LaunchSpec,
        token: &str,
    ) -> Result<Option<Instance>, CallError> {
        let filter = InstanceFilter::ClientToken(token.to_owned());
        let found = self.api.describe_instances(&filter).await?;
        Ok(found.into_iter().next().and_then(|it| self.instance(it, Some(&spec.cell))))
    }

    /// Returns an instance of this owner. Without the tag of a cell, the instance belongs to the
    /// cell of its launch or of an earlier description, or otherwise to `asked`; `None` if neither
    /// is known. Removing the tags of an instance does not end it.
    fn instance(&self, described: InstanceDescription, asked: Option<&CellId>) -> Option<Instance> {
        let tag = |key: &str| described.tags.get(key).filter(|value| !value.is_empty());
        let tagged = Tagged::of(&described);
        let state = state(described.state);
        let tagged_cell = tag(owner::CELL).and_then(|cell| CellId::parse(cell).ok());
        let ended = described.reason.as_ref().filter(|_| !state.is_alive());
        let end_reason = ended.map(end_reason);
        let lacks_capacity = ended.is_some_and(|reason| lacks_capacity(&reason.code));
        let mut seen = self.seen();
        let known = seen.get(&described.id).and_then(|before| before.cell.clone());
        let cell = tagged_cell.clone().or(known).or_else(|| asked.cloned())?;
        let before = seen.entry(described.id.clone()).or_default();
        let is_first = before.shown.is_none();
        before.address = described.private_address.or(before.address);
        before.names = InstanceNames {
            private_name: described.private_name,
            public_address: described.public_address,
            public_name: described.public_name,
        };
        before.instance_type.clone_from(&described.instance_type);
        before.tagged = tagged;
        before.cell = Some(cell.clone());
        before.is_alive = state.is_alive();
        before.shown = Some(Instant::now());
        if let Some(pod_uid) = described.tags.get(owner::POD_UID) {
            before.pod_uid.clone_from(pod_uid);
        }
        // EC2 itself removes the tags of a terminated instance after a while.
        let lacks_tags = tagged_cell.is_none() && state.is_alive() && !is_first;
        if lacks_tags && !std::mem::replace(&mut before.is_untagged, true) {
            let instance = &described.id;
            tracing::warn!(instance, %cell, "tag {} of the instance was removed", owner::CELL);
        }
        drop(seen);
        let market = if described.is_spot { Market::Spot } else { Market::OnDemand };
        let addresses = [described.private_address, described.public_address];
        Some(Instance {
            token: described.client_token,
            fingerprint: tag(owner::FINGERPRINT).cloned(),
            // Only providers whose ends are awaited need the field.
            pod_uid: None,
            addresses: addresses.into_iter().flatten().collect(),
            state,
            end_reason,
            lacks_capacity,
            since: described.launched,
            offering: Offering {
                instance_type: described.instance_type,
                zone: described.zone,
                market,
            },
            id: InstanceId(described.id),
            cell,
        })
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the error of a launch, with the offerings that it refuses.
    async fn launch_error(&self, spec: &LaunchSpec, error: CallError) -> ProviderError {
        let (class, refused) = classify(&error);
        // The policy permits each role, group, type and image separately.
        let is_of_request = error.is_denied()
            || error.code().is_some_and(depends_on_volume) && self.has_larger_volume(spec)
            || refused == Refused::Type && !self.has_default_parameters(spec).await;
        let Some(tried) = spec.offerings().next() else {
            return ProviderError::new(class, format!("launch {}", spec.cell), error);
        };
        let asked = |is_refused: &dyn Fn(&Offering) -> bool| {
            spec.offerings().filter(|offering| is_refused(offering)).cloned().collect()
        };
        let of_zone = |offering: &Offering| offering.zone == tried.zone;
        let refusal = match refused {
            Refused::None => None,
            Refused::Offering => Some(LaunchRefusal::Offerings(vec![tried.clone()])),
            Refused::Type => Some(LaunchRefusal::Type {
                code: error.code().unwrap_or_default().into(),
                offerings: asked(&|offering| offering.instance_type == tried.instance_type),
            }),
            Refused::Zone if is_of_request => Some(LaunchRefusal::Offerings(asked(&of_zone))),
            Refused::Zone => Some(LaunchRefusal::Zone(tried.zone.clone())),
            Refused::Market => Some(LaunchRefusal::Market(tried.market)),
            Refused::Quota => {
                let quota = Arc::new(self.refused_quota(tried).await);
                let offerings = asked(&|offering| quota.refuses(offering));
                Some(LaunchRefusal::Quota { quota, offerings })
            }
            Refused::All if is_of_request => Some(LaunchRefusal::Offerings(asked(&|_| true))),
            Refused::All => Some(LaunchRefusal::All(asked(&|_| true))),
        };
        let error = ProviderError::new(class, format!("launch {tried}"), error);
        ProviderError { refusal, is_of_request, ..error }
    }

    /// Returns whether a launch has the parameters of a pod without annotations.
    async fn has_default_parameters(&self, spec: &LaunchSpec) -> bool {
        let Ok(resources) = self.resources().await else { return false };
        let own = self.parameters_with(&resources, &Wanted::default());
        own.is_ok_and(|own| own.stored() == spec.parameters)
    }

    /// Returns whether a pod requests a larger volume than the configured size.
    fn has_larger_volume(&self, spec: &LaunchSpec) -> bool {
        let own = Parameters::from_stored(&spec.parameters).map(|it| it.volume_gib);
        own.is_ok_and(|own| u64::try_from(own).unwrap_or_default() > self.volume_gib())
    }

    /// Returns the configured volume size of cells in GiB.
    fn volume_gib(&self) -> u64 {
        self.config.volume_size.div_ceil(root_volume::GIB)
    }
}

#[async_trait]
impl Provider for Ec2 {
    fn capabilities(&self) -> Capabilities {
        Capabilities { listing_period: self.config.listing_period, ..CAPABILITIES }
    }

    fn place(&self) -> Option<String> {
        let config::Ec2 { region, endpoint_url, .. } = &self.config;
        Some(match endpoint_url {
            Some(endpoint) => {
                format!("region {region}, endpoint {}", endpoint.trim_end_matches('/'))
            }
            None => format!("region {region}"),
        })
    }

    async fn catalogue(&self) -> Result<Catalogue, ProviderError> {
        let failed = |error: CallError| {
            ProviderError::new(classify(&error).0, "read the instance types of the region", error)
        };
        let in_zones = self.in_zones.get(|| async {
            let types = self.api.types_in_zones();
            within(LIST_TIMEOUT, "DescribeInstanceTypeOfferings", types).await
        });
        let (resources, in_zones) = tokio::join!(self.resources(), in_zones);
        let (resources, in_zones) = (resources?, in_zones.map_err(failed)?);
        let on_demand = self.on_demand.current();
        let zones: BTreeSet<String> = resources.subnets.keys().cloned().collect();
        let (added, spot) =
            tokio::join!(self.added_types(&in_zones, &zones), self.spot.current(&zones));
        let spot = spot.iter().flat_map(|prices| prices.iter());
        let images = resources.images.keys().copied().collect();
        let on_demand = on_demand.as_deref();
        let region = self.config.region.as_str();
        let types = Types { region, built_in: &self.types, added: &added };
        Ok(market_data::catalogue(types, on_demand, &in_zones, spot, &zones, images))
    }

    async fn parameters(&self, wanted: &Wanted) -> Result<BTreeMap<String, String>, ProviderError> {
        let resources = self.resources().await?;
        let Wanted { request: CellRequest { cloud_routes, .. }, key, .. } = wanted;
        self.config.check_cloud_routes(cloud_routes).map_err(|refused| {
            ProviderError::without_cause(ErrorClass::Invalid, refused.to_string())
        })?;
        if !cloud_routes.is_empty() {
            let subnets = resources.subnets.values();
            let is_own =
                |id: &str| self.seen().get(id).is_some_and(|seen| seen.is_live_of(&key.pod_uid));
            self.routes.check(&resources.vpc, subnets, cloud_routes, is_own).await?;
        }
        Ok(self.parameters_with(&resources, wanted)?.stored())
    }

    async fn launch(&self, spec: &LaunchSpec, token: &str) -> Result<Instance, ProviderError> {
        let request = self.request(spec, token).await?;
        let launched = match self.api.run_instances(&request).await {
            Ok(launched) => launched,
            // A daemon of another version or configuration has made a launch with this token.
            Err(error) if error.code() == Some(PARAMETER_MISMATCH) => {
                let found = self.launched_with(spec, token).await;
                let unknown = |cause: CallError| {
                    let doing = format!("find the instance of {}", spec.cell);
                    ProviderError::new(ErrorClass::Unanswered, doing, cause)
                };
                return found.map_err(unknown)?.ok_or_else(|| unknown(error));
            }
            Err(error) => {
                if error.code().is_some_and(lacks_image) {
                    // Another image may have this name now.
                    self.resources.expire();
                }
                let lacks_role = error.code() == Some(SERVICE_LINKED_ROLE);
                if lacks_role && !self.lacks_spot_role.swap(true, Ordering::Relaxed) {
                    let error = &error as &dyn std::error::Error;
                    tracing::error!(error, "the account has no role for spot (docs/ec2.md)");
                }
                return Err(self.launch_error(spec, error).await);
            }
        };
        let id = launched.id.clone();
        self.instance(launched, Some(&spec.cell)).ok_or_else(|| {
            let what = format!("launch {}: instance {id} has no tag of a cell", spec.cell);
            ProviderError::without_cause(ErrorClass::Unanswered, what)
        })
    }

    async fn attach(
        &self,
        instance: &InstanceId,
        to: &Attachment,
    ) -> Result<Attached, ProviderError> {
        let seen = self.seen().get(&instance.0).cloned();
        let address = match seen.as_ref().and_then(|seen| seen.address) {
            Some(address) => Some(address),
            None => self.describe(instance).await?.addresses.first().copied(),
        };
        let address = address.ok_or_else(|| {
            let what = format!("instance {instance} has no private address");
            ProviderError::without_cause(ErrorClass::Transient, what)
        })?;
        let ways = async {
            self.forwarding.open(instance, address, &to.ports).await?;
            self.routes.open(instance, &to.cloud_routes).await
        };
        let metadata = async {
            match to.has_instance_profile || self.config.instance_profile.is_some() {
                true => Ok(()),
                false => self.metadata.close(instance).await,
            }
        };
        // Both calls end before a failure is reported, because the instance is detached after a
        // failure.
        let (ways, metadata) = tokio::join!(ways, metadata);
        ways.and(metadata)?;
        if !to.tags.is_empty() {
            self.tagging.begin(instance, seen.map(|seen| seen.tagged), to.tags.clone());
        }
        Ok(Attached::already_made(vec![address]))
    }

    fn names(&self, instance: &InstanceId) -> InstanceNames {
        self.seen().get(&instance.0).map(|seen| seen.names.clone()).unwrap_or_default()
    }

    async fn detach(&self, instance: &InstanceId) -> Result<(), ProviderError> {
        // A failure of one part does not stop the other.
        let routes = self.routes.close(std::slice::from_ref(instance)).await;
        let ports = self.forwarding.close(instance).await;
        routes.and(ports)
    }

    fn adopt(&self, held: Vec<Held>) {
        self.forwarding.adopt(held);
    }

    async fn restore(&self) -> Result<(), ProviderError> {
        self.forwarding.restore().await
    }

    async fn restore_cgroups(&self, parents: &[String]) -> Result<(), ProviderError> {
        pod_cgroup::restore(parents).await
    }

    async fn list_owned(&self) -> Result<Vec<Instance>, ProviderError> {
        let described =
            self.api.describe_instances(&self.own_instances()).await.map_err(|error| {
                ProviderError::new(classify(&error).0, "list the instances of this node", error)
            })?;
        let listed: Vec<Instance> =
            described.into_iter().filter_map(|described| self.instance(described, None)).collect();
        let ids: BTreeSet<&str> = listed.iter().map(|instance| instance.id.0.as_str()).collect();
        // Neither a list nor a description may show a new instance yet.
        let is_young = |seen: &Seen| {
            let believed_after = CAPABILITIES.not_found_believed_after;
            seen.shown.is_some_and(|shown| shown.elapsed() < believed_after)
        };
        self.seen().retain(|id, seen| ids.contains(id.as_str()) || is_young(seen));
        Ok(listed)
    }

    /// Returns region, endpoint, VPC and cluster: a VPC belongs to one account.
    fn shared_place(&self) -> Option<String> {
        let (place, cluster) = (self.place()?, &self.owner.cluster);
        let vpc = &self.resources.peek()?.vpc;
        let is_known = !vpc.is_empty() && !cluster.is_empty();
        is_known.then(|| format!("{place}, {vpc}, cluster {cluster}"))
    }

    async fn has_instances_of(&self, node: &str) -> Result<bool, ProviderError> {
        let filter = self.instances_of(node);
        let listed = self.api.describe_instances(&filter);
        let listed = within(LIST_TIMEOUT, "DescribeInstances", listed).await.map_err(|error| {
            let doing = format!("list the instances of node {node}");
            ProviderError::new(classify(&error).0, doing, error)
        })?;
        Ok(listed.iter().any(|instance| instance.state != InstanceStateName::Terminated))
    }

    async fn describe(&self, instance: &InstanceId) -> Result<Instance, ProviderError> {
        let filter = InstanceFilter::Ids(vec![instance.0.clone()]);
        let described = match self.api.describe_instances(&filter).await {
            Ok(described) => described,
            Err(error) => {
                let (class, doing) = (classify(&error).0, format!("describe instance {instance}"));
                return Err(self.as_evidence(ProviderError::new(class, doing, error)).await);
            }
        };
        let found = described.into_iter().find(|described| described.id == instance.0);
        match found.and_then(|found| self.instance(found, Some(&unknown_cell()))) {
            Some(found) => Ok(found),
            None => {
                let what = format!("instance {instance} does not exist");
                let absent = ProviderError::without_cause(ErrorClass::NotFound, what);
                Err(self.as_evidence(absent).await)
            }
        }
    }

    async fn terminate(&self, instances: &[InstanceId]) -> kiyot_engine::provider::Terminations {
        for instance in instances {
            if let Some(seen) = self.seen().get_mut(&instance.0) {
                seen.is_ending = true;
            }
        }
        // The routes of a cell are already removed; an instance without a cell may have routes.
        if let Err(error) = self.routes.close(instances).await {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(?instances, error, "routes of ended instances may be left");
        }
        let mut outcomes = self.terminations.terminate(instances).await;
        for outcome in outcomes.values_mut() {
            if let Err(error) = outcome {
                *error = self.as_evidence(error.clone()).await;
            }
        }
        outcomes
    }

    async fn console(&self, instance: &InstanceId) -> Result<String, ProviderError> {
        // Types that the file lacks are newer, and belong to the Nitro System.
        let is_nitro =
            |name: &str| self.types.named(name).is_none_or(|entry| entry.instance_type.is_nitro);
        let latest = self.seen().get(&instance.0).is_some_and(|it| is_nitro(&it.instance_type));
        self.api.console_output(&instance.0, latest).await.map_err(|error| {
            let doing = format!("read the console of instance {instance}");
            ProviderError::new(classify(&error).0, doing, error)
        })
    }

    async fn check(&self) -> Result<(), ProviderError> {
        // The daemon calls this function at its start, when prices should begin to be read.
        let _ = self.on_demand.current();
        let resources = self.resources().await?;
        if !resources.subnets.is_empty() {
            self.spot.begin(resources.subnets.keys());
            return Ok(());
        }
        let what = "ec2.subnets: EC2 knows no subnet of these ids";
        Err(ProviderError::without_cause(ErrorClass::Invalid, what))
    }
}

/// Returns the pause after a denied list that the policy need not permit.
fn pause_of_denied(error: &CallError) -> Option<Duration> {
    error.is_denied().then_some(DENIED_PAUSE)
}

/// Limits the time of a list, with all its pages.
async fn within<T>(
    limit: Duration,
    operation: &'static str,
    list: impl Future<Output = Result<T, CallError>>,
) -> Result<T, CallError> {
    let too_slow = |_| Err(CallError { operation, failure: Failure::TooSlow(limit) });
    timeout(limit, list).await.unwrap_or_else(too_slow)
}

/// Returns the placeholder cell of an instance of which only the id is known. No real cell has this
/// id.
fn unknown_cell() -> CellId {
    CellId::from_random(&[0; CellId::RANDOM_BYTES])
}

/// Returns EC2's reason for the end of an instance, with its usual cause.
fn end_reason(reason: &StateReason) -> String {
    match usual_cause(&reason.code) {
        Some(cause) => format!("{reason}; {cause}"),
        None => reason.to_string(),
    }
}

/// Returns the state of an instance. A stopped instance never runs its pod again.
fn state(name: InstanceStateName) -> InstanceState {
    match name {
        InstanceStateName::Pending => InstanceState::Pending,
        InstanceStateName::Running => InstanceState::Running,
        InstanceStateName::ShuttingDown
        | InstanceStateName::Stopping
        | InstanceStateName::Stopped => InstanceState::Stopped,
        InstanceStateName::Terminated => InstanceState::Terminated,
    }
}
