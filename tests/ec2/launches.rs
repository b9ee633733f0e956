//! Launches: one instance a token, with the settings of every cell.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use kiyot_config::{ImageFilter, VolumePerformance};
use kiyot_engine::{
    Wanted,
    placement::{Market, Needs},
    provider::{Attachment, ErrorClass, InstanceState, LaunchSpec, Provider},
    request::CellRequest,
};
use kiyot_testcloud::{ImageVolume, Volume};
use kiyot_testkit::{LIMIT, wait_until};

use crate::world::{NANO, World, pod};

/// Verifies A29.
#[tokio::test]
async fn launch_that_succeeds_at_once_is_one_call_and_its_replay_returns_the_same_instance() {
    let world = World::new().await;
    let spec = world.spec(&[world.offering(0, Market::OnDemand)]).await;
    world.cloud.clear_calls();
    let launched = world.provider.launch(&spec, "token").await.unwrap();
    assert_eq!(world.cloud.calls().len(), 1);
    assert_eq!(
        (launched.cell, launched.token.as_deref(), launched.fingerprint.as_deref()),
        (spec.cell.clone(), Some("token"), Some("0123"))
    );
    assert_eq!(launched.offering, world.offering(0, Market::OnDemand));
    assert!(launched.since.is_some());
    let replayed = world.provider.launch(&spec, "token").await.unwrap();
    assert_eq!(replayed.id, launched.id);
    assert_eq!(world.cloud.instances().len(), 1);
}

#[tokio::test]
async fn replay_with_other_parameters_finds_the_instance_of_the_token() {
    let world = World::new().await;
    let spec = world.spec(&[world.offering(0, Market::OnDemand)]).await;
    let launched = world.provider.launch(&spec, "token").await.unwrap();
    let mut changed = spec.clone();
    changed.tags.insert("team".into(), "web".into());
    let found = world.provider.launch(&changed, "token").await.unwrap();
    assert_eq!((found.id, found.cell), (launched.id, spec.cell));
    assert_eq!(world.cloud.instances().len(), 1);
}

/// Verifies A29.
#[tokio::test]
async fn lost_reply_of_a_launch_is_unanswered_and_its_replay_finds_the_instance() {
    let world = World::new().await;
    let spec = world.spec(&[world.offering(0, Market::Spot)]).await;
    world.cloud.faults().lose_replies("RunInstances", 1);
    let error = world.provider.launch(&spec, "token").await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Unanswered, "{}", error.text());
    let launched = world.provider.launch(&spec, "token").await.unwrap();
    assert_eq!(launched.offering.market, Market::Spot);
    assert_eq!(world.cloud.instances().len(), 1);
}

#[tokio::test]
async fn replay_does_not_return_the_terminated_instance_of_its_token() {
    let world = World::new().await;
    let spec = world.spec(&[world.offering(0, Market::OnDemand)]).await;
    let launched = world.provider.launch(&spec, "token").await.unwrap();
    world.provider.terminate(std::slice::from_ref(&launched.id)).await;
    let error = world.provider.launch(&spec, "token").await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Ended, "{}", error.text());
    assert!(error.text().contains("IdempotentInstanceTerminated"), "{}", error.text());
}

#[tokio::test]
async fn launched_instance_has_the_settings_of_every_cell() {
    let world = World::new().await;
    world.launch("token").await;
    let call = world.cloud.calls_of("RunInstances").remove(0);
    for (key, value) in [
        ("ClientToken", "token"),
        ("MinCount", "1"),
        ("MaxCount", "1"),
        ("InstanceType", NANO),
        ("InstanceInitiatedShutdownBehavior", "terminate"),
        ("MetadataOptions.HttpTokens", "required"),
        ("MetadataOptions.HttpPutResponseHopLimit", "1"),
        ("MetadataOptions.HttpEndpoint", "enabled"),
        ("BlockDeviceMapping.1.Ebs.Encrypted", "true"),
        ("BlockDeviceMapping.1.Ebs.DeleteOnTermination", "true"),
        ("BlockDeviceMapping.1.Ebs.VolumeSize", "10"),
        ("BlockDeviceMapping.1.Ebs.VolumeType", "gp3"),
        ("CreditSpecification.CpuCredits", "standard"),
        ("NetworkInterface.1.AssociatePublicIpAddress", "false"),
        ("NetworkInterface.1.DeleteOnTermination", "true"),
    ] {
        assert_eq!(call.parameters.get(key).map(String::as_str), Some(value), "{key}");
    }
    for (number, resource) in [(1, "instance"), (2, "volume"), (3, "network-interface")] {
        let of = |key: &str| &call.parameters[&format!("TagSpecification.{number}.{key}")];
        assert_eq!(of("ResourceType"), resource);
        let tags: Vec<(&str, &str)> = (1..=10)
            .map(|tag| (of(&format!("Tag.{tag}.Key")).as_str(), tag))
            .map(|(key, tag)| (key, of(&format!("Tag.{tag}.Value")).as_str()))
            .collect();
        for tag in [
            ("Name", "default/web-0"),
            ("app", "web"),
            ("kiyot:cluster", "production"),
            ("kiyot:node", "worker-1"),
            ("kiyot:pod", "web-0"),
            ("kiyot:pod-uid", "1-2-3"),
            ("team", "checkout"),
        ] {
            assert!(tags.contains(&tag), "{tag:?} is not in {tags:?}");
        }
    }
}

#[tokio::test]
async fn annotations_of_a_pod_choose_its_instance() {
    let world = World::new().await;
    let request = CellRequest {
        security_groups: vec!["sg-of-the-pod".into()],
        volume_size_gib: Some(42),
        sustained_cpu: true,
        ..CellRequest::default()
    };
    let offering = world.offering(1, Market::Spot);
    let spec = world.spec_for(std::slice::from_ref(&offering), &request).await.unwrap();
    // The cloud may not know the group. The test checks the request.
    let _ = world.provider.launch(&spec, "token").await;
    let call = world.cloud.calls_of("RunInstances").remove(0);
    let subnet = &world.cloud.setup().subnets[1].id;
    for (key, value) in [
        ("NetworkInterface.1.SubnetId", subnet.as_str()),
        ("NetworkInterface.1.SecurityGroupId.1", &world.cloud.setup().security_group),
        ("NetworkInterface.1.SecurityGroupId.2", "sg-of-the-pod"),
        ("BlockDeviceMapping.1.Ebs.VolumeSize", "42"),
        ("CreditSpecification.CpuCredits", "unlimited"),
        ("InstanceMarketOptions.MarketType", "spot"),
        ("InstanceMarketOptions.SpotOptions.SpotInstanceType", "one-time"),
    ] {
        assert_eq!(call.parameters.get(key).map(String::as_str), Some(value), "{key}");
    }
    let groups = (0..5).map(|number| format!("sg-{number}")).collect();
    let request = CellRequest { security_groups: groups, ..CellRequest::default() };
    let error = world.spec_for(&[offering], &request).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Invalid);
    let refusal = "makes 6 security groups with ec2.security_groups; allowed: 5";
    assert!(error.text().contains(refusal), "{}", error.text());
}

fn with_storage(gib: u64) -> Arc<Needs> {
    Arc::new(Needs { storage_bytes: gib << 30, ..Needs::default() })
}

/// Verifies V95, V97, V109.
#[tokio::test]
async fn volumes_are_at_least_as_large_as_the_image_encrypted_and_deleted_with_the_instance() {
    let world = World::with(|ec2| {
        ec2.volume_performance = VolumePerformance {
            iops: Some(4000),
            throughput: Some(500),
            initialization_rate: Some(200),
        };
        ec2.kms_key_id = Some("alias/cells".into());
    })
    .await;
    let of_image = |device: &str, gib, ends_with_instance| ImageVolume {
        device: device.into(),
        gib,
        ends_with_instance,
    };
    world
        .cloud
        .set_image_volumes(vec![of_image("/dev/sda1", 30, true), of_image("/dev/sdb", 5, false)]);
    for (volume_size_gib, storage_gib, root_gib) in [
        (None, 0, 30),
        (Some(20), 0, 30),
        (Some(42), 0, 42),
        // The size has room for the image's system and for images of the pod.
        (Some(42), 20, 54),
        (Some(60), 20, 60),
    ] {
        let request = CellRequest { volume_size_gib, ..CellRequest::default() };
        let wanted = Wanted { request, needs: with_storage(storage_gib), ..pod() };
        let spec = world.spec_of(&[world.offering(0, Market::OnDemand)], &wanted).await.unwrap();
        let launched = world.provider.launch(&spec, spec.cell.as_str()).await.unwrap();
        let volume = |device: &str, gib| Volume {
            device: device.into(),
            gib,
            encrypted: true,
            kms_key: "alias/cells".into(),
            ends_with_instance: true,
        };
        let volumes = [volume("/dev/sda1", root_gib), volume("/dev/sdb", 5)];
        assert_eq!(world.cloud.volumes(), volumes);
        let call = world.cloud.calls_of("RunInstances").pop().unwrap();
        for (option, value) in
            [("Iops", "4000"), ("Throughput", "500"), ("VolumeInitializationRate", "200")]
        {
            let key = format!("BlockDeviceMapping.1.Ebs.{option}");
            assert_eq!(call.parameters.get(&key).map(String::as_str), Some(value), "{key}");
        }
        world.provider.terminate(std::slice::from_ref(&launched.id)).await;
        world.cloud.settle(&launched.id.0);
        assert_eq!(world.cloud.volumes(), []);
    }
    let wanted = Wanted { needs: with_storage(65_536), ..pod() };
    let offering = world.offering(0, Market::OnDemand);
    let error = world.spec_of(&[offering], &wanted).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Invalid);
    assert!(error.text().contains("of ephemeral-storage: need a root volume"), "{}", error.text());
}

/// Verifies V78.
#[tokio::test]
async fn cell_is_launched_in_the_subnet_of_the_node_without_configured_subnets() {
    let world = World::new().await;
    let node = world.running_node(1).await;
    let provider = world.with_node_at(node.addresses[0]).await;
    provider.check().await.unwrap();
    let catalogue = provider.catalogue().await.unwrap();
    let offers = catalogue.entries().iter().flat_map(|entry| &entry.offers);
    let zones: BTreeSet<String> = offers.map(|offer| offer.zone.clone()).collect();
    assert_eq!(zones, [world.zone(1)].into());
    let parameters = provider.parameters(&Wanted::default()).await.unwrap();
    let subnet = &world.cloud.setup().subnets[1].id;
    assert!(parameters.values().any(|value| value.contains(subnet)), "{parameters:?}");
    let other = &world.cloud.setup().subnets[0].id;
    assert!(!parameters.values().any(|value| value.contains(other)), "{parameters:?}");
    let stranger = world.with_node_at([10, 99, 0, 1].into()).await;
    let error = stranger.check().await.unwrap_err();
    assert!(error.text().contains("has the node's address 10.99.0.1"), "{}", error.text());
}

/// Returns a parameter of a launch for a pod with these annotations.
async fn launched_with(world: &World, request: &CellRequest, key: &str) -> Option<String> {
    let spec = world.spec_for(&[world.offering(0, Market::OnDemand)], request).await.unwrap();
    let launched = world.provider.launch(&spec, spec.cell.as_str()).await.unwrap();
    let call = world.cloud.calls_of("RunInstances").pop().unwrap();
    assert_eq!(call.parameters["ClientToken"], launched.token.unwrap());
    call.parameters.get(key).cloned()
}

#[tokio::test]
async fn public_address_is_configured_and_a_pod_can_decline_it() {
    const KEY: &str = "NetworkInterface.1.AssociatePublicIpAddress";
    let world = World::with(|ec2| ec2.public_address = true).await;
    let declined = CellRequest { private_ip_only: true, ..CellRequest::default() };
    for (request, is_public) in [(CellRequest::default(), "true"), (declined.clone(), "false")] {
        assert_eq!(launched_with(&world, &request, KEY).await.as_deref(), Some(is_public));
    }
    let world = World::new().await;
    assert_eq!(launched_with(&world, &declined, KEY).await.as_deref(), Some("false"));
}

#[tokio::test]
async fn instance_profile_is_that_of_the_pod_or_of_the_configuration() {
    const ARN: &str = "arn:aws:iam::123456789012:instance-profile/of-the-pod";
    const CONFIGURED: &str = "arn:aws:iam::123456789012:instance-profile/configured";
    let of_pod = CellRequest { instance_profile: Some(ARN.into()), ..CellRequest::default() };
    let world = World::with(|ec2| ec2.instance_profile = Some("configured".into())).await;
    for (request, key, sent, shown) in [
        (CellRequest::default(), "IamInstanceProfile.Name", "configured", CONFIGURED),
        (of_pod, "IamInstanceProfile.Arn", ARN, ARN),
    ] {
        assert_eq!(launched_with(&world, &request, key).await.as_deref(), Some(sent));
        let token = world.cloud.calls_of("RunInstances").pop().unwrap();
        let filter = [
            ("Filter.1.Name", "client-token"),
            ("Filter.1.Value.1", &token.parameters["ClientToken"]),
        ];
        let reply = world.cloud.call("DescribeInstances", &filter).await.unwrap();
        let root = reply.root();
        let profile = root.all("iamInstanceProfile");
        assert_eq!((profile.len(), profile[0].at("arn")), (1, shown), "{}", reply.body);
    }
    let world = World::new().await;
    let without = CellRequest::default();
    assert_eq!(launched_with(&world, &without, "IamInstanceProfile.Name").await, None);
    assert_eq!(launched_with(&world, &without, "IamInstanceProfile.Arn").await, None);
}

#[tokio::test]
async fn key_pair_is_that_of_the_configuration() {
    let world = World::with(|ec2| ec2.key_name = Some("ops".into())).await;
    let spec = world.spec(&[world.offering(0, Market::OnDemand)]).await;
    let error = world.provider.launch(&spec, "early").await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Invalid);
    assert!(error.text().contains("'ops' does not exist"), "{}", error.text());
    world.cloud.call("CreateKeyPair", &[("KeyName", "ops")]).await.unwrap();
    let key = launched_with(&world, &CellRequest::default(), "KeyName").await;
    assert_eq!(key.as_deref(), Some("ops"));
    let world = World::new().await;
    assert_eq!(launched_with(&world, &CellRequest::default(), "KeyName").await, None);
}

#[tokio::test]
async fn slowly_pending_instance_is_alive_and_can_be_attached() {
    let world = World::new().await;
    world.cloud.faults().set_pending_for(Duration::MAX);
    let launched = world.launch("token").await;
    assert_eq!(launched.state, InstanceState::Pending);
    let listed = world.provider.list_owned().await.unwrap();
    assert_eq!((listed.len(), listed[0].state), (1, InstanceState::Pending));
    let attached = world.provider.attach(&launched.id, &Attachment::default()).await.unwrap();
    assert_eq!(attached.addresses, launched.addresses);
    world.cloud.settle(&launched.id.0);
    let described = world.provider.describe(&launched.id).await.unwrap();
    assert_eq!(described.state, InstanceState::Running);
}

#[tokio::test]
async fn address_of_a_cell_is_the_private_address_of_its_instance() {
    let world = World::new().await;
    let launched = world.launch("token").await;
    let address = world.cloud.instance(&launched.id.0).unwrap().address;
    world.cloud.clear_calls();
    let attached = world.provider.attach(&launched.id, &Attachment::default()).await.unwrap();
    assert_eq!(attached.addresses, [address.parse::<std::net::IpAddr>().unwrap()]);
    assert_eq!(attached.network, None);
    let described = world.cloud.calls_of("DescribeInstances");
    assert!(described.is_empty(), "the address of a launch is known: {described:?}");
}

#[tokio::test]
async fn address_of_a_launch_is_known_while_lists_do_not_show_its_instance() {
    let world = World::new().await;
    world.cloud.faults().set_visible_after(Duration::MAX);
    let launched = world.launch("token").await;
    assert_eq!(world.provider.list_owned().await.unwrap(), []);
    // Calls with the instance fail until EC2 knows it.
    let to = Attachment { has_instance_profile: true, ..Attachment::default() };
    let attached = world.provider.attach(&launched.id, &to).await.unwrap();
    assert_eq!(attached.addresses, launched.addresses);
}

#[tokio::test]
async fn termination_ends_an_instance_beside_an_unknown_id() {
    let world = World::new().await;
    let launched = world.launch("token").await;
    let unknown = kiyot_engine::provider::InstanceId("i-0123456789abcdef0".into());
    let outcomes = world.provider.terminate(&[unknown.clone(), launched.id.clone()]).await;
    assert_eq!(outcomes[&unknown].as_ref().unwrap_err().class, ErrorClass::NotFound);
    outcomes[&launched.id].as_ref().unwrap();
    world.cloud.settle(&launched.id.0);
    let described = world.provider.describe(&launched.id).await.unwrap();
    assert_eq!(described.state, InstanceState::Terminated);
    let error = world.provider.describe(&unknown).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::NotFound);
}

/// Registers an image in the world's cloud, and returns its id.
async fn register(world: &World, name: &str) -> String {
    let image = [
        ("Name", name),
        ("Architecture", "x86_64"),
        ("RootDeviceName", "/dev/xvda"),
        ("VirtualizationType", "hvm"),
    ];
    let reply = world.cloud.call("RegisterImage", &image).await.unwrap();
    reply.root().all("imageId")[0].text.clone()
}

/// Returns the time of an image's creation.
async fn created(world: &World, id: &str) -> String {
    let reply = world.cloud.call("DescribeImages", &[("ImageId.1", id)]).await.unwrap();
    reply.root().all("creationDate")[0].text.clone()
}

/// Registers an image that is newer than another by the clock of the API, which has seconds.
async fn register_after(world: &World, name: &str, other: &str) -> String {
    let before = created(world, other).await;
    let mut number = 0;
    wait_until("an image is newer", LIMIT, async || {
        number += 1;
        let id = register(world, &format!("{name}-{number}")).await;
        (created(world, &id).await > before).then_some(id)
    })
    .await
}

#[tokio::test]
async fn newest_image_of_an_owner_is_launched() {
    let world = World::new().await;
    let named = async |owner: &str| {
        let image = ImageFilter::Named { owner: owner.into(), name: "debian-12-*".into() };
        world.restarted_with(|ec2| ec2.image = Some(image)).await
    };
    let none = "no available image of this id or name";
    let error = named("self").await.check().await.unwrap_err();
    assert!(error.text().contains(none), "{}", error.text());
    let first = register(&world, "debian-12-first").await;
    let newest = register_after(&world, "debian-12-newer", &first).await;
    let other = register_after(&world, "debian-13", &newest).await;
    let provider = named("self").await;
    provider.check().await.unwrap();
    let parameters = provider.parameters(&Wanted::default()).await.unwrap();
    let has = |id: &str| parameters.values().any(|value| value.contains(id));
    assert_eq!((has(&first), has(&newest), has(&other)), (false, true, false), "{parameters:?}");
    let spec = world.spec(&[world.offering(0, Market::OnDemand)]).await;
    provider.launch(&LaunchSpec { parameters, ..spec }, "token").await.unwrap();
    let call = world.cloud.calls_of("RunInstances").remove(0);
    assert_eq!(call.parameters["ImageId"], newest);
    // The images belong to another owner.
    let error = named("099720109477").await.check().await.unwrap_err();
    assert!(error.text().contains(none), "{}", error.text());
}
