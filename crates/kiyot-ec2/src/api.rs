//! Interface of EC2.

use std::{collections::BTreeMap, fmt, net::Ipv4Addr};

use async_trait::async_trait;
use kiyot_config::ImageFilter;

use super::{
    CallError, Image, InstanceDescription, InstanceStateName, ProductPage, RouteTable,
    RouteTableFilter, RunInstances, SpotPrice, Subnet, TypeDescription, TypeInZone,
};

/// Most instance types that a call describes.
pub const MAX_DESCRIBED_TYPES: usize = 100;

/// The instances to describe. A description by id fails if an id is unknown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstanceFilter {
    /// Instances with these ids.
    Ids(Vec<String>),
    /// Instances with all of these tags.
    Tags(BTreeMap<String, String>),
    /// The instance of the launch with this client token.
    ClientToken(String),
    /// Instances with this private address. Each VPC may have one.
    PrivateAddress(Ipv4Addr),
}

/// Call that EC2 only checks (`DryRun`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DryRun {
    /// RunInstances.
    Launch(Box<RunInstances>),
    /// TerminateInstances of an instance.
    Terminate(String),
    /// CreateTags of an instance.
    Tag(String, BTreeMap<String, String>),
    /// GetConsoleOutput of an instance.
    Console(String),
    /// ModifyInstanceMetadataOptions of an instance.
    Metadata(String),
    /// ModifyInstanceAttribute of an instance, for its source/destination check.
    SourceDestCheck(String),
    /// CreateRoute to an instance.
    CreateRoute {
        /// The id of the route table.
        table: String,
        /// The network.
        network: String,
        /// The id of the instance.
        instance: String,
    },
    /// DeleteRoute.
    DeleteRoute {
        /// The id of the route table.
        table: String,
        /// The network.
        network: String,
    },
}

/// The state of changed metadata options (`InstanceMetadataOptions.State`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetadataOptionsState {
    /// The instance's metadata service still has the earlier options.
    Pending,
    /// The instance's metadata service has the options.
    Applied,
}

/// The calls of EC2 that kiyot makes. Every call has a time limit. Lists are complete: all pages
/// are read.
#[async_trait]
pub trait Ec2Api: fmt::Debug + Send + Sync + 'static {
    /// Launches an instance (RunInstances).
    async fn run_instances(&self, request: &RunInstances)
    -> Result<InstanceDescription, CallError>;
    /// Describes instances (DescribeInstances), including instances that terminated within the last
    /// hour.
    async fn describe_instances(
        &self,
        filter: &InstanceFilter,
    ) -> Result<Vec<InstanceDescription>, CallError>;
    /// Terminates all instances, or none after an error (TerminateInstances). Returns their states.
    async fn terminate_instances(
        &self,
        ids: &[String],
    ) -> Result<BTreeMap<String, InstanceStateName>, CallError>;
    /// Sets tags of instances, volumes and network interfaces (CreateTags): of all, or of none
    /// after an error.
    async fn create_tags(
        &self,
        ids: &[String],
        tags: &BTreeMap<String, String>,
    ) -> Result<(), CallError>;
    /// Returns the decoded console output of an instance (GetConsoleOutput): with `latest`, which
    /// only types of the Nitro System support, the current output, otherwise the last posted
    /// output.
    async fn console_output(&self, id: &str, latest: bool) -> Result<String, CallError>;
    /// Lists the zones of all instance types (DescribeInstanceTypeOfferings).
    async fn types_in_zones(&self) -> Result<Vec<TypeInZone>, CallError>;
    /// Describes instance types (DescribeInstanceTypes), at most [`MAX_DESCRIBED_TYPES`].
    async fn instance_types(&self, names: &[String]) -> Result<Vec<TypeDescription>, CallError>;
    /// Lists the current spot prices of Linux in these zones, or in all zones if the list is empty
    /// (DescribeSpotPriceHistory).
    async fn spot_prices(&self, zones: &[String]) -> Result<Vec<SpotPrice>, CallError>;
    /// Returns a page of the region's on-demand products of Linux in the price list (GetProducts):
    /// the first page, or the page of a token.
    async fn products(&self, page: Option<String>) -> Result<ProductPage, CallError>;
    /// Describes subnets (DescribeSubnets).
    async fn subnets(&self, ids: &[String]) -> Result<Vec<Subnet>, CallError>;
    /// Lists images (DescribeImages).
    async fn images(&self, filter: &ImageFilter) -> Result<Vec<Image>, CallError>;
    /// Checks a call without effect. Fails as the call would.
    async fn dry_run(&self, call: &DryRun) -> Result<(), CallError>;
    /// Lists route tables (DescribeRouteTables).
    async fn route_tables(&self, filter: &RouteTableFilter) -> Result<Vec<RouteTable>, CallError>;
    /// Adds a route to an instance (CreateRoute). Fails if the table already has a route for the
    /// network.
    async fn create_route(
        &self,
        table: &str,
        network: &str,
        instance: &str,
    ) -> Result<(), CallError>;
    /// Removes the route of a network with any target (DeleteRoute).
    async fn delete_route(&self, table: &str, network: &str) -> Result<(), CallError>;
    /// Lets an instance receive and send packets of other addresses (ModifyInstanceAttribute).
    async fn disable_source_dest_check(&self, instance: &str) -> Result<(), CallError>;
    /// Closes the metadata service of an instance (ModifyInstanceMetadataOptions). Fails if the
    /// service is open by the response.
    async fn disable_metadata(&self, instance: &str) -> Result<MetadataOptionsState, CallError>;
}
