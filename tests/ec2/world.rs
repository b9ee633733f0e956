//! A provider over a cloud of its own.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use kiyot_config::{self as config, GatewayListen, MilpaBackend, PriceSource};
use kiyot_ec2::provider::Ec2;
use kiyot_engine::{
    OrderKey, Wanted,
    id::CellId,
    placement::{Accuracy, Candidate, Market, Offering},
    provider::{Instance, InstanceState, LaunchSpec, Owner, Provider, ProviderError, TagRules},
    request::CellRequest,
};
use kiyot_link::bootstrap::{AgentPin, Bootstrap, GatewayAddress};
use kiyot_local::PauseImage;
use kiyot_testcloud::Cloud;
use kiyot_testkit::{LIMIT, wait_until};
use kiyot_values::price::Price;

use crate::over_cloud;

/// An instance type that the cloud has.
pub(crate) const NANO: &str = "t3.nano";

/// A cloud with a provider.
pub(crate) struct World {
    pub(crate) cloud: Cloud,
    pub(crate) provider: Ec2,
    owner: Owner,
    tag_rules: TagRules,
}

impl World {
    pub(crate) async fn new() -> Self {
        Self::with_cloud_routes(&[]).await
    }

    /// Makes a world whose pods may have routes to these networks.
    pub(crate) async fn with_cloud_routes(networks: &[&str]) -> Self {
        let networks = networks.iter().map(|network| network.parse().unwrap()).collect();
        Self::with(|ec2| ec2.cloud_routes = networks).await
    }

    /// Makes a world with a changed configuration.
    pub(crate) async fn with(change: impl FnOnce(&mut config::Ec2)) -> Self {
        let cloud = Cloud::start().await;
        let owner = Owner {
            cluster: "production".into(),
            node: "worker-1".into(),
            fingerprint: "0123".into(),
        };
        let mut ec2 = over_cloud::config(&cloud);
        change(&mut ec2);
        let provider = provider_with(&cloud, &owner, ec2).await;
        Self { cloud, provider, owner, tag_rules: tag_rules() }
    }

    /// Returns a provider of another node of the cluster.
    pub(crate) async fn of_other_node(&self) -> Ec2 {
        let owner = Owner { node: "worker-2".into(), ..self.owner.clone() };
        provider(&self.cloud, &owner, &[]).await
    }

    /// Returns the provider of a restarted daemon, whose pods may have routes to these networks.
    pub(crate) async fn restarted(&self, networks: &[&str]) -> Ec2 {
        provider(&self.cloud, &self.owner, networks).await
    }

    /// Returns the provider of a daemon that is restarted with a changed configuration.
    pub(crate) async fn restarted_with(&self, change: impl FnOnce(&mut config::Ec2)) -> Ec2 {
        let mut ec2 = over_cloud::config(&self.cloud);
        change(&mut ec2);
        provider_with(&self.cloud, &self.owner, ec2).await
    }

    /// Returns a provider of another region. The cloud plays this region too.
    pub(crate) async fn in_region(&self, region: &str) -> Ec2 {
        let ec2 = config::Ec2 { region: region.into(), ..over_cloud::config(&self.cloud) };
        provider_with(&self.cloud, &self.owner, ec2).await
    }

    /// Returns the provider of a daemon that is restarted with the credentials of the account of
    /// another cloud.
    pub(crate) async fn with_credentials_of(&self, other: &Cloud) -> Ec2 {
        provider_with(other, &self.owner, over_cloud::config(&self.cloud)).await
    }

    /// Returns a provider with on-demand prices of this source.
    pub(crate) async fn with_prices(&self, prices: PriceSource) -> Ec2 {
        let ec2 = config::Ec2 { prices, ..over_cloud::config(&self.cloud) };
        provider_with(&self.cloud, &self.owner, ec2).await
    }

    /// Returns a provider without configured subnets, whose node has an address.
    pub(crate) async fn with_node_at(&self, address: IpAddr) -> Ec2 {
        let ec2 = config::Ec2 { subnets: Vec::new(), ..over_cloud::config(&self.cloud) };
        provider_at(&self.cloud, &self.owner, ec2, address).await
    }

    /// Returns the zone of a subnet, by its number.
    pub(crate) fn zone(&self, number: usize) -> String {
        self.cloud.setup().subnets[number].zone.clone()
    }

    /// Returns the offering of a type in a zone, by its number.
    pub(crate) fn offering(&self, zone: usize, market: Market) -> Offering {
        Offering { instance_type: NANO.into(), zone: self.zone(zone), market }
    }

    /// Returns the parameters of a launch with these candidates.
    pub(crate) async fn spec(&self, offerings: &[Offering]) -> LaunchSpec {
        self.spec_for(offerings, &CellRequest::default()).await.unwrap()
    }

    pub(crate) async fn spec_for(
        &self,
        offerings: &[Offering],
        request: &CellRequest,
    ) -> Result<LaunchSpec, ProviderError> {
        self.spec_of(offerings, &Wanted { request: request.clone(), ..pod() }).await
    }

    pub(crate) async fn spec_of(
        &self,
        offerings: &[Offering],
        wanted: &Wanted,
    ) -> Result<LaunchSpec, ProviderError> {
        let cell = CellId::mint().unwrap();
        let candidate = |offering: &Offering| Candidate {
            offering: offering.clone(),
            price: Price::FREE,
            accuracy: Accuracy::Exact,
        };
        Ok(LaunchSpec {
            candidates: offerings.iter().map(candidate).collect(),
            tags: self.tags(&cell, wanted),
            bootstrap: Bootstrap {
                cell: cell.to_string(),
                gateway: GatewayAddress::Tcp("10.77.0.5:7700".parse().unwrap()),
                ca_sha256: "00".repeat(32),
                token: "open-sesame".into(),
                orphan_timeout_secs: 900,
                agent: Some(AgentPin {
                    sha256: "11".repeat(32),
                    size_bytes: 1,
                    ca_pem: "-".into(),
                }),
            },
            parameters: self.provider.parameters(wanted).await?,
            cell,
        })
    }

    /// Returns the tags of an instance.
    pub(crate) fn tags(&self, cell: &CellId, pod: &Wanted) -> BTreeMap<String, String> {
        self.owner.tags(&self.tag_rules, cell, pod).tags
    }

    /// Launches an instance on demand in the first zone.
    pub(crate) async fn launch(&self, token: &str) -> Instance {
        let spec = self.spec(&[self.offering(0, Market::OnDemand)]).await;
        self.provider.launch(&spec, token).await.unwrap()
    }

    /// Returns a running instance of a subnet, by its number, that plays the node.
    pub(crate) async fn running_node(&self, subnet: usize) -> Instance {
        let spec = self.spec(&[self.offering(subnet, Market::OnDemand)]).await;
        let node = self.provider.launch(&spec, "node").await.unwrap();
        wait_until("the node runs", LIMIT, async || {
            let described = self.provider.describe(&node.id).await.ok()?;
            (described.state == InstanceState::Running).then_some(described)
        })
        .await
    }

    /// Launches an instance for a warm pool.
    pub(crate) async fn launch_warm(&self, token: &str) -> Instance {
        let spec = self.spec(&[self.offering(0, Market::OnDemand)]).await;
        let tags = self.tags(&spec.cell, &Wanted::default());
        self.provider.launch(&LaunchSpec { tags, ..spec }, token).await.unwrap()
    }

    /// Returns the tags that the API shows, by the ids of instances, volumes and interfaces.
    pub(crate) async fn shown_tags(&self) -> BTreeMap<String, BTreeMap<String, String>> {
        let reply = self.cloud.call("DescribeTags", &[]).await.unwrap();
        let root = reply.root();
        let mut shown: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
        for item in root.items("tagSet") {
            let text = |name: &str| item.child(name).map_or("", |child| &child.text).to_owned();
            shown.entry(text("resourceId")).or_default().insert(text("key"), text("value"));
        }
        shown
    }
}

/// Returns a pod with a label.
pub(crate) fn pod() -> Wanted {
    let key = OrderKey {
        pod_uid: "1-2-3".into(),
        namespace: "default".into(),
        name: "web-0".into(),
        attempt: 0,
    };
    Wanted { key, labels: [("app".to_owned(), "web".to_owned())].into(), ..Wanted::default() }
}

fn tag_rules() -> TagRules {
    TagRules {
        configured: [("team".to_owned(), "checkout".to_owned())].into(),
        ..TagRules::default()
    }
}

async fn provider(cloud: &Cloud, owner: &Owner, networks: &[&str]) -> Ec2 {
    let ec2 = over_cloud::config(cloud);
    let cloud_routes = networks.iter().map(|network| network.parse().unwrap()).collect();
    provider_with(cloud, owner, config::Ec2 { cloud_routes, ..ec2 }).await
}

async fn provider_with(cloud: &Cloud, owner: &Owner, ec2: config::Ec2) -> Ec2 {
    provider_at(cloud, owner, ec2, [10, 77, 0, 5].into()).await
}

async fn provider_at(cloud: &Cloud, owner: &Owner, ec2: config::Ec2, node: IpAddr) -> Ec2 {
    let client = over_cloud::client(cloud, &ec2.region).await;
    let config = MilpaBackend {
        ec2,
        gateway: GatewayListen { listen: Some((node, 7700).into()), ..GatewayListen::default() },
        ..MilpaBackend::default()
    };
    Ec2::new(&config, owner.clone(), Arc::new(client), PauseImage::new(None))
}
