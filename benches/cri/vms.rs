//! Memory of the idle virtual machines of a warm pool on the node, before any pod.

use std::{fs, path::Path, time::Duration};

use kiyot_testkit::{Kiyot, KiyotOptions, Node, Provider, poll_until, processes};

use super::startup::IS_WARM;

/// Limit for the start of all machines. Without KVM each takes several seconds of a processor.
const START_LIMIT: Duration = Duration::from_secs(1200);
/// Period of the checks of the log.
const POLL_PERIOD: Duration = Duration::from_millis(500);

/// Starts machines, and prints their memory.
pub(crate) async fn measure(node: &Node, program: &Path, count: usize) {
    let options = KiyotOptions {
        name: "idle-vms",
        log: "info,kiyot::backends::milpa::sync=debug".to_owned(),
        sections: format!("[[backends.milpa.warm]]\ncount = {count}\n"),
        provider: Provider::Qemu,
        ..KiyotOptions::new(program)
    };
    let kiyot = Kiyot::start(node, options).await;
    poll_until("all machines are warm", START_LIMIT, POLL_PERIOD, async || {
        (kiyot.log().matches(IS_WARM).count() >= count).then_some(())
    })
    .await;
    println!("\n| idle VMs | each: QEMU's MiB | launcher's MiB | guest's size MiB |");
    println!("| --- | --- | --- | --- |");
    let state = kiyot.state().display().to_string();
    let machines = processes(&["qemu-system"]);
    let launchers = processes(&["launch-vm", &state]);
    let memory = machines.first().and_then(|pid| guest_mib(pid)).unwrap_or_default();
    println!(
        "| {} | {:.0} | {:.1} | {memory} |",
        machines.len(),
        mean_mib(&machines),
        mean_mib(&launchers)
    );
    kiyot.reload(&format!("count = {count}"), "count = 0").await;
    poll_until("the pool is empty", START_LIMIT, POLL_PERIOD, async || {
        kiyot.cells().is_empty().then_some(())
    })
    .await;
}

/// Returns the mean memory of processes: private memory, and their part of shared memory.
fn mean_mib(pids: &[String]) -> f64 {
    let kib: u64 = pids.iter().filter_map(|pid| proportional_kib(pid)).sum();
    kib as f64 / 1024.0 / pids.len().max(1) as f64
}

fn proportional_kib(pid: &str) -> Option<u64> {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let pss = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    pss.split_whitespace().next()?.parse().ok()
}

/// Returns the memory of the guest in MiB, from the command line of its QEMU.
fn guest_mib(pid: &str) -> Option<String> {
    let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
    line.split('\0').skip_while(|argument| *argument != "-m").nth(1).map(str::to_owned)
}
