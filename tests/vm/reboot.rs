//! Reboot of the node, simulated by records with another boot id and the end of all processes.

use std::fs;

use kiyot::backends::milpa::store::{Batch, Store, Table};
use kiyot_proto::store as records;
use kiyot_testkit::{Kiyot, Node, kill_all, processes, wait_for};

use super::{WAIT, options, pod};

/// The boot id of a previous boot.
const EARLIER_BOOT: &str = "the boot before";

/// Verifies V15.
#[tokio::test]
#[ignore = "takes long without KVM; make test-vm"]
async fn reboot_of_the_node_ends_the_pods_of_its_machines() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("before", WAIT)).await.unwrap();
    let cell = kiyot.cells().remove(0);
    assert_eq!(node.addresses().len(), 1);
    kiyot.kill9();
    // QEMU ends with its launcher.
    kill_all(&processes(&["kiyot-cell launch-vm", &cell]));
    wait_for("the cell's processes have ended", || processes(&[&cell]).is_empty()).await;
    kiyot_testkit::output("ip", &["netns", "delete", &format!("kiyot-{cell}")]).unwrap();
    let store = Store::open(&kiyot.state()).await.unwrap();
    let (key, record) = store.load::<records::Cell>(Table::Cells).await.unwrap().remove(0);
    assert!(!record.boot_id.is_empty());
    let mut batch = Batch::default();
    let record = records::Cell { boot_id: EARLIER_BOOT.to_owned(), ..record };
    batch.put(Table::Cells, &key, &record);
    store.commit(batch).await.unwrap();
    store.close().await;
    let instance = kiyot.state().join("cells").join(&cell).join("instance.json");
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let known = fs::read_to_string(&instance).unwrap().replace(boot_id.trim(), EARLIER_BOOT);
    fs::write(&instance, known).unwrap();

    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    let status = kubelet.exited(&running.container("main").id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (137, "CellLost"));
    assert!(status.message.contains("the node was rebooted"), "{}", status.message);
    assert_eq!((kiyot.cells(), node.addresses()), (Vec::new(), Vec::new()));
    kubelet.stop_and_remove(&running).await.unwrap();
    drop(kiyot);
    let left = node.stop();
    assert!(left.is_empty(), "leftovers:\n{left}");
}
