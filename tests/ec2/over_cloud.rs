//! Configuration and client of the provider over a test cloud, for this and other test binaries.

use kiyot_config as config;
use kiyot_config::ImageFilter;
use kiyot_ec2::sdk::{Client, ClientConfig};
use kiyot_testcloud::Cloud;

/// The region of the cloud.
const REGION: &str = "us-east-1";

/// Returns the configuration of a provider whose image has the agent.
pub(crate) fn config(cloud: &Cloud) -> config::Ec2 {
    let setup = cloud.setup();
    config::Ec2 {
        region: REGION.into(),
        subnets: setup.subnets.iter().map(|subnet| subnet.id.clone()).collect(),
        security_groups: vec![setup.security_group.clone()],
        image: Some(ImageFilter::Id(setup.image.clone())),
        image_has_agent: true,
        ..config::Ec2::default()
    }
}

/// Returns a client. moto does not check its signatures.
pub(crate) async fn client(cloud: &Cloud, region: &str) -> Client {
    let config = ClientConfig {
        region: region.to_owned(),
        endpoint_url: Some(cloud.endpoint()),
        pricing_endpoint_url: Some(cloud.endpoint()),
    };
    Client::with_credentials(&config, "AKIATEST", "secret").await
}
