//! Faults of EC2, by the class of their error.

use std::time::Duration;

use kiyot::backends::milpa::{
    placement::{Market, Offering},
    providers::{ErrorClass, Provider, ProviderError},
};
use kiyot_testcloud::{Credentials, Market as CloudMarket, Outage};
use kiyot_testkit::{LIMIT, wait_until};

use crate::world::{NANO, World};

/// Returns the error of a launch with candidates in all zones and both markets.
async fn refused(world: &World) -> ProviderError {
    let spec = world.spec(&all(world)).await;
    world.provider.launch(&spec, "token").await.unwrap_err()
}

fn all(world: &World) -> Vec<Offering> {
    let markets = [Market::Spot, Market::OnDemand].into_iter();
    markets
        .flat_map(|market| (0..3).map(move |zone| (zone, market)))
        .map(|(zone, market)| world.offering(zone, market))
        .collect()
}

#[tokio::test]
async fn missing_capacity_refuses_the_offering_alone() {
    let world = World::new().await;
    let zone = world.zone(0);
    world.cloud.faults().set_no_capacity(NANO, &zone, CloudMarket::Spot, true);
    let error = refused(&world).await;
    assert_eq!(error.class, ErrorClass::Capacity);
    assert_eq!(error.refused, [world.offering(0, Market::Spot)]);
    assert!(error.text().contains("InsufficientInstanceCapacity"), "{}", error.text());
    let spec = world.spec(&all(&world)[1..]).await;
    let launched = world.provider.launch(&spec, "another").await.unwrap();
    assert_eq!(launched.offering, world.offering(1, Market::Spot));
}

#[tokio::test]
async fn subnet_without_addresses_refuses_its_zone() {
    let world = World::new().await;
    let subnet = world.cloud.setup().subnets[0].id.clone();
    world.cloud.faults().set_subnet_full(&subnet, true);
    let error = refused(&world).await;
    assert_eq!(error.class, ErrorClass::Capacity);
    let zone = [Market::Spot, Market::OnDemand].map(|market| world.offering(0, market));
    assert_eq!(error.refused, zone);
    assert_eq!(error.refused_zone, Some(world.zone(0)));
}

#[tokio::test]
async fn limit_of_spot_instances_refuses_the_market() {
    let world = World::new().await;
    world.cloud.faults().set_spot_limit(Some(0));
    let error = refused(&world).await;
    assert_eq!(error.class, ErrorClass::Capacity);
    assert_eq!(error.refused, [0, 1, 2].map(|zone| world.offering(zone, Market::Spot)));
}

#[tokio::test]
async fn refusals_of_the_account_have_their_class_and_launch_nothing() {
    let world = World::new().await;
    let faults = world.cloud.faults();
    // Subnets and image are read before.
    world.provider.check().await.unwrap();
    faults.set_vcpu_limit(Some(0));
    let spec = world.spec(&[world.offering(0, Market::OnDemand)]).await;
    let error = world.provider.launch(&spec, "token").await.unwrap_err();
    assert_eq!((error.class, error.refused.len()), (ErrorClass::Quota, 0), "{error:?}");
    faults.clear();
    faults.set_denied("RunInstances", true);
    let error = refused(&world).await;
    assert_eq!(error.class, ErrorClass::Auth, "{error:?}");
    faults.clear();
    for credentials in [Credentials::Wrong, Credentials::Expired, Credentials::Unknown] {
        faults.set_credentials(Some(credentials));
        let error = refused(&world).await;
        assert_eq!(error.class, ErrorClass::Auth, "{credentials:?}: {error:?}");
    }
    faults.clear();
    faults.fail("RunInstances", 503, "RequestLimitExceeded", 1);
    assert_eq!(refused(&world).await.class, ErrorClass::Throttled);
    faults.fail("RunInstances", 400, "InvalidAMIID.NotFound", 1);
    assert_eq!(refused(&world).await.class, ErrorClass::Invalid);
    assert!(world.cloud.instances().is_empty());
}

#[tokio::test]
async fn api_that_is_down_says_nothing_about_a_launch_that_it_may_have_received() {
    let world = World::new().await;
    world.provider.check().await.unwrap();
    let faults = world.cloud.faults();
    for (outage, class) in [
        (Outage::Reset, ErrorClass::Unanswered),
        (Outage::Unavailable, ErrorClass::Unanswered),
        (Outage::InternalError, ErrorClass::Unanswered),
    ] {
        faults.set_outage(Some(outage));
        let error = refused(&world).await;
        assert_eq!(error.class, class, "{outage:?}: {error:?}");
        assert!(world.provider.list_owned().await.is_err(), "{outage:?}");
        faults.clear();
    }
    faults.set_outage(Some(Outage::Refused));
    let error = refused(&world).await;
    let not_an_end = [ErrorClass::Transient, ErrorClass::Unanswered];
    assert!(not_an_end.contains(&error.class), "{error:?}");
    faults.clear();
    // The API listens again a moment later.
    wait_until("the API answers", LIMIT, async || world.provider.list_owned().await.ok()).await;
}

#[tokio::test]
async fn launched_instance_that_ec2_does_not_show_yet_is_not_found() {
    let world = World::new().await;
    world.cloud.faults().set_visible_after(Duration::MAX);
    let launched = world.launch("token").await;
    assert_eq!(world.provider.list_owned().await.unwrap(), []);
    let error = world.provider.describe(&launched.id).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::NotFound);
}
