//! Unit tests of the provider over a fake API.

use kiyot_config::{GatewayListen, PriceSource};
use kiyot_engine::{
    placement::{Accuracy, Candidate},
    provider::CATALOGUE_TIMEOUT,
};
use kiyot_link::bootstrap::{AgentPin, Bootstrap, GatewayAddress};
use kiyot_values::price::Price;

use crate::{
    Image, ImageVolume,
    provider::{
        fake_api::{ADDED_TYPE, FakeApi, IMAGE, SUBNET, TYPE, ZONE, image, running},
        parameters::BootImage,
        *,
    },
};

const NODE: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 5);
const OFFERINGS: &str = "DescribeInstanceTypeOfferings";
const TYPES: &str = "DescribeInstanceTypes";
const SPOT_PRICES: &str = "DescribeSpotPriceHistory";

fn provider(api: FakeApi) -> (Arc<FakeApi>, Ec2) {
    provider_in(api, vec![SUBNET.into()])
}

/// Returns a provider whose node has the address [`NODE`].
fn provider_in(api: FakeApi, subnets: Vec<String>) -> (Arc<FakeApi>, Ec2) {
    let api = Arc::new(api);
    let config = config::MilpaBackend {
        gateway: GatewayListen { listen: Some((NODE, 7700).into()), ..GatewayListen::default() },
        ec2: config::Ec2 {
            region: "us-east-1".into(),
            subnets,
            security_groups: vec!["sg-1".into()],
            image: Some(ImageFilter::Id(IMAGE.into())),
            prices: PriceSource::Live,
            ..config::Ec2::default()
        },
        ..config::MilpaBackend::default()
    };
    let owner = Owner { cluster: "c".into(), node: "n".into(), fingerprint: "0123".into() };
    (Arc::clone(&api), Ec2::new(&config, owner, api, PauseImage::new(None)))
}

fn spec(instance_type: &str, parameters: BTreeMap<String, String>) -> LaunchSpec {
    LaunchSpec {
        cell: CellId::from_random(&[7; CellId::RANDOM_BYTES]),
        candidates: vec![Candidate {
            offering: Offering {
                instance_type: instance_type.into(),
                zone: ZONE.into(),
                market: Market::OnDemand,
            },
            price: Price::FREE,
            accuracy: Accuracy::Exact,
        }],
        tags: BTreeMap::new(),
        bootstrap: Bootstrap {
            cell: "cell".into(),
            gateway: GatewayAddress::Tcp((NODE, 7700).into()),
            ca_sha256: "0".into(),
            token: "0".into(),
            orphan_timeout_secs: 900,
            agent: Some(AgentPin { sha256: "0".repeat(64), size_bytes: 1, ca_pem: "-".into() }),
        },
        parameters,
    }
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

/// Verifies V79.
#[tokio::test(start_paused = true)]
async fn lists_are_read_again_at_their_age() {
    let (api, provider) = provider(FakeApi::default());
    let reads = async |operation: &str| {
        provider.catalogue().await.unwrap();
        // Spot prices are read in the background.
        provider.spot.readings_ended().await;
        api.lists.lock().unwrap().iter().filter(|it| **it == operation).count()
    };
    let moment = Duration::from_secs(1);
    for (operation, age) in [
        (SPOT_PRICES, Duration::from_secs(30 * 60)),
        ("DescribeSubnets", Duration::from_secs(3600)),
        ("DescribeImages", Duration::from_secs(3600)),
        (OFFERINGS, Duration::from_secs(12 * 3600)),
        (TYPES, Duration::from_secs(12 * 3600)),
    ] {
        // All lists are read now.
        tokio::time::advance(Duration::from_secs(24 * 3600)).await;
        let before = reads(operation).await;
        tokio::time::advance(age - moment).await;
        assert_eq!(reads(operation).await, before, "{operation}");
        tokio::time::advance(moment).await;
        assert_eq!(reads(operation).await, before + 1, "{operation}");
    }
}

/// Verifies V87.
#[tokio::test(start_paused = true)]
async fn denied_list_that_cells_do_not_need_is_called_once_an_hour() {
    let (api, ec2) = provider(FakeApi::default());
    api.denied.lock().unwrap().extend([SPOT_PRICES, TYPES]);
    for _ in 0..12 {
        let catalogue = ec2.catalogue().await.unwrap();
        assert_eq!(accuracy(&catalogue, Market::Spot), Accuracy::AtMost);
        assert!(catalogue.named(ADDED_TYPE).is_none());
        tokio::time::advance(Duration::from_secs(300)).await;
    }
    let calls = |list: &str| api.lists.lock().unwrap().iter().filter(|it| **it == list).count();
    assert_eq!([SPOT_PRICES, TYPES].map(calls), [1, 1]);
    // Both lists are permitted now.
    api.denied.lock().unwrap().clear();
    ec2.catalogue().await.unwrap();
    ec2.spot.readings_ended().await;
    let catalogue = ec2.catalogue().await.unwrap();
    assert_eq!(accuracy(&catalogue, Market::Spot), Accuracy::Exact);
    assert!(catalogue.named(ADDED_TYPE).is_some());
    assert_eq!([SPOT_PRICES, TYPES].map(calls), [2, 2]);
}

/// Verifies V78.
#[tokio::test(start_paused = true)]
async fn subnet_of_the_node_is_read_only_without_configured_subnets() {
    let instances = || vec![running("i-node", SUBNET, NODE)];
    let with_node = || FakeApi { instances: instances(), ..FakeApi::default() };
    let (api, without) = provider_in(with_node(), Vec::new());
    let catalogue = without.catalogue().await.unwrap();
    assert!(catalogue.named(TYPE).unwrap().offers.iter().any(|offer| offer.zone == ZONE));
    assert_eq!(*api.subnet_calls.lock().unwrap(), [vec![SUBNET.to_owned()]]);

    let (api, with) = provider_in(with_node(), vec![SUBNET.into()]);
    with.catalogue().await.unwrap();
    assert!(!api.lists.lock().unwrap().contains(&"DescribeInstances"));

    let (_, elsewhere) = provider_in(FakeApi::default(), Vec::new());
    for error in [elsewhere.catalogue().await.unwrap_err(), elsewhere.check().await.unwrap_err()] {
        assert_eq!(error.class, ErrorClass::Invalid);
        let text = error.text();
        assert!(
            text.contains("no running instance of the region has the node's address"),
            "{text}"
        );
    }
}

/// Verifies V79.
#[tokio::test(start_paused = true)]
async fn catalogue_has_built_in_types_if_others_are_not_described_in_time() {
    let (_, provider) = provider(hanging(&[TYPES]));
    let began = Instant::now();
    let catalogue = provider.catalogue().await.unwrap();
    assert!(began.elapsed() * 2 < CATALOGUE_TIMEOUT, "{:?}", began.elapsed());
    assert!(catalogue.named(TYPE).is_some() && catalogue.named(ADDED_TYPE).is_none());
}

/// Verifies V79.
#[tokio::test(start_paused = true)]
async fn launch_of_an_added_type_is_the_same_before_and_after_a_restart() {
    let spec = |parameters| spec(ADDED_TYPE, parameters);
    let (_, first) = provider(FakeApi::default());
    first.catalogue().await.unwrap();
    let parameters = first.parameters(&Wanted::default()).await.unwrap();
    let before = first.request(&spec(parameters.clone()), "token").await.unwrap();
    assert_eq!(before.image, IMAGE);
    let (api, restarted) = provider(FakeApi::default());
    let after = restarted.request(&spec(parameters.clone()), "token").await.unwrap();
    assert_eq!(after, before);
    assert_eq!(*api.lists.lock().unwrap(), [TYPES]);
    let (_, unanswered) = provider(hanging(&[TYPES]));
    let error = unanswered.request(&spec(parameters), "token").await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Transient);
}

/// Verifies A15.
#[tokio::test]
async fn denied_launch_and_too_large_volume_are_errors_of_the_pods_request() {
    let (_, provider) = provider(FakeApi::default());
    let error_of = async |volume_size_gib, code: &str| {
        let request = CellRequest { volume_size_gib, ..CellRequest::default() };
        let wanted = Wanted { request, ..Wanted::default() };
        let spec = spec(TYPE, provider.parameters(&wanted).await.unwrap());
        let failure = Failure::Refused { code: Some(code.into()), message: String::new() };
        provider.launch_error(&spec, CallError { operation: "RunInstances", failure }).await
    };
    for (volume, code, expected) in [
        (None, "UnauthorizedOperation", true),
        // All launches have these credentials.
        (None, "AuthFailure", false),
        (None, "ExpiredToken", false),
        (None, "VolumeLimitExceeded", false),
        (Some(4096), "VolumeLimitExceeded", true),
        (Some(4096), "InsufficientVolumeCapacity", true),
        (Some(4096), "MaxIOPSLimitExceeded", true),
        (Some(1), "VolumeLimitExceeded", false),
        (Some(4096), "InstanceLimitExceeded", false),
        (Some(4096), "InsufficientFreeAddressesInSubnet", false),
    ] {
        let error = error_of(volume, code).await;
        assert_eq!(error.is_of_request, expected, "{volume:?} {code}");
        let is_zone = code.starts_with("Insufficient") && !expected;
        let of_zone = matches!(error.refusal, Some(LaunchRefusal::Zone(_)));
        assert_eq!(of_zone, is_zone, "{volume:?} {code}");
        if code.contains("Limit") || code.contains("Insufficient") {
            // The pod itself tries its next offering, if any.
            let tried = spec(TYPE, BTreeMap::new()).candidates.remove(0).offering;
            assert!(error.refusal.unwrap().refuses(&tried), "{volume:?} {code}");
        }
    }
}

#[test]
fn newest_image_of_each_architecture_is_launched() {
    let volumes = |id: &str| {
        let volume = |device, gib| ImageVolume { device, gib };
        vec![volume("/dev/sdb".to_owned(), 5), volume(format!("/dev/{id}"), 30)]
    };
    let image = |id: &str, architecture: &str, created: &str| Image {
        id: id.into(),
        name: "debian-12".into(),
        architecture: architecture.into(),
        created: created.into(),
        root_device: format!("/dev/{id}"),
        volumes: volumes(id),
    };
    let images = vec![
        image("ami-old", "x86_64", "2026-01-31T23:59:59.000Z"),
        image("ami-new", "x86_64", "2026-02-01T00:00:00.000Z"),
        image("ami-older", "x86_64", "2025-12-31T00:00:00.000Z"),
        image("ami-arm", "arm64", "2024-01-01T00:00:00.000Z"),
        image("ami-mac", "x86_64_mac", "2026-12-31T00:00:00.000Z"),
    ];
    let boot = |id: &str| BootImage {
        id: id.into(),
        root_device: format!("/dev/{id}"),
        root_gib: Some(30),
        further_volumes: vec![ImageVolume { device: "/dev/sdb".into(), gib: 5 }],
    };
    let expected = [(Architecture::Amd64, boot("ami-new")), (Architecture::Arm64, boot("ami-arm"))];
    // The order of the list does not matter.
    for rotation in 0..images.len() {
        let mut listed = images.clone();
        listed.rotate_left(rotation);
        assert_eq!(newest(listed), BTreeMap::from(expected.clone()), "{rotation}");
    }
    // At equal times every daemon chooses the same image.
    let same = ["ami-b", "ami-c", "ami-a"].map(|id| image(id, "x86_64", "2026-01-01T00:00:00Z"));
    assert_eq!(newest(same.to_vec()), [(Architecture::Amd64, boot("ami-c"))].into());
    assert_eq!(newest(Vec::new()), BTreeMap::new());
}

/// Verifies V86.
#[tokio::test(start_paused = true)]
async fn image_is_looked_for_until_it_is_published_and_again_once_it_is_deregistered() {
    let publish = |api: &FakeApi, images: &[(&str, &str)]| {
        let images = images.iter().map(|(id, created)| image(id, created)).collect();
        *api.images.lock().unwrap() = Some(images);
    };
    let (api, ec2) = provider(FakeApi::default());
    publish(&api, &[]);
    let parameters = async || ec2.parameters(&Wanted::default()).await;
    for error in [ec2.catalogue().await.unwrap_err(), parameters().await.unwrap_err()] {
        assert_eq!(error.class, ErrorClass::Invalid);
        let text = error.text();
        assert!(text.ends_with("EC2 has no available image of this id or name"), "{text}");
    }
    let image = async || {
        let parameters = Parameters::from_stored(&parameters().await.unwrap()).unwrap();
        parameters.images[&Architecture::Amd64].id.clone()
    };
    publish(&api, &[("ami-old", "2025"), ("ami-new", "2026")]);
    assert_eq!(image().await, "ami-new");
    publish(&api, &[("ami-old", "2025")]);
    tokio::time::advance(NETWORK_MAX_AGE / 2).await;
    assert_eq!(image().await, "ami-new");
    let deregistered = Failure::Refused {
        code: Some("InvalidAMIID.NotFound".into()),
        message: "The image id '[ami-new]' does not exist".into(),
    };
    api.launch_failures.lock().unwrap().push_back(deregistered);
    let spec = spec(TYPE, parameters().await.unwrap());
    let error = ec2.launch(&spec, "token").await.unwrap_err();
    assert!(error.text().contains("ami-new"), "{}", error.text());
    assert_eq!(image().await, "ami-old");
}

/// Verifies V84.
#[tokio::test]
async fn instances_that_download_the_agent_have_its_architecture() {
    // The list has one image, of x86_64.
    for (agent, has_agent, is_launched) in [
        (Some(Architecture::Amd64), false, true),
        (Some(Architecture::Arm64), false, false),
        (Some(Architecture::Arm64), true, true),
        (None, false, true),
    ] {
        let (_, mut ec2) = provider(FakeApi::default());
        ec2.config.image_has_agent = has_agent;
        let ec2 = ec2.with_agent_for(agent);
        let checked = ec2.check().await;
        assert_eq!(checked.is_ok(), is_launched, "{agent:?} {has_agent}: {checked:?}");
        for error in [checked.err(), ec2.catalogue().await.err()] {
            assert_eq!(error.is_none(), is_launched, "{agent:?} {has_agent}: {error:?}");
            let text = error.map(|error| error.text()).unwrap_or_default();
            let expected = "for arm64, the architecture of gateway.agent";
            assert!(is_launched || text.ends_with(expected), "{text}");
        }
    }
}

/// Returns an API with an instance of a node of cluster c.
fn with_instance_of(node: &str, state: InstanceStateName) -> FakeApi {
    let tags = [(owner::CLUSTER, "c"), (owner::NODE, node)];
    let tags = tags.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    let instance = InstanceDescription { state, tags, ..running("i-1", SUBNET, NODE) };
    FakeApi { instances: vec![instance], ..FakeApi::default() }
}

/// Verifies K26.
#[tokio::test]
async fn instances_of_another_node_are_those_of_its_tags_that_are_not_terminated() {
    use InstanceStateName::{Pending, Running, ShuttingDown, Stopped, Stopping, Terminated};
    for state in [Pending, Running, ShuttingDown, Stopping, Stopped, Terminated] {
        let (_, ec2) = provider(with_instance_of("other", state));
        let found = ec2.has_instances_of("other").await.unwrap();
        assert_eq!(found, state != Terminated, "{state:?}");
        assert!(!ec2.has_instances_of("third").await.unwrap());
    }
}

/// Verifies K26.
#[tokio::test(start_paused = true)]
async fn list_of_another_node_that_fails_or_hangs_is_no_answer() {
    const LIST: &str = "DescribeInstances";
    let (_, ec2) = provider(hanging(&[LIST]));
    let begun = Instant::now();
    ec2.has_instances_of("other").await.unwrap_err();
    assert_eq!(begun.elapsed(), LIST_TIMEOUT);
    let (api, ec2) = provider(FakeApi::default());
    api.denied.lock().unwrap().insert(LIST);
    let error = ec2.has_instances_of("other").await.unwrap_err();
    assert_eq!((error.class, error.doing.as_str()), {
        (ErrorClass::Auth, "list the instances of node other")
    });
}

/// Verifies K26.
#[tokio::test]
async fn place_of_instances_of_other_nodes_is_known_with_the_subnets() {
    let (_, ec2) = provider(FakeApi::default());
    assert_eq!(ec2.shared_place(), None);
    ec2.check().await.unwrap();
    assert_eq!(ec2.shared_place().as_deref(), Some("region us-east-1, vpc-1, cluster c"));
    let without_a_name = Ec2 { owner: Owner::default(), ..ec2 };
    assert_eq!(without_a_name.shared_place(), None);
}
