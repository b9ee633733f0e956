//! Pods in cells, called as by a kubelet.

use kiyot_testkit::{
    Container, Kiyot, KiyotOptions, Kubelet, LIMIT, Node, Pod, RunningContainer, RunningPod, cri,
    wait_until,
};

mod failures;
mod isolation;
pub(super) mod lifecycle;
mod operator;
mod registry;
mod storage;
mod streaming;

/// Returns the options of a daemon with cells.
fn options() -> KiyotOptions {
    KiyotOptions::new(env!("CARGO_BIN_EXE_kiyot"))
}

/// Returns a pod in a cell with one container, `main`.
fn pod(name: &str, script: &str) -> Pod {
    Pod::new(name).in_cell().container(Container::script("main", script))
}

/// A script that runs until SIGTERM.
const WAIT: &str = "trap 'exit 0' TERM; while :; do sleep 0.1; done";

/// Stops and removes a pod. Asserts that neither a list entry nor a cell is left.
async fn remove_and_assert_clean(kubelet: &mut Kubelet, kiyot: &Kiyot<'_>, pod: &RunningPod) {
    kubelet.stop_and_remove(pod).await.unwrap();
    assert!(kubelet.sandboxes().await.unwrap().iter().all(|listed| listed.id != pod.sandbox));
    assert!(
        kubelet
            .containers()
            .await
            .unwrap()
            .iter()
            .all(|listed| listed.pod_sandbox_id != pod.sandbox)
    );
    assert_eq!(kiyot.cells(), Vec::<String>::new());
}

/// Runs a script in a container. Returns its standard output followed by its standard error.
async fn run_script(kubelet: &mut Kubelet, container: &str, script: &str) -> String {
    let output = kubelet.exec_sync(container, &["sh", "-c", script]).await.unwrap();
    output.stdout + &output.stderr
}

/// Waits until a script prints `expected`. Calls may fail while the cell is disconnected.
async fn wait_for_output(kubelet: &mut Kubelet, container: &str, script: &str, expected: &str) {
    wait_until(format!("{script:?} in the cell shows {expected:?}"), LIMIT, async || {
        let output = kubelet.exec_sync(container, &["sh", "-c", script]).await.ok()?;
        (output.stdout == expected).then_some(())
    })
    .await;
}

/// Waits until the cell of a container takes calls after a restart of the daemon, as by a kubelet's
/// retries.
async fn wait_until_connected(kubelet: &mut Kubelet, container: &RunningContainer) {
    wait_until("the cell is connected again", LIMIT, async || {
        kubelet.exec_sync(&container.id, &["true"]).await.ok()
    })
    .await;
}

/// Returns the pod's address, from its status.
async fn address(kubelet: &mut Kubelet, sandbox: &str) -> String {
    kubelet.sandbox_status(sandbox).await.unwrap().network.unwrap().ip
}

/// Stops a node and asserts that the test left nothing on the machine.
fn assert_nothing_left(node: Node) {
    let left = node.stop();
    assert!(left.is_empty(), "left:\n{left}");
}

/// Returns the major and minor version of the machine's containerd, which cells use too.
async fn containerd_version(kubelet: &mut Kubelet) -> (u64, u64) {
    let version = kubelet
        .runtime
        .version(cri::VersionRequest::default())
        .await
        .unwrap()
        .into_inner()
        .runtime_version;
    let mut numbers = version
        .trim_start_matches('v')
        .split(|c: char| !c.is_ascii_digit())
        .map(|number| number.parse().unwrap());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

/// Returns whether the sandbox is READY.
async fn is_ready(kubelet: &mut Kubelet, sandbox: &str) -> bool {
    kubelet
        .sandbox_status(sandbox)
        .await
        .is_ok_and(|status| status.state == cri::PodSandboxState::SandboxReady as i32)
}
