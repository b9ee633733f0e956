//! Calls of the CRI socket while an operator's tools call the admin API of the same daemon.

use std::path::Path;

use kiyot_testkit::{Container, Kiyot, KiyotOptions, Node, Pod, cri};

use super::{
    beside::Beside,
    calls::{self, Times},
    client::Call,
    ratios::Ratios,
};

/// The programs that run beside the calls; `milpactl` is the program with its socket. The last two
/// are controls: starts of the program with a call that costs the daemon almost nothing, and a
/// program unrelated to kiyot. They show how much any program slows the calls down.
const BESIDE: [(&str, &[&str]); 5] = [
    ("nothing", &[]),
    ("`get pods --watch`", &["exec milpactl get pods --watch"]),
    (
        "and `dump all` in a loop",
        &["exec milpactl get pods --watch", "while :; do milpactl dump all; done"],
    ),
    (
        "and `version` in a loop",
        &["exec milpactl get pods --watch", "while :; do milpactl version; done"],
    ),
    ("an empty loop", &["while :; do :; done"]),
];

/// Measures in interleaved rounds, and prints a table.
pub(crate) async fn measure(
    node: &Node,
    program: &Path,
    rounds: usize,
    calls: usize,
    cells: usize,
) {
    let options = KiyotOptions { log: "warn".to_owned(), ..KiyotOptions::new(program) };
    let kiyot = Kiyot::start(node, options).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut pods = Vec::new();
    for at in 0..=cells {
        let pod = Pod::new(&format!("operator-{at}"));
        // The first is on the node.
        let pod = if at == 0 { pod } else { pod.in_cell() };
        let pod = pod.container(Container::script("main", "sleep 100000"));
        pods.push(kubelet.run_pod(&pod).await.expect("a pod runs"));
    }
    let status = |name: &'static str, at: usize| {
        let pod_sandbox_id = pods[at].sandbox.clone();
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id, verbose: false };
        (name, Call::new("PodSandboxStatus", &request))
    };
    let methods = [
        status("PodSandboxStatus, on the node", 0),
        status("PodSandboxStatus, in a cell", cells.min(1)),
        ("ListPodSandbox", Call::new("ListPodSandbox", &cri::ListPodSandboxRequest::default())),
    ];
    println!("\n| call | callers | beside | p50 us | p99 us | p50 to nothing | least | greatest |");
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    for (name, method) in &methods {
        for callers in calls::CALLERS {
            let mut times = BESIDE.map(|_| Times::default());
            for round in 0..rounds {
                for turn in 0..BESIDE.len() {
                    let at = (round + turn) % BESIDE.len();
                    let beside = Beside::start(BESIDE[at].1, &kiyot, program);
                    let socket = kiyot.socket();
                    calls::run(&socket, "kiyot", method, callers, calls, &mut times[at]).await;
                    drop(beside);
                }
            }
            let alone = times[0].medians.clone();
            for ((beside, _), times) in BESIDE.iter().zip(&mut times) {
                let ratios = Ratios::of(&times.medians, &alone);
                let [p50, p99] = [0.5, 0.99].map(|part| times.quantile(part));
                println!("| {name} | {callers} | {beside} | {p50:.0} | {p99:.0} | {ratios} |");
            }
        }
    }
    for pod in &pods {
        kubelet.stop_and_remove(pod).await.expect("a pod ends");
    }
}
