//! Unit tests of the provider over a played API.

use super::{
    fake_api::{FakeApi, IMAGE, SUBNET, TYPE, ZONE},
    *,
};
use crate::{
    backends::milpa::{placement::Accuracy, providers::CATALOGUE_TIMEOUT},
    config::PriceSource,
};

const OFFERINGS: &str = "DescribeInstanceTypeOfferings";
const SPOT_PRICES: &str = "DescribeSpotPriceHistory";

fn provider(api: FakeApi) -> (Arc<FakeApi>, Ec2) {
    let api = Arc::new(api);
    let config = config::MilpaBackend {
        ec2: config::Ec2 {
            region: "us-east-1".into(),
            subnets: vec![SUBNET.into()],
            security_groups: vec!["sg-1".into()],
            image: Some(ImageFilter::Id(IMAGE.into())),
            prices: PriceSource::Live,
            ..config::Ec2::default()
        },
        ..config::MilpaBackend::default()
    };
    let owner = Owner { cluster: "c".into(), node: "n".into(), fingerprint: "0123".into() };
    (Arc::clone(&api), Ec2::new(&config, owner, api))
}

fn hanging(lists: &[&'static str]) -> FakeApi {
    FakeApi { hanging: lists.iter().copied().collect(), ..FakeApi::default() }
}

fn accuracy(catalogue: &Catalogue, market: Market) -> Accuracy {
    let offers = &catalogue.named(TYPE).unwrap().offers;
    offers.iter().find(|it| it.market == market && it.zone == ZONE).unwrap().accuracy
}

/// Verifies V70.
#[tokio::test(start_paused = true)]
async fn hanging_price_lists_leave_a_catalogue_with_spot_as_on_demand() {
    let (_, provider) = provider(hanging(&[SPOT_PRICES, "GetProducts"]));
    let began = Instant::now();
    let catalogue = provider.catalogue().await.unwrap();
    assert!(began.elapsed() * 2 < CATALOGUE_TIMEOUT, "{:?}", began.elapsed());
    assert_eq!(accuracy(&catalogue, Market::Spot), Accuracy::AtMost);
    assert_eq!(accuracy(&catalogue, Market::OnDemand), Accuracy::Exact);
}

#[tokio::test(start_paused = true)]
async fn hanging_list_of_offerings_subnets_or_images_is_an_error_within_its_time() {
    for list in [OFFERINGS, "DescribeSubnets", "DescribeImages"] {
        let (_, provider) = provider(hanging(&[list, SPOT_PRICES]));
        let began = Instant::now();
        let error = provider.catalogue().await.unwrap_err();
        assert_eq!(error.class, ErrorClass::Unanswered);
        assert!(began.elapsed() < CATALOGUE_TIMEOUT, "{:?}", began.elapsed());
        assert!(error.text().contains(list), "{}", error.text());
    }
}

#[tokio::test(start_paused = true)]
async fn lists_are_read_again_at_their_age() {
    let (api, provider) = provider(FakeApi::default());
    let reads = async |operation: &str| {
        provider.catalogue().await.unwrap();
        api.lists.lock().unwrap().iter().filter(|it| **it == operation).count()
    };
    let moment = Duration::from_secs(1);
    for (operation, age) in [
        (SPOT_PRICES, Duration::from_secs(30 * 60)),
        ("DescribeSubnets", Duration::from_secs(3600)),
        ("DescribeImages", Duration::from_secs(3600)),
        (OFFERINGS, Duration::from_secs(12 * 3600)),
    ] {
        // All are read now.
        tokio::time::advance(Duration::from_secs(24 * 3600)).await;
        let before = reads(operation).await;
        tokio::time::advance(age - moment).await;
        assert_eq!(reads(operation).await, before, "{operation}");
        tokio::time::advance(moment).await;
        assert_eq!(reads(operation).await, before + 1, "{operation}");
    }
}
