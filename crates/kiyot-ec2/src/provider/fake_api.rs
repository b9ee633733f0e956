//! An API for unit tests.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::{IpAddr, Ipv4Addr},
    sync::Mutex,
};

use async_trait::async_trait;
use kiyot_config::ImageFilter;

use crate::{
    CallError, DryRun, Ec2Api, Failure, Image, InstanceDescription, InstanceFilter,
    InstanceStateName, MetadataOptionsState, ProductPage, RouteTable, RouteTableFilter,
    RunInstances, SpotPrice, Subnet, TypeDescription, TypeInZone,
};

/// The code of the error that names unknown ids.
const NOT_FOUND: &str = "InvalidInstanceID.NotFound";

/// An API that knows some instances, and records terminations and tags.
#[derive(Debug, Default)]
pub(super) struct FakeApi {
    pub(super) known: BTreeSet<String>,
    /// The ids of each TerminateInstances.
    pub(super) calls: Mutex<Vec<Vec<String>>>,
    /// The instances that can't be terminated, with the code of the refusal.
    pub(super) protected: BTreeMap<String, &'static str>,
    /// The failure of all terminations.
    pub(super) failure: Option<Failure>,
    /// The ids of each CreateTags.
    pub(super) tag_calls: Mutex<Vec<Vec<String>>>,
    /// The failures of the next CreateTags.
    pub(super) tag_failures: Mutex<VecDeque<Failure>>,
    /// The ids of each ModifyInstanceMetadataOptions.
    pub(super) metadata_calls: Mutex<Vec<String>>,
    /// The failures of the next ModifyInstanceMetadataOptions.
    pub(super) metadata_failures: Mutex<VecDeque<Failure>>,
    /// The instances that are found by their address or tags.
    pub(super) instances: Vec<InstanceDescription>,
    /// The ids of each DescribeSubnets.
    pub(super) subnet_calls: Mutex<Vec<Vec<String>>>,
    /// Lists that are never answered.
    pub(super) hanging: BTreeSet<&'static str>,
    /// The zones whose spot prices are never answered.
    pub(super) slow_zones: Mutex<BTreeSet<String>>,
    /// The lists that the policy denies.
    pub(super) denied: Mutex<BTreeSet<&'static str>>,
    /// The lists that were read.
    pub(super) lists: Mutex<Vec<&'static str>>,
    /// Images that replace [`IMAGE`].
    pub(super) images: Mutex<Option<Vec<Image>>>,
    /// The failures of the next RunInstances.
    pub(super) launch_failures: Mutex<VecDeque<Failure>>,
}

/// The only subnet, image, type and zone of the lists.
pub(super) const SUBNET: &str = "subnet-1";
/// See [`SUBNET`].
pub(super) const IMAGE: &str = "ami-1";
/// See [`SUBNET`].
pub(super) const TYPE: &str = "t3.nano";
/// A type of the lists that the built-in file lacks.
pub(super) const ADDED_TYPE: &str = "z9.large";
/// See [`SUBNET`].
pub(super) const ZONE: &str = "us-east-1a";

impl FakeApi {
    async fn list<T>(&self, operation: &'static str, answer: T) -> Result<T, CallError> {
        self.lists.lock().unwrap().push(operation);
        if self.hanging.contains(operation) {
            std::future::pending::<()>().await;
        }
        if self.denied.lock().unwrap().contains(operation) {
            let (code, message) = (Some("UnauthorizedOperation".into()), String::new());
            return Err(CallError { operation, failure: Failure::Refused { code, message } });
        }
        Ok(answer)
    }
}

/// Returns an image of x86_64.
pub(super) fn image(id: &str, created: &str) -> Image {
    Image {
        id: id.to_owned(),
        name: String::new(),
        architecture: "x86_64".into(),
        created: created.to_owned(),
        root_device: "/dev/xvda".into(),
        volumes: Vec::new(),
    }
}

/// Returns the description of a usable instance type.
pub(super) fn described(name: &str) -> TypeDescription {
    TypeDescription {
        name: name.to_owned(),
        vcpus: 2,
        memory_mib: 4096,
        architectures: vec!["x86_64".into()],
        is_burstable: false,
        is_bare_metal: false,
        is_current: true,
        gpus: None,
        has_on_demand: true,
        has_spot: true,
    }
}

/// Returns a running instance of the VPC `vpc-1`.
pub(super) fn running(id: &str, subnet: &str, address: Ipv4Addr) -> InstanceDescription {
    InstanceDescription {
        id: id.to_owned(),
        client_token: None,
        instance_type: TYPE.to_owned(),
        zone: ZONE.to_owned(),
        is_spot: false,
        state: InstanceStateName::Running,
        reason: None,
        subnet: Some(subnet.to_owned()),
        vpc: Some("vpc-1".to_owned()),
        has_source_dest_check: None,
        metadata: None,
        private_address: Some(address.into()),
        public_address: None,
        private_name: None,
        public_name: None,
        launched: None,
        volumes: Vec::new(),
        interfaces: Vec::new(),
        tags: BTreeMap::new(),
    }
}

fn not_called<T>(operation: &'static str) -> Result<T, CallError> {
    Err(CallError { operation, failure: Failure::NotSent("not expected".into()) })
}

#[async_trait]
impl Ec2Api for FakeApi {
    async fn run_instances(&self, _: &RunInstances) -> Result<InstanceDescription, CallError> {
        let operation = "RunInstances";
        match self.launch_failures.lock().unwrap().pop_front() {
            Some(failure) => Err(CallError { operation, failure }),
            None => not_called(operation),
        }
    }
    async fn describe_instances(
        &self,
        filter: &InstanceFilter,
    ) -> Result<Vec<InstanceDescription>, CallError> {
        let is_found = |it: &&InstanceDescription| match filter {
            InstanceFilter::PrivateAddress(address) => {
                it.private_address == Some(IpAddr::V4(*address))
            }
            InstanceFilter::Tags(tags) => {
                tags.iter().all(|(key, value)| it.tags.get(key) == Some(value))
            }
            _ => false,
        };
        let found = self.instances.iter().filter(is_found).cloned().collect();
        self.list("DescribeInstances", found).await
    }
    async fn terminate_instances(
        &self,
        ids: &[String],
    ) -> Result<BTreeMap<String, InstanceStateName>, CallError> {
        self.calls.lock().unwrap().push(ids.to_vec());
        let operation = "TerminateInstances";
        if let Some(failure) = self.failure.clone() {
            return Err(CallError { operation, failure });
        }
        if let Some(code) = ids.iter().find_map(|id| self.protected.get(id)) {
            let failure = Failure::Refused { code: Some((*code).into()), message: String::new() };
            return Err(CallError { operation, failure });
        }
        let unknown: Vec<&str> =
            ids.iter().filter(|id| !self.known.contains(*id)).map(String::as_str).collect();
        if unknown.is_empty() {
            let ending = |id: &String| (id.clone(), InstanceStateName::ShuttingDown);
            return Ok(ids.iter().map(ending).collect());
        }
        let message = format!("The instance IDs '{}' do not exist", unknown.join(", "));
        let failure = Failure::Refused { code: Some(NOT_FOUND.into()), message };
        Err(CallError { operation, failure })
    }
    async fn create_tags(
        &self,
        ids: &[String],
        _: &BTreeMap<String, String>,
    ) -> Result<(), CallError> {
        self.tag_calls.lock().unwrap().push(ids.to_vec());
        let failure = self.tag_failures.lock().unwrap().pop_front();
        failure.map_or(Ok(()), |failure| Err(CallError { operation: "CreateTags", failure }))
    }
    async fn console_output(&self, _: &str, _: bool) -> Result<String, CallError> {
        not_called("GetConsoleOutput")
    }
    async fn types_in_zones(&self) -> Result<Vec<TypeInZone>, CallError> {
        let listed = [TYPE, ADDED_TYPE]
            .map(|name| TypeInZone { instance_type: name.into(), zone: ZONE.into() });
        self.list("DescribeInstanceTypeOfferings", listed.to_vec()).await
    }
    async fn instance_types(&self, names: &[String]) -> Result<Vec<TypeDescription>, CallError> {
        let described = names.iter().map(|name| described(name)).collect();
        self.list("DescribeInstanceTypes", described).await
    }
    async fn spot_prices(&self, zones: &[String]) -> Result<Vec<SpotPrice>, CallError> {
        let is_slow = zones.iter().any(|zone| self.slow_zones.lock().unwrap().contains(zone));
        if is_slow {
            std::future::pending::<()>().await;
        }
        let price = |zone: &String| SpotPrice {
            instance_type: TYPE.into(),
            zone: zone.clone(),
            price: "0.0017".into(),
        };
        self.list("DescribeSpotPriceHistory", zones.iter().map(price).collect()).await
    }
    async fn products(&self, _: Option<String>) -> Result<ProductPage, CallError> {
        self.list("GetProducts", ProductPage::default()).await
    }
    async fn subnets(&self, ids: &[String]) -> Result<Vec<Subnet>, CallError> {
        self.subnet_calls.lock().unwrap().push(ids.to_vec());
        let subnet = Subnet {
            id: SUBNET.into(),
            vpc: "vpc-1".into(),
            zone: ZONE.into(),
            network: "10.77.0.0/16".into(),
        };
        self.list("DescribeSubnets", vec![subnet]).await
    }
    async fn images(&self, _: &ImageFilter) -> Result<Vec<Image>, CallError> {
        let images = self.images.lock().unwrap().clone();
        self.list("DescribeImages", images.unwrap_or_else(|| vec![image(IMAGE, "")])).await
    }
    async fn dry_run(&self, _: &DryRun) -> Result<(), CallError> {
        not_called("DryRun")
    }
    async fn route_tables(&self, _: &RouteTableFilter) -> Result<Vec<RouteTable>, CallError> {
        not_called("DescribeRouteTables")
    }
    async fn create_route(&self, _: &str, _: &str, _: &str) -> Result<(), CallError> {
        not_called("CreateRoute")
    }
    async fn delete_route(&self, _: &str, _: &str) -> Result<(), CallError> {
        not_called("DeleteRoute")
    }
    async fn disable_source_dest_check(&self, _: &str) -> Result<(), CallError> {
        not_called("ModifyInstanceAttribute")
    }
    async fn disable_metadata(&self, id: &str) -> Result<MetadataOptionsState, CallError> {
        self.metadata_calls.lock().unwrap().push(id.to_owned());
        let operation = "ModifyInstanceMetadataOptions";
        let failure = self.metadata_failures.lock().unwrap().pop_front();
        failure.map_or(Ok(MetadataOptionsState::Pending), |failure| {
            Err(CallError { operation, failure })
        })
    }
}
