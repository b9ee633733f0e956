//! Directory trees of pods that are hard to remove.

use std::fs;

use kiyot_testkit::{Container, Kiyot, LIMIT, Node, Pod, Source, wait_until};

use crate::cell::{
    WAIT, assert_nothing_left, options, pod, remove_and_assert_clean, storage::disks::Disk,
};

/// Creates about 27,000 nested directories. The tree is too deep for the stack of a recursive walk,
/// and its paths are longer than PATH_MAX.
const NEST: &str = "nest() { cd $1; p=d; i=0; while [ $i -lt 900 ]; do p=$p/d; i=$((i+1)); done; \
    mkdir chain; \
    n=0; while [ $n -lt 30 ]; do \
    mkdir -p new/$p && mv chain new/$p/chain && mv new chain || exit 1; n=$((n+1)); done; }";

/// Verifies X41.
#[tokio::test]
async fn pod_with_nested_directories_ends_and_leaves_no_file() {
    let node = Node::start().await;
    // The tree is in memory, because some disks remove only a few hundred directories a second.
    let disk = Disk::mount(&node.directory().join("kiyot/state"), "size=512m");
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let daemon = kiyot.pid();
    let script = format!("{NEST}; (nest /scratch) && (nest /) && echo nested; cd /; {WAIT}");
    let nested = Pod::new("nested")
        .in_cell()
        .volume("scratch", Source::EmptyDir { memory: false })
        .container(Container::script("main", &script).mount("scratch", "/scratch"));
    let nested = kubelet.run_pod(&nested).await.unwrap();
    let other = kubelet.run_pod(&pod("other", WAIT)).await.unwrap();
    kubelet.logged(nested.container("main"), "nested").await;
    kubelet.stop_and_remove(&nested).await.unwrap();
    assert_eq!(kiyot.cells().len(), 1);
    let output = kubelet.exec_sync(&other.container("main").id, &["echo", "here"]).await.unwrap();
    assert_eq!(output.stdout, "here\n");
    assert_eq!(kiyot.pid(), daemon);
    assert!(fs::exists(format!("/proc/{daemon}")).unwrap());
    let removed = kiyot.state().join("removed");
    wait_until("the files are removed", LIMIT, async || {
        fs::read_dir(&removed).unwrap().next().is_none().then_some(())
    })
    .await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &other).await;
    drop(kiyot);
    drop(disk);
    assert_nothing_left(node);
}
