//! Live check of a configuration: calls without effect prove its ids and permissions.
//!
//! Lists are read as the daemon reads them. Calls that change something are dry runs; launches have
//! the parameters that the daemon would send. A call that needs an instance is tried on an instance
//! of the node, because a policy may permit only instances with the cluster's tag.

use std::{collections::BTreeMap, sync::Arc};

use kiyot_config::{ImageFilter, MilpaBackend, PriceSource, ProviderKind};
use kiyot_engine::{
    OrderKey, Wanted,
    placement::{Candidate, Catalogue, Needs, Requested, Rules, rank},
    provider::{InstanceId, LaunchSpec, Owner, ProviderError, TagRules, owner},
    request::LaunchType,
};
use kiyot_link::bootstrap::{AgentPin, Bootstrap, GatewayAddress};
use kiyot_local::PauseImage;
use kiyot_proto::text::counted;

use crate::{
    DryRun, Ec2Api, InstanceDescription, InstanceFilter, InstanceStateName, RunInstances,
    SpotPrice, Subnet, TypeInZone,
    provider::{
        Architecture, CellId, CellRequest, Ec2, Market, Resources, added_types, by_zone,
        market_data::{self, Types},
        newest,
        node_subnet::{self, NodeSubnet},
        parameters::BootImage,
        price_list::Listed,
        terminations::NOT_FOUND,
    },
};

mod caller;
mod network;
mod node;
mod policy;
mod report;
mod routes;

use caller::Caller;
use policy::Values;
pub use report::LiveReport;
use report::Outcome;
use routes::NODE;

/// An instance id that EC2 never assigns.
const NO_INSTANCE: &str = "i-00000000000000000";
/// An instance type that every region has.
const ANY_TYPE: &str = "t3.nano";
/// The root device of an image that can't be described; a dry run does not use it.
const ANY_ROOT_DEVICE: &str = "/dev/xvda";
/// The bytes of the certificate in the user data of a real launch.
const CA_PEM_BYTES: usize = 700;

/// Checks a configuration over the API, without effect.
pub async fn check(config: &MilpaBackend, owner: Owner, api: Arc<dyn Ec2Api>) -> LiveReport {
    let pause_image = PauseImage::new(config.pause_image.clone());
    let ec2 = Ec2::new(config, owner, Arc::clone(&api), pause_image);
    let mut check = LiveCheck {
        caller: Caller::new(LiveReport::new(Values::of(&config.ec2, &ec2.owner.cluster))),
        ec2,
        config,
        api,
        vpc: None,
        node: None,
    };
    check.run().await;
    check.caller.report
}

/// Running live check.
#[derive(Debug)]
struct LiveCheck<'a> {
    caller: Caller,
    ec2: Ec2,
    config: &'a MilpaBackend,
    api: Arc<dyn Ec2Api>,
    /// The VPC of the subnets, after they were read.
    vpc: Option<String>,
    /// The node's instance, after it was found for its subnet.
    node: Option<NodeSubnet>,
}

impl LiveCheck<'_> {
    async fn run(&mut self) {
        let subnets = self.subnets().await;
        let images = self.images().await;
        let in_zones = self.types_in_zones().await;
        self.instance_types(in_zones.as_deref().unwrap_or_default()).await;
        let spot = self.spot_prices(subnets.as_ref()).await;
        let instances = self.instances().await;
        if instances.is_some() {
            self.find_node().await;
            self.node_metadata();
        }
        if !self.config.ec2.cluster_networks.is_empty() {
            self.source_dest_check();
        }
        let instances = instances.unwrap_or_default();
        let lives =
            |instance: &&InstanceDescription| instance.state != InstanceStateName::Terminated;
        let own = instances.iter().find(lives).map(|instance| InstanceId(instance.id.clone()));
        if !self.config.ec2.cloud_routes.is_empty() {
            self.routes(subnets.as_ref(), own.as_ref().map(|own| own.0.as_str())).await;
        }
        match (subnets, images) {
            (Some(subnets), Some(images)) => {
                let resources = Resources { vpc: String::new(), subnets, images };
                self.launches(&resources, in_zones, &spot.unwrap_or_default()).await;
            }
            _ => self.caller.skip("RunInstances", "it needs the subnets and the image"),
        }
        self.calls_of_an_instance(own).await;
        if self.config.ec2.prices == PriceSource::Live {
            self.products().await;
        }
        self.caller.finish();
    }

    /// Reads the subnets, by their zone. Without permission the zones are unknown, and each subnet
    /// counts as a separate zone.
    async fn subnets(&mut self) -> Option<BTreeMap<String, String>> {
        let ids = match self.config.ec2.subnets.as_slice() {
            [] => vec![self.node_subnet().await?],
            ids => ids.to_vec(),
        };
        let called = self.caller.call("DescribeSubnets", self.api.subnets(&ids)).await;
        let described = match called {
            Ok(described) => described,
            Err(failed) => {
                return failed
                    .is_denied
                    .then(|| ids.iter().map(|id| (id.clone(), id.clone())).collect());
            }
        };
        self.vpc = described.first().map(|subnet| subnet.vpc.clone());
        let subnets = by_zone(&ids, &described);
        let text = |subnet: &Subnet| format!("{} in {}", subnet.id, subnet.zone);
        let known: Vec<String> = described.iter().map(text).collect();
        let unknown: Vec<&str> = ids
            .iter()
            .filter(|id| !described.iter().any(|subnet| subnet.id == **id))
            .map(String::as_str)
            .collect();
        if unknown.is_empty() {
            self.caller.add(Outcome::Ok, "DescribeSubnets", &known.join(", "));
        } else {
            let text = format!("EC2 does not show {}", unknown.join(", "));
            self.caller.add(Outcome::Failed, "DescribeSubnets", &text);
        }
        for warning in network::warnings(self.config, &described, &subnets) {
            self.caller.add(Outcome::Warning, "network", &warning);
        }
        (!subnets.is_empty()).then_some(subnets)
    }

    /// Finds the node's own subnet, in which cells are launched if no subnets are configured.
    async fn node_subnet(&mut self) -> Option<String> {
        let address = self.config.gateway.node_address()?;
        let filter = InstanceFilter::PrivateAddress(address);
        let listed = self.caller.list(NODE, self.api.describe_instances(&filter)).await.ok()?;
        match node_subnet::find(address, listed) {
            Ok(node) => {
                let NodeSubnet { instance, subnet, .. } = self.node.insert(node);
                let text = format!(
                    "{instance} with {address} is in {subnet}, where cells are launched \
                     (ec2.subnets is not set)"
                );
                self.caller.add(Outcome::Ok, NODE, &text);
                Some(subnet.clone())
            }
            Err(unknown) => {
                self.caller.add(Outcome::Failed, NODE, &unknown.to_string());
                None
            }
        }
    }

    async fn images(&mut self) -> Option<BTreeMap<Architecture, BootImage>> {
        let filter = self.ec2.image();
        let images = match self.caller.call("DescribeImages", self.api.images(&filter)).await {
            Ok(images) => newest(images),
            Err(failed) => {
                let ImageFilter::Id(id) = filter else { return None };
                let root_device = ANY_ROOT_DEVICE.to_owned();
                let (root_gib, further_volumes) = (None, Vec::new());
                let image = BootImage { id, root_device, root_gib, further_volumes };
                return failed.is_denied.then(|| [(Architecture::of_node(), image)].into());
            }
        };
        if images.is_empty() {
            let text = "EC2 has no available image of this id or name (ec2.image)";
            self.caller.add(Outcome::Failed, "DescribeImages", text);
            return None;
        }
        let found =
            images.iter().map(|(architecture, image)| format!("{} {architecture}", image.id));
        self.caller.add(Outcome::Ok, "DescribeImages", &found.collect::<Vec<_>>().join(", "));
        Some(images)
    }

    async fn types_in_zones(&mut self) -> Option<Vec<TypeInZone>> {
        const NAME: &str = "DescribeInstanceTypeOfferings";
        let listed = self.caller.list(NAME, self.api.types_in_zones()).await.ok()?;
        let text = format!("{} instance types and zones", listed.len());
        self.caller.add(Outcome::Ok, NAME, &text);
        Some(listed)
    }

    /// Describes a type, as the daemon describes types that the built-in file lacks.
    async fn instance_types(&mut self, in_zones: &[TypeInZone]) {
        const NAME: &str = "DescribeInstanceTypes";
        let zones = in_zones.iter().map(|entry| entry.zone.clone()).collect();
        let added = added_types::names(&self.ec2.types, in_zones, &zones);
        let name = added.first().map_or(ANY_TYPE, String::as_str).to_owned();
        let tried = std::slice::from_ref(&name);
        if self.caller.list(NAME, self.api.instance_types(tried)).await.is_ok() {
            let text = format!("{} instance types are newer than the built-in file", added.len());
            self.caller.add(Outcome::Ok, NAME, &text);
        }
    }

    /// Reads the spot prices of the subnets' zones, or otherwise of all zones.
    async fn spot_prices(
        &mut self,
        subnets: Option<&BTreeMap<String, String>>,
    ) -> Option<Vec<SpotPrice>> {
        const NAME: &str = "DescribeSpotPriceHistory";
        let known = subnets.into_iter().flatten().filter(|(zone, subnet)| zone != subnet);
        let zones: Vec<String> = known.map(|(zone, _)| zone.clone()).collect();
        let prices = self.caller.list(NAME, self.api.spot_prices(&zones)).await.ok()?;
        self.caller.add(Outcome::Ok, NAME, &format!("{} spot prices", prices.len()));
        Some(prices)
    }

    async fn instances(&mut self) -> Option<Vec<InstanceDescription>> {
        const NAME: &str = "DescribeInstances";
        let filter = self.ec2.own_instances();
        let listed = self.caller.list(NAME, self.api.describe_instances(&filter)).await.ok()?;
        let text = format!(
            "{} of node {}",
            counted(listed.len(), "instance", "instances"),
            self.ec2.owner.node
        );
        self.caller.add(Outcome::Ok, NAME, &text);
        Some(listed)
    }

    /// Reads a page of the price list. Without the list, the built-in prices are used.
    async fn products(&mut self) {
        const NAME: &str = "GetProducts";
        let Some(page) = self.caller.call_optional(NAME, self.api.products(None)).await else {
            return;
        };
        let region = &self.config.ec2.region;
        let usable = page.products.iter().filter(|it| Listed::parse(it, region).is_ok()).count();
        let text = format!("{usable} of {} products of a page have a price", page.products.len());
        let outcome = if usable > 0 { Outcome::Ok } else { Outcome::Warning };
        self.caller.add(outcome, NAME, &text);
    }

    /// Tries an on-demand launch in each zone, and a spot launch in the first zone with a spot
    /// offer.
    async fn launches(
        &mut self,
        resources: &Resources,
        in_zones: Option<Vec<TypeInZone>>,
        spot: &[SpotPrice],
    ) {
        let zones = resources.subnets.keys().cloned().collect();
        let in_zones = in_zones
            .filter(|listed| listed.iter().any(|entry| resources.subnets.contains_key(&entry.zone)))
            .unwrap_or_else(|| self.all_types_in(resources));
        let images = resources.images.keys().copied().collect();
        let region = self.config.ec2.region.as_str();
        let types = Types { region, built_in: &self.ec2.types, added: &[] };
        let catalogue = market_data::catalogue(types, None, &in_zones, spot, &zones, images);
        let mut spot_is_tried = false;
        for (zone, subnet) in &resources.subnets {
            for (market, launch_type) in
                [(Market::OnDemand, LaunchType::OnDemand), (Market::Spot, LaunchType::Spot)]
            {
                if market == Market::Spot && spot_is_tried {
                    continue;
                }
                let place =
                    if zone == subnet { subnet.clone() } else { format!("{subnet}, {zone}") };
                let name = format!("RunInstances ({market}, {place})");
                match self.candidate(&catalogue, zone, launch_type) {
                    Err(why) => self.caller.add(Outcome::Warning, &name, &why),
                    Ok(candidate) => {
                        spot_is_tried |= market == Market::Spot;
                        self.launch(&name, resources, candidate).await;
                    }
                }
            }
        }
    }

    /// Returns all known types as the types of zones whose types are unknown.
    fn all_types_in(&self, resources: &Resources) -> Vec<TypeInZone> {
        let names = self.ec2.types.entries().iter().map(|entry| &entry.instance_type.name);
        let of_zone = |zone: &String| {
            let in_zone =
                |name: &String| TypeInZone { instance_type: name.clone(), zone: zone.clone() };
            names.clone().map(in_zone).collect::<Vec<_>>()
        };
        resources.subnets.keys().flat_map(of_zone).collect()
    }

    /// Returns the offering of a zone for a pod without annotations; the error is the reason why no
    /// offering fits.
    fn candidate(
        &self,
        catalogue: &Catalogue,
        zone: &str,
        launch_type: LaunchType,
    ) -> Result<Candidate, String> {
        let mut rules = Rules::of(self.config, ProviderKind::Ec2);
        // Without permission to describe subnets, zones are unknown.
        let zone_is_known = !zone.starts_with("subnet-");
        if zone_is_known && !rules.zones.is_empty() && !rules.zones.iter().any(|it| it == zone) {
            return Err("never launched: placement.zones does not have this zone".to_owned());
        }
        rules.zones = vec![zone.to_owned()];
        let request = CellRequest { launch_type, ..CellRequest::default() };
        let needs = Needs::new(&request, &Requested::default(), &rules.defaults);
        rank(catalogue, &needs, &rules, &()).into_iter().next().ok_or_else(|| {
            format!("no instance type of the zone fits a pod without annotations: {needs}")
        })
    }

    async fn launch(&mut self, name: &str, resources: &Resources, candidate: Candidate) {
        let text = candidate.offering.instance_type.clone();
        let request = match self.request(resources, candidate).await {
            Ok(request) => request,
            Err(error) => {
                return self.caller.add(Outcome::Failed, name, &error.text());
            }
        };
        let api = Arc::clone(&self.api);
        let call = DryRun::Launch(Box::new(request));
        let tried = self.caller.call(name, api.dry_run(&call)).await;
        if tried.is_ok() {
            self.caller.add(Outcome::Ok, name, &text);
        }
    }

    /// Returns the request that the daemon would make for a pod without annotations. Values of the
    /// same form replace the values that only the daemon has (token, certificate, agent).
    async fn request(
        &self,
        resources: &Resources,
        candidate: Candidate,
    ) -> Result<RunInstances, ProviderError> {
        let parameters = self.ec2.parameters_with(resources, &Wanted::default())?;
        let cell = CellId::mint().map_err(|error| {
            ProviderError::new(
                kiyot_engine::provider::ErrorClass::Transient,
                "make the id of a cell",
                error,
            )
        })?;
        let gateway = self.config.gateway.advertised().or(self.config.gateway.listen);
        let spec = LaunchSpec {
            candidates: vec![candidate],
            tags: self.tags(&cell),
            bootstrap: Bootstrap {
                cell: cell.to_string(),
                gateway: GatewayAddress::Tcp(gateway.unwrap_or_else(|| ([0, 0, 0, 0], 0).into())),
                ca_sha256: "0".repeat(64),
                token: "0".repeat(64),
                orphan_timeout_secs: self.config.orphan_timeout.as_secs(),
                agent: Some(AgentPin {
                    sha256: "0".repeat(64),
                    size_bytes: 1,
                    ca_pem: "0".repeat(CA_PEM_BYTES),
                }),
            },
            parameters: parameters.stored(),
            cell: cell.clone(),
        };
        self.ec2.request(&spec, cell.as_str()).await
    }

    fn tags(&self, cell: &CellId) -> BTreeMap<String, String> {
        let key = OrderKey {
            namespace: "default".into(),
            name: "check-config".into(),
            ..OrderKey::default()
        };
        let pod = Wanted { key, ..Wanted::default() };
        self.ec2.owner.tags(&TagRules::of(self.config), cell, &pod).tags
    }

    /// Tries the calls that name an instance.
    async fn calls_of_an_instance(&mut self, own: Option<InstanceId>) {
        let id = own.as_ref().map_or(NO_INSTANCE, |own| &own.0);
        let tag = (owner::CLUSTER.to_owned(), self.ec2.owner.cluster.clone());
        let mut calls = vec![
            ("TerminateInstances", DryRun::Terminate(id.to_owned())),
            ("CreateTags", DryRun::Tag(id.to_owned(), [tag].into())),
            ("GetConsoleOutput", DryRun::Console(id.to_owned())),
            ("ModifyInstanceMetadataOptions", DryRun::Metadata(id.to_owned())),
        ];
        if !self.config.ec2.cloud_routes.is_empty() {
            calls.push(("ModifyInstanceAttribute", DryRun::SourceDestCheck(id.to_owned())));
        }
        for (name, call) in calls {
            let api = Arc::clone(&self.api);
            let trial = async {
                match api.dry_run(&call).await {
                    // EC2 checks the permission before it looks for the instance.
                    Err(error) if own.is_none() && error.code() == Some(NOT_FOUND) => Ok(()),
                    tried => tried,
                }
            };
            let trial_without = "tried on an id that does not exist, because the node has no \
                                 instance: a policy that permits tagged instances alone may \
                                 refuse it; check again when a pod runs in a cell";
            match (self.caller.call(name, trial).await, &own) {
                (Ok(()), Some(own)) => {
                    self.caller.add(Outcome::Ok, name, &format!("dry run on {}", own.0));
                }
                (Ok(()), None) => {
                    self.caller.add(Outcome::Ok, name, "dry run on an id that does not exist");
                }
                (Err(failed), None) if failed.is_denied => {
                    self.caller.add(Outcome::Warning, name, trial_without);
                }
                (Err(_), _) => {}
            }
        }
    }
}
