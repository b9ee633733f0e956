//! Pods on instances of EC2, in a test cloud on this machine: the time from the launch's answer to
//! the first container, and the API calls of pods that start and end together.

use std::{
    collections::BTreeMap,
    path::Path,
    time::{Duration, Instant},
};

use kiyot_testcloud::Cloud;
use kiyot_testkit::{Container, Kiyot, Node, Pod, RunningPod, poll_until};
use serde_json::Value;

use super::{concurrent::each, density::worst};

/// Steps of a start, as `crictl inspectp` shows them.
const STEPS: [&str; 4] = ["enrolledMs", "boundMs", "imageReadyMs", "firstContainerMs"];
/// Step from which times count: the instance exists and boots.
const LAUNCHED: &str = "launchedMs";
/// Time in which all pods have started or ended.
const TOGETHER_LIMIT: Duration = Duration::from_secs(900);
const POLL_PERIOD: Duration = Duration::from_millis(100);

/// Starts pods one after another, then `together` at once, and prints tables.
pub(crate) async fn measure(node: &Node, program: &Path, times: usize, together: usize) {
    let cloud = Cloud::start_with_instances().await;
    let options =
        kiyot_testkit::KiyotOptions { name: "instances", ..cloud.daemon_options(program) };
    let kiyot = Kiyot::start(node, options).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut starts: [Vec<i64>; STEPS.len()] = Default::default();
    for at in 0..times {
        let running = kubelet.run_pod(&pod(at)).await.expect("a pod runs");
        let account = kubelet.cell_account(&running.sandbox).await.unwrap().unwrap();
        let step = |name: &str| account["start"].get(name).and_then(Value::as_i64).unwrap();
        for (times, name) in starts.iter_mut().zip(STEPS) {
            times.push(step(name) - step(LAUNCHED));
        }
        kubelet.stop_and_remove(&running).await.expect("a pod ends");
    }
    println!("\n| ms after the launch's answer | starts | p50 | max |");
    println!("| --- | --- | --- | --- |");
    for (name, times) in STEPS.iter().zip(&mut starts) {
        times.sort_unstable();
        let (median, last) = (times[times.len() / 2], times[times.len() - 1]);
        println!("| {} | {} | {median} | {last} |", name.trim_end_matches("Ms"), times.len());
    }
    have_ended(&cloud).await;

    println!("\n| pods at once | phase | s | calls | of it |");
    println!("| --- | --- | --- | --- | --- |");
    cloud.clear_calls();
    let begun = Instant::now();
    let pods = each(&kubelet, (0..together).map(pod), together, |mut kubelet, pod| async move {
        kubelet.run_pod(&pod).await.expect("a pod runs")
    })
    .await;
    print(&cloud, together, "start", begun);
    cloud.clear_calls();
    let begun = Instant::now();
    each(&kubelet, pods, together, |mut kubelet, pod: RunningPod| async move {
        kubelet.stop_and_remove(&pod).await.expect("a pod ends");
    })
    .await;
    have_ended(&cloud).await;
    print(&cloud, together, "end", begun);
    worst::of_copies(node, &kiyot, &kubelet).await;
    have_ended(&cloud).await;
}

fn pod(at: usize) -> Pod {
    Pod::new(&format!("instance-{at}"))
        .in_cell()
        .container(Container::script("main", "trap 'exit 0' TERM; while :; do sleep 0.5; done"))
}

async fn have_ended(cloud: &Cloud) {
    poll_until("all instances have ended", TOGETHER_LIMIT, POLL_PERIOD, async || {
        cloud.running().is_empty().then_some(())
    })
    .await;
}

fn print(cloud: &Cloud, pods: usize, phase: &str, begun: Instant) {
    let mut actions = BTreeMap::<String, usize>::new();
    for call in cloud.calls() {
        *actions.entry(call.action).or_default() += 1;
    }
    let total: usize = actions.values().sum();
    let actions: Vec<_> =
        actions.into_iter().map(|(action, count)| format!("{action} {count}")).collect();
    println!(
        "| {pods} | {phase} | {:.1} | {total} | {} |",
        begun.elapsed().as_secs_f64(),
        actions.join(", ")
    );
}
