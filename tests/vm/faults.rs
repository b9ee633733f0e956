//! Faults of virtual machines and of the daemon.

use kiyot_testkit::{Kiyot, LIMIT, Node, cri, kill_all, processes, wait_until};

use super::{WAIT, options, pod};

/// Verifies V3, V4.
#[tokio::test]
async fn vm_outlives_its_daemon_and_ends_its_pod_when_killed() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("kept", &format!("echo up; {WAIT}"))).await.unwrap();
    let main = running.container("main").clone();
    kubelet.logged(&main, "up").await;

    kiyot.kill9();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    let container = kubelet.container_status(&main.id).await.unwrap();
    assert_eq!(container.state(), cri::ContainerState::ContainerRunning);
    wait_until("the cell answers again", LIMIT, async || {
        let output = kubelet.exec_sync(&main.id, &["echo", "there"]).await.ok()?;
        (output.stdout == "there\n").then_some(())
    })
    .await;

    let cell = kiyot.cells().remove(0);
    let machines = processes(&["qemu-system", &cell]);
    assert!(!machines.is_empty(), "QEMU runs for {cell}");
    kill_all(&machines);
    wait_until("the pod has ended", LIMIT, async || {
        let container = kubelet.container_status(&main.id).await.ok()?;
        (container.state() == cri::ContainerState::ContainerExited).then_some(())
    })
    .await;
    kubelet.stop_and_remove(&running).await.unwrap();
    assert_eq!(kiyot.cells(), Vec::<String>::new());
}
