//! Client of EC2.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use aws_config::{
    BehaviorVersion, ConfigLoader, Region, SdkConfig, retry::RetryConfig,
    stalled_stream_protection, timeout::TimeoutConfig,
};
use aws_credential_types::Credentials;
use aws_sdk_ec2::{
    Client as Sdk,
    operation::{
        create_route::builders::CreateRouteFluentBuilder,
        delete_route::builders::DeleteRouteFluentBuilder,
        modify_instance_attribute::builders::ModifyInstanceAttributeFluentBuilder,
    },
    types::{
        AttributeBooleanValue, Filter, InstanceMetadataEndpointState, InstanceMetadataOptionsState,
        InstanceType, LocationType, Tag,
    },
};
use aws_smithy_http_client::{
    Builder,
    tls::{Provider, rustls_provider::CryptoMode},
};
use kiyot_config::ImageFilter;

use super::{
    error::{call_error, incomplete},
    launch, prices, response,
};
use crate::{
    CallError, DRY_RUN_SUCCEEDED, DryRun, Ec2Api, Failure, Image, InstanceDescription,
    InstanceFilter, InstanceStateName, MetadataOptionsState, ProductPage, RouteTable,
    RouteTableFilter, RunInstances, SpotPrice, Subnet, TypeDescription, TypeInZone,
};

/// Bounds the time of a call, or of a page of a list.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit of making a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The instances of a page of DescribeInstances, the most that EC2 accepts.
const PAGE_INSTANCES: i32 = 1000;
/// The entries of a page of other lists, the most that EC2 accepts.
const PAGE_ENTRIES: i32 = 1000;
/// The tables of a page of DescribeRouteTables, the most that EC2 accepts.
const PAGE_TABLES: i32 = 100;
/// Bounds the pages of a list: a hundred times the pages of the longest list.
const MAX_PAGES: usize = 1000;
/// The operating system of spot prices.
const LINUX: &str = "Linux/UNIX";

/// The settings of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientConfig {
    /// The region, such as `us-east-1`.
    pub region: String,
    /// The URL of the endpoint; by default the region's.
    pub endpoint_url: Option<String>,
    /// The URL of the endpoint of the price list; by default the nearest region's with such an
    /// endpoint.
    pub pricing_endpoint_url: Option<String>,
}

/// A client of EC2. Credentials come from the SDK's default chain: environment, profile, web
/// identity, container, instance profile.
#[derive(Debug, Clone)]
pub struct Client {
    sdk: Sdk,
    prices: aws_sdk_pricing::Client,
    region: String,
}

impl Client {
    /// Returns a client. Reads the environment and files of the user, and makes no call.
    pub async fn new(config: &ClientConfig) -> Self {
        Self::of(config, &loader(&config.region).load().await)
    }

    /// Returns a client with these credentials.
    pub async fn with_credentials(config: &ClientConfig, key_id: &str, secret: &str) -> Self {
        let credentials = Credentials::builder()
            .access_key_id(key_id)
            .secret_access_key(secret)
            .provider_name("static")
            .build();
        Self::of(config, &loader(&config.region).credentials_provider(credentials).load().await)
    }

    fn of(config: &ClientConfig, shared: &SdkConfig) -> Self {
        let mut builder = aws_sdk_ec2::config::Builder::from(shared);
        if let Some(url) = &config.endpoint_url {
            builder = builder.endpoint_url(url);
        }
        Self {
            sdk: Sdk::from_conf(builder.build()),
            prices: prices::client(shared, &config.region, config.pricing_endpoint_url.as_deref()),
            region: config.region.clone(),
        }
    }

    fn create_route_call(
        &self,
        table: &str,
        network: &str,
        instance: &str,
    ) -> CreateRouteFluentBuilder {
        let call = self.sdk.create_route().route_table_id(table);
        call.destination_cidr_block(network).instance_id(instance)
    }

    fn delete_route_call(&self, table: &str, network: &str) -> DeleteRouteFluentBuilder {
        self.sdk.delete_route().route_table_id(table).destination_cidr_block(network)
    }

    fn disable_check_call(&self, instance: &str) -> ModifyInstanceAttributeFluentBuilder {
        let off = AttributeBooleanValue::builder().value(false).build();
        self.sdk.modify_instance_attribute().instance_id(instance).source_dest_check(off)
    }
}

fn loader(region: &str) -> ConfigLoader {
    let http = Builder::new().tls_provider(Provider::Rustls(CryptoMode::Ring)).build_https();
    let timeouts = TimeoutConfig::builder()
        .connect_timeout(CONNECT_TIMEOUT)
        .operation_timeout(CALL_TIMEOUT)
        .build();
    aws_config::defaults(BehaviorVersion::latest())
        .http_client(http)
        .region(Region::new(region.to_owned()))
        // The caller decides about retries, because it records its calls.
        .retry_config(RetryConfig::disabled())
        .timeout_config(timeouts)
        .stalled_stream_protection(
            stalled_stream_protection::StalledStreamProtectionConfig::disabled(),
        )
}

#[async_trait]
impl Ec2Api for Client {
    async fn run_instances(
        &self,
        request: &RunInstances,
    ) -> Result<InstanceDescription, CallError> {
        const NAME: &str = "RunInstances";
        let call = launch::call(self.sdk.run_instances(), request);
        let output = call.send().await.map_err(|error| call_error(NAME, error))?;
        let instance = output.instances.unwrap_or_default().into_iter().next();
        let instance = instance.ok_or_else(|| incomplete(NAME, "instance"))?;
        response::instance(NAME, instance)
    }

    async fn describe_instances(
        &self,
        filter: &InstanceFilter,
    ) -> Result<Vec<InstanceDescription>, CallError> {
        const NAME: &str = "DescribeInstances";
        let mut call = self.sdk.describe_instances();
        call = match filter {
            // A call by id has no pages.
            InstanceFilter::Ids(ids) => call.set_instance_ids(Some(ids.clone())),
            InstanceFilter::Tags(tags) => call.max_results(PAGE_INSTANCES).set_filters(Some(
                tags.iter().map(|(key, value)| tag_filter(key, value)).collect(),
            )),
            InstanceFilter::ClientToken(token) => {
                call.max_results(PAGE_INSTANCES).filters(named_filter("client-token", token))
            }
            InstanceFilter::PrivateAddress(address) => {
                let filter = named_filter("private-ip-address", &address.to_string());
                call.max_results(PAGE_INSTANCES).filters(filter)
            }
        };
        let mut pages = call.into_paginator().send();
        let mut instances = Vec::new();
        let mut read = 0;
        while let Some(page) = pages.next().await {
            let page = page.map_err(|error| call_error(NAME, error))?;
            for reservation in page.reservations.unwrap_or_default() {
                for instance in reservation.instances.unwrap_or_default() {
                    instances.push(response::instance(NAME, instance)?);
                }
            }
            read += 1;
            bound_pages(NAME, read)?;
        }
        Ok(instances)
    }

    async fn terminate_instances(
        &self,
        ids: &[String],
    ) -> Result<BTreeMap<String, InstanceStateName>, CallError> {
        const NAME: &str = "TerminateInstances";
        let call = self.sdk.terminate_instances().set_instance_ids(Some(ids.to_vec()));
        let output = call.send().await.map_err(|error| call_error(NAME, error))?;
        let changes = output.terminating_instances.unwrap_or_default().into_iter();
        changes.map(|change| response::state_change(NAME, change)).collect()
    }

    async fn create_tags(
        &self,
        ids: &[String],
        tags: &BTreeMap<String, String>,
    ) -> Result<(), CallError> {
        let call =
            self.sdk.create_tags().set_resources(Some(ids.to_vec())).set_tags(Some(sdk_tags(tags)));
        call.send().await.map(drop).map_err(|error| call_error("CreateTags", error))
    }

    async fn console_output(&self, id: &str, latest: bool) -> Result<String, CallError> {
        const NAME: &str = "GetConsoleOutput";
        let call = self.sdk.get_console_output().instance_id(id).latest(latest);
        let output = call.send().await.map_err(|error| call_error(NAME, error))?;
        let encoded = output.output.unwrap_or_default();
        let bytes = aws_smithy_types::base64::decode(encoded.trim())
            .map_err(|_| incomplete(NAME, "output"))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    async fn types_in_zones(&self) -> Result<Vec<TypeInZone>, CallError> {
        const NAME: &str = "DescribeInstanceTypeOfferings";
        let call = self
            .sdk
            .describe_instance_type_offerings()
            .location_type(LocationType::AvailabilityZone)
            .max_results(PAGE_ENTRIES);
        let mut pages = call.into_paginator().send();
        let mut entries = Vec::new();
        let mut read = 0;
        while let Some(page) = pages.next().await {
            let page = page.map_err(|error| call_error(NAME, error))?;
            let listed = page.instance_type_offerings.unwrap_or_default().into_iter();
            entries.extend(listed.filter_map(response::type_in_zone));
            read += 1;
            bound_pages(NAME, read)?;
        }
        Ok(entries)
    }

    async fn instance_types(&self, names: &[String]) -> Result<Vec<TypeDescription>, CallError> {
        const NAME: &str = "DescribeInstanceTypes";
        let names = names.iter().map(|name| InstanceType::from(name.as_str())).collect();
        let call = self.sdk.describe_instance_types().set_instance_types(Some(names));
        let output = call.send().await.map_err(|error| call_error(NAME, error))?;
        let described = output.instance_types.unwrap_or_default().into_iter();
        Ok(described.filter_map(response::instance_type).collect())
    }

    async fn spot_prices(&self, zones: &[String]) -> Result<Vec<SpotPrice>, CallError> {
        const NAME: &str = "DescribeSpotPriceHistory";
        let of_zones = || {
            let filter = Filter::builder().name("availability-zone");
            vec![filter.set_values(Some(zones.to_vec())).build()]
        };
        // With this start the history has only the current prices.
        let call = self
            .sdk
            .describe_spot_price_history()
            .start_time(SystemTime::now().into())
            .product_descriptions(LINUX)
            .set_filters((!zones.is_empty()).then(of_zones))
            .max_results(PAGE_ENTRIES);
        let mut pages = call.into_paginator().send();
        let mut prices = Vec::new();
        let mut read = 0;
        while let Some(page) = pages.next().await {
            let page = page.map_err(|error| call_error(NAME, error))?;
            let listed = page.spot_price_history.unwrap_or_default().into_iter();
            prices.extend(listed.filter_map(response::spot_price));
            read += 1;
            bound_pages(NAME, read)?;
        }
        Ok(prices)
    }

    async fn products(&self, page: Option<String>) -> Result<ProductPage, CallError> {
        prices::products(&self.prices, &self.region, page).await
    }

    async fn subnets(&self, ids: &[String]) -> Result<Vec<Subnet>, CallError> {
        const NAME: &str = "DescribeSubnets";
        let call = self.sdk.describe_subnets().set_subnet_ids(Some(ids.to_vec()));
        let output = call.send().await.map_err(|error| call_error(NAME, error))?;
        let listed = output.subnets.unwrap_or_default().into_iter();
        listed
            .map(|subnet| response::subnet(subnet).ok_or_else(|| incomplete(NAME, "subnet")))
            .collect()
    }

    async fn images(&self, filter: &ImageFilter) -> Result<Vec<Image>, CallError> {
        const NAME: &str = "DescribeImages";
        let call = match filter {
            ImageFilter::Id(id) => self.sdk.describe_images().image_ids(id),
            ImageFilter::Named { owner, name } => self
                .sdk
                .describe_images()
                .owners(owner)
                .filters(named_filter("name", name))
                .filters(named_filter("state", "available")),
        };
        let output = call.send().await.map_err(|error| call_error(NAME, error))?;
        Ok(output.images.unwrap_or_default().into_iter().filter_map(response::image).collect())
    }

    async fn route_tables(&self, filter: &RouteTableFilter) -> Result<Vec<RouteTable>, CallError> {
        const NAME: &str = "DescribeRouteTables";
        let filter = match filter {
            RouteTableFilter::Vpc(vpc) => named_filter("vpc-id", vpc),
            RouteTableFilter::Targets(instances) => {
                let filter = Filter::builder().name("route.instance-id");
                filter.set_values(Some(instances.clone())).build()
            }
        };
        let call = self.sdk.describe_route_tables().filters(filter).max_results(PAGE_TABLES);
        let mut pages = call.into_paginator().send();
        let mut tables = Vec::new();
        let mut read = 0;
        while let Some(page) = pages.next().await {
            let page = page.map_err(|error| call_error(NAME, error))?;
            let listed = page.route_tables.unwrap_or_default().into_iter();
            tables.extend(listed.filter_map(response::route_table));
            read += 1;
            bound_pages(NAME, read)?;
        }
        Ok(tables)
    }

    async fn create_route(
        &self,
        table: &str,
        network: &str,
        instance: &str,
    ) -> Result<(), CallError> {
        let call = self.create_route_call(table, network, instance);
        call.send().await.map(drop).map_err(|error| call_error("CreateRoute", error))
    }

    async fn delete_route(&self, table: &str, network: &str) -> Result<(), CallError> {
        let call = self.delete_route_call(table, network);
        call.send().await.map(drop).map_err(|error| call_error("DeleteRoute", error))
    }

    async fn disable_source_dest_check(&self, instance: &str) -> Result<(), CallError> {
        let call = self.disable_check_call(instance);
        call.send().await.map(drop).map_err(|error| call_error("ModifyInstanceAttribute", error))
    }

    async fn disable_metadata(&self, instance: &str) -> Result<MetadataOptionsState, CallError> {
        const NAME: &str = "ModifyInstanceMetadataOptions";
        let call = self
            .sdk
            .modify_instance_metadata_options()
            .instance_id(instance)
            .http_endpoint(InstanceMetadataEndpointState::Disabled);
        let output = call.send().await.map_err(|error| call_error(NAME, error))?;
        let options = output
            .instance_metadata_options
            .filter(|it| it.http_endpoint == Some(InstanceMetadataEndpointState::Disabled))
            .ok_or_else(|| incomplete(NAME, "httpEndpoint"))?;
        Ok(match options.state {
            Some(InstanceMetadataOptionsState::Applied) => MetadataOptionsState::Applied,
            _ => MetadataOptionsState::Pending,
        })
    }

    async fn dry_run(&self, call: &DryRun) -> Result<(), CallError> {
        let outcome = match call {
            DryRun::Launch(request) => {
                let call = launch::call(self.sdk.run_instances(), request).dry_run(true);
                call.send().await.map(drop).map_err(|error| call_error("RunInstances", error))
            }
            DryRun::Metadata(id) => {
                let call = self
                    .sdk
                    .modify_instance_metadata_options()
                    .instance_id(id)
                    .http_endpoint(InstanceMetadataEndpointState::Disabled)
                    .dry_run(true);
                let name = "ModifyInstanceMetadataOptions";
                call.send().await.map(drop).map_err(|error| call_error(name, error))
            }
            DryRun::Terminate(id) => {
                let call = self.sdk.terminate_instances().instance_ids(id).dry_run(true);
                call.send().await.map(drop).map_err(|error| call_error("TerminateInstances", error))
            }
            DryRun::Tag(id, tags) => {
                let call = self
                    .sdk
                    .create_tags()
                    .resources(id)
                    .set_tags(Some(sdk_tags(tags)))
                    .dry_run(true);
                call.send().await.map(drop).map_err(|error| call_error("CreateTags", error))
            }
            DryRun::Console(id) => {
                let call = self.sdk.get_console_output().instance_id(id).dry_run(true);
                call.send().await.map(drop).map_err(|error| call_error("GetConsoleOutput", error))
            }
            DryRun::SourceDestCheck(id) => {
                let (name, call) = ("ModifyInstanceAttribute", self.disable_check_call(id));
                let tried = call.dry_run(true).send().await;
                tried.map(drop).map_err(|error| call_error(name, error))
            }
            DryRun::CreateRoute { table, network, instance } => {
                let call = self.create_route_call(table, network, instance).dry_run(true);
                call.send().await.map(drop).map_err(|error| call_error("CreateRoute", error))
            }
            DryRun::DeleteRoute { table, network } => {
                let call = self.delete_route_call(table, network).dry_run(true);
                call.send().await.map(drop).map_err(|error| call_error("DeleteRoute", error))
            }
        };
        match outcome {
            Err(error) if error.code() == Some(DRY_RUN_SUCCEEDED) => Ok(()),
            outcome => outcome,
        }
    }
}

/// Fails if a list has more pages than any list of EC2.
fn bound_pages(operation: &'static str, read: usize) -> Result<(), CallError> {
    if read < MAX_PAGES {
        return Ok(());
    }
    Err(CallError { operation, failure: Failure::Incomplete("end of the list") })
}

fn sdk_tags(tags: &BTreeMap<String, String>) -> Vec<Tag> {
    tags.iter().map(|(key, value)| Tag::builder().key(key).value(value).build()).collect()
}

fn tag_filter(key: &str, value: &str) -> Filter {
    named_filter(&format!("tag:{key}"), value)
}

/// Returns a filter by a value. EC2 treats `*` and `?` in a value as wildcards, except after a
/// backslash.
fn named_filter(name: &str, value: &str) -> Filter {
    Filter::builder().name(name).values(value).build()
}
