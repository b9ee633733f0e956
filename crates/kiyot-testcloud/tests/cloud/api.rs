//! Calls of the API: client tokens, lists, faults.

use std::time::Duration;

use kiyot_testcloud::{
    Cloud, Credentials, ImageVolume, Market, Outage, Outcome, Reply, State, Volume,
};
use kiyot_testkit::{LIMIT, wait_until};

/// Calls RunInstances in the first subnet, with additional parameters.
pub(crate) async fn run(cloud: &Cloud, more: &[(&str, &str)]) -> Result<Reply, String> {
    let setup = cloud.setup();
    let needed = [
        ("ImageId", setup.image.as_str()),
        ("SubnetId", &setup.subnets[0].id),
        ("MinCount", "1"),
        ("MaxCount", "1"),
    ];
    let mut parameters: Vec<_> =
        needed.into_iter().filter(|(key, _)| more.iter().all(|(own, _)| own != key)).collect();
    if more.iter().all(|(key, _)| *key != "InstanceType") {
        parameters.push(("InstanceType", "t3.nano"));
    }
    parameters.extend(more);
    cloud.call("RunInstances", &parameters).await
}

pub(crate) fn id_of(reply: &Reply) -> String {
    let root = reply.root();
    let ids = root.all("instanceId");
    ids.first().unwrap_or_else(|| panic!("{}", reply.body)).text.clone()
}

pub(crate) async fn launch(cloud: &Cloud) -> String {
    id_of(&run(cloud, &[]).await.unwrap())
}

async fn describe(cloud: &Cloud, id: &str) -> Reply {
    cloud.call("DescribeInstances", &[("InstanceId.1", id)]).await.unwrap()
}

/// Returns the state that the API shows, or the code of the error.
pub(crate) async fn state(cloud: &Cloud, id: &str) -> String {
    let reply = describe(cloud, id).await;
    reply.error().unwrap_or_else(|| reply.root().all("instanceState")[0].at("name").to_owned())
}

async fn wait_for_state(cloud: &Cloud, id: &str, wanted: &str) {
    wait_until(format!("{id} is {wanted}"), LIMIT, async || {
        (state(cloud, id).await == wanted).then_some(())
    })
    .await;
}

pub(crate) async fn terminate(cloud: &Cloud, id: &str) -> Reply {
    cloud.call("TerminateInstances", &[("InstanceId.1", id)]).await.unwrap()
}

pub(crate) fn error(reply: Result<Reply, String>) -> String {
    reply.unwrap().error().unwrap_or_default()
}

#[tokio::test]
async fn repeated_client_token_returns_the_same_reservation() {
    let cloud = Cloud::start().await;
    let token = ("ClientToken", "a");
    let first = run(&cloud, &[token]).await.unwrap();
    let again = run(&cloud, &[token]).await.unwrap();
    assert_eq!(id_of(&first), id_of(&again));
    assert_eq!(first.root().at("reservationId"), again.root().at("reservationId"));
    let other = run(&cloud, &[("ClientToken", "b")]).await.unwrap();
    assert_ne!(id_of(&first), id_of(&other));
    assert_eq!(cloud.instances().len(), 2);
    assert_eq!(
        error(run(&cloud, &[token, ("InstanceType", "t3.micro")]).await),
        "IdempotentParameterMismatch"
    );
    terminate(&cloud, &id_of(&first)).await;
    assert_eq!(error(run(&cloud, &[token]).await), "IdempotentInstanceTerminated");
    assert_eq!(cloud.instances().len(), 2);
}

#[tokio::test]
async fn concurrent_launches_with_a_token_make_one_instance() {
    let cloud = Cloud::start().await;
    let token = [("ClientToken", "a")];
    let (a, b, c) = tokio::join!(run(&cloud, &token), run(&cloud, &token), run(&cloud, &token));
    let ids = [a, b, c].map(|reply| id_of(&reply.unwrap()));
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
    assert_eq!(cloud.instances().len(), 1);
}

#[tokio::test]
async fn young_instance_is_not_found_until_it_is_visible() {
    let cloud = Cloud::start().await;
    cloud.faults().set_visible_after(Duration::MAX);
    let hidden = launch(&cloud).await;
    assert_eq!(state(&cloud, &hidden).await, "InvalidInstanceID.NotFound");
    let list = cloud.call("DescribeInstances", &[]).await.unwrap();
    assert!(!list.body.contains(&hidden));
    assert_eq!(terminate(&cloud, &hidden).await.error().unwrap(), "InvalidInstanceID.NotFound");
    assert_eq!(
        error(cloud.call("CreateTags", &[("ResourceId.1", &hidden), ("Tag.1.Key", "a")]).await),
        "InvalidInstanceID.NotFound"
    );
    cloud.faults().set_visible_after(Duration::from_millis(300));
    let late = launch(&cloud).await;
    wait_for_state(&cloud, &late, "running").await;
    assert!(cloud.instance(&late).unwrap().launched.elapsed() >= Duration::from_millis(300));
}

#[tokio::test]
async fn passing_states_last_as_long_as_they_are_set() {
    let cloud = Cloud::start().await;
    cloud.faults().set_pending_for(Duration::MAX);
    cloud.faults().set_shutting_down_for(Duration::MAX);
    let id = launch(&cloud).await;
    assert_eq!(state(&cloud, &id).await, "pending");
    let pending = [("Filter.1.Name", "instance-state-name"), ("Filter.1.Value.1", "pending")];
    let running = [pending[0], ("Filter.1.Value.1", "running")];
    let listed = cloud.call("DescribeInstances", &pending).await.unwrap();
    assert!(listed.body.contains(&id));
    let listed = cloud.call("DescribeInstances", &running).await.unwrap();
    assert!(!listed.body.contains(&id));
    cloud.settle(&id);
    assert_eq!(state(&cloud, &id).await, "running");
    let ended = terminate(&cloud, &id).await.root();
    assert_eq!(ended.all("previousState")[0].at("name"), "running");
    assert_eq!(ended.all("currentState")[0].at("name"), "shutting-down");
    assert_eq!(state(&cloud, &id).await, "shutting-down");
    cloud.settle(&id);
    let shown = describe(&cloud, &id).await.root();
    assert_eq!(shown.all("instanceState")[0].at("name"), "terminated");
    assert_eq!(shown.all("stateReason")[0].at("code"), "Client.UserInitiatedShutdown");
    assert!(shown.all("privateIpAddress").is_empty());
}

#[tokio::test]
async fn capacity_is_refused_by_type_zone_and_market() {
    let cloud = Cloud::start().await;
    let zone = cloud.setup().subnets[0].zone.clone();
    cloud.faults().set_no_capacity("t3.nano", &zone, Market::Spot, true);
    let spot = ("InstanceMarketOptions.MarketType", "spot");
    let refused = run(&cloud, &[spot]).await.unwrap();
    assert_eq!((refused.status, refused.error().as_deref()), {
        (500, Some("InsufficientInstanceCapacity"))
    });
    assert_eq!(error(run(&cloud, &[]).await), "");
    assert_eq!(error(run(&cloud, &[spot, ("InstanceType", "t3.micro")]).await), "");
    let other = cloud.setup().subnets[1].id.clone();
    let elsewhere = run(&cloud, &[spot, ("SubnetId", &other)]).await.unwrap();
    assert_eq!(elsewhere.root().all("instanceLifecycle")[0].text, "spot");
    cloud.faults().set_no_capacity("*", "*", Market::OnDemand, true);
    assert_eq!(error(run(&cloud, &[]).await), "InsufficientInstanceCapacity");
    cloud.faults().clear();
    assert_eq!(error(run(&cloud, &[spot]).await), "");
}

#[tokio::test]
async fn quotas_and_addresses_are_refused_at_their_limits() {
    let cloud = Cloud::start().await;
    let spot = ("InstanceMarketOptions.MarketType", "spot");
    cloud.faults().set_vcpu_limit(Some(2));
    cloud.faults().set_spot_limit(Some(1));
    let id = launch(&cloud).await;
    assert_eq!(error(run(&cloud, &[]).await), "VcpuLimitExceeded");
    terminate(&cloud, &id).await;
    assert_eq!(error(run(&cloud, &[]).await), "");
    assert_eq!(error(run(&cloud, &[spot]).await), "");
    assert_eq!(error(run(&cloud, &[spot]).await), "MaxSpotInstanceCountExceeded");
    cloud.faults().clear();
    let subnet = cloud.setup().subnets[0].id.clone();
    cloud.faults().set_subnet_full(&subnet, true);
    assert_eq!(error(run(&cloud, &[]).await), "InsufficientFreeAddressesInSubnet");
    cloud.faults().set_subnet_full(&subnet, false);
    assert_eq!(error(run(&cloud, &[]).await), "");
}

#[tokio::test]
async fn invalid_launch_parameters_are_refused() {
    let cloud = Cloud::start().await;
    let refused = async |more: &[(&str, &str)]| error(run(&cloud, more).await);
    assert_eq!(refused(&[("InstanceType", "x9.huge")]).await, "InvalidParameterValue");
    assert_eq!(refused(&[("ImageId", "ami-0123456789abcdef0")]).await, "InvalidAMIID.NotFound");
    assert_eq!(refused(&[("SubnetId", "subnet-0123")]).await, "InvalidSubnetID.NotFound");
    assert_eq!(refused(&[("UserData", "%")]).await, "InvalidUserData.Malformed");
    assert_eq!(refused(&[("UserData", &"AAAA".repeat(5600))]).await, "InvalidParameterValue");
    let zone = cloud.setup().subnets[0].zone.clone();
    cloud.faults().set_not_offered("t3.nano", &zone);
    assert_eq!(refused(&[]).await, "Unsupported");
    let by_zone = ("LocationType", "availability-zone");
    let offered = cloud.call("DescribeInstanceTypeOfferings", &[by_zone]).await.unwrap().root();
    let zones = |name: &str| {
        let items = offered.items("instanceTypeOfferingSet").iter();
        items
            .filter(|item| item.at("instanceType") == name)
            .map(|item| item.at("location").to_owned())
            .collect::<Vec<_>>()
    };
    assert!(!zones("t3.nano").contains(&zone) && zones("t3.micro").contains(&zone));
    assert!(cloud.instances().is_empty());
}

#[tokio::test]
async fn denied_action_and_dry_run_have_no_effect() {
    let cloud = Cloud::start().await;
    let dry = run(&cloud, &[("DryRun", "true")]).await.unwrap();
    assert_eq!((dry.status, dry.error().as_deref()), (412, Some("DryRunOperation")));
    cloud.faults().set_denied("RunInstances", true);
    let denied = run(&cloud, &[("DryRun", "true")]).await.unwrap();
    assert_eq!((denied.status, denied.error().as_deref()), (403, Some("UnauthorizedOperation")));
    assert_eq!(error(run(&cloud, &[]).await), "UnauthorizedOperation");
    assert_eq!(error(cloud.call("DescribeInstances", &[]).await), "");
    assert!(cloud.instances().is_empty());
    cloud.faults().set_denied("RunInstances", false);
    let id = launch(&cloud).await;
    let dry = [("InstanceId.1", id.as_str()), ("DryRun", "true")];
    assert_eq!(error(cloud.call("TerminateInstances", &dry).await), "DryRunOperation");
    wait_for_state(&cloud, &id, "running").await;
}

#[tokio::test]
async fn refused_credentials_fail_every_call() {
    let cloud = Cloud::start().await;
    for (refusal, code) in [
        (Credentials::Wrong, "AuthFailure"),
        (Credentials::Expired, "RequestExpired"),
        (Credentials::Unknown, "InvalidClientTokenId"),
    ] {
        cloud.faults().set_credentials(Some(refusal));
        assert_eq!(error(run(&cloud, &[]).await), code);
        assert_eq!(error(cloud.call("DescribeInstances", &[]).await), code);
    }
    cloud.faults().set_credentials(None);
    assert_eq!(error(run(&cloud, &[]).await), "");
}

#[tokio::test]
async fn terminate_with_an_unknown_id_ends_no_instance() {
    let cloud = Cloud::start().await;
    let id = launch(&cloud).await;
    let ids = [("InstanceId.1", id.as_str()), ("InstanceId.2", "i-0123456789abcdef0")];
    let refused = cloud.call("TerminateInstances", &ids).await.unwrap();
    assert_eq!(refused.error().as_deref(), Some("InvalidInstanceID.NotFound"));
    assert!(refused.body.contains("i-0123456789abcdef0") && !refused.body.contains(&id));
    wait_for_state(&cloud, &id, "running").await;
    terminate(&cloud, &id).await;
    wait_for_state(&cloud, &id, "terminated").await;
}

#[tokio::test]
async fn empty_bucket_refuses_its_action_alone() {
    let cloud = Cloud::start().await;
    cloud.faults().set_throttled(true);
    // The bucket precedes the permissions: a denied call takes a token, and moto gets no call.
    cloud.faults().set_denied("RunInstances", true);
    let refused = wait_until("a launch is refused", LIMIT, async || {
        let replies = tokio::join!(run(&cloud, &[]), run(&cloud, &[]), run(&cloud, &[]));
        let replies = [replies.0, replies.1, replies.2].map(|reply| reply.unwrap());
        replies.into_iter().find(|reply| reply.status != 403)
    })
    .await;
    assert_eq!((refused.status, refused.error().as_deref()), (503, Some("RequestLimitExceeded")));
    assert_eq!(error(cloud.call("DescribeInstances", &[]).await), "");
    cloud.faults().clear();
    assert_eq!(error(run(&cloud, &[]).await), "");
}

#[tokio::test]
async fn lost_reply_has_its_effect() {
    let cloud = Cloud::start().await;
    cloud.faults().lose_replies("RunInstances", 1);
    let token = [("ClientToken", "a")];
    run(&cloud, &token).await.unwrap_err();
    let [instance] = &cloud.instances()[..] else { panic!("{:?}", cloud.instances()) };
    assert_eq!(id_of(&run(&cloud, &token).await.unwrap()), instance.id);
    let outcomes: Vec<_> =
        cloud.calls_of("RunInstances").into_iter().map(|call| call.outcome).collect();
    assert_eq!(outcomes, [Outcome::Lost, Outcome::Ok]);
}

#[tokio::test]
async fn late_reply_does_not_delay_its_effect() {
    let cloud = Cloud::start().await;
    cloud.faults().set_reply_delay("RunInstances", Duration::from_secs(3600));
    let call = run(&cloud, &[]);
    let launched = wait_until("the instance exists", LIMIT, async || {
        cloud.instances().first().map(|instance| instance.id.clone())
    });
    tokio::select! {
        reply = call => panic!("{reply:?}"),
        id = launched => assert!(id.starts_with("i-")),
    }
}

#[tokio::test]
async fn outage_answers_no_call_and_ends() {
    let cloud = Cloud::start().await;
    let id = launch(&cloud).await;
    for (outage, code) in
        [(Outage::Unavailable, "Unavailable"), (Outage::InternalError, "InternalError")]
    {
        cloud.faults().set_outage(Some(outage));
        assert_eq!(terminate(&cloud, &id).await.error().as_deref(), Some(code));
    }
    let terminates = [("InstanceId.1", id.as_str())];
    for outage in [Outage::Reset, Outage::Refused] {
        cloud.faults().set_outage(Some(outage));
        cloud.call("TerminateInstances", &terminates).await.unwrap_err();
    }
    wait_until("connections are refused", LIMIT, async || {
        let failure = cloud.call("DescribeInstances", &[]).await.unwrap_err();
        failure.contains("refused").then_some(())
    })
    .await;
    cloud.faults().set_outage(None);
    wait_until("the API is up", LIMIT, async || cloud.call("DescribeInstances", &[]).await.ok())
        .await;
    assert_eq!(state(&cloud, &id).await, "running");
    cloud.faults().set_outage(Some(Outage::Hang));
    let hung = tokio::time::timeout(
        Duration::from_millis(200),
        cloud.call("TerminateInstances", &terminates),
    );
    hung.await.unwrap_err();
    cloud.faults().set_outage(None);
    assert_eq!(state(&cloud, &id).await, "running");
}

#[tokio::test]
async fn failure_of_an_action_lasts_for_its_count() {
    let cloud = Cloud::start().await;
    cloud.faults().fail("DescribeInstances", 400, "OptInRequired", 2);
    for code in ["OptInRequired", "OptInRequired", ""] {
        assert_eq!(error(cloud.call("DescribeInstances", &[]).await), code);
    }
}

#[tokio::test]
async fn ignored_options_of_a_launch_are_shown() {
    let cloud = Cloud::start().await;
    let options = [
        ("MetadataOptions.HttpTokens", "required"),
        ("MetadataOptions.HttpPutResponseHopLimit", "2"),
        ("InstanceMarketOptions.MarketType", "spot"),
        ("ClientToken", "a-token"),
        ("TagSpecification.1.ResourceType", "instance"),
        ("TagSpecification.1.Tag.1.Key", "owner"),
        ("TagSpecification.1.Tag.1.Value", "me"),
    ];
    let id = id_of(&run(&cloud, &options).await.unwrap());
    let shown = describe(&cloud, &id).await.root();
    let item = shown.all("instancesSet")[0].children[0].clone();
    assert_eq!(item.at("metadataOptions/httpTokens"), "required");
    assert_eq!(item.at("metadataOptions/httpPutResponseHopLimit"), "2");
    assert_eq!(item.at("metadataOptions/httpEndpoint"), "enabled");
    assert_eq!(item.at("instanceLifecycle"), "spot");
    assert_eq!(item.at("clientToken"), "a-token");
    assert!(item.at("privateIpAddress").starts_with("10.77."), "{}", item.at("privateIpAddress"));
    let by_tag = [("Filter.1.Name", "tag:owner"), ("Filter.1.Value.1", "me")];
    assert!(cloud.call("DescribeInstances", &by_tag).await.unwrap().body.contains(&id));
}

#[tokio::test]
async fn spot_prices_are_a_share_of_the_on_demand_price() {
    let cloud = Cloud::start().await;
    let asked = [("InstanceType.1", "t3.nano"), ("ProductDescription.1", "Linux/UNIX")];
    let root = cloud.call("DescribeSpotPriceHistory", &asked).await.unwrap().root();
    let items = root.items("spotPriceHistorySet");
    assert_eq!(items.len(), 6);
    assert!(items.iter().all(|item| item.at("spotPrice") == "0.001820"), "{items:?}");
    let paged = [("AvailabilityZone", "us-east-1a"), ("MaxResults", "100")];
    let first = cloud.call("DescribeSpotPriceHistory", &paged).await.unwrap().root();
    assert_eq!(first.items("spotPriceHistorySet").len(), 100);
    assert_eq!(first.at("nextToken"), "100");
}

#[tokio::test]
async fn console_output_is_posted_after_its_delay_and_shown_at_once_with_latest() {
    let cloud = Cloud::start().await;
    let id = launch(&cloud).await;
    cloud.set_console(&id, b"hello\n");
    let output = async |id: &str, latest: &str| {
        let asked = [("InstanceId", id), ("Latest", latest)];
        let reply = cloud.call("GetConsoleOutput", &asked).await.unwrap();
        reply.error().unwrap_or_else(|| reply.root().at("output").to_owned())
    };
    assert_eq!(output(&id, "false").await, "");
    assert_eq!(output(&id, "true").await, "aGVsbG8K");
    cloud.faults().set_console_after(Duration::ZERO);
    assert_eq!(output(&id, "false").await, "aGVsbG8K");
    let xen = id_of(&run(&cloud, &[("InstanceType", "t2.nano")]).await.unwrap());
    assert_eq!(output(&xen, "true").await, "UnsupportedOperation");
}

#[tokio::test]
async fn types_that_image_or_account_refuse_are_named_and_others_are_launched() {
    let cloud = Cloud::start().await;
    let launched = async |kind: &str| error(run(&cloud, &[("InstanceType", kind)]).await);
    cloud.faults().refuse_type("t2.nano", "InvalidParameterValue", "boot mode");
    assert_eq!(launched("t2.nano").await, "InvalidParameterValue");
    cloud.faults().set_free_plan(&["t3.micro"]);
    assert_eq!(launched("t3.nano").await, "InvalidParameterCombination");
    assert_eq!(launched("t3.micro").await, "");
}

#[tokio::test]
async fn volumes_of_image_and_launch_exist_and_may_outlive_their_instance() {
    let cloud = Cloud::start().await;
    let volume = |device: &str, gib, ends_with_instance| ImageVolume {
        device: device.to_owned(),
        gib,
        ends_with_instance,
    };
    cloud.set_image_volumes(vec![volume("/dev/xvda", 30, true), volume("/dev/sdb", 5, false)]);
    let root = ("BlockDeviceMapping.1.DeviceName", "/dev/xvda");
    let of_size = |gib| [root, ("BlockDeviceMapping.1.Ebs.VolumeSize", gib)];
    assert_eq!(error(run(&cloud, &of_size("10")).await), "InvalidBlockDeviceMapping");
    for (option, value, code) in [
        ("KmsKeyId", "alias/a", "InvalidParameterDependency"),
        ("Iops", "4000", "InvalidParameterCombination"),
        ("VolumeInitializationRate", "50", "InvalidParameterValue"),
    ] {
        let option = format!("BlockDeviceMapping.1.Ebs.{option}");
        let options = [&of_size("30")[..], &[(option.as_str(), value)]].concat();
        assert_eq!(error(run(&cloud, &options).await), code, "{option}");
    }
    let id = id_of(&run(&cloud, &of_size("40")).await.unwrap());
    let shown = |volumes: Vec<Volume>| -> Vec<(String, u32, bool)> {
        volumes.into_iter().map(|it| (it.device, it.gib, it.encrypted)).collect()
    };
    let other = ("/dev/sdb".to_owned(), 5, false);
    assert_eq!(shown(cloud.volumes()), [("/dev/xvda".to_owned(), 40, false), other.clone()]);
    terminate(&cloud, &id).await;
    wait_for_state(&cloud, &id, "terminated").await;
    assert_eq!(shown(cloud.volumes()), [other]);
}

#[tokio::test]
async fn launch_with_a_denied_key_ends_after_its_answer() {
    let cloud = Cloud::start().await;
    cloud.faults().set_key_denied("alias/a");
    let volume = [
        ("BlockDeviceMapping.1.DeviceName", "/dev/xvda"),
        ("BlockDeviceMapping.1.Ebs.VolumeSize", "8"),
        ("BlockDeviceMapping.1.Ebs.Encrypted", "true"),
        ("BlockDeviceMapping.1.Ebs.KmsKeyId", "alias/a"),
    ];
    let id = id_of(&run(&cloud, &volume).await.unwrap());
    wait_for_state(&cloud, &id, "terminated").await;
    assert_eq!(cloud.instance(&id).unwrap().reason.0, "Client.InternalError");
}

#[tokio::test]
async fn stopped_instance_starts_again() {
    let cloud = Cloud::start().await;
    let id = launch(&cloud).await;
    let ids = [("InstanceId.1", id.as_str())];
    assert_eq!(error(cloud.call("StopInstances", &ids).await), "");
    wait_for_state(&cloud, &id, "stopped").await;
    assert_eq!(error(cloud.call("StartInstances", &ids).await), "");
    wait_for_state(&cloud, &id, "running").await;
    terminate(&cloud, &id).await;
    wait_for_state(&cloud, &id, "terminated").await;
    assert_eq!(error(cloud.call("StartInstances", &ids).await), "IncorrectInstanceState");
    assert_eq!(cloud.instance(&id).unwrap().state, State::Terminated);
}

#[tokio::test]
async fn calls_are_recorded_with_their_parameters() {
    let cloud = Cloud::start().await;
    cloud.clear_calls();
    cloud.call("DescribeVpcs", &[("VpcId.1", &cloud.setup().vpc)]).await.unwrap();
    cloud.call("DescribeInstances", &[("InstanceId.1", "i-0123456789abcdef0")]).await.unwrap();
    let calls = cloud.calls();
    assert_eq!(calls[0].action, "DescribeVpcs");
    assert_eq!(calls[0].parameters["VpcId.1"], cloud.setup().vpc);
    assert_eq!(calls[0].outcome, Outcome::Ok);
    assert_eq!(calls[1].outcome, Outcome::Error("InvalidInstanceID.NotFound".to_owned()));
}

#[tokio::test]
async fn default_resources_exist() {
    let cloud = Cloud::start().await;
    let owned = [("Owner.1", "self"), ("Filter.1.Name", "name"), ("Filter.1.Value.1", "kiyot-*")];
    let images = cloud.call("DescribeImages", &owned).await.unwrap().root();
    assert_eq!(images.items("imagesSet")[0].at("imageId"), cloud.setup().image);
    for subnet in &cloud.setup().subnets {
        let found = cloud.call("DescribeSubnets", &[("SubnetId.1", &subnet.id)]).await.unwrap();
        assert_eq!(found.root().items("subnetSet")[0].at("availabilityZone"), subnet.zone);
    }
    let types =
        cloud.call("DescribeInstanceTypes", &[("InstanceType.1", "t3.nano")]).await.unwrap();
    assert_eq!(types.root().items("instanceTypeSet").len(), 1);
    let behaviour = async |id: &str| {
        let attribute =
            [("InstanceId", id), ("InstanceInitiatedShutdownBehavior.Value", "terminate")];
        cloud.call("ModifyInstanceAttribute", &attribute).await.unwrap()
    };
    let id = launch(&cloud).await;
    assert!(cloud.instance(&id).unwrap().stops_on_shutdown);
    assert_eq!(behaviour(&id).await.status, 200);
    assert!(!cloud.instance(&id).unwrap().stops_on_shutdown);
}
