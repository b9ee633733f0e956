//! Pods that start together, and short pods that follow each other: on the node and in cells.

use std::{path::Path, time::Instant};

use kiyot_testkit::{
    Container, Kiyot, KiyotOptions, Kubelet, LIMIT, Node, Pod, RunningPod, wait_until,
};

use super::concurrent::each;

/// Short pods that run at a time.
const SHORT_AT_A_TIME: usize = 12;

/// The numbers of pods.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Batches {
    /// Pods that start together.
    pub(crate) together: usize,
    /// Short pods in all.
    pub(crate) short: usize,
    /// Rounds. Each has a batch on the node and a batch in cells.
    pub(crate) rounds: usize,
}

/// Starts batches of pods on the node and in cells in turn, and prints a table.
pub(crate) async fn measure(node: &Node, program: &Path, batches: Batches) {
    let kiyot =
        Kiyot::start(node, KiyotOptions { log: "info".to_owned(), ..KiyotOptions::new(program) })
            .await;
    let kubelet = kiyot.kubelet().await;
    let Batches { together, short, rounds } = batches;
    println!("\n| pods | at a time | rounds | on the node s | in cells s | ratio |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for (name, is_short, pods, at_a_time) in
        [("start", false, together, together), ("run", true, short, SHORT_AT_A_TIME)]
    {
        let mut seconds = [Vec::new(), Vec::new()];
        for round in 0..rounds {
            for (place, seconds) in seconds.iter_mut().enumerate() {
                let pods = (0..pods).map(|at| {
                    let pod = Pod::new(&format!("{name}-{round}-{place}-{at}"));
                    if place == 0 { pod } else { pod.in_cell() }
                });
                let took = if is_short {
                    run_short(&kubelet, pods, at_a_time).await
                } else {
                    start(&kubelet, pods, at_a_time).await
                };
                seconds.push(took);
                // The next batch has the machine to itself.
                wait_until("all cells have ended", LIMIT, async || {
                    kiyot.cells().is_empty().then_some(())
                })
                .await;
            }
        }
        print(name, pods, at_a_time, seconds);
    }
}

/// Starts pods, and returns the seconds until the last runs.
async fn start(kubelet: &Kubelet, pods: impl Iterator<Item = Pod>, at_a_time: usize) -> f64 {
    let pods = pods.map(|pod| pod.container(Container::script("main", "sleep 100000")));
    let begun = Instant::now();
    let running = each(kubelet, pods, at_a_time, |mut kubelet, pod| async move {
        kubelet.run_pod(&pod).await.expect("a pod runs")
    })
    .await;
    let took = begun.elapsed().as_secs_f64();
    each(kubelet, running, at_a_time, |mut kubelet, pod: RunningPod| async move {
        kubelet.stop_and_remove(&pod).await.expect("a pod ends");
    })
    .await;
    took
}

/// Runs pods whose container ends at once, and returns the seconds until the last is removed.
async fn run_short(kubelet: &Kubelet, pods: impl Iterator<Item = Pod>, at_a_time: usize) -> f64 {
    let pods = pods.map(|pod| pod.container(Container::script("main", "true")));
    let begun = Instant::now();
    each(kubelet, pods, at_a_time, |mut kubelet, pod| async move {
        let running = kubelet.run_pod(&pod).await.expect("a pod runs");
        let ended = kubelet.exited(&running.container("main").id).await;
        assert_eq!(ended.exit_code, 0, "{ended:?}");
        kubelet.stop_and_remove(&running).await.expect("a pod ends");
    })
    .await;
    begun.elapsed().as_secs_f64()
}

fn print(name: &str, pods: usize, at_a_time: usize, mut seconds: [Vec<f64>; 2]) {
    let rounds = seconds[0].len();
    let [on_node, in_cells] = seconds.each_mut().map(|seconds| {
        seconds.sort_unstable_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    });
    println!(
        "| {pods} that {name} | {at_a_time} | {rounds} | {on_node:.1} | {in_cells:.1} | {:.2} |",
        in_cells / on_node
    );
}
