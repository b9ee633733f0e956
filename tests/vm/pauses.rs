//! Machines that the node pauses and resumes.

use std::time::{Duration, Instant};

use kiyot_testkit::{Kiyot, KiyotOptions, LIMIT, Node, cri, processes, wait_until};
use rustix::process::{Pid, Signal, kill_process};

use super::{WAIT, options, pod};

/// Sends a signal to the QEMU of a cell.
fn signal(cell: &str, signal: Signal) {
    let machines = processes(&["qemu-system", cell]);
    assert!(!machines.is_empty(), "QEMU runs for {cell}");
    for machine in machines {
        kill_process(Pid::from_raw(machine.parse().unwrap()).unwrap(), signal).unwrap();
    }
}

/// Verifies V12.
#[tokio::test]
#[ignore = "takes long without KVM; make test-vm"]
async fn next_attempt_of_a_pod_waits_for_the_end_of_its_paused_machine() {
    let node = Node::start().await;
    let milpa = "healthy_timeout = \"10s\"\n".to_owned();
    let kiyot = Kiyot::start(&node, KiyotOptions { milpa, ..options() }).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = pod("member-0", &format!("echo up; {WAIT}"));
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").clone();
    kubelet.logged(&main, "up").await;
    let cell = kiyot.cells().remove(0);
    signal(&cell, Signal::STOP);

    // Like a kubelet whose StopPodSandbox was not answered.
    let mut next = spec.clone();
    next.attempt = 1;
    let anew = kubelet.run_pod(&next).await.unwrap();
    assert_eq!(processes(&["qemu-system", &cell]), Vec::<String>::new(), "the first VM has ended");
    let container = kubelet.container_status(&main.id).await.unwrap();
    assert_eq!(container.state(), cri::ContainerState::ContainerExited, "{container:?}");
    kubelet.logged(anew.container("main"), "up").await;
    assert!(!kiyot.cells().contains(&cell), "{:?}", kiyot.cells());

    // The silence of a machine ends its pod too.
    let cell = kiyot.cells().remove(0);
    signal(&cell, Signal::STOP);
    let container = kubelet.exited(&anew.container("main").id).await;
    assert_eq!((container.exit_code, container.reason.as_str()), (137, "CellLost"));
    assert_eq!(processes(&["qemu-system", &cell]), Vec::<String>::new(), "the machine has ended");
    kubelet.stop_pod(&anew).await.unwrap();
    kubelet.remove_pod(&anew).await.unwrap();
    kubelet.stop_and_remove(&running).await.unwrap();
    assert_eq!(kiyot.cells(), Vec::<String>::new());
}

/// The time for which the machine is paused: longer than the agent waits for its daemon.
const PAUSE: Duration = Duration::from_secs(40);

/// Verifies V12.
#[tokio::test]
#[ignore = "takes long without KVM; make test-vm"]
async fn resumed_machine_goes_on_or_ends_its_pod_and_never_both() {
    let node = Node::start().await;
    // The daemon never treats the silence as the end, so that the agent decides.
    let milpa = "healthy_timeout = \"0s\"\norphan_timeout = \"20s\"\n".to_owned();
    let kiyot = Kiyot::start(&node, KiyotOptions { milpa, ..options() }).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("paused", &format!("echo up; {WAIT}"))).await.unwrap();
    let main = running.container("main").clone();
    kubelet.logged(&main, "up").await;
    let cell = kiyot.cells().remove(0);
    let paused = Instant::now();
    signal(&cell, Signal::STOP);
    wait_until("the pause is over", LIMIT, async || (paused.elapsed() > PAUSE).then_some(())).await;
    let container = kubelet.container_status(&main.id).await.unwrap();
    assert_eq!(container.state(), cri::ContainerState::ContainerRunning, "no end is reported");
    signal(&cell, Signal::CONT);

    let goes_on = wait_until("the machine goes on or has ended", LIMIT, async || {
        let container = kubelet.container_status(&main.id).await.ok()?;
        if container.state() == cri::ContainerState::ContainerExited {
            return Some(false);
        }
        let output = kubelet.exec_sync(&main.id, &["echo", "there"]).await.ok()?;
        (output.stdout == "there\n").then_some(true)
    })
    .await;
    let machines = processes(&["qemu-system", &cell]);
    assert_eq!(goes_on, !machines.is_empty(), "a pod that reads ended has no machine");
    kubelet.stop_and_remove(&running).await.unwrap();
    assert_eq!(kiyot.cells(), Vec::<String>::new());
}
