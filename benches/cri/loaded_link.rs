//! Latency of calls of a cell whose link is loaded: they share a connection with its logs and
//! streams.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use kiyot_testkit::{Container, Kiyot, KiyotOptions, Kubelet, Node, Pod, RunningPod};
use tokio_util::task::AbortOnDropHandle;

use super::{calls::quantile, streams::forwarded_port};

/// Measures ExecSync of `true` in a cell that is idle, that has a forwarded port at full speed,
/// that writes its log at full speed, and that does both. Prints a table.
pub(crate) async fn measure(node: &Node, program: &Path, calls: usize) {
    let options = KiyotOptions { log: "warn".to_owned(), ..KiyotOptions::new(program) };
    let kiyot = Kiyot::start(node, options).await;
    let mut kubelet = kiyot.kubelet().await;
    let line = "x".repeat(4095);
    let script = format!(
        "nc -ll -p 8080 -e cat /dev/zero & \
         while :; do if [ -e /tmp/talk ]; then yes {line} | head -n 2000; else sleep 0.1; fi; done"
    );
    let running = kubelet
        .run_pod(&Pod::new("busy").in_cell().container(Container::script("main", &script)))
        .await
        .expect("a pod runs");
    println!("\n| the cell's link carries | ExecSync of `true`, p50 ms | p99 ms | max ms |");
    println!("| --- | --- | --- | --- |");
    for (name, forwards, talks) in [
        ("nothing else", false, false),
        ("a forwarded port", true, false),
        ("a log", false, true),
        ("a forwarded port and a log", true, true),
    ] {
        let forwarded = if forwards { Some(forward(&mut kubelet, &running).await) } else { None };
        let talk = if talks { "touch /tmp/talk" } else { "rm -f /tmp/talk" };
        kubelet
            .exec_sync(&running.container("main").id, &["sh", "-c", talk])
            .await
            .expect("a program runs");
        let mut times = Vec::new();
        for _ in 0..calls {
            let begun = Instant::now();
            kubelet
                .exec_sync(&running.container("main").id, &["true"])
                .await
                .expect("a program runs");
            times.push(begun.elapsed());
        }
        drop(forwarded);
        print(name, &mut times);
    }
    kubelet.stop_and_remove(&running).await.expect("a pod ends");
}

fn print(name: &str, times: &mut [Duration]) {
    times.sort_unstable();
    let [p50, p99, max] = [0.5, 0.99, 1.0].map(|part| quantile(times, part) / 1e3);
    println!("| {name} | {p50:.0} | {p99:.0} | {max:.0} |");
}

/// Forwards a port and reads from it until the handle is dropped.
async fn forward(kubelet: &mut Kubelet, pod: &RunningPod) -> AbortOnDropHandle<()> {
    let mut streams = forwarded_port(kubelet, pod).await;
    streams.read_bytes(0, 1 << 20).await;
    AbortOnDropHandle::new(tokio::spawn(async move {
        loop {
            streams.read_bytes(0, 1 << 20).await;
        }
    }))
}
