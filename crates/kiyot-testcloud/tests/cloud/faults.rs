//! Faults that last until a test ends them: held calls, stale or partial lists, interruptions.

use kiyot_testcloud::{Cloud, Hold, Lists, Outcome, State};
use kiyot_testkit::{LIMIT, wait_until};

use crate::api::{error, id_of, launch, run, state, terminate};

/// Client token that makes launches equal.
const TOKEN: [(&str, &str); 1] = [("ClientToken", "a")];

async fn wait_for_outcomes(cloud: &Cloud, wanted: &[Outcome]) {
    wait_until("the launches have outcomes", LIMIT, async || {
        let calls = cloud.calls_of("RunInstances").into_iter();
        calls.map(|call| call.outcome).eq(wanted.iter().cloned()).then_some(())
    })
    .await;
}

/// Returns the ids in a list of all instances, in order.
async fn listed(cloud: &Cloud) -> Vec<String> {
    let list = cloud.call("DescribeInstances", &[]).await.unwrap().root();
    list.all("instanceId").iter().map(|id| id.text.clone()).collect()
}

#[tokio::test]
async fn held_reply_comes_when_the_hold_ends_and_its_effect_at_once() {
    let cloud = Cloud::start().await;
    cloud.faults().set_hold("RunInstances", Some(Hold::Reply));
    let held = wait_for_outcomes(&cloud, &[Outcome::Held]);
    let launch = async {
        let reply = run(&cloud, &TOKEN).await;
        id_of(&reply.unwrap())
    };
    let release = async {
        held.await;
        assert_eq!(cloud.instances().len(), 1);
        cloud.faults().set_hold("RunInstances", None);
    };
    let (id, ()) = tokio::join!(launch, release);
    assert_eq!(cloud.instances()[0].id, id);
    wait_for_outcomes(&cloud, &[Outcome::Ok]).await;
}

#[tokio::test]
async fn held_effect_comes_when_the_hold_ends_after_its_caller_has_failed() {
    let cloud = Cloud::start().await;
    cloud.faults().set_hold("RunInstances", Some(Hold::Effect));
    for _ in 0..2 {
        run(&cloud, &TOKEN).await.unwrap_err();
    }
    wait_for_outcomes(&cloud, &[Outcome::Held, Outcome::Held]).await;
    assert!(cloud.instances().is_empty());
    cloud.faults().set_hold("RunInstances", None);
    let id = id_of(&run(&cloud, &TOKEN).await.unwrap());
    wait_for_outcomes(&cloud, &[Outcome::Ok, Outcome::Ok, Outcome::Ok]).await;
    let [instance] = &cloud.instances()[..] else { panic!("{:?}", cloud.instances()) };
    assert_eq!(instance.id, id);
}

#[tokio::test]
async fn stale_list_shows_the_instances_as_of_its_begin() {
    let cloud = Cloud::start().await;
    let old = launch(&cloud).await;
    cloud.faults().set_lists(Some(Lists::Stale));
    let new = launch(&cloud).await;
    terminate(&cloud, &old).await;
    let list = cloud.call("DescribeInstances", &[]).await.unwrap();
    assert!(list.body.contains("running") && !list.body.contains(&new));
    assert_eq!(state(&cloud, &old).await, "terminated");
    assert_eq!(state(&cloud, &new).await, "running");
    cloud.faults().set_lists(None);
    assert_eq!(listed(&cloud).await.len(), 2);
}

#[tokio::test]
async fn partial_list_lacks_every_second_instance() {
    let cloud = Cloud::start().await;
    let mut all = Vec::new();
    for _ in 0..4 {
        all.push(launch(&cloud).await);
    }
    cloud.faults().set_lists(Some(Lists::Partial));
    assert_eq!(listed(&cloud).await, [all[1].as_str(), &all[3]]);
    assert_eq!(state(&cloud, &all[0]).await, "running");
}

#[tokio::test]
async fn interrupted_instance_ends_with_its_volume() {
    let cloud = Cloud::start().await;
    let id = launch(&cloud).await;
    cloud.interrupt(&id).await;
    let shown = cloud.call("DescribeInstances", &[("InstanceId.1", &id)]).await.unwrap().root();
    assert_eq!(shown.all("instanceState")[0].at("name"), "terminated");
    assert_eq!(shown.all("stateReason")[0].at("code"), "Server.SpotInstanceTermination");
    let volumes = cloud.call("DescribeVolumes", &[]).await.unwrap().root();
    assert!(volumes.items("volumeSet").is_empty());
    assert!(cloud.calls_of("TerminateInstances").is_empty());
}

#[tokio::test]
async fn repeated_termination_succeeds() {
    let cloud = Cloud::start().await;
    let subnet = cloud.setup().subnets[0].id.clone();
    let interface = [
        ("SubnetId", ""),
        ("NetworkInterface.1.DeviceIndex", "0"),
        ("NetworkInterface.1.SubnetId", subnet.as_str()),
        ("NetworkInterface.1.DeleteOnTermination", "true"),
    ];
    let id = id_of(&run(&cloud, &interface).await.unwrap());
    for _ in 0..3 {
        assert_eq!(error(Ok(terminate(&cloud, &id).await)), "");
    }
    assert_eq!(cloud.instance(&id).unwrap().state, State::Terminated);
}
