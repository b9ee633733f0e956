//! Tags of instances, volumes and network interfaces.

use std::collections::BTreeMap;

use kiyot_engine::{
    placement::Market,
    provider::{Attachment, Instance, Provider},
};
use kiyot_testkit::{LIMIT, wait_until};

use crate::world::{World, pod};

/// Returns the attachment of a pod that takes a warm cell.
fn taking(world: &World, instance: &Instance) -> Attachment {
    Attachment { tags: world.tags(&instance.cell, &pod()), ..Attachment::default() }
}

/// Waits until the API shows tags for a number of resources.
async fn shown_for(world: &World, wanted: &BTreeMap<String, String>, resources: usize) {
    wait_until("the tags are shown", LIMIT, async || {
        let shown = world.shown_tags().await;
        let with = shown.values().filter(|tags| *tags == wanted).count();
        (with == resources).then_some(())
    })
    .await;
}

#[tokio::test]
async fn launch_tags_instance_and_volume() {
    let world = World::new().await;
    let launched = world.launch("token").await;
    let tags = world.tags(&launched.cell, &pod());
    assert_eq!((tags["Name"].as_str(), tags["kiyot:pod-uid"].as_str()), ("default/web-0", "1-2-3"));
    let shown = world.shown_tags().await;
    let mut kinds: Vec<&str> =
        shown.keys().map(|id| id.split_once('-').map_or(id.as_str(), |(kind, _)| kind)).collect();
    kinds.sort_unstable();
    // moto does not keep the tags of the interface, which the request has.
    assert_eq!(kinds, ["i", "vol"]);
    for (id, shown) in &shown {
        assert_eq!(shown, &tags, "{id}");
    }
}

/// Verifies V99.
#[tokio::test]
async fn spot_launch_tags_its_request() {
    let world = World::new().await;
    for (market, expected) in [(Market::OnDemand, 3), (Market::Spot, 4)] {
        world.cloud.clear_calls();
        let spec = world.spec(&[world.offering(0, market)]).await;
        world.provider.launch(&spec, &market.to_string()).await.unwrap();
        let calls = world.cloud.calls_of("RunInstances");
        let resource = |number| format!("TagSpecification.{number}.ResourceType");
        let tagged: Vec<&String> =
            (1..).map_while(|number| calls[0].parameters.get(&resource(number))).collect();
        assert_eq!(tagged.len(), expected, "{tagged:?}");
        let has_request = tagged.iter().any(|it| *it == "spot-instances-request");
        assert_eq!(has_request, market == Market::Spot);
    }
}

#[tokio::test]
async fn replay_has_the_tags_of_its_launch() {
    let world = World::new().await;
    let spec = world.spec(&[world.offering(0, Market::OnDemand)]).await;
    world.provider.launch(&spec, "token").await.unwrap();
    // After a restart of the provider the replay is the same request, without another call.
    let restarted = world.of_other_node().await;
    restarted.launch(&spec, "token").await.unwrap();
    let calls = world.cloud.calls_of("RunInstances");
    assert_eq!(calls.len(), 2);
    assert_eq!(calls[0].parameters, calls[1].parameters);
    assert!(world.cloud.calls_of("DescribeInstances").is_empty());
}

/// Verifies P22.
#[tokio::test]
async fn warm_cell_gets_the_tags_of_its_pod() {
    let world = World::new().await;
    let launched = world.launch_warm("token").await;
    let shown = world.shown_tags().await;
    assert_eq!(shown[&launched.id.0]["Name"], "kiyot warm");
    assert_eq!(shown[&launched.id.0].get("app"), None);
    let to = taking(&world, &launched);
    world.provider.attach(&launched.id, &to).await.unwrap();
    shown_for(&world, &to.tags, 3).await;
    assert_eq!(world.cloud.calls_of("CreateTags").len(), 1);
    // The list has the volumes of further cells.
    let launched = world.launch_warm("another").await;
    world.provider.list_owned().await.unwrap();
    world.cloud.clear_calls();
    let to = taking(&world, &launched);
    world.provider.attach(&launched.id, &to).await.unwrap();
    shown_for(&world, &to.tags, 3).await;
    assert!(world.cloud.calls_of("DescribeInstances").is_empty());
}

#[tokio::test]
async fn throttled_tags_are_set_later() {
    let world = World::new().await;
    let launched = world.launch_warm("token").await;
    world.cloud.faults().fail("CreateTags", 503, "RequestLimitExceeded", 1);
    let to = taking(&world, &launched);
    world.provider.attach(&launched.id, &to).await.unwrap();
    shown_for(&world, &to.tags, 3).await;
    assert_eq!(world.cloud.calls_of("CreateTags").len(), 2);
}

/// Verifies P22.
#[tokio::test]
async fn pod_gets_its_cell_although_its_tags_are_denied() {
    let world = World::new().await;
    let launched = world.launch_warm("token").await;
    world.cloud.faults().set_denied("CreateTags", true);
    let to = taking(&world, &launched);
    let attached = world.provider.attach(&launched.id, &to).await.unwrap();
    assert_eq!(attached.addresses.len(), 1);
    // The calls with and without the volumes are refused.
    wait_until("the calls are refused", LIMIT, async || {
        (world.cloud.calls_of("CreateTags").len() == 2).then_some(())
    })
    .await;
    assert_eq!(world.provider.attach(&launched.id, &to).await.unwrap(), attached);
    assert_eq!(world.provider.list_owned().await.unwrap().len(), 1);
}
