//! Lists of the provider: instances of its owner, offerings with prices, consoles.

use std::time::Duration;

use kiyot_engine::{
    placement::{Accuracy, Market, Offering},
    provider::{InstanceId, InstanceState, Provider},
};

use crate::world::{NANO, World};

#[tokio::test]
async fn list_has_the_instances_of_the_owner_in_one_call() {
    let world = World::new().await;
    let mut launched = Vec::new();
    for number in 0..5 {
        launched.push(world.launch(&format!("token-{number}")).await.id);
    }
    let other = world.of_other_node().await;
    assert_eq!(other.list_owned().await.unwrap(), []);
    world.cloud.clear_calls();
    let mut listed = world.provider.list_owned().await.unwrap();
    assert_eq!(world.cloud.calls().len(), 1);
    listed.sort_by(|one, other| one.id.cmp(&other.id));
    launched.sort();
    let ids: Vec<_> = listed.iter().map(|instance| instance.id.clone()).collect();
    assert_eq!(ids, launched);
    for instance in listed {
        assert!(instance.state.is_alive());
        assert!(instance.token.unwrap().starts_with("token-"));
        assert_eq!(instance.addresses.len(), 1);
    }
}

#[tokio::test]
async fn names_and_public_address_of_an_instance_are_those_that_ec2_shows() {
    let world = World::new().await;
    let launched = world.launch("token").await;
    world.provider.list_owned().await.unwrap();
    let filter = [("InstanceId.1", launched.id.0.as_str())];
    let reply = world.cloud.call("DescribeInstances", &filter).await.unwrap();
    let root = reply.root();
    let names = world.provider.names(&launched.id);
    let public = names.public_address.map(|address| address.to_string()).unwrap_or_default();
    let first = |name: &str| root.all(name).first().map(|it| it.text.clone()).unwrap_or_default();
    let shown = ["privateDnsName", "ipAddress", "dnsName"].map(first);
    assert_eq!([names.private_name.unwrap(), public, names.public_name.unwrap_or_default()], shown);
    assert!(shown[0].contains("internal"), "{shown:?}");
    assert_eq!(world.provider.names(&InstanceId("i-unknown".into())), Default::default());
}

/// Removes tags of an instance.
async fn untag(world: &World, instance: &str, keys: &[&str]) {
    let numbered: Vec<(String, &str)> =
        keys.iter().zip(1..).map(|(key, number)| (format!("Tag.{number}.Key"), *key)).collect();
    let numbered = numbered.iter().map(|(name, key)| (name.as_str(), *key));
    let call: Vec<(&str, &str)> =
        [("ResourceId.1", instance)].into_iter().chain(numbered).collect();
    let reply = world.cloud.call("DeleteTags", &call).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
}

#[tokio::test]
async fn instance_whose_tags_were_removed_still_belongs_to_its_cell() {
    let world = World::new().await;
    let launched = world.launch("token").await;
    untag(&world, &launched.id.0, &["kiyot:cell"]).await;
    let listed = world.provider.list_owned().await.unwrap();
    assert_eq!((listed.len(), &listed[0].cell), (1, &launched.cell));
    // Without the owner's tags no list has the instance. Its description by id has it.
    untag(&world, &launched.id.0, &["kiyot:cluster", "kiyot:node"]).await;
    assert_eq!(world.provider.list_owned().await.unwrap(), []);
    let restarted = world.restarted(&[]).await;
    for provider in [&world.provider, &restarted] {
        let described = provider.describe(&launched.id).await.unwrap();
        assert!(described.state.is_alive());
        assert_eq!(described.id, launched.id);
    }
    world.cloud.interrupt(&launched.id.0).await;
    let described = restarted.describe(&launched.id).await.unwrap();
    assert!(!described.state.is_alive());
}

#[tokio::test]
async fn instance_of_others_without_the_tag_of_a_cell_is_not_listed() {
    let world = World::new().await;
    let launched = world.launch("token").await;
    untag(&world, &launched.id.0, &["kiyot:cell"]).await;
    // The daemon does not know this instance, and does not end it.
    assert_eq!(world.restarted(&[]).await.list_owned().await.unwrap(), []);
}

#[tokio::test]
async fn instance_stopped_from_the_console_is_not_alive() {
    let world = World::new().await;
    let launched = world.launch("token").await;
    let stop = [("InstanceId.1", launched.id.0.as_str())];
    world.cloud.call("StopInstances", &stop).await.unwrap();
    world.cloud.settle(&launched.id.0);
    let listed = world.provider.list_owned().await.unwrap();
    assert_eq!(listed[0].state, InstanceState::Stopped);
}

#[tokio::test]
async fn catalogue_has_the_zones_of_the_subnets_and_live_spot_prices() {
    let world = World::new().await;
    let catalogue = world.provider.catalogue().await.unwrap();
    let entry = catalogue.named(NANO).unwrap();
    for zone in 0..3 {
        let price = |market| {
            let offer =
                entry.offers.iter().find(|it| it.zone == world.zone(zone) && it.market == market);
            offer.unwrap_or_else(|| panic!("no {market} in zone {zone}")).clone()
        };
        let (on_demand, spot) = (price(Market::OnDemand), price(Market::Spot));
        assert!(spot.price < on_demand.price && spot.accuracy == Accuracy::Exact, "{spot:?}");
    }
    assert!(catalogue.entries().len() > 500);
    // Prices and zones are cached: reading the catalogue again calls no method of EC2.
    world.cloud.clear_calls();
    assert_eq!(world.provider.catalogue().await.unwrap(), catalogue);
    assert!(world.cloud.calls().iter().all(|call| call.action == "GetProducts"));
}

#[tokio::test]
async fn spot_counts_as_on_demand_while_its_prices_are_not_readable() {
    let world = World::new().await;
    world.cloud.faults().set_denied("DescribeSpotPriceHistory", true);
    let catalogue = world.provider.catalogue().await.unwrap();
    let entry = catalogue.named(NANO).unwrap();
    assert!(
        entry
            .offers
            .iter()
            .all(|it| (it.market == Market::Spot) == (it.accuracy == Accuracy::AtMost))
    );
}

/// Verifies V96.
#[tokio::test]
async fn console_is_the_latest_output_or_the_posted_output_of_types_before_nitro() {
    let world = World::new().await;
    for (name, posted_after, expected) in [
        (NANO, Duration::MAX, "kernel panic\n"),
        ("t2.nano", Duration::MAX, ""),
        ("t2.nano", Duration::ZERO, "kernel panic\n"),
    ] {
        world.cloud.faults().set_console_after(posted_after);
        let offering = world.offering(0, Market::OnDemand);
        let spec = world.spec(&[Offering { instance_type: name.into(), ..offering }]).await;
        let launched = world.provider.launch(&spec, spec.cell.as_str()).await.unwrap();
        world.cloud.set_console(&launched.id.0, b"kernel panic\n");
        assert_eq!(world.provider.console(&launched.id).await.unwrap(), expected, "{name}");
    }
}

#[tokio::test]
async fn check_names_what_ec2_does_not_know() {
    let world = World::new().await;
    world.provider.check().await.unwrap();
    let image = world.cloud.setup().image.clone();
    world.cloud.call("DeregisterImage", &[("ImageId", &image)]).await.unwrap();
    let fresh = world.of_other_node().await;
    assert!(fresh.check().await.is_err());
}

/// Verifies K26.
#[tokio::test]
async fn instances_of_another_node_are_found_in_its_place_until_they_are_terminated() {
    let world = World::new().await;
    let other = world.of_other_node().await;
    other.check().await.unwrap();
    world.provider.check().await.unwrap();
    let place = other.shared_place().unwrap();
    assert!(place.contains("vpc-") && place.ends_with("cluster production"), "{place}");
    assert_eq!(world.provider.shared_place(), Some(place));
    let found = async || other.has_instances_of("worker-1").await.unwrap();
    assert!(!found().await);
    let launched = world.launch("token").await;
    assert!(found().await && !other.has_instances_of("worker-3").await.unwrap());
    let stop = [("InstanceId.1", launched.id.0.as_str())];
    world.cloud.call("StopInstances", &stop).await.unwrap();
    world.cloud.settle(&launched.id.0);
    assert!(found().await, "a stopped instance costs its volume, and may go on");
    world.provider.terminate(std::slice::from_ref(&launched.id)).await;
    world.cloud.settle(&launched.id.0);
    assert!(!found().await);
    // A failed list is not a proof of absence.
    world.cloud.faults().set_denied("DescribeInstances", true);
    other.has_instances_of("worker-1").await.unwrap_err();
}
