//! Faults of EC2, by the class of their error.

use std::time::Duration;

use kiyot_engine::{
    placement::{LaunchRefusal, Market, Offering},
    provider::{ErrorClass, InstanceId, Provider, ProviderError},
    request::CellRequest,
};
use kiyot_testcloud::{Cloud, Credentials, Market as CloudMarket, Outage};
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
async fn missing_capacity_refuses_only_the_offering() {
    let world = World::new().await;
    let zone = world.zone(0);
    world.cloud.faults().set_no_capacity(NANO, &zone, CloudMarket::Spot, true);
    let error = refused(&world).await;
    assert_eq!(error.class, ErrorClass::Capacity);
    assert_eq!(
        error.refusal,
        Some(LaunchRefusal::Offerings(vec![world.offering(0, Market::Spot)]))
    );
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
    assert_eq!(error.refusal, Some(LaunchRefusal::Zone(world.zone(0))));
}

/// Verifies V94.
#[tokio::test]
async fn type_that_account_or_image_refuse_is_the_only_type_refused() {
    let world = World::new().await;
    let other = Offering { instance_type: "t3.micro".into(), ..world.offering(0, Market::Spot) };
    let offerings = [all(&world), vec![other.clone()]].concat();
    let spec = world.spec(&offerings).await;
    let faults = world.cloud.faults();
    for (code, text) in [
        ("InvalidParameterCombination", "not eligible for Free Tier"),
        ("InvalidParameterValue", "does not support an AMI with a boot mode of UEFI"),
        ("UnsupportedOperation", "not supported"),
    ] {
        match code {
            "InvalidParameterCombination" => faults.set_free_plan(&["t3.micro"]),
            code => faults.refuse_type(NANO, code, text),
        }
        let error = world.provider.launch(&spec, code).await.unwrap_err();
        let refusal = LaunchRefusal::Type { code: code.into(), offerings: all(&world) };
        assert_eq!((error.class, &error.refusal), (ErrorClass::Invalid, &Some(refusal)));
        assert!(!error.is_of_request, "{code}");
        assert!(error.text().contains(text), "{}", error.text());
        // The mistake may be what the pod asked for.
        let request = CellRequest { volume_size_gib: Some(11), ..CellRequest::default() };
        let larger = world.spec_for(&offerings, &request).await.unwrap();
        let error = world.provider.launch(&larger, &format!("{code}-2")).await.unwrap_err();
        assert!(error.is_of_request, "{code}");
        faults.clear();
    }
    let spec = world.spec(std::slice::from_ref(&other)).await;
    assert_eq!(world.provider.launch(&spec, "token").await.unwrap().offering, other);
}

/// Verifies V97.
#[tokio::test]
async fn instance_without_rights_on_its_key_ends_with_the_reason_and_its_usual_cause() {
    let world = World::with(|ec2| ec2.kms_key_id = Some("alias/cells".into())).await;
    world.cloud.faults().set_key_denied("alias/cells");
    let launched = world.launch("token").await;
    let listed = wait_until("the instance has ended", LIMIT, async || {
        let listed = world.provider.list_owned().await.unwrap().remove(0);
        (!listed.state.is_alive()).then_some(listed)
    })
    .await;
    assert_eq!(listed.id, launched.id);
    let expected = "Client.InternalError: Client error on launch; usually rights are missing on \
                    the KMS key of a volume (docs/ec2.md)";
    assert_eq!(listed.end_reason.as_deref(), Some(expected));
}

#[tokio::test]
async fn limit_of_spot_instances_refuses_the_market() {
    let world = World::new().await;
    world.cloud.faults().set_spot_limit(Some(0));
    let error = refused(&world).await;
    assert_eq!(error.class, ErrorClass::Capacity);
    let Some(LaunchRefusal::Quota { offerings, .. }) = error.refusal else { panic!("{error:?}") };
    assert_eq!(offerings, [0, 1, 2].map(|zone| world.offering(zone, Market::Spot)));
}

/// Returns the error of a launch with one refusal of EC2, of candidates of two quotas.
async fn refused_with(world: &World, first: Market, code: &str) -> ProviderError {
    let second = if first == Market::Spot { Market::OnDemand } else { Market::Spot };
    let offerings = quotas(world, &[first, second]);
    let spec = world.spec(&offerings).await;
    world.cloud.faults().fail("RunInstances", 400, code, 1);
    world.provider.launch(&spec, code).await.unwrap_err()
}

/// Returns offerings of these markets: of the first zone, of another zone, and of another quota.
fn quotas(world: &World, markets: &[Market]) -> Vec<Offering> {
    let of_market = |market: &Market| {
        let first = world.offering(0, *market);
        let gpu = Offering { instance_type: "g4dn.xlarge".into(), ..first.clone() };
        [first, world.offering(1, *market), gpu]
    };
    markets.iter().flat_map(of_market).collect()
}

#[tokio::test]
async fn quotas_refuse_what_they_count() {
    let world = World::new().await;
    let both = [Market::OnDemand, Market::Spot];
    for (first, code, class, refused) in [
        (both[0], "VcpuLimitExceeded", ErrorClass::Quota, &quotas(&world, &both[..1])[..2]),
        (
            both[1],
            "MaxSpotInstanceCountExceeded",
            ErrorClass::Capacity,
            &quotas(&world, &both[1..])[..2],
        ),
        (both[0], "InstanceLimitExceeded", ErrorClass::Quota, &[]),
        (both[0], "VolumeLimitExceeded", ErrorClass::Quota, &quotas(&world, &both)),
    ] {
        let error = refused_with(&world, first, code).await;
        assert_eq!(error.class, class, "{code}");
        match error.refusal.unwrap() {
            LaunchRefusal::Quota { quota, offerings } => {
                assert_eq!((quota.market, &offerings[..]), (first, refused), "{code}");
                // All types of the family count, unless they are smaller than the launched type.
                let counts = |name: &str| quota.types.contains(name);
                assert_eq!(["m5.24xlarge", NANO].map(counts), [true; 2], "{code}");
                assert_eq!(["a1.medium", "g4dn.xlarge"].map(counts), [false; 2], "{code}");
            }
            refusal if code == "InstanceLimitExceeded" => {
                assert_eq!(refusal, LaunchRefusal::Market(first));
            }
            refusal => {
                assert_eq!(
                    (code, refusal),
                    ("VolumeLimitExceeded", LaunchRefusal::All(refused.to_vec()))
                );
            }
        }
    }
}

#[tokio::test]
async fn account_without_the_role_of_spot_instances_refuses_only_spot() {
    let world = World::new().await;
    let code = "AuthFailure.ServiceLinkedRoleCreationNotPermitted";
    let error = refused_with(&world, Market::Spot, code).await;
    assert_eq!(error.class, ErrorClass::Capacity, "a pod that prefers spot gets on-demand");
    assert_eq!(error.refusal, Some(LaunchRefusal::Market(Market::Spot)));
    assert!(error.text().contains(code), "{}", error.text());
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
    assert_eq!(error.class, ErrorClass::Quota, "{error:?}");
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
async fn launch_that_a_failing_api_may_have_received_is_unanswered() {
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
    // The API listens again after a moment.
    wait_until("the API answers", LIMIT, async || world.provider.list_owned().await.ok()).await;
}

#[tokio::test]
async fn launch_that_fails_after_its_answer_says_why() {
    let world = World::new().await;
    for (token, code, message) in [
        ("volume", "Client.VolumeLimitExceeded", "Volume limit exceeded"),
        ("off", "Client.InstanceInitiatedShutdown", "Instance initiated shutdown"),
        ("internal", "Server.InternalError", "Internal error on launch"),
        (
            "key",
            "Client.InvalidKMSKey.InvalidState",
            "The KMS key provided is in an incorrect state",
        ),
        ("capacity", "Server.InsufficientInstanceCapacity", "Insufficient capacity"),
        ("spot", "Server.SpotInstanceTermination", "Spot instance terminated"),
        ("stopped", "Server.SpotInstanceShutdown", "Spot instance stopped"),
    ] {
        let lacks_capacity = ["capacity", "spot", "stopped"].contains(&token);
        let launched = world.launch(token).await;
        assert_eq!(launched.end_reason, None);
        world.cloud.end(&launched.id.0, code, message).await;
        let listed = world.provider.list_owned().await.unwrap();
        let listed = listed.into_iter().find(|listed| listed.id == launched.id).unwrap();
        for found in [listed, world.provider.describe(&launched.id).await.unwrap()] {
            assert!(!found.state.is_alive());
            assert_eq!(found.end_reason, Some(format!("{code}: {message}")));
            assert_eq!(found.lacks_capacity, lacks_capacity, "{code}");
        }
    }
}

#[tokio::test]
async fn instance_ends_although_the_removal_of_its_routes_fails() {
    let world = World::with_cloud_routes(&["10.8.0.0/16"]).await;
    let launched = world.launch("token").await;
    for code in ["InvalidParameterValue", "Unavailable"] {
        world.cloud.faults().fail("DescribeRouteTables", 503, code, 1);
        let outcomes = world.provider.terminate(std::slice::from_ref(&launched.id)).await;
        outcomes[&launched.id].as_ref().unwrap();
    }
    assert!(world.cloud.instance(&launched.id.0).unwrap().state.is_ended());
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

/// Verifies V81.
#[tokio::test]
async fn not_found_with_credentials_of_another_account_proves_no_end() {
    let world = World::new().await;
    let launched = world.launch("token").await;
    let unknown = InstanceId("i-0123456789abcdef0".into());
    let own = world.provider.describe(&unknown).await.unwrap_err();
    assert_eq!(own.class, ErrorClass::NotFound, "{own}");
    let other = Cloud::start().await;
    let other = world.with_credentials_of(&other).await;
    assert_eq!(other.list_owned().await.unwrap(), []);
    let mut outcomes = other.terminate(std::slice::from_ref(&launched.id)).await;
    for error in [
        other.describe(&launched.id).await.unwrap_err(),
        outcomes.remove(&launched.id).unwrap().unwrap_err(),
    ] {
        assert_eq!(error.class, ErrorClass::Transient, "{error}");
        let text = error.text();
        for part in [&launched.id.0, "may be those of another account", "DescribeSubnets"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }
    assert!(!world.cloud.instance(&launched.id.0).unwrap().state.is_ended());
}
