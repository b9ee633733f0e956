//! Time from RunPodSandbox to the first log line on the node: of a pod on the node, in a cold cell,
//! and in a warm cell.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use kiyot_testkit::{
    Container, Kiyot, KiyotOptions, Kubelet, LIMIT, Node, Pod, Provider, poll_until, wait_until,
};

/// Period of the checks of the log, finer than the measured times.
const POLL_PERIOD: Duration = Duration::from_millis(1);

/// Sizes of the warm pool.
const NOT_WARM: &str = "count = 0";
const WARM: &str = "count = 1";
/// Log line of a prepared cell of the pool.
pub(crate) const IS_WARM: &str = "warm cell is prepared";

/// Place of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Node,
    ColdCell,
    WarmCell,
}

/// Times of a start since the call of RunPodSandbox.
#[derive(Debug, Clone, Copy)]
struct Start {
    sandbox: Duration,
    created: Duration,
    started: Duration,
    logged: Duration,
}

/// Starts pods one after another with cells of a provider, and prints a table of the medians.
pub(crate) async fn measure(node: &Node, program: &Path, provider: Provider, times: usize) {
    let options = KiyotOptions {
        log: "info,kiyot::backends::milpa::sync=debug".to_owned(),
        sections: format!("[[backends.milpa.warm]]\n{NOT_WARM}\n"),
        provider,
        ..KiyotOptions::new(program)
    };
    let kiyot = Kiyot::start(node, options).await;
    let mut kubelet = kiyot.kubelet().await;
    println!(
        "\n| pod | starts | sandbox p50 ms | created p50 | started p50 | first log line p50 \
         | first log line max |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    let places: &[_] = match provider {
        Provider::Netns => &[
            ("on the node", Place::Node),
            ("in a cold cell", Place::ColdCell),
            ("in a warm cell", Place::WarmCell),
        ],
        Provider::Qemu => &[("in a cold VM", Place::ColdCell), ("in a warm VM", Place::WarmCell)],
        Provider::Ec2 => {
            &[("on a cold instance", Place::ColdCell), ("on a warm instance", Place::WarmCell)]
        }
    };
    for &(name, place) in places {
        if place == Place::WarmCell {
            kiyot.reload(NOT_WARM, WARM).await;
        }
        let mut starts = Vec::new();
        for at in 0..times {
            if place == Place::WarmCell {
                wait_until("a cell is warm", LIMIT, async || {
                    (kiyot.log().matches(IS_WARM).count() > at).then_some(())
                })
                .await;
            }
            let pod = Pod::new(&format!("start-{at}"))
                .container(Container::script("main", "echo up; sleep 100000"));
            let pod = if place == Place::Node { pod } else { pod.in_cell() };
            starts.push(start(&mut kubelet, pod).await);
        }
        print(name, &starts);
    }
    // A cell that boots now would still exist when the daemon stops.
    kiyot.reload(WARM, NOT_WARM).await;
    wait_until("the pool is empty", LIMIT, async || kiyot.cells().is_empty().then_some(())).await;
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
