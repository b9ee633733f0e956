//! Deaths of processes of a cell.

pub(crate) use kiyot_testkit::processes;
use kiyot_testkit::{Kiyot, LIMIT, Node, cri, kill_all, wait_until};

use crate::cell::{WAIT, is_ready, options, pod, remove_and_assert_clean};

pub(crate) fn kill9(pids: &[String]) {
    assert!(!pids.is_empty(), "no process to kill");
    kill_all(pids);
}

/// Verifies P7.
#[tokio::test]
async fn killed_cell_is_reported_as_lost() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("doomed", WAIT)).await.unwrap();
    let cell = kiyot.cells().remove(0);
    kill9(&processes(&["kiyot-cell launch", &cell]));
    let status = kubelet.exited(&running.container("main").id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (137, "CellLost"));
    wait_until("the sandbox is not ready", LIMIT, async || {
        (!is_ready(&mut kubelet, &running.sandbox).await).then_some(())
    })
    .await;
    assert_eq!(
        kubelet.sandboxes().await.unwrap().len(),
        1,
        "the pod stays listed until it is removed"
    );
    wait_until("no process of the cell is left", LIMIT, async || {
        processes(&[&cell]).is_empty().then_some(())
    })
    .await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies P8.
#[tokio::test]
async fn killed_agent_and_containerd_are_restarted() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet
        .run_pod(&pod("steady", "i=0; while :; do i=$((i+1)); echo line $i; sleep 0.05; done"))
        .await
        .unwrap();
    let main = running.container("main").clone();
    let cell = kiyot.cells().remove(0);
    for words in [&["kiyot-cell agent", &cell][..], &["containerd", "containerd.toml", &cell]] {
        kill9(&processes(words));
        let output = wait_until("exec succeeds again", LIMIT, async || {
            kubelet.exec_sync(&main.id, &["echo", "here"]).await.ok()
        })
        .await;
        assert_eq!(output.stdout, "here\n");
        assert_eq!(
            kubelet.container_status(&main.id).await.unwrap().state(),
            cri::ContainerState::ContainerRunning,
            "the pod kept running"
        );
    }
    let now = kubelet.log_lines(&main).len();
    kubelet.logged(&main, &format!("line {}", now + 20)).await;
    for (at, line) in kubelet.log_lines(&main).iter().enumerate() {
        assert_eq!(line.text, format!("line {}", at + 1), "no line is lost or duplicated");
    }
    let breaks = || kiyot.log().matches("agent of a cell has disconnected").count();
    wait_until("the log reports the disconnected agent", LIMIT, async || {
        (breaks() > 0).then_some(())
    })
    .await;
    let before = breaks();
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    assert_eq!(breaks(), before, "the end of an agent with its pod is not logged");
}
