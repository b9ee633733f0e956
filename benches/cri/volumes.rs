//! Time from the kubelet's rename on the node until a container in a cell reads the updated volume.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use kiyot_testkit::{Container, Kiyot, KiyotOptions, Node, Pod, Source, cri, websocket::Streams};

use super::calls::quantile;

/// Updates a Secret about once a second, and prints a table.
pub(crate) async fn measure(node: &Node, program: &Path, updates: usize) {
    let options = KiyotOptions { log: "warn".to_owned(), ..KiyotOptions::new(program) };
    let kiyot = Kiyot::start(node, options).await;
    let mut kubelet = kiyot.kubelet().await;
    let version = |n: usize| {
        Source::files(&[("version", &format!("version {n} of it")), ("other", "the same")])
    };
    let spec = Pod::new("updated")
        .in_cell()
        .volume("key", Source::Secret(version(0)))
        .container(Container::script("main", "sleep 100000").mount("key", "/key"));
    let running = kubelet.run_pod(&spec).await.expect("a pod runs");
    // Polls every 2 ms and writes changes to a stream, whose latency is below that.
    let watch = "last=; while :; do read -r now < /key/version; \
                 [ \"$now\" = \"$last\" ] || { last=$now; echo $now; }; usleep 2000; done";
    let cmd = ["sh", "-c", watch].map(str::to_owned).to_vec();
    let request = cri::ExecRequest {
        container_id: running.container("main").id.clone(),
        cmd,
        tty: false,
        stdin: false,
        stdout: true,
        stderr: true,
    };
    let url = kubelet.runtime.exec(request).await.expect("a program can be run").into_inner().url;
    let mut seen = Streams::open(&url).await.expect("its streams open");
    seen.read_until(1, "version 0 of it").await;
    let mut times = Vec::new();
    for n in 1..=updates {
        // The gap varies, so that no periodic task of the daemon is in phase with the updates.
        tokio::time::sleep(Duration::from_millis(500 + 37 * (n as u64 % 20))).await;
        kubelet.update_volume(&spec, "key", &version(n));
        let begun = Instant::now();
        seen.read_until(1, &format!("version {n} of it")).await;
        times.push(begun.elapsed());
    }
    times.sort_unstable();
    println!("\n| updates of a volume | p50 ms | p99 ms | max ms |");
    println!("| --- | --- | --- | --- |");
    println!(
        "| {updates} | {:.0} | {:.0} | {:.0} |",
        quantile(&times, 0.5) / 1e3,
        quantile(&times, 0.99) / 1e3,
        quantile(&times, 1.0) / 1e3
    );
    drop(seen);
    kubelet.stop_and_remove(&running).await.expect("a pod ends");
}
