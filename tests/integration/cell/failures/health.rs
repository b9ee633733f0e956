//! Silent cells, which are lost after their timeout.

use std::time::{Duration, Instant};

use kiyot_testkit::{Kiyot, KiyotOptions, Kubelet, Node, RunningPod, cri};
use tokio::time::sleep;

use crate::cell::{
    Pod, WAIT, assert_nothing_left,
    failures::faults::{kill9, processes},
    failures::freezes::FrozenCell,
    is_ready,
    lifecycle::stops::{freeze, thaw},
    options, pod, remove_and_assert_clean, wait_until_connected,
};

/// The timeout in these tests, which is the shortest allowed.
const TIMEOUT: Duration = Duration::from_secs(5);
/// A time after which a silent cell is lost.
const LONGER: Duration = Duration::from_secs(12);

/// Cells whose agents are killed. The cells' inits, which would restart the agents, are stopped
/// until the drop.
struct SilentCell(Vec<String>);

impl SilentCell {
    fn new(cell: &str) -> Self {
        Self::together(&[cell.to_owned()])
    }

    /// Makes cells silent at the same time.
    fn together(cells: &[String]) -> Self {
        let of = |program: &str| -> Vec<String> {
            let of_cell = |cell: &String| {
                let found = processes(&[program, cell]);
                assert!(!found.is_empty(), "{cell} has no {program}");
                found
            };
            cells.iter().flat_map(of_cell).collect()
        };
        let (inits, agents) = (Self(of("kiyot-cell init")), of("kiyot-cell agent"));
        freeze(&inits.0);
        kill9(&agents);
        inits
    }
}

impl Drop for SilentCell {
    fn drop(&mut self) {
        thaw(&self.0);
    }
}

fn with_timeout(timeout: &str) -> KiyotOptions {
    KiyotOptions { milpa: format!("healthy_timeout = \"{timeout}\"\n"), ..options() }
}

/// Runs a pod. Returns the pod and the id of its cell.
async fn run(kubelet: &mut Kubelet, kiyot: &Kiyot<'_>, pod: &Pod) -> (RunningPod, String) {
    let before = kiyot.cells();
    let running = kubelet.run_pod(pod).await.unwrap();
    let cell = kiyot.cells().into_iter().find(|cell| !before.contains(cell)).unwrap();
    (running, cell)
}

async fn assert_runs(kubelet: &mut Kubelet, pod: &RunningPod) {
    assert!(is_ready(kubelet, &pod.sandbox).await);
    let status = kubelet.container_status(&pod.container("main").id).await.unwrap();
    assert_eq!(status.state(), cri::ContainerState::ContainerRunning);
}

async fn assert_lost(kubelet: &mut Kubelet, pod: &RunningPod) {
    let status = kubelet.exited(&pod.container("main").id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (137, "CellLost"));
    assert!(status.message.contains("its agent has been silent for"), "{}", status.message);
    assert!(!is_ready(kubelet, &pod.sandbox).await);
}

/// Verifies P19, P20.
#[tokio::test]
async fn silent_cell_is_lost_after_its_own_timeout_and_others_run() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, with_timeout("0s")).await;
    let mut kubelet = kiyot.kubelet().await;
    let (doomed, silent) = run(&mut kubelet, &kiyot, &pod("doomed", WAIT)).await;
    let never = pod("never", WAIT).annotation("pod.elotl.co/healthcheck-healthy-timeout", "0");
    let (never, unlimited) = run(&mut kubelet, &kiyot, &never).await;
    let (brief, interrupted) = run(&mut kubelet, &kiyot, &pod("brief", WAIT)).await;

    let (_silent, unlimited) = (SilentCell::new(&silent), SilentCell::new(&unlimited));
    sleep(LONGER).await;
    assert_runs(&mut kubelet, &doomed).await;
    // A restarted daemon counts from zero. A reload also applies to running cells.
    let began = Instant::now();
    kiyot.kill9();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    // This cell must be connected before the reload sets the timeout.
    wait_until_connected(&mut kubelet, brief.container("main")).await;
    kiyot.reload("healthy_timeout = \"0s\"", "healthy_timeout = \"5s\"").await;
    assert_lost(&mut kubelet, &doomed).await;
    assert!(began.elapsed() >= TIMEOUT);
    assert!(!kiyot.cells().contains(&silent));
    // This cell has been silent for as long as the lost cell.
    sleep(Duration::from_secs(3)).await;
    assert_runs(&mut kubelet, &never).await;

    kiyot.reload("healthy_timeout = \"5s\"", "healthy_timeout = \"60s\"").await;
    let short = SilentCell::new(&interrupted);
    sleep(Duration::from_secs(2)).await;
    drop(short);
    wait_until_connected(&mut kubelet, brief.container("main")).await;
    assert_runs(&mut kubelet, &brief).await;
    assert_eq!(kiyot.log().matches("cell is lost").count(), 1);

    drop(unlimited);
    wait_until_connected(&mut kubelet, never.container("main")).await;
    for ended in [&doomed, &brief] {
        kubelet.stop_and_remove(ended).await.unwrap();
    }
    remove_and_assert_clean(&mut kubelet, &kiyot, &never).await;
    drop(kiyot);
    assert_nothing_left(node);
}

/// Verifies P19.
#[tokio::test]
async fn frozen_cell_is_lost() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, with_timeout("5s")).await;
    let mut kubelet = kiyot.kubelet().await;
    let (cold, cell) = run(&mut kubelet, &kiyot, &pod("cold", WAIT)).await;
    let frozen = FrozenCell::new(&cell);
    assert_lost(&mut kubelet, &cold).await;
    drop(frozen);
    assert_eq!(processes(&[&cell]), Vec::<String>::new());
    remove_and_assert_clean(&mut kubelet, &kiyot, &cold).await;
    drop(kiyot);
    assert_nothing_left(node);
}

/// Verifies P21.
#[tokio::test]
async fn cells_that_are_silent_together_are_not_lost() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, with_timeout("5s")).await;
    let mut kubelet = kiyot.kubelet().await;
    let (mut pods, mut silent) = (Vec::new(), Vec::new());
    for name in ["first", "second", "third"] {
        let (running, cell) = run(&mut kubelet, &kiyot, &pod(name, WAIT)).await;
        pods.push(running);
        silent.push(cell);
    }
    let silent = SilentCell::together(&silent);
    sleep(LONGER).await;
    for running in &pods {
        assert_runs(&mut kubelet, running).await;
    }
    assert_eq!(kiyot.log().matches("taken for a node that is cut off").count(), 1);
    drop(silent);
    for running in &pods {
        wait_until_connected(&mut kubelet, running.container("main")).await;
        assert_runs(&mut kubelet, running).await;
    }
    assert_eq!(kiyot.log().matches("mass silence is over").count(), 1);
    for running in &pods[1..] {
        kubelet.stop_and_remove(running).await.unwrap();
    }
    remove_and_assert_clean(&mut kubelet, &kiyot, &pods[0]).await;
    drop(kiyot);
    assert_nothing_left(node);
}
