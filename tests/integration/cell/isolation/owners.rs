//! Cells without records, and the cells of two daemons on a node.

use std::fs;

use kiyot_engine::id::CellId;
use kiyot_testkit::{Kiyot, KiyotOptions, LIMIT, Leftovers, Node, wait_until};

use crate::cell::{WAIT, assert_nothing_left, is_ready, options, pod, remove_and_assert_clean};

/// Verifies N3, X1.
#[tokio::test]
async fn cells_of_a_lost_store_end_and_their_pods_get_new_cells() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let (again, removed) = (pod("again", WAIT), pod("removed", WAIT));
    kubelet.run_pod(&again).await.unwrap();
    let mut lost = kiyot.cells();
    kubelet.run_pod(&removed).await.unwrap();
    lost.extend(kiyot.cells().into_iter().filter(|cell| !lost.contains(cell)).collect::<Vec<_>>());
    assert_eq!(lost.len(), 2);
    kiyot.kill9();
    fs::remove_file(kiyot.state().join("store.redb")).unwrap();
    kiyot.start_again().await;

    // The kubelet sees no sandboxes of its pods, and runs the pods again.
    let mut kubelet = kiyot.kubelet().await;
    assert!(kubelet.sandboxes().await.unwrap().is_empty());
    let running = kubelet.run_pod(&again).await.unwrap();
    assert!(!kiyot.cells().contains(&lost[0]), "the pod never has two cells");
    wait_until("the cells of the lost store have ended", LIMIT, async || {
        kiyot.cells().iter().all(|cell| !lost.contains(cell)).then_some(())
    })
    .await;
    let left = Leftovers::of_host().about(&lost);
    assert!(left.is_empty(), "left:\n{left}");
    let log = kiyot.log();
    let line = log.lines().find(|line| line.contains("terminating stray instances"));
    assert!(line.is_some_and(|line| lost.iter().all(|cell| line.contains(cell))), "{log}");
    assert_eq!(kiyot.cells().len(), 1);
    assert!(is_ready(&mut kubelet, &running.sandbox).await);
    let main = &running.container("main").id;
    assert_eq!(kubelet.exec_sync(main, &["echo", "here"]).await.unwrap().stdout, "here\n");
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    kubelet.forget(&removed);
    drop(kiyot);
    assert_nothing_left(node);
}

/// Makes the directory of a cell without a record. The daemon ends such a stray after two
/// sightings.
fn add_stray(kiyot: &Kiyot<'_>) -> String {
    let stray = CellId::mint().unwrap().to_string();
    fs::create_dir_all(kiyot.state().join("cells").join(&stray)).unwrap();
    stray
}

/// Verifies N20.
#[tokio::test]
async fn two_daemons_of_a_node_end_no_cells_of_each_other() {
    let node = Node::start().await;
    let mut first = Kiyot::start(&node, options()).await;
    let mut second = Kiyot::start(&node, KiyotOptions { name: "second", ..options() }).await;
    let mut pods = Vec::new();
    for (kiyot, name) in [(&first, "of-first"), (&second, "of-second")] {
        let mut kubelet = kiyot.kubelet().await;
        pods.push(kubelet.run_pod(&pod(name, WAIT)).await.unwrap());
    }
    let cells = (first.cells(), second.cells());
    for restarts in [false, true] {
        for kiyot in [&mut first, &mut second] {
            if restarts {
                kiyot.kill9();
                kiyot.start_again().await;
            }
            // When the stray has ended, the daemon has listed all instances twice.
            let stray = add_stray(kiyot);
            wait_until("the stray has ended", LIMIT, async || {
                (!kiyot.cells().contains(&stray)).then_some(())
            })
            .await;
        }
        assert_eq!((first.cells(), second.cells()), cells);
    }
    for (kiyot, running) in [&first, &second].into_iter().zip(&pods) {
        let mut kubelet = kiyot.kubelet().await;
        let main = running.container("main").id.clone();
        let output = wait_until("the cell is connected", LIMIT, async || {
            kubelet.exec_sync(&main, &["echo", "here"]).await.ok()
        })
        .await;
        assert_eq!(output.stdout, "here\n");
        assert!(is_ready(&mut kubelet, &running.sandbox).await);
        remove_and_assert_clean(&mut kubelet, kiyot, running).await;
    }
    drop((first, second));
    assert_nothing_left(node);
}
