//! Routes of the VPC to instances (`pod.elotl.co/cloud-route`).

use std::collections::{BTreeMap, BTreeSet};

use kiyot_engine::{
    OrderKey, Wanted,
    placement::Market,
    provider::{Attachment, ErrorClass, Instance, Provider, ProviderError},
    request::CellRequest,
};
use kiyot_testcloud::Outage;
use serde_json::Value;

use crate::world::{World, pod};

/// The networks that pods of these tests may have.
const ALLOWED: [&str; 2] = ["10.8.0.0/16", "10.9.0.0/16"];

fn wanted(networks: &[&str]) -> Wanted {
    let cloud_routes = networks.iter().map(|network| network.parse().unwrap()).collect();
    let request = CellRequest { cloud_routes, ..CellRequest::default() };
    Wanted { request, ..pod() }
}

fn attachment(networks: &[&str]) -> Attachment {
    Attachment {
        cloud_routes: networks.iter().map(|network| (*network).to_owned()).collect(),
        ..Attachment::default()
    }
}

/// Launches an instance of a pod with routes.
async fn launch(world: &World, token: &str, networks: &[&str]) -> Instance {
    let offering = world.offering(0, Market::OnDemand);
    let spec = world.spec_of(&[offering], &wanted(networks)).await.unwrap();
    world.provider.launch(&spec, token).await.unwrap()
}

async fn refused(world: &World, networks: &[&str]) -> ProviderError {
    world.provider.parameters(&wanted(networks)).await.unwrap_err()
}

/// Returns the routes that the API shows, by table: networks with their instances.
async fn routes(world: &World) -> BTreeMap<String, BTreeMap<String, String>> {
    let reply = world.cloud.call("DescribeRouteTables", &[]).await.unwrap();
    let mut shown: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
    for table in reply.root().items("routeTableSet") {
        let routes =
            table.items("routeSet").iter().filter(|route| !route.at("instanceId").is_empty());
        let routes = routes.map(|route| {
            (route.at("destinationCidrBlock").to_owned(), route.at("instanceId").to_owned())
        });
        shown.entry(table.at("routeTableId").to_owned()).or_default().extend(routes);
    }
    shown.retain(|_, routes| !routes.is_empty());
    shown
}

/// Returns the routes of the only table that has some.
async fn only_routes(world: &World) -> BTreeMap<String, String> {
    let mut shown = routes(world).await;
    assert!(shown.len() <= 1, "{shown:?}");
    shown.pop_first().map(|(_, routes)| routes).unwrap_or_default()
}

/// Returns the id of the VPC's main table.
async fn main_table(world: &World) -> String {
    let vpc = world.cloud.setup().vpc.clone();
    let filters = [
        ("Filter.1.Name", "vpc-id"),
        ("Filter.1.Value.1", vpc.as_str()),
        ("Filter.2.Name", "association.main"),
        ("Filter.2.Value.1", "true"),
    ];
    let reply = world.cloud.call("DescribeRouteTables", &filters).await.unwrap();
    reply.root().items("routeTableSet")[0].at("routeTableId").to_owned()
}

/// Verifies V45.
#[tokio::test]
async fn routes_of_a_pod_lead_to_its_instance_until_it_ends() {
    let world = World::with_cloud_routes(&ALLOWED).await;
    let networks = ["10.8.0.0/16", "10.9.4.0/24"];
    let launched = launch(&world, "token", &networks).await;
    // A repeated attachment changes nothing.
    for _ in 0..2 {
        world.provider.attach(&launched.id, &attachment(&networks)).await.unwrap();
    }
    let expected = networks.map(|network| (network.to_owned(), launched.id.0.clone()));
    assert_eq!(only_routes(&world).await, expected.into());
    assert!(routes(&world).await.contains_key(&main_table(&world).await));
    assert_eq!(world.cloud.calls_of("CreateRoute").len(), 2);
    let id = [("InstanceId", launched.id.0.as_str()), ("Attribute", "sourceDestCheck")];
    let reply = world.cloud.call("DescribeInstanceAttribute", &id).await.unwrap();
    assert_eq!(reply.root().all("value")[0].text, "false", "{}", reply.body);
    world.provider.detach(&launched.id).await.unwrap();
    assert_eq!(only_routes(&world).await, BTreeMap::new());
    world.cloud.clear_calls();
    world.provider.detach(&launched.id).await.unwrap();
    assert_eq!(world.cloud.calls().len(), 0, "an instance without routes needs no call");
}

/// Verifies V45.
#[tokio::test]
async fn pods_without_routes_need_no_call() {
    for world in [World::new().await, World::with_cloud_routes(&ALLOWED).await] {
        let launched = launch(&world, "token", &[]).await;
        world.cloud.clear_calls();
        // Its metadata service stays open.
        let to = Attachment { has_instance_profile: true, ..Attachment::default() };
        world.provider.attach(&launched.id, &to).await.unwrap();
        world.provider.detach(&launched.id).await.unwrap();
        assert_eq!(world.cloud.calls().len(), 0, "{:?}", world.cloud.calls());
    }
}

/// Verifies V45.
#[tokio::test]
async fn table_that_is_associated_with_the_subnet_gets_the_routes() {
    let world = World::with_cloud_routes(&ALLOWED).await;
    let vpc = world.cloud.setup().vpc.clone();
    let made = world.cloud.call("CreateRouteTable", &[("VpcId", &vpc)]).await.unwrap();
    let table = made.root().all("routeTableId")[0].text.clone();
    let subnet = world.cloud.setup().subnets[0].id.clone();
    let association = [("RouteTableId", table.as_str()), ("SubnetId", &subnet)];
    world.cloud.call("AssociateRouteTable", &association).await.unwrap();
    let launched = launch(&world, "token", &["10.8.0.0/16"]).await;
    // A network that is named twice is a single route.
    let twice = attachment(&["10.8.0.0/16", "10.8.0.0/16"]);
    world.provider.attach(&launched.id, &twice).await.unwrap();
    assert_eq!(world.cloud.calls_of("CreateRoute").len(), 1);
    let shown = routes(&world).await;
    assert_eq!(shown.keys().collect::<Vec<_>>(), [&table]);
}

/// Verifies V46.
#[tokio::test]
async fn network_routed_elsewhere_is_refused_and_keeps_its_route() {
    let world = World::with_cloud_routes(&ALLOWED).await;
    let first = launch(&world, "first", &["10.8.0.0/16"]).await;
    let second = launch(&world, "second", &["10.8.0.0/16"]).await;
    world.provider.attach(&first.id, &attachment(&["10.8.0.0/16"])).await.unwrap();
    let taken = attachment(&["10.8.0.0/16", "10.9.0.0/16"]);
    let error = world.provider.attach(&second.id, &taken).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Invalid);
    let why = format!("pod.elotl.co/cloud-route = 10.8.0.0/16: leads to {} already", first.id);
    assert!(error.text().contains(&why), "{}", error.text());
    // The end of an instance without routes removes no route of another instance, although the
    // daemon does not know that instance.
    let restarted = world.restarted(&ALLOWED).await;
    restarted.detach(&second.id).await.unwrap();
    let expected = BTreeMap::from([("10.8.0.0/16".to_owned(), first.id.0.clone())]);
    assert_eq!(only_routes(&world).await, expected);
    // Before a launch, another daemon and a call of another pod are refused. A call of the same pod
    // is accepted, because the route may be that of an earlier call.
    let asked = wanted(&["10.8.0.0/16"]);
    let key = OrderKey { pod_uid: "another pod's".into(), ..asked.key.clone() };
    let of_another = Wanted { key, ..asked.clone() };
    for (provider, asked) in [(&restarted, &asked), (&world.provider, &of_another)] {
        let error = provider.parameters(asked).await.unwrap_err();
        assert_eq!(error.class, ErrorClass::Invalid);
        assert!(error.text().contains(&why), "{}", error.text());
    }
    world.provider.parameters(&asked).await.unwrap();
    assert_eq!(world.cloud.calls_of("ReplaceRoute").len(), 0);
}

/// Verifies V47.
#[tokio::test]
async fn networks_that_are_not_allowed_are_refused_before_a_launch() {
    let world = World::new().await;
    let error = refused(&world, &["10.8.0.0/16"]).await;
    assert_eq!(error.class, ErrorClass::Invalid);
    assert!(error.text().contains("networks in ec2.cloud_routes (empty)"), "{}", error.text());
    // The configuration allows the VPC's network and the node's address here.
    let world = World::with_cloud_routes(&["10.0.0.0/8"]).await;
    for (network, why) in [
        ("192.168.0.0/16", "10.0.0.0/8"),
        ("0.0.0.0/0", "is not allowed"),
        ("10.77.64.0/24", "overlaps 10.77.0.0/16, a network of the VPC itself"),
        ("10.77.0.0/24", "has the node's address"),
    ] {
        let error = refused(&world, &["10.8.0.0/16", network]).await;
        assert_eq!(error.class, ErrorClass::Invalid, "{network}");
        let at = format!("pod.elotl.co/cloud-route = {network}: ");
        assert!(error.text().contains(&at) && error.text().contains(why), "{}", error.text());
    }
    assert!(world.cloud.instances().is_empty());
}

/// Verifies V48.
#[tokio::test]
async fn routes_of_an_instance_that_ended_alone_are_removed_by_a_restarted_daemon() {
    let world = World::with_cloud_routes(&ALLOWED).await;
    let launched = launch(&world, "token", &["10.8.0.0/16"]).await;
    world.provider.attach(&launched.id, &attachment(&["10.8.0.0/16"])).await.unwrap();
    world.cloud.interrupt(&launched.id.0).await;
    assert_eq!(only_routes(&world).await.len(), 1);
    let restarted = world.restarted(&ALLOWED).await;
    world.cloud.faults().set_outage(Some(Outage::Unavailable));
    let error = restarted.detach(&launched.id).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Unanswered);
    world.cloud.faults().clear();
    restarted.detach(&launched.id).await.unwrap();
    assert_eq!(only_routes(&world).await, BTreeMap::new());
}

/// Verifies V48.
#[tokio::test]
async fn routes_of_instances_that_are_terminated_together_are_found_by_one_list() {
    let world = World::with_cloud_routes(&ALLOWED).await;
    let mut ids = Vec::new();
    for (token, network) in [("first", "10.8.0.0/16"), ("second", "10.9.0.0/16")] {
        let launched = launch(&world, token, &[network]).await;
        world.provider.attach(&launched.id, &attachment(&[network])).await.unwrap();
        ids.push(launched.id);
    }
    assert_eq!(only_routes(&world).await.len(), 2);
    world.cloud.clear_calls();
    world.restarted(&ALLOWED).await.terminate(&ids).await;
    assert_eq!(world.cloud.calls_of("DescribeRouteTables").len(), 1);
    assert_eq!(only_routes(&world).await, BTreeMap::new());
}

/// Verifies V48.
#[tokio::test]
async fn instance_ends_although_the_removal_of_its_routes_is_denied() {
    let world = World::with_cloud_routes(&ALLOWED).await;
    let launched = launch(&world, "token", &["10.8.0.0/16"]).await;
    world.provider.attach(&launched.id, &attachment(&["10.8.0.0/16"])).await.unwrap();
    world.cloud.faults().set_denied("DeleteRoute", true);
    world.provider.detach(&launched.id).await.unwrap();
    world.cloud.faults().clear();
    world.provider.detach(&launched.id).await.unwrap();
    assert_eq!(only_routes(&world).await, BTreeMap::new());
}

/// Verifies V46, V48.
#[tokio::test]
async fn leftover_route_refuses_the_next_call_without_a_launch() {
    let world = World::with_cloud_routes(&ALLOWED).await;
    let asked = wanted(&["10.8.0.0/16"]);
    let launched = launch(&world, "token", &["10.8.0.0/16"]).await;
    world.provider.attach(&launched.id, &attachment(&["10.8.0.0/16"])).await.unwrap();
    world.cloud.faults().set_denied("DeleteRoute", true);
    world.provider.detach(&launched.id).await.unwrap();
    world.provider.terminate(std::slice::from_ref(&launched.id)).await;
    // The lists show the instance as running, as ending, and as ended.
    for settled in [false, true] {
        let error = world.provider.parameters(&asked).await.unwrap_err();
        assert!(error.text().contains("leads to"), "{}", error.text());
        world.provider.list_owned().await.unwrap();
        if !settled {
            world.cloud.settle(&launched.id.0);
        }
    }
    assert!(world.provider.parameters(&asked).await.is_err());
    assert_eq!(world.cloud.calls_of("RunInstances").len(), 1);
}

/// Verifies V46.
#[tokio::test]
async fn route_to_an_ended_instance_refuses_the_call_of_its_pod() {
    let world = World::with_cloud_routes(&ALLOWED).await;
    let asked = wanted(&["10.8.0.0/16"]);
    let launched = launch(&world, "token", &["10.8.0.0/16"]).await;
    world.provider.attach(&launched.id, &attachment(&["10.8.0.0/16"])).await.unwrap();
    world.provider.parameters(&asked).await.unwrap();
    world.cloud.interrupt(&launched.id.0).await;
    world.provider.list_owned().await.unwrap();
    assert!(world.provider.parameters(&asked).await.is_err());
}

#[tokio::test]
async fn policy_of_routes_has_the_actions_that_are_called() {
    let world = World::with_cloud_routes(&ALLOWED).await;
    world.provider.check().await.unwrap();
    world.cloud.clear_calls();
    let launched = launch(&world, "token", &["10.8.0.0/16"]).await;
    world.provider.attach(&launched.id, &attachment(&["10.8.0.0/16"])).await.unwrap();
    world.provider.detach(&launched.id).await.unwrap();
    let mut called: BTreeSet<String> =
        world.cloud.calls().into_iter().map(|call| format!("ec2:{}", call.action)).collect();
    // Prices are read in the background.
    for of_prices in ["GetProducts", "DescribeSpotPriceHistory"] {
        called.remove(&format!("ec2:{of_prices}"));
    }
    for of_every_pod in ["RunInstances", "DescribeInstances", "ModifyInstanceMetadataOptions"] {
        assert!(called.remove(&format!("ec2:{of_every_pod}")), "{of_every_pod}");
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/config/iam-cloud-routes.json");
    let policy = std::fs::read_to_string(path).unwrap();
    let statements: Vec<Value> = serde_json::from_str(&policy).unwrap();
    let permitted = statements.iter().flat_map(|statement| match &statement["Action"] {
        Value::Array(actions) => actions.clone(),
        action => vec![action.clone()],
    });
    let permitted: BTreeSet<String> =
        permitted.map(|action| action.as_str().unwrap().to_owned()).collect();
    assert_eq!(permitted, called);
}
