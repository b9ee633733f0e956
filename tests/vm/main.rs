//! Pods in virtual machines, called as by a kubelet. The tests are few, because QEMU emulates the
//! processor: `PROVIDER=qemu cargo test --test integration` runs the tests of all cells, by hand.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "test code")]

mod disks;
mod enrolment;
mod faults;
mod hostile;
mod images;
mod life;
mod lost_answers;
mod memory;
mod name_server;
mod network;
mod pauses;
mod power_off;
mod powers;
mod privileges;
mod reboot;
mod stolen;
mod streams;
mod warm;

use std::fs;

use kiyot_testkit::{Container, Kiyot, KiyotOptions, Kubelet, Pod, Provider};

/// Returns the options of the daemon under test.
fn options() -> KiyotOptions {
    let mut options = KiyotOptions::new(env!("CARGO_BIN_EXE_kiyot"));
    options.provider = Provider::Qemu;
    options
}

/// Returns a pod in a cell with one container, `main`.
fn pod(name: &str, script: &str) -> Pod {
    Pod::new(name).in_cell().container(Container::script("main", script))
}

/// Script of a container that runs until SIGTERM.
const WAIT: &str = "trap 'exit 0' TERM; while :; do sleep 0.5; done";

/// Runs a script in a container, which must succeed, and returns its standard output.
async fn run(kubelet: &mut Kubelet, container: &str, script: &str) -> String {
    let output = kubelet.exec_sync(container, &["sh", "-c", script]).await.unwrap();
    assert_eq!(output.code, 0, "{script}: {}{}", output.stdout, output.stderr);
    output.stdout
}

/// Returns the console of a cell's machine.
fn console(kiyot: &Kiyot<'_>, cell: &str) -> String {
    let path = kiyot.state().join("cells").join(cell).join("console.log");
    let content = fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&content).into_owned()
}

/// Gives a pod all power over its machine. [`strong_options`] allow it.
fn strong(mut pod: Pod) -> Pod {
    pod.host_pid = true;
    for container in &mut pod.containers {
        container.privileged = true;
    }
    pod
}

/// Returns options of a daemon that gives pods all power over their machine.
fn strong_options() -> KiyotOptions {
    let sections = "[backends.milpa.policy]\nprivileged = \"cell\"\nhost_pid = \"cell\"\n";
    KiyotOptions { sections: sections.to_owned(), ..options() }
}
