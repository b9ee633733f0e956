//! Processes in cells.

use kiyot_testkit::{Container, Kiyot, Node, Pod};
use tonic::{Code, Request};

use crate::cell::{WAIT, options, pod, remove_and_assert_clean};

/// Timeout of an exec, in seconds. It is long enough for a busy machine: a start that takes longer
/// fails with another code of containerd (`Unknown`).
pub(crate) const EXEC_TIMEOUT_SECONDS: i64 = 8;

/// Verifies D5.
#[tokio::test]
async fn exec_sync_over_its_timeout_is_killed() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("slow", WAIT)).await.unwrap();
    let request = kiyot_testkit::cri::ExecSyncRequest {
        container_id: running.container("main").id.clone(),
        cmd: ["sleep", "1000"].map(str::to_owned).to_vec(),
        timeout: EXEC_TIMEOUT_SECONDS,
    };
    let status = kubelet.runtime.exec_sync(Request::new(request)).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

#[tokio::test]
async fn container_that_ignores_its_stop_signal_is_killed() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet
        .run_pod(&pod("stubborn", "trap '' TERM; echo ready; while :; do sleep 0.1; done"))
        .await
        .unwrap();
    let main = running.container("main").clone();
    kubelet.logged(&main, "ready").await;
    kubelet.stop_container(&main.id, 1).await.unwrap();
    assert_eq!(kubelet.container_status(&main.id).await.unwrap().exit_code, 137);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies P3.
#[tokio::test]
async fn too_much_memory_is_an_oom_kill() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut container =
        Container::script("main", "x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo survived");
    container.resources.memory_limit_in_bytes = 32 << 20;
    let running =
        kubelet.run_pod(&Pod::new("greedy").in_cell().container(container)).await.unwrap();
    let status = kubelet.exited(&running.container("main").id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (137, "OOMKilled"));
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
