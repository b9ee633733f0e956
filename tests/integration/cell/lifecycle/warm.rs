//! Warm pools: cells that wait for pods.

use std::{collections::BTreeSet, fs};

use kiyot_testkit::{Container, Kiyot, KiyotOptions, LIMIT, Node, Pod, wait_until};

use crate::cell::{WAIT, assert_nothing_left, is_ready, options, pod, remove_and_assert_clean};

fn with_pool(count: usize) -> KiyotOptions {
    KiyotOptions {
        milpa: "max_cells = 6\n".to_owned(),
        sections: format!("[[backends.milpa.warm]]\ncount = {count}\n"),
        ..options()
    }
}

/// Waits until this many cells have joined the pool since the first start of the daemon.
async fn wait_until_warm(kiyot: &Kiyot<'_>, times: usize) {
    wait_until(format!("{times} cells are warm"), LIMIT, async || {
        (kiyot.log().matches("cell waits in its warm pool").count() >= times).then_some(())
    })
    .await;
}

/// Verifies A20, A21, A22, A28.
#[tokio::test]
async fn pod_takes_a_cell_of_the_pool_that_survived_a_restart() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, with_pool(2)).await;
    wait_until_warm(&kiyot, 2).await;
    wait_until("the cells are prepared", LIMIT, async || {
        (kiyot.log().matches("warm cell is prepared").count() >= 2).then_some(())
    })
    .await;
    let warm: BTreeSet<String> = kiyot.cells().into_iter().collect();
    assert_eq!(warm.len(), 2);

    kiyot.kill9();
    kiyot.start_again().await;
    wait_until_warm(&kiyot, 4).await;
    assert_eq!(kiyot.cells().into_iter().collect::<BTreeSet<_>>(), warm);

    wait_until("the cells are prepared again", LIMIT, async || {
        (kiyot.log().matches("warm cell is prepared").count() >= 4).then_some(())
    })
    .await;
    wait_until("no sandbox of a rehearsal is left", LIMIT, async || {
        crate::cell::failures::faults::processes(&["containerd-shim"]).is_empty().then_some(())
    })
    .await;

    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("taken", WAIT)).await.unwrap();
    assert!(kiyot.log().contains("pod takes a cell of a warm pool"));
    let output = kubelet.exec_sync(&running.container("main").id, &["echo", "here"]).await.unwrap();
    assert_eq!(output.stdout, "here\n");
    // Another cell is launched for the pool.
    wait_until_warm(&kiyot, 5).await;
    let cells: BTreeSet<String> = kiyot.cells().into_iter().collect();
    assert!(cells.len() == 3 && cells.is_superset(&warm), "{cells:?}, before {warm:?}");

    // The reload drains the pool and does not affect the pod.
    kiyot.reload("count = 2", "count = 0").await;
    wait_until("the pool is empty", LIMIT, async || (kiyot.cells().len() == 1).then_some(())).await;
    assert!(is_ready(&mut kubelet, &running.sandbox).await);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    drop(kiyot);
    assert_nothing_left(node);
}

/// Verifies A21.
#[tokio::test]
async fn warm_cell_whose_instance_ends_is_replaced() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, with_pool(1)).await;
    wait_until_warm(&kiyot, 1).await;
    let cell = kiyot.cells().remove(0);
    crate::cell::failures::faults::kill9(&crate::cell::failures::faults::processes(&[
        "kiyot-cell init",
        &cell,
    ]));
    wait_until_warm(&kiyot, 2).await;
    wait_until("the ended cell is removed", LIMIT, async || {
        (!kiyot.cells().contains(&cell)).then_some(())
    })
    .await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("after", WAIT)).await.unwrap();
    kiyot.reload("count = 1", "count = 0").await;
    wait_until("the pool is empty", LIMIT, async || (kiyot.cells().len() == 1).then_some(())).await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    drop(kiyot);
    assert_nothing_left(node);
}

/// Verifies A21.
#[tokio::test]
async fn pods_run_while_the_pool_can_not_be_filled() {
    let node = Node::start().await;
    let binary = node.directory().join("kiyot-cell");
    let options =
        KiyotOptions { of_provider: format!("cell_binary = {binary:?}\n"), ..with_pool(1) };
    let kiyot = Kiyot::start(&node, options).await;
    wait_until("the pool has failed twice", LIMIT, async || {
        (kiyot.log().matches("warm pool not filled").count() >= 2).then_some(())
    })
    .await;
    let mut kubelet = kiyot.kubelet().await;
    let local = Pod::new("local").container(Container::script("main", WAIT));
    let local = kubelet.run_pod(&local).await.unwrap();
    kubelet.stop_and_remove(&local).await.unwrap();
    // The cause is fixed while the daemon runs.
    let cell = std::path::Path::new(env!("CARGO_BIN_EXE_kiyot")).with_file_name("kiyot-cell");
    fs::copy(cell, &binary).unwrap();
    wait_until_warm(&kiyot, 1).await;
    kiyot.reload("count = 1", "count = 0").await;
    wait_until("the pool is empty", LIMIT, async || kiyot.cells().is_empty().then_some(())).await;
    drop(kiyot);
    assert_nothing_left(node);
}
