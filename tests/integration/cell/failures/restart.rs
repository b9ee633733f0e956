//! Restarts of the daemon, which do not affect pods.

use kiyot_testkit::{Kiyot, LIMIT, Node, cri, wait_until};

use crate::cell::{
    WAIT,
    lifecycle::endings::{Ending, wait_for_cell_log},
    options, pod, remove_and_assert_clean,
};

/// Verifies P5.
#[tokio::test]
async fn pods_outlive_a_killed_daemon() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let count = "i=0; while :; do i=$((i+1)); echo line $i; sleep 0.05; done";
    let running = kubelet.run_pod(&pod("survivor", count)).await.unwrap();
    let main = running.container("main").clone();
    kubelet.logged(&main, "line 5").await;
    let before = (
        kubelet.sandboxes().await.unwrap(),
        kubelet.containers().await.unwrap(),
        kubelet.sandbox_status(&running.sandbox).await.unwrap(),
    );

    kiyot.kill9();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    let after = (
        kubelet.sandboxes().await.unwrap(),
        kubelet.containers().await.unwrap(),
        kubelet.sandbox_status(&running.sandbox).await.unwrap(),
    );
    assert_eq!(after, before, "lists are unchanged");
    let result = wait_until("the cell takes exec again", LIMIT, async || {
        kubelet.exec_sync(&main.id, &["echo", "back"]).await.ok()
    })
    .await;
    assert_eq!(result.stdout, "back\n");

    let now = kubelet.log_lines(&main).len();
    kubelet.logged(&main, &format!("line {}", now + 20)).await;
    for (at, line) in kubelet.log_lines(&main).iter().enumerate() {
        assert_eq!(line.text, format!("line {}", at + 1), "no line is lost or duplicated");
    }
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies P5.
#[tokio::test]
async fn exit_during_the_outage_is_reported_afterwards() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let (begin, ending) = (Ending::new(), Ending::new());
    let running = kubelet
        .run_pod(&pod(
            "leaver",
            &format!("{}; echo bye; {}; exit 4", begin.script(), ending.script()),
        ))
        .await
        .unwrap();
    let main = running.container("main").clone();
    kiyot.kill9();
    begin.release().await;
    wait_for_cell_log(&kiyot, &main, "bye").await;
    ending.release().await;
    ending.wait_until_exited().await;
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    let status = kubelet.exited(&main.id).await;
    assert_eq!(status.exit_code, 4);
    assert_eq!(
        kubelet.log_lines(&main).iter().map(|line| line.text.as_str()).collect::<Vec<_>>(),
        ["bye"]
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies P6.
#[tokio::test]
async fn half_made_pod_is_joined_by_the_kubelets_retry() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let kubelet = kiyot.kubelet().await;
    let spec = pod("half-made", WAIT);
    let config = kubelet.prepare(&spec);
    let mut caller = kubelet.clone();
    let call = tokio::spawn(async move { caller.run_sandbox(&config, "").await });
    wait_until("a cell is being launched", LIMIT, async || {
        (!kiyot.cells().is_empty()).then_some(())
    })
    .await;
    kiyot.kill9();
    let result = call.await.unwrap();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    // If the kubelet received an id before the kill, the pod must be listed. Otherwise the sandbox
    // may have been recorded.
    let listed = kubelet.sandboxes().await.unwrap();
    match result {
        Ok(id) => assert!(listed.iter().any(|sandbox| sandbox.id == id)),
        // A recorded sandbox is returned to the kubelet's retry.
        Err(_) => assert!(listed.len() <= 1),
    }
    let running = kubelet.run_pod(&spec).await.unwrap();
    assert_eq!(kiyot.cells().len(), 1, "a pod has a single cell");
    kubelet.stop_and_remove(&running).await.unwrap();
    wait_until("no cell is left", LIMIT, async || kiyot.cells().is_empty().then_some(())).await;
}

#[tokio::test]
async fn stopped_daemon_starts_with_its_stopped_pods() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("done", "exit 5")).await.unwrap();
    kubelet.exited(&running.container("main").id).await;
    kubelet.stop_pod(&running).await.unwrap();
    kiyot.restart().await;
    let mut kubelet = kiyot.kubelet().await;
    let status = kubelet.container_status(&running.container("main").id).await.unwrap();
    assert_eq!((status.state(), status.exit_code), (cri::ContainerState::ContainerExited, 5));
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
