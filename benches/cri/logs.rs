//! How fast what a container writes comes into the node's log file: of a pod on the node, whose
//! file containerd writes itself, and of one in a cell.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::Path,
    time::{Duration, Instant},
};

use kiyot_testkit::{Container, Kiyot, KiyotOptions, Kubelet, Node, Pod};
use tokio::time::{sleep, timeout};

/// Between two looks at the file: far below what is measured.
const LOOK: Duration = Duration::from_millis(5);
/// Nothing that is measured takes so long.
const LIMIT: Duration = Duration::from_secs(600);

/// The last line of what a container writes.
const LAST: &str = "the end";
/// What a container writes: the name of it, and the length of a line with its end.
const LINES: [(&str, usize); 2] = [("lines of 100 bytes", 100), ("lines of 4 KiB", 4096)];

/// Runs one writer after another, in turns on the node and in a cell, and prints a table.
pub(crate) async fn measure(node: &Node, rounds: usize, mib: usize) {
    let options =
        KiyotOptions { log: "warn".to_owned(), ..KiyotOptions::new(env!("CARGO_BIN_EXE_kiyot")) };
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

/// One container that writes so many bytes in lines and then waits. Gives what it wrote by the time
/// until the last line was on the node, in MB/s.
async fn write(kubelet: &mut Kubelet, in_cell: bool, length: usize, bytes: usize) -> f64 {
    let count = bytes / length;
    let line = "x".repeat(length - 1);
    // `yes` writes whole blocks: nothing is as fast in a shell.
    let script = format!("yes {line} | head -n {count}; echo {LAST}; sleep 100000");
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
    timeout(LIMIT, last_line(&main.log))
        .await
        .unwrap_or_else(|_| panic!("a log has no end: {:?}", fs::metadata(&main.log)));
    let rate = (count * length) as f64 / 1e6 / begun.elapsed().as_secs_f64();
    running.containers.insert("main".to_owned(), main);
    kubelet.stop_and_remove(&running).await.expect("a pod ends");
    rate
}

/// Waits for the last line. Sizes say nothing: the times in a log are not all of one length.
async fn last_line(file: &Path) {
    let end = format!(" stdout F {LAST}\n");
    while !ends_with(file, end.as_bytes()).unwrap_or(false) {
        sleep(LOOK).await;
    }
}

fn ends_with(file: &Path, end: &[u8]) -> io::Result<bool> {
    let file = File::open(file)?;
    let mut last = vec![0; end.len()];
    let Some(at) = file.metadata()?.len().checked_sub(end.len() as u64) else { return Ok(false) };
    file.read_exact_at(&mut last, at)?;
    Ok(last == end)
}
