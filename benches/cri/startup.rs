//! Time from RunPodSandbox to the first log line on the node: of a pod in a cold cell, and of a pod
//! on the node.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use kiyot_testkit::{Container, Kiyot, KiyotOptions, Kubelet, LIMIT, Node, Pod, poll_until};

/// Period of the checks of the log, finer than the measured times.
const POLL_PERIOD: Duration = Duration::from_millis(1);

/// Times of one start, from the call of RunPodSandbox on.
#[derive(Debug, Clone, Copy)]
struct Start {
    sandbox: Duration,
    created: Duration,
    started: Duration,
    logged: Duration,
}

/// Starts pods one after another, and prints a table of the medians.
pub(crate) async fn measure(node: &Node, program: &Path, times: usize) {
    let options = KiyotOptions { log: "info".to_owned(), ..KiyotOptions::new(program) };
    let kiyot = Kiyot::start(node, options).await;
    let mut kubelet = kiyot.kubelet().await;
    println!(
        "\n| pod | starts | sandbox p50 ms | created p50 | started p50 | first log line p50 \
         | first log line max |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for (name, in_cell) in [("on the node", false), ("in a cold cell", true)] {
        let mut starts = Vec::new();
        for at in 0..times {
            let pod = Pod::new(&format!("cold-{at}"))
                .container(Container::script("main", "echo up; sleep 100000"));
            starts.push(start(&mut kubelet, if in_cell { pod.in_cell() } else { pod }).await);
        }
        print(name, &starts);
    }
}

async fn start(kubelet: &mut Kubelet, pod: Pod) -> Start {
    let config = kubelet.prepare(&pod);
    let begun = Instant::now();
    let sandbox = kubelet.run_sandbox(&config, "").await.expect("a sandbox runs");
    let after_sandbox = begun.elapsed();
    let mut running = kubelet.running(&pod, config, sandbox);
    let main = kubelet
        .create_container(&running, &pod.containers[0], 0)
        .await
        .expect("a container is created");
    let created = begun.elapsed();
    kubelet.start_container(&main.id).await.expect("a container starts");
    let started = begun.elapsed();
    poll_until("the pod has logged a line", LIMIT, POLL_PERIOD, async || {
        (!kubelet.log_lines(&main).is_empty()).then_some(())
    })
    .await;
    let logged = begun.elapsed();
    running.containers.insert("main".to_owned(), main);
    kubelet.stop_and_remove(&running).await.expect("a pod ends");
    Start { sandbox: after_sandbox, created, started, logged }
}

fn print(name: &str, starts: &[Start]) {
    let sorted = |part: fn(&Start) -> Duration| {
        let mut times: Vec<_> = starts.iter().map(part).collect();
        times.sort_unstable();
        times
    };
    let median = |times: Vec<Duration>| times[times.len() / 2].as_millis();
    let logged = sorted(|start| start.logged);
    let slowest = logged.last().map_or(0, Duration::as_millis);
    println!(
        "| {name} | {} | {} | {} | {} | {} | {slowest} |",
        starts.len(),
        median(sorted(|start| start.sandbox)),
        median(sorted(|start| start.created)),
        median(sorted(|start| start.started)),
        median(logged)
    );
}
