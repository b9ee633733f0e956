//! Launches that can't succeed. The pod's error has the reason.

use kiyot_testkit::wait_for;

use super::{SHORT_LISTING_PERIOD, WAIT, World, pod};

/// An image that does not exist.
const NO_IMAGE: &str = "ami-0123456789abcdef0";
/// The call that closes the metadata service of an instance.
const CLOSE_METADATA: &str = "ModifyInstanceMetadataOptions";
/// A stand-in for curl that downloads another program.
const OTHER_PROGRAM: &str = "#!/bin/sh\n\
    while [ $# -gt 0 ]; do [ \"$1\" != --output ] || echo other > \"$2\"; shift; done\n";

/// A stand-in for curl that sends another token to the gateway.
const OTHER_TOKEN: &str = "#!/bin/sh\nsed 's/:[^:]*\"$/:other\"/' | exec /usr/bin/curl \"$@\"\n";
/// A stand-in for apt-get and dnf whose repositories have no package.
const NO_PACKAGES: &str = "#!/bin/sh\n\
    case \"$*\" in *install*) echo \"${0##*/}: no package containerd\"; exit 100 ;; esac\n";

/// Verifies V38.
#[tokio::test]
async fn full_subnet_moves_the_launch_to_another_zone_until_all_are_full() {
    let world = World::start().await;
    let (_kiyot, mut kubelet) = world.daemon(world.options()).await;
    let subnets = world.setup().subnets.clone();
    for subnet in &subnets[..2] {
        world.faults().set_subnet_full(&subnet.id, true);
    }
    let running = kubelet.run_pod(&pod("elsewhere", WAIT)).await.unwrap();
    assert_eq!(world.instance_of("elsewhere").zone, subnets[2].zone);
    // Full zones are also remembered for types that the first launch did not try.
    world.clear_calls();
    let other = pod("other-type", WAIT).annotation("pod.elotl.co/instance-type", "c6i.32xlarge");
    let other = kubelet.run_pod(&other).await.unwrap();
    assert_eq!(world.calls_of("RunInstances").len(), 1);
    kubelet.stop_and_remove(&other).await.unwrap();
    world.clear_calls();
    world.faults().set_subnet_full(&subnets[2].id, true);
    for _ in 0..2 {
        let error = kubelet.run_pod(&pod("nowhere", WAIT)).await.unwrap_err();
        let reason = "not enough free addresses in subnet";
        assert!(error.message().contains(reason), "{error}");
    }
    // At most one call is made for each zone.
    let calls = world.calls_of("RunInstances");
    assert!(calls.len() <= 2 * subnets.len(), "{calls:?}");
    world.ends(&mut kubelet, &[&running]).await;
}

/// Verifies V94.
#[tokio::test]
async fn type_that_the_account_may_not_launch_gives_way_to_the_next() {
    let world = World::start().await;
    let (_kiyot, mut kubelet) = world.daemon(world.options()).await;
    world.faults().fail("RunInstances", 400, "InvalidParameterCombination", 1);
    let running = kubelet.run_pod(&pod("free-tier", WAIT)).await.unwrap();
    assert_eq!(world.calls_of("RunInstances").len(), 2);
    // Each call of the kubelet tries three types, until the cheapest is an allowed type.
    let allowed = ["t3.small", "t4g.small", "c7i-flex.large", "m7i-flex.large"];
    world.faults().set_free_plan(&allowed);
    let free = pod("free-plan", WAIT);
    let mut errors = Vec::new();
    let other = loop {
        world.clear_calls();
        match kubelet.run_pod(&free).await {
            Ok(running) => break running,
            Err(error) => errors.push(error.message().to_owned()),
        }
        let calls = world.calls_of("RunInstances").len();
        assert!((1..=3).contains(&calls) && errors.len() < 30, "{calls}: {errors:?}");
    };
    assert!(errors.iter().all(|it| it.contains("not eligible for Free Tier")), "{errors:?}");
    let launched = world.instance_of("free-plan").instance_type;
    assert!(allowed.contains(&launched.as_str()), "{launched}: {errors:?}");
    world.ends(&mut kubelet, &[&running, &other]).await;
}

/// Verifies V97.
#[tokio::test]
async fn cell_without_rights_on_its_key_fails_its_pod_with_reason_and_cause() {
    let world = World::start().await;
    let mut options = world.options();
    options.of_provider.push_str(SHORT_LISTING_PERIOD);
    options.of_provider.push_str("kms_key_id = \"alias/cells\"\n");
    let (_kiyot, mut kubelet) = world.daemon(options).await;
    world.faults().set_key_denied("alias/cells");
    let error = kubelet.run_pod(&pod("keyless", WAIT)).await.unwrap_err();
    let message = error.message();
    assert!(message.contains("Client.InternalError: Client error on launch"), "{message}");
    assert!(message.contains("on the KMS key of a volume (docs/ec2.md)"), "{message}");
    wait_for("the instances have ended", || world.left().is_empty()).await;
}

/// Verifies A13.
#[tokio::test]
async fn full_quota_costs_a_call_for_each_size_and_not_for_each_pod() {
    let world = World::start().await;
    let (_kiyot, mut kubelet) = world.daemon(world.options()).await;
    world.faults().set_vcpu_limit(Some(0));
    for number in 0..5 {
        let error = kubelet.run_pod(&pod(&format!("pod-{number}"), WAIT)).await.unwrap_err();
        assert!(error.message().contains("VcpuLimitExceeded"), "{error}");
    }
    // The types have one or two vCPUs: at most two calls.
    let calls = world.calls_of("RunInstances");
    assert!((1..=2).contains(&calls.len()), "{calls:?}");
    assert!(world.launched().is_empty());
}

/// Verifies V38.
#[tokio::test]
async fn unknown_image_is_named_in_the_error_of_its_pod() {
    let world = World::start().await;
    let mut options = world.options();
    let image = world.setup().image.clone();
    options.of_provider = options.of_provider.replace(&image, NO_IMAGE);
    let (_kiyot, mut kubelet) = world.daemon(options).await;
    let error = kubelet.run_pod(&pod("imageless", WAIT)).await.unwrap_err();
    assert!(error.message().contains(NO_IMAGE), "{error}");
    assert!(world.launched().is_empty());
}

/// Verifies V38.
#[tokio::test]
async fn image_that_is_deregistered_in_mid_run_is_named_in_the_error_of_the_next_pod() {
    let world = World::start().await;
    let (_kiyot, mut kubelet) = world.daemon(world.options()).await;
    let running = kubelet.run_pod(&pod("running", WAIT)).await.unwrap();
    let image = world.setup().image.clone();
    let reply = world.call("DeregisterImage", &[("ImageId", &image)]).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    let error = kubelet.run_pod(&pod("imageless", WAIT)).await.unwrap_err();
    assert!(error.message().contains("InvalidAMIID.NotFound"), "{error}");
    assert!(error.message().contains(&image), "{error}");
    world.ends(&mut kubelet, &[&running]).await;
}

/// Verifies V38.
#[tokio::test]
async fn agent_with_another_digest_ends_its_instance_and_the_console_is_in_the_error() {
    let world = World::start().await;
    world.add_to_images("/usr/local/sbin/curl", OTHER_PROGRAM.as_bytes(), 0o755);
    let mut options = world.options();
    options.of_provider.push_str(SHORT_LISTING_PERIOD);
    let (_kiyot, mut kubelet) = world.daemon(options).await;
    let error = kubelet.run_pod(&pod("other", WAIT)).await.unwrap_err();
    let message = error.message();
    assert!(message.contains("1 computed checksum did NOT match"), "{message}");
    assert!(message.contains("the cell is not installed (status 1)"), "{message}");
    wait_for("the instances have ended", || world.left().is_empty()).await;
}

/// Verifies V38.
#[tokio::test]
async fn package_that_cannot_be_installed_ends_its_instance_and_the_console_is_in_the_error() {
    let world = World::start().await;
    // A program that can't be executed counts as absent.
    world.add_to_images("/usr/bin/curl", b"", 0o644);
    let mut options = world.options();
    options.of_provider.push_str(SHORT_LISTING_PERIOD);
    let (_kiyot, mut kubelet) = world.daemon(options).await;
    for (program, absent) in [("apt-get", "dnf"), ("dnf", "apt-get")] {
        world.add_to_images(&format!("/usr/local/sbin/{program}"), NO_PACKAGES.as_bytes(), 0o755);
        for directory in ["/usr/bin", "/usr/local/sbin"] {
            world.add_to_images(&format!("{directory}/{absent}"), b"", 0o644);
        }
        let error = kubelet.run_pod(&pod(program, WAIT)).await.unwrap_err();
        let message = error.message();
        let reason = format!("{program}: no package containerd");
        assert!(message.contains(&reason), "{message}");
        assert!(message.contains("the cell is not installed (status 100)"), "{message}");
        wait_for("the instances have ended", || world.left().is_empty()).await;
    }
}

/// Verifies V104, V106.
#[tokio::test]
async fn boots_that_never_enrol_pause_launches_in_their_zone() {
    let world = World::start().await;
    world.add_to_images("/usr/bin/curl", b"", 0o644);
    for program in ["apt-get", "dnf"] {
        world.add_to_images(&format!("/usr/local/sbin/{program}"), NO_PACKAGES.as_bytes(), 0o755);
    }
    let mut options = world.options();
    let (first, others) = world.setup().subnets.split_first().unwrap();
    for other in others {
        options.of_provider = options.of_provider.replace(&format!(", {:?}", other.id), "");
    }
    options.of_provider.push_str(SHORT_LISTING_PERIOD);
    let (kiyot, mut kubelet) = world.daemon(options).await;
    kubelet.run_pod(&pod("fails", WAIT)).await.unwrap_err();
    assert_eq!(world.launched().len(), 3);
    let error = kubelet.run_pod(&pod("refused", WAIT)).await.unwrap_err();
    let message = error.message();
    let reason = format!("3 boots in {} in a row did not enrol; the console of", first.zone);
    assert!(message.contains(&reason) && message.contains("no package containerd"), "{message}");
    assert_eq!(world.launched().len(), 3, "no further instance");
    assert!(kiyot.log().contains("launches of cells pause in a zone"), "{}", kiyot.log());
}

/// Verifies V38.
#[tokio::test]
async fn download_that_the_gateway_refuses_fails_the_pod_with_the_console() {
    let world = World::start().await;
    world.add_to_images("/usr/local/sbin/curl", OTHER_TOKEN.as_bytes(), 0o755);
    let (mut kiyot, _kubelet) = world.daemon(world.options()).await;
    let refused = "The requested URL returned error: 401";
    let error = world.error_of_launch_that_says(&mut kiyot, &pod("tokenless", WAIT), refused).await;
    let message = error.message();
    assert!(message.contains("did not connect within"), "{message}");
    assert!(message.contains(refused), "{message}");
    assert!(!kiyot.log().contains("certificate issued"), "{}", kiyot.log());
    world.has_no_cells().await;
}

/// Verifies V60.
#[tokio::test]
async fn pod_whose_metadata_service_stays_open_is_refused_and_a_throttled_call_is_repeated() {
    let world = World::start().await;
    let (_kiyot, mut kubelet) = world.daemon(world.options()).await;
    world.faults().set_denied(CLOSE_METADATA, true);
    let error = kubelet.run_pod(&pod("open", WAIT)).await.unwrap_err();
    let message = error.message();
    assert!(message.contains("close the metadata service of instance i-"), "{message}");
    assert!(message.contains("UnauthorizedOperation"), "{message}");
    assert!(message.contains(CLOSE_METADATA), "{message}");
    world.has_no_cells().await;

    world.faults().clear();
    world.clear_calls();
    world.faults().fail(CLOSE_METADATA, 503, "RequestLimitExceeded", 2);
    let running = kubelet.run_pod(&pod("closed", WAIT)).await.unwrap();
    assert_eq!(world.calls_of(CLOSE_METADATA).len(), 3);
    world.ends(&mut kubelet, &[&running]).await;
}
