//! On-demand prices of AWS's price list.

use kiyot_config::{MilpaBackend, PriceSource, ProviderKind};
use kiyot_ec2::provider::Ec2;
use kiyot_engine::{
    placement::{Accuracy, Catalogue, Market, Needs, Offer, Offering, Requested, Rules, rank},
    provider::Provider,
    request::CellRequest,
};
use kiyot_testcloud::{Hold, Outcome};
use kiyot_testkit::{LIMIT, wait_until};
use kiyot_values::price::Price;

use crate::world::{NANO, World};

/// Another region than the region of the built-in prices.
const OTHER_REGION: &str = "eu-west-1";
/// A price that only the price list has.
const ODD: &str = "0.0101010000";
/// A type that the pods don't get.
const OTHER: &str = "t3.micro";

fn offer(catalogue: &Catalogue, name: &str, market: Market) -> Offer {
    let offers = &catalogue.named(name).unwrap().offers;
    offers.iter().find(|offer| offer.market == market).unwrap().clone()
}

/// Waits until the catalogue has a price of the price list.
async fn read(provider: &Ec2, name: &str, price: &str) -> Catalogue {
    let price: Price = price.parse().unwrap();
    wait_until("the price list is read", LIMIT, async || {
        let catalogue = provider.catalogue().await.unwrap();
        (offer(&catalogue, name, Market::OnDemand).price == price).then_some(catalogue)
    })
    .await
}

/// Waits until a call of the price list has an outcome, and returns the calls.
async fn ended(world: &World) -> usize {
    wait_until("the price list is called", LIMIT, async || {
        let calls = world.cloud.calls_of("GetProducts");
        let is_ended = calls.iter().all(|call| call.outcome != Outcome::Pending);
        (is_ended && !calls.is_empty()).then_some(calls.len())
    })
    .await
}

/// Returns the type that a pod without annotations gets on demand.
fn choice(catalogue: &Catalogue) -> String {
    let rules = Rules::of(&MilpaBackend::default(), ProviderKind::Netns);
    let needs = Needs::new(&CellRequest::default(), &Requested::default(), &rules.defaults);
    rank(catalogue, &needs, &rules, &())[0].offering.instance_type.clone()
}

/// Verifies V70, V71.
#[tokio::test]
async fn prices_of_another_region_decide_the_choice() {
    let world = World::new().await;
    let provider = world.in_region(OTHER_REGION).await;
    // No pod waits for prices: the first catalogue has the built-in prices, as estimates.
    world.cloud.faults().set_hold("GetProducts", Some(Hold::Reply));
    let before = provider.catalogue().await.unwrap();
    let first = choice(&before);
    let built_in = offer(&before, &first, Market::OnDemand);
    assert_eq!(built_in.accuracy, Accuracy::Estimate);
    // The next type is cheaper in this region.
    let rules = Rules::of(&MilpaBackend::default(), ProviderKind::Netns);
    let needs = Needs::new(&CellRequest::default(), &Requested::default(), &rules.defaults);
    let others = rank(&before, &needs, &rules, &());
    let names = others.iter().map(|it| it.offering.instance_type.clone());
    let second = names.into_iter().find(|name| *name != first).unwrap();
    let provider = world.in_region(OTHER_REGION).await;
    world.cloud.faults().set_price(&first, "0.9");
    world.cloud.faults().set_price(&second, "0.0001");
    world.cloud.faults().set_hold("GetProducts", None);
    let after = read(&provider, &first, "0.9").await;
    assert_eq!(choice(&after), second);
    assert_eq!(offer(&after, &second, Market::OnDemand).accuracy, Accuracy::Exact);
}

/// Verifies V70.
#[tokio::test]
async fn price_list_is_read_in_pages_and_once() {
    let world = World::new().await;
    world.cloud.faults().set_price(NANO, ODD);
    let catalogue = read(&world.provider, NANO, ODD).await;
    assert_eq!(offer(&catalogue, NANO, Market::OnDemand).accuracy, Accuracy::Exact);
    let calls = world.cloud.calls_of("GetProducts");
    assert!((5..=20).contains(&calls.len()), "{} pages", calls.len());
    for (number, call) in calls.iter().enumerate() {
        let text = |key: &str| call.parameters.get(key).cloned().unwrap_or_default();
        assert_eq!(
            text("NextToken"),
            if number == 0 { String::new() } else { format!("{number}00") }
        );
        assert_eq!(
            (text("ServiceCode").as_str(), text("MaxResults").as_str()),
            ("AmazonEC2", "100")
        );
        assert!(call.parameters.values().any(|value| value == "us-east-1"), "{call:?}");
    }
    let _ = world.provider.catalogue().await.unwrap();
    assert_eq!(world.cloud.calls_of("GetProducts").len(), calls.len());
}

/// Verifies V72.
#[tokio::test]
async fn broken_products_are_set_aside() {
    let world = World::new().await;
    world.cloud.faults().set_broken_products(250);
    world.cloud.faults().set_price(OTHER, "0.0000000000");
    world.cloud.faults().set_price(NANO, ODD);
    let catalogue = read(&world.provider, NANO, ODD).await;
    let other = offer(&catalogue, OTHER, Market::OnDemand);
    assert_eq!((other.price.to_string(), other.accuracy), ("$0.0104".into(), Accuracy::Exact));
    assert!(catalogue.named("broken0.large").is_none());
}

/// Verifies V73.
#[tokio::test]
async fn denied_price_list_is_called_once_and_the_built_in_prices_are_used() {
    let world = World::new().await;
    world.cloud.faults().set_denied("GetProducts", true);
    let before = world.provider.catalogue().await.unwrap();
    assert_eq!(ended(&world).await, 1);
    for _ in 0..3 {
        assert_eq!(world.provider.catalogue().await.unwrap(), before);
    }
    assert_eq!(world.cloud.calls_of("GetProducts").len(), 1);
    assert_eq!(offer(&before, NANO, Market::OnDemand).price.to_string(), "$0.0052");
}

/// Verifies V73.
#[tokio::test]
async fn throttled_price_list_is_read_after_a_pause() {
    let world = World::new().await;
    world.cloud.faults().set_price(NANO, ODD);
    world.cloud.faults().fail("GetProducts", 400, "ThrottlingException", 2);
    read(&world.provider, NANO, ODD).await;
    let calls = world.cloud.calls_of("GetProducts");
    let failed = calls.iter().filter(|call| call.outcome != Outcome::Ok).count();
    assert_eq!(failed, 2);
}

/// Verifies V74.
#[tokio::test]
async fn built_in_prices_need_no_call() {
    let world = World::new().await;
    let provider = world.with_prices(PriceSource::BuiltIn).await;
    provider.check().await.unwrap();
    let catalogue = provider.catalogue().await.unwrap();
    assert_eq!(offer(&catalogue, NANO, Market::OnDemand).price.to_string(), "$0.0052");
    assert_eq!(world.cloud.calls_of("GetProducts").len(), 0);
}

/// An instance type of the cloud that is newer than the built-in file.
const NEWER: &str = "m8idb.large";

/// Verifies V79.
#[tokio::test]
async fn type_that_is_newer_than_the_built_in_file_is_chosen_and_launched_at_its_price() {
    let world = World::new().await;
    world.cloud.faults().set_price(NEWER, "0.0001000000");
    let before = world.provider.catalogue().await.unwrap();
    assert_eq!(before.named(NEWER).unwrap().instance_type.memory_mib, 8192);
    let catalogue = wait_until("its price is read", LIMIT, async || {
        let catalogue = world.provider.catalogue().await.unwrap();
        (!catalogue.named(NEWER)?.offers.is_empty()).then_some(catalogue)
    })
    .await;
    assert_eq!(choice(&catalogue), NEWER);
    let described = world.cloud.calls_of("DescribeInstanceTypes");
    assert_eq!(described.len(), 2, "145 types, of which a call describes 100");
    let offering = Offering { instance_type: NEWER.into(), ..world.offering(0, Market::OnDemand) };
    let spec = world.spec(std::slice::from_ref(&offering)).await;
    let launched = world.provider.launch(&spec, "token").await.unwrap();
    assert_eq!(launched.offering, offering);
    // A daemon that has not read them describes the type alone.
    let replayed = world.restarted(&[]).await.launch(&spec, "token").await.unwrap();
    assert_eq!(replayed.id, launched.id);
    assert_eq!(world.cloud.calls_of("DescribeInstanceTypes").len(), 3);
}

/// Verifies V79.
#[tokio::test]
async fn types_are_those_of_the_built_in_file_until_others_are_described() {
    let world = World::new().await;
    world.cloud.faults().set_denied("DescribeInstanceTypes", true);
    let catalogue = world.provider.catalogue().await.unwrap();
    assert!(catalogue.named(NEWER).is_none() && catalogue.named(OTHER).is_some());
}
