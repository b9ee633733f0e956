//! Launches that a fault interrupts.

use std::time::Duration;

use kiyot_testcloud::Market;
use kiyot_testkit::{Kiyot, LIMIT, Node, wait_until};

use super::{TestCloud, WAIT, pod};

/// Verifies V26.
#[tokio::test]
async fn daemon_killed_during_the_launch_joins_it() {
    let cloud = TestCloud::start().await;
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, cloud.options()).await;
    let kubelet = kiyot.kubelet().await;
    let spec = pod("killed", WAIT);
    cloud.faults().set_reply_delay("RunInstances", Duration::from_secs(3600));
    let mut early = kiyot.kubelet().await;
    let config = kubelet.prepare(&spec);
    let calling = tokio::spawn(async move { early.run_sandbox(&config, "").await });
    wait_until("the launch is under way", LIMIT, async || cloud.launched().pop()).await;
    kiyot.kill9();
    calling.await.unwrap().unwrap_err();
    cloud.faults().clear();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    let running =
        wait_until("the pod runs", LIMIT, async || kubelet.run_pod(&spec).await.ok()).await;
    assert_eq!(cloud.running().len(), 1, "{:?}", cloud.launched());
    kubelet.stop_and_remove(&running).await.unwrap();
    cloud.has_no_cells().await;
}

/// Verifies V26.
#[tokio::test]
async fn lost_reply_of_a_launch_makes_one_instance() {
    let cloud = TestCloud::start().await;
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, cloud.options()).await;
    let mut kubelet = kiyot.kubelet().await;
    cloud.faults().lose_replies("RunInstances", 1);
    let running = kubelet.run_pod(&pod("lost", WAIT)).await.unwrap();
    assert_eq!(cloud.launched().len(), 1, "{:?}", cloud.launched());
    kubelet.stop_and_remove(&running).await.unwrap();
    cloud.has_no_cells().await;
}

/// Verifies V26.
#[tokio::test]
async fn launch_goes_where_capacity_is() {
    let cloud = TestCloud::start().await;
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, cloud.options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let setup = cloud.setup().clone();
    let kind = "t3.nano";
    for subnet in &setup.subnets[..2] {
        for market in [Market::Spot, Market::OnDemand] {
            cloud.faults().set_no_capacity(kind, &subnet.zone, market, true);
        }
    }
    let spec = pod("elsewhere", WAIT).annotation("pod.elotl.co/instance-type", kind);
    let running = kubelet.run_pod(&spec).await.unwrap();
    assert_eq!(cloud.running()[0].zone, setup.subnets[2].zone);
    kubelet.stop_and_remove(&running).await.unwrap();
    cloud.has_no_cells().await;
}
