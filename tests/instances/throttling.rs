//! Calls that EC2 refuses because there are too many.

use kiyot_testcloud::Outcome;
use kiyot_testkit::{LIMIT, wait_until};
use tokio::task::JoinSet;

use super::{WAIT, World, pod};

/// Pods that start together: one more than the burst that EC2 allows.
const PODS: usize = 6;
/// Maximal number of calls of a launch. Its replays have pauses of 3, 6 and 12 s.
const MAX_CALLS_PER_POD: usize = 4;

/// Verifies V34.
#[tokio::test]
async fn throttled_launches_of_many_pods_succeed() {
    let world = World::start().await;
    let (_kiyot, mut kubelet) = world.daemon(world.options()).await;
    world.faults().set_throttled(true);
    let mut starting = JoinSet::new();
    for number in 0..PODS {
        let (mut kubelet, spec) = (kubelet.clone(), pod(&format!("pod-{number}"), WAIT));
        starting.spawn(async move { kubelet.run_pod(&spec).await });
    }
    let launches = || {
        let mut calls = world.calls_of("RunInstances");
        calls.retain(|call| call.parameters.contains_key("ClientToken"));
        calls
    };
    let refused = Outcome::Error("RequestLimitExceeded".to_owned());
    // Other users of the account use up the rate.
    wait_until("a launch is refused", LIMIT, async || {
        world.call("RunInstances", &[("ImageId", "ami-of-others")]).await.unwrap();
        launches().iter().any(|call| call.outcome == refused).then_some(())
    })
    .await;
    let mut running = Vec::new();
    while let Some(started) = starting.join_next().await {
        running.push(started.unwrap().unwrap());
    }
    let (calls, instances) = (launches(), world.launched());
    assert!(calls.len() <= PODS * MAX_CALLS_PER_POD, "{} calls: {calls:?}", calls.len());
    assert_eq!(instances.len(), PODS, "{instances:?}");
    let mut ending = JoinSet::new();
    for pod in running {
        let mut kubelet = kubelet.clone();
        ending.spawn(async move { kubelet.stop_and_remove(&pod).await });
    }
    while let Some(ended) = ending.join_next().await {
        ended.unwrap().unwrap();
    }
    world.has_no_cells().await;
    let calls = world.calls_of("TerminateInstances");
    assert!(calls.len() <= PODS, "{} calls: {calls:?}", calls.len());
    kubelet.containers().await.unwrap();
}
