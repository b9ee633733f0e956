//! Kills of the daemon while cells are frozen.

use std::fs;

use kiyot_testkit::{Kiyot, LIMIT, Node, cri, wait_until};

use crate::cell::{
    assert_nothing_left, is_ready,
    lifecycle::stops::{freeze, processes_of, thaw},
    options, pod, remove_and_assert_clean,
};

/// A cell whose cgroup is frozen. The drop thaws the cgroup, so that the processes can be ended
/// after a failed test.
pub(crate) struct FrozenCell(String);

impl FrozenCell {
    pub(crate) fn new(cell: &str) -> Self {
        let frozen = Self(cell.to_owned());
        frozen.set("FROZEN", "1").unwrap();
        frozen
    }

    fn set(&self, v1: &str, v2: &str) -> std::io::Result<()> {
        fs::write(format!("/sys/fs/cgroup/freezer/kiyot/{}/freezer.state", self.0), v1)
            .or_else(|_| fs::write(format!("/sys/fs/cgroup/kiyot/{}/cgroup.freeze", self.0), v2))
    }
}

impl Drop for FrozenCell {
    fn drop(&mut self) {
        // The cell may have ended.
        let _ = self.set("THAWED", "0");
    }
}

/// Verifies X14.
#[tokio::test]
async fn daemon_killed_while_cells_are_frozen_finds_them_unchanged() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let (mut pods, mut cells) = (Vec::new(), Vec::<String>::new());
    for name in ["cold", "stopped", "ended"] {
        let running = kubelet
            .run_pod(&pod(name, "i=0; while :; do i=$((i+1)); echo line $i; sleep 0.05; done"))
            .await
            .unwrap();
        kubelet.logged(running.container("main"), "line 5").await;
        pods.push(running);
        cells.extend(
            kiyot.cells().into_iter().filter(|cell| !cells.contains(cell)).collect::<Vec<_>>(),
        );
    }
    let stopped = processes_of(&cells[1]);
    freeze(&stopped);
    let (cold, _ended) = (FrozenCell::new(&cells[0]), FrozenCell::new(&cells[2]));
    let listed = (kubelet.sandboxes().await.unwrap(), kubelet.containers().await.unwrap());
    kiyot.kill9();
    kiyot.start_again().await;

    let mut kubelet = kiyot.kubelet().await;
    assert_eq!(
        (kubelet.sandboxes().await.unwrap(), kubelet.containers().await.unwrap()),
        listed,
        "an unresponsive cell is not dead"
    );
    for running in &pods {
        let main = running.container("main");
        assert!(is_ready(&mut kubelet, &running.sandbox).await);
        assert_eq!(
            kubelet.container_status(&main.id).await.unwrap().state(),
            cri::ContainerState::ContainerRunning
        );
        // The call fails instead of hanging.
        kubelet.exec_sync(&main.id, &["true"]).await.unwrap_err();
        assert_eq!(
            kubelet.run_sandbox(&running.config, "").await.unwrap(),
            running.sandbox,
            "a pod has a single sandbox"
        );
    }
    assert_eq!(kiyot.cells().len(), pods.len(), "a pod has a single cell");
    // The first cell to end is still frozen, and has not sent a message since the restart.
    let ended = pods.pop().unwrap();
    kubelet.stop_container(&ended.container("main").id, 1).await.unwrap_err();
    kubelet
        .runtime
        .stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id: ended.sandbox.clone() })
        .await
        .unwrap();
    kubelet.stop_and_remove(&ended).await.unwrap();
    assert_eq!(kiyot.cells().len(), pods.len());

    drop(cold);
    thaw(&stopped);
    for running in &pods {
        let main = running.container("main");
        let output = wait_until("exec succeeds again", LIMIT, async || {
            kubelet.exec_sync(&main.id, &["echo", "here"]).await.ok()
        })
        .await;
        assert_eq!(output.stdout, "here\n");
        let now = kubelet.log_lines(main).len();
        kubelet.logged(main, &format!("line {}", now + 5)).await;
        for (at, line) in kubelet.log_lines(main).iter().enumerate() {
            assert_eq!(line.text, format!("line {}", at + 1), "no line is lost or duplicated");
        }
    }
    assert_eq!(kiyot.cells().len(), pods.len());
    for running in &pods[1..] {
        kubelet.stop_and_remove(running).await.unwrap();
    }
    remove_and_assert_clean(&mut kubelet, &kiyot, &pods[0]).await;
    drop(kiyot);
    assert_nothing_left(node);
}
