//! Reboots of the node. A reboot is simulated by ending everything that it ends, and by another
//! boot id in the store and the cell.

use std::fs;

use kiyot::backends::milpa::store::{Batch, Store, Table};
use kiyot_proto::store as records;
use kiyot_testkit::{Kiyot, LIMIT, Node, cri, wait_until};

use crate::cell::{
    WAIT,
    failures::faults::{kill9, processes},
    is_ready, options, pod, remove_and_assert_clean,
};

/// Returns the addresses that the node's network has allocated.
pub(crate) fn allocated_addresses(node: &Node) -> Vec<String> {
    let dir = node.directory().join("cni/state").join(node.name());
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("10."))
        .collect()
}

/// Verifies X4.
#[tokio::test]
async fn reboot_ends_pods_and_releases_addresses() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("before", WAIT)).await.unwrap();
    let cell = kiyot.cells().remove(0);
    assert_eq!(allocated_addresses(&node).len(), 1);
    kiyot.kill9();
    // A reboot ends all processes and clears /run.
    kill9(&processes(&["kiyot-cell launch", &cell]));
    wait_until("the cell's processes have ended", LIMIT, async || {
        processes(&[&cell]).is_empty().then_some(())
    })
    .await;
    kiyot_testkit::output("ip", &["netns", "delete", &format!("kiyot-{cell}")]).unwrap();
    // A reboot changes the boot id.
    let store = Store::open(&kiyot.state()).await.unwrap();
    let (key, record) = store.load::<records::Cell>(Table::Cells).await.unwrap().remove(0);
    assert!(!record.boot_id.is_empty());
    let mut batch = Batch::default();
    batch.put(
        Table::Cells,
        &key,
        &records::Cell { boot_id: "the boot before".to_owned(), ..record },
    );
    store.commit(batch).await.unwrap();
    store.close().await;
    let instance = kiyot.state().join("cells").join(&cell).join("instance.json");
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let known = fs::read_to_string(&instance).unwrap().replace(boot_id.trim(), "the boot before");
    fs::write(&instance, known).unwrap();

    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    let status = kubelet.exited(&running.container("main").id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (137, "CellLost"));
    assert!(status.message.contains("the node was rebooted"), "{}", status.message);
    assert!(!is_ready(&mut kubelet, &running.sandbox).await);
    assert_eq!(kubelet.sandboxes().await.unwrap().len(), 1, "the reported pod is listed");
    assert_eq!(kiyot.cells(), Vec::<String>::new());
    assert_eq!(allocated_addresses(&node), Vec::<String>::new());

    // The kubelet continues with the pod's next sandbox.
    let mut next = running.spec.clone();
    next.attempt += 1;
    let anew = kubelet.run_pod(&next).await.unwrap();
    assert_eq!(
        kubelet.container_status(&anew.container("main").id).await.unwrap().state(),
        cri::ContainerState::ContainerRunning
    );
    kubelet.stop_pod(&anew).await.unwrap();
    kubelet.remove_pod(&anew).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
