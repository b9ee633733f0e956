//! Launches that a fault interrupts.

use std::{path::Path, time::Duration};

use kiyot_testcloud::{Instance, Market};
use kiyot_testkit::{Kiyot, LIMIT, output, wait_until};
use serde_json::Value;

use super::{SHORT_LISTING_PERIOD, WAIT, World, pod};

/// Verifies V26.
#[tokio::test]
async fn daemon_killed_during_the_launch_joins_it() {
    let world = World::start().await;
    let (mut kiyot, kubelet) = world.daemon(world.options()).await;
    let spec = pod("killed", WAIT);
    world.faults().set_reply_delay("RunInstances", Duration::from_secs(3600));
    let mut early = kiyot.kubelet().await;
    let config = kubelet.prepare(&spec);
    let calling = tokio::spawn(async move { early.run_sandbox(&config, "").await });
    wait_until("the launch is under way", LIMIT, async || world.launched().pop()).await;
    kiyot.kill9();
    calling.await.unwrap().unwrap_err();
    world.faults().clear();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    let running =
        wait_until("the pod runs", LIMIT, async || kubelet.run_pod(&spec).await.ok()).await;
    assert_eq!(world.running().len(), 1, "{:?}", world.launched());
    world.ends(&mut kubelet, &[&running]).await;
}

/// Verifies V26.
#[tokio::test]
async fn lost_reply_of_a_launch_makes_one_instance() {
    let world = World::start().await;
    let (_kiyot, mut kubelet) = world.daemon(world.options()).await;
    world.faults().lose_replies("RunInstances", 1);
    let running = kubelet.run_pod(&pod("lost", WAIT)).await.unwrap();
    assert_eq!(world.launched().len(), 1, "{:?}", world.launched());
    world.ends(&mut kubelet, &[&running]).await;
}

/// Verifies V26.
#[tokio::test]
async fn launch_moves_to_an_offering_with_capacity() {
    let world = World::start().await;
    let (_kiyot, mut kubelet) = world.daemon(world.options()).await;
    let setup = world.setup().clone();
    let kind = "t3.nano";
    for subnet in &setup.subnets[..2] {
        for market in [Market::Spot, Market::OnDemand] {
            world.faults().set_no_capacity(kind, &subnet.zone, market, true);
        }
    }
    let spec = pod("elsewhere", WAIT).annotation("pod.elotl.co/instance-type", kind);
    let running = kubelet.run_pod(&spec).await.unwrap();
    assert_eq!(world.running()[0].zone, setup.subnets[2].zone);
    world.ends(&mut kubelet, &[&running]).await;
}

/// Returns a pod as the JSON that milpactl prints.
fn pod_object(kiyot: &Kiyot<'_>, name: &str) -> Value {
    object(kiyot, &["get", "pod", name])
}

/// Returns the JSON that a command of milpactl prints.
pub(super) fn object(kiyot: &Kiyot<'_>, verb: &[&str]) -> Value {
    let program = Path::new(env!("CARGO_BIN_EXE_kiyot")).with_file_name("milpactl");
    let (program, socket) =
        (program.to_str().unwrap(), kiyot.socket().with_file_name("admin.sock"));
    let line = [&["--socket", socket.to_str().unwrap()], verb, &["-ojson"]].concat();
    serde_json::from_str(&output(program, &line).unwrap()).unwrap()
}

/// Verifies V64.
#[tokio::test]
async fn launch_that_lacks_capacity_moves_to_another_offering() {
    let world = World::start().await;
    let mut options = world.options();
    options.of_provider.push_str(SHORT_LISTING_PERIOD);
    let (kiyot, mut kubelet) = world.daemon(options).await;
    world.set_installing_for_ever(true);
    let mut caller = kubelet.clone();
    let spec = pod("moved", WAIT).annotation("pod.elotl.co/launch-type", "Spot-Preferred");
    let calling = tokio::spawn(async move { caller.run_pod(&spec).await });
    let refused = world.first_runs_without_agent().await;
    assert!(refused.spot, "{refused:?}");
    world.end(&refused.id, "Server.InsufficientInstanceCapacity", "Insufficient capacity").await;
    let moved = calling.await.unwrap().unwrap();
    assert_eq!(world.launched().len(), 2, "{:?}", world.launched());
    let offering = |instance: &Instance| {
        (instance.instance_type.clone(), instance.zone.clone(), instance.spot)
    };
    assert_ne!(offering(&world.instance_of("moved")), offering(&refused));
    // Other pods avoid the offering as well.
    let next = kubelet.run_pod(&pod("next", WAIT)).await.unwrap();
    assert_ne!(offering(&world.instance_of("next")), offering(&refused));
    // The operator sees the failed start.
    for (name, failures, spot) in [("moved", 1, true), ("next", 0, false)] {
        let status = &pod_object(&kiyot, name)["status"];
        let found = (&status["startFailures"], &status["spotFailure"]);
        assert_eq!(found, (&failures.into(), &spot.into()), "{status:#}");
    }
    world.ends(&mut kubelet, &[&moved, &next]).await;
}

/// Verifies V73.
#[tokio::test]
async fn pod_starts_at_the_built_in_price_if_the_price_list_is_denied() {
    let world = World::start().await;
    world.faults().set_denied("GetProducts", true);
    let (_kiyot, mut kubelet) = world.daemon(world.options()).await;
    let running = kubelet.run_pod(&pod("priced", WAIT)).await.unwrap();
    let calls = world.calls_of("GetProducts");
    assert_eq!(calls.len(), 1, "{calls:?}");
    kubelet.stop_and_remove(&running).await.unwrap();
    world.has_no_cells().await;
}
