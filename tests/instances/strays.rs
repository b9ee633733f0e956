//! Instances without a cell of this daemon.

use std::time::Duration;

use kiyot_testcloud::{Instance, State};
use kiyot_testkit::{LIMIT, wait_until};

use super::{SHORT_LISTING_PERIOD, WAIT, World, are_unharmed, pod, run_in_the_end};

/// Time after which a cell without a daemon ends by itself.
const ORPHAN_TIMEOUT: Duration = Duration::from_secs(5);
/// A cell without a record.
const UNKNOWN_CELL: &str = "cell-aaaaaaaaaaaa";

/// Launches an instance with the parameters of another, some of them changed. Without user data it
/// runs no cell.
async fn launch_like(
    world: &World,
    instance: &Instance,
    changed: &[(&str, &str)],
    has_user_data: bool,
) -> String {
    let token = instance.client_token.as_str();
    let mut launches = world.calls_of("RunInstances");
    launches.retain(|call| call.parameters.get("ClientToken").is_some_and(|its| its == token));
    let parameters = launches.remove(0).parameters;
    let other = format!("like-{token}-{}", changed.len());
    let kept = parameters.iter().filter(|(key, _)| has_user_data || *key != "UserData");
    let parameters = kept.map(|(key, value)| {
        let new = changed.iter().find(|(old, _)| value == old).map(|(_, new)| *new);
        (key.as_str(), if value == token { other.as_str() } else { new.unwrap_or(value) })
    });
    let reply = world.call("RunInstances", &parameters.collect::<Vec<_>>()).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.root().all("instanceId")[0].text.clone()
}

/// Verifies V37.
#[tokio::test]
async fn stray_is_ended_and_instances_of_others_are_not_touched() {
    let world = World::start().await;
    let mut options = world.options();
    options.of_provider.push_str(SHORT_LISTING_PERIOD);
    let (kiyot, mut kubelet) = world.daemon(options).await;
    let running = kubelet.run_pod(&pod("running", WAIT)).await.unwrap();
    let own = world.instance_of("running");
    let (cell, fingerprint) =
        (own.tags["kiyot:cell"].clone(), own.tags["kiyot:fingerprint"].clone());
    let unknown = (cell.as_str(), UNKNOWN_CELL);
    // Counted before the launch: the first sighting may follow at once.
    let lists = || world.calls_of("DescribeInstances").len();
    let before = lists();
    let stray = launch_like(&world, &own, &[unknown], false).await;
    let of_other_node =
        launch_like(&world, &own, &[unknown, ("worker-1", "worker-2")], false).await;
    let others = (fingerprint.as_str(), "of another daemon");
    let of_other_daemon = launch_like(&world, &own, &[unknown, others, ("", "")], false).await;
    world.reaches(&stray, State::Terminated).await;
    assert!(lists() >= before + 2, "the stray was ended before its second sighting");
    for untouched in [&of_other_node, &of_other_daemon, &own.id] {
        assert_eq!(world.instance(untouched).unwrap().state, State::Running, "{untouched}");
    }
    let log = kiyot.log();
    let is_named = |line: &str| line.contains(&of_other_daemon) && line.contains("ERROR");
    assert!(log.lines().any(is_named), "{log}");
    assert!(!log.contains(&of_other_node), "{log}");
    let spec = pod("waits", WAIT);
    let error = kubelet.run_pod(&spec).await.unwrap_err();
    assert!(error.message().contains(&of_other_daemon), "{error}");
    are_unharmed(&mut kubelet, &[&running]).await;
    world.change("TerminateInstances", &of_other_daemon).await;
    let waited = run_in_the_end(&mut kubelet, &spec).await;
    for running in [&running, &waited] {
        kubelet.stop_and_remove(running).await.unwrap();
    }
    wait_until("the cells have ended", LIMIT, async || {
        let left = world.running();
        (left.len() == 1 && left[0].id == of_other_node).then_some(())
    })
    .await;
}

/// Verifies V37.
#[tokio::test]
async fn replaced_node_waits_until_the_cells_of_the_previous_node_have_ended() {
    let world = World::start().await;
    let mut options = world.options();
    options.milpa.push_str(&format!("orphan_timeout = \"{}s\"\n", ORPHAN_TIMEOUT.as_secs()));
    options.of_provider.push_str(SHORT_LISTING_PERIOD);
    let (mut kiyot, mut kubelet) = world.daemon(options.clone()).await;
    let earlier = kubelet.run_pod(&pod("earlier", WAIT)).await.unwrap();
    let instance = world.instance_of("earlier").id;
    // Another state directory has another certificate authority. The previous daemon is killed
    // after the first refusal, so that the cell's time without a daemon starts then, however slow
    // the machine is.
    options.name = "replaced";
    let (replaced, mut kubelet) = world.daemon(options).await;
    wait_until("the previous instance is noticed", LIMIT, async || {
        replaced.log().contains(&instance).then_some(())
    })
    .await;
    let spec = pod("later", WAIT);
    let error = kubelet.run_pod(&spec).await.unwrap_err();
    assert!(error.message().contains(&instance), "{error}");
    // The previous daemon lives: its cell outlasts the timeout.
    tokio::time::sleep(ORPHAN_TIMEOUT * 2).await;
    assert_eq!(world.instance(&instance).unwrap().state, State::Running);
    kiyot.kill9();
    world.reaches(&instance, State::Terminated).await;
    assert_eq!(world.calls_of("TerminateInstances").len(), 0);
    let later = run_in_the_end(&mut kubelet, &spec).await;
    world.ends(&mut kubelet, &[&later]).await;
    kubelet.forget(&earlier.spec);
}

/// Verifies L1.
#[tokio::test]
async fn token_presented_by_another_machine_is_refused_and_logged_and_its_pod_is_unharmed() {
    let world = World::start().await;
    let (kiyot, mut kubelet) = world.daemon(world.options()).await;
    let running = kubelet.run_pod(&pod("running", WAIT)).await.unwrap();
    let own = world.instance_of("running");
    // The user data of the pod's instance has leaked: another machine boots from it.
    let thief = launch_like(&world, &own, &[("worker-1", "worker-2")], true).await;
    wait_until("the daemon logs an alarm", LIMIT, async || {
        let is_alarm = |line: &str| {
            line.contains("ERROR") && line.contains("spent token presented with a second key")
        };
        kiyot.log().lines().any(is_alarm).then_some(())
    })
    .await;
    assert_eq!(kiyot.log().matches("certificate issued").count(), 1, "{}", kiyot.log());
    are_unharmed(&mut kubelet, &[&running]).await;
    world.change("TerminateInstances", &thief).await;
    world.ends(&mut kubelet, &[&running]).await;
}
