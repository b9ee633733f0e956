//! Faults of the API and of instances, as a kubelet sees them.

use kiyot_testcloud::{Cloud, Outage};
use kiyot_testkit::{Container, LIMIT, Pod, wait_until};

use super::{WAIT, World, pod};

/// Verifies V27.
#[tokio::test]
async fn agent_that_never_starts_fails_its_pod_with_the_console() {
    let world = World::start().await;
    let mut options = world.options();
    // A program without the command `service`.
    options.sections.push_str("agent = \"/bin/true\"\n");
    options.milpa.push_str("launch_timeout = \"5s\"\n");
    let (_kiyot, mut kubelet) = world.daemon(options).await;
    let error = kubelet.run_pod(&pod("silent", WAIT)).await.unwrap_err();
    let message = error.message();
    assert!(message.contains("did not connect within 5 s"), "{message}");
    assert!(message.contains("its console ends: user-data ended with status 0"), "{message}");
    world.has_no_cells().await;
}

/// Verifies V28.
#[tokio::test]
async fn api_that_is_down_delays_cells_alone() {
    let world = World::start().await;
    let mut options = world.options();
    options.milpa.push_str("launch_timeout = \"20s\"\n");
    world.faults().set_outage(Some(Outage::Hang));
    let (_kiyot, mut kubelet) = world.daemon(options).await;
    let local = Pod::new("local").container(Container::script("main", WAIT));
    let local = kubelet.run_pod(&local).await.unwrap();
    let spec = pod("waits", WAIT);
    let error = kubelet.run_pod(&spec).await.unwrap_err();
    let message = error.message();
    assert!(message.starts_with("the provider of cells: read subnets and images"), "{message}");
    assert!(message.ends_with("DescribeSubnets: not answered within 20 s"), "{message}");
    world.faults().clear();
    let running =
        wait_until("the pod runs", LIMIT, async || kubelet.run_pod(&spec).await.ok()).await;
    for outage in [Outage::Refused, Outage::Reset, Outage::Unavailable, Outage::InternalError] {
        world.faults().set_outage(Some(outage));
        kubelet.exec_sync(&running.container("main").id, &["true"]).await.unwrap();
        kubelet.exec_sync(&local.container("main").id, &["true"]).await.unwrap();
    }
    world.faults().clear();
    world.ends(&mut kubelet, &[&running, &local]).await;
}

/// Verifies V28.
#[tokio::test]
async fn another_endpoint_proves_no_end() {
    let world = World::start().await;
    let other = Cloud::start().await;
    let (mut kiyot, mut kubelet) = world.daemon(world.options()).await;
    let running = kubelet.run_pod(&pod("elsewhere", WAIT)).await.unwrap();
    let main = running.container("main").id.clone();
    kiyot.stop().await;
    let configuration = std::fs::read_to_string(kiyot.configuration()).unwrap();
    let changed = configuration.replace(&world.endpoint(), &other.endpoint());
    std::fs::write(kiyot.configuration(), changed).unwrap();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    wait_until("the other endpoint is asked for instances", LIMIT, async || {
        (!other.calls_of("DescribeInstances").is_empty()).then_some(())
    })
    .await;
    wait_until("the pod answers", LIMIT, async || kubelet.exec_sync(&main, &["true"]).await.ok())
        .await;
    kiyot.stop().await;
    std::fs::write(kiyot.configuration(), configuration).unwrap();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    world.ends(&mut kubelet, &[&running]).await;
}
