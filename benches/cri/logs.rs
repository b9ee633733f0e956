//! Throughput of logs from a container to the node's log file: of a pod on the node, whose file
//! containerd writes, and of a pod in a cell.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::Path,
    time::{Duration, Instant},
};

use kiyot_testkit::{Container, Kiyot, KiyotOptions, Kubelet, Node, Pod, poll_until};

/// Period of the checks of the file, far below the measured times.
const POLL_PERIOD: Duration = Duration::from_millis(5);
/// Time after which a measurement fails.
const TIMEOUT: Duration = Duration::from_secs(600);

/// The last line of a log.
const LAST_LINE: &str = "the end";
/// Kinds of lines: name, and length with the line end.
const LINES: [(&str, usize); 2] = [("lines of 100 bytes", 100), ("lines of 4 KiB", 4096)];

/// Runs writers, alternately on the node and in a cell, and prints a table.
pub(crate) async fn measure(node: &Node, program: &Path, rounds: usize, mib: usize) {
    let options = KiyotOptions { log: "warn".to_owned(), ..KiyotOptions::new(program) };
    let kiyot = Kiyot::start(node, options).await;
    let mut kubelet = kiyot.kubelet().await;
    println!("\n| what is written | pod | MiB | MB/s p50 | MB/s least | MB/s most |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for (name, length) in LINES {
        let mut rates = [Vec::new(), Vec::new()];
        for _ in 0..rounds {
            for (rates, in_cell) in rates.iter_mut().zip([false, true]) {
                rates.push(write(&mut kubelet, in_cell, length, mib << 20).await);
            }
        }
        for (rates, pod) in rates.iter_mut().zip(["on the node", "in a cell"]) {
            rates.sort_by(f64::total_cmp);
            let (least, most) = (rates[0], rates[rates.len() - 1]);
            println!(
                "| {name} | {pod} | {mib} | {:.0} | {least:.0} | {most:.0} |",
                rates[rates.len() / 2]
            );
        }
    }
}

/// Runs a container that writes this many bytes in lines. Returns the rate in MB/s until the last
/// line is on the node.
async fn write(kubelet: &mut Kubelet, in_cell: bool, length: usize, bytes: usize) -> f64 {
    let count = bytes / length;
    let line = "x".repeat(length - 1);
    // `yes` writes whole blocks, the fastest way in a shell.
    let script = format!("yes {line} | head -n {count}; echo {LAST_LINE}; sleep 100000");
    let pod = Pod::new("writer").container(Container::script("main", &script));
    let pod = if in_cell { pod.in_cell() } else { pod };
    let config = kubelet.prepare(&pod);
    let sandbox = kubelet.run_sandbox(&config, "").await.expect("a sandbox runs");
    let mut running = kubelet.running(&pod, config, sandbox);
    let main = kubelet
        .create_container(&running, &pod.containers[0], 0)
        .await
        .expect("a container is created");
    kubelet.start_container(&main.id).await.expect("a container starts");
    let begun = Instant::now();
    // The size of the file says nothing, because timestamps differ in length.
    let end = format!(" stdout F {LAST_LINE}\n");
    poll_until("the log has its last line", TIMEOUT, POLL_PERIOD, async || {
        ends_with(&main.log, end.as_bytes()).unwrap_or(false).then_some(())
    })
    .await;
    let rate = (count * length) as f64 / 1e6 / begun.elapsed().as_secs_f64();
    running.containers.insert("main".to_owned(), main);
    kubelet.stop_and_remove(&running).await.expect("a pod ends");
    rate
}

fn ends_with(file: &Path, end: &[u8]) -> io::Result<bool> {
    let file = File::open(file)?;
    let mut last = vec![0; end.len()];
    let Some(at) = file.metadata()?.len().checked_sub(end.len() as u64) else { return Ok(false) };
    file.read_exact_at(&mut last, at)?;
    Ok(last == end)
}
