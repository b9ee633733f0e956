//! Terminations and other calls that EC2 refuses.

use kiyot_testkit::{LIMIT, wait_until};

use super::{
    SHORT_LISTING_PERIOD, WAIT, World, are_unharmed, local_pod, pod, run_in_the_end, sandbox_ends,
};

/// Verifies V35.
#[tokio::test]
async fn pod_of_a_reclaimed_instance_ends_although_terminations_are_denied() {
    let world = World::start().await;
    let mut options = world.options();
    options.of_provider.push_str(SHORT_LISTING_PERIOD);
    let (_kiyot, mut kubelet) = world.daemon(options).await;
    let kept = kubelet.run_pod(&pod("kept", WAIT)).await.unwrap();
    let spec = pod("reclaimed", WAIT);
    let reclaimed = kubelet.run_pod(&spec).await.unwrap();
    world.faults().set_denied("TerminateInstances", true);
    world.interrupt(&world.instance_of("reclaimed").id).await;
    sandbox_ends(&mut kubelet, &reclaimed.sandbox).await;
    are_unharmed(&mut kubelet, &[&kept]).await;
    kubelet.stop_and_remove(&reclaimed).await.unwrap();
    // The next attempt of the pod runs.
    let mut spec = spec;
    spec.attempt = 1;
    let next = run_in_the_end(&mut kubelet, &spec).await;
    are_unharmed(&mut kubelet, &[&kept, &next]).await;
    world.faults().clear();
    world.ends(&mut kubelet, &[&kept, &next]).await;
}

/// Verifies A15, V32, V33.
#[tokio::test]
async fn denied_launch_is_the_reason_of_its_pod_and_harms_no_other() {
    let world = World::start().await;
    let (mut kiyot, mut kubelet) = world.daemon(world.options()).await;
    let local = kubelet.run_pod(&local_pod()).await.unwrap();
    let kept = kubelet.run_pod(&pod("kept", WAIT)).await.unwrap();
    world.faults().set_denied("RunInstances", true);
    let spec = pod("denied", WAIT);
    let again = "no cell is launched for";
    for reason in ["UnauthorizedOperation", again, again, again] {
        let error = kubelet.run_pod(&spec).await.unwrap_err();
        assert!(error.message().contains(reason), "{error}");
        assert!(error.message().contains("UnauthorizedOperation"), "{error}");
        are_unharmed(&mut kubelet, &[&kept, &local]).await;
    }
    // The launch is tried once and logged once, however often the kubelet repeats its call.
    assert_eq!(world.calls_of("RunInstances").len(), 2);
    let log = kiyot.log();
    let denied = log.lines().filter(|line| line.contains("UnauthorizedOperation"));
    assert_eq!(denied.count(), 1, "{log}");
    world.faults().clear();
    // The restart replaces the pause of three minutes after a launch that was not permitted.
    kiyot.restart().await;
    let mut kubelet = kiyot.kubelet().await;
    let running = run_in_the_end(&mut kubelet, &spec).await;
    world.ends(&mut kubelet, &[&kept, &local, &running]).await;
}

/// Verifies V33.
#[tokio::test]
async fn pod_gets_its_warm_cell_although_tags_are_denied() {
    let world = World::start().await;
    let (_kiyot, mut kubelet, warm) = world.warm_daemon().await;
    world.faults().set_denied("CreateTags", true);
    let running = kubelet.run_pod(&pod("taken", WAIT)).await.unwrap();
    let status = kubelet.sandbox_status(&running.sandbox).await.unwrap();
    assert_eq!(status.network.unwrap().ip, warm.address);
    wait_until("the tags are denied", LIMIT, async || {
        (!world.calls_of("CreateTags").is_empty()).then_some(())
    })
    .await;
    are_unharmed(&mut kubelet, &[&running]).await;
    kubelet.stop_and_remove(&running).await.unwrap();
    world.reaches(&warm.id, kiyot_testcloud::State::Terminated).await;
}
