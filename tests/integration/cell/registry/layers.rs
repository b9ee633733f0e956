//! Layers that the node has unpacked, which netns cells mount.

use std::fs;

use kiyot_linux::mountinfo;
use kiyot_testkit::{Container, Kiyot, LIMIT, Node, Pod, image::ImageSpec, processes, wait_until};

use crate::cell::{
    WAIT, failures::faults::kill9, options, pod, remove_and_assert_clean, run_script,
};

/// Returns the snapshots on the node that hold layers for cells.
fn held(node: &Node) -> Vec<String> {
    let snapshots = node.ctr(&["snapshots", "list"]);
    snapshots.lines().filter(|line| line.starts_with("kiyot-")).map(str::to_owned).collect()
}

async fn nothing_is_held(node: &Node) {
    let is_released = || held(node).is_empty();
    wait_until("no layers are held", LIMIT, async || is_released().then_some(())).await;
}

/// Verifies I23.
#[tokio::test]
async fn cell_mounts_the_layers_of_the_node_and_changes_none() {
    let node = Node::start().await;
    let upper = [("/word", "upper"), ("/kept", "here")]
        .map(|(path, text)| (path.to_owned(), 0o644, text.as_bytes().to_vec()))
        .to_vec();
    let image = ImageSpec { upper, ..ImageSpec::script(WAIT) };
    node.image("kiyot.test/two-layers:1", &image).await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = |name| {
        let container = Container::of_image("main", "kiyot.test/two-layers:1");
        Pod::new(name).in_cell().container(container)
    };
    let running = kubelet.run_pod(&spec("first")).await.unwrap();
    let cell = kiyot.cells().remove(0);
    let agent = processes(&["kiyot-cell agent", &cell]).remove(0);
    let table = fs::read(format!("/proc/{agent}/mountinfo")).unwrap();
    let mounts = mountinfo::parse(&table).into_iter().map(|mount| mount.point);
    let snapshots: Vec<_> = mounts
        .filter(|point| point.starts_with(kiyot.state()))
        .filter(|point| point.ends_with("fs") && point.to_string_lossy().contains("/snapshots/"))
        .collect();
    // The cell mounts both layers. The lower one is also a layer of the pause image.
    assert_eq!(snapshots.len(), 2, "{}", String::from_utf8_lossy(&table));
    for snapshot in snapshots {
        let file = format!("/proc/{agent}/root{}/own", snapshot.display());
        let refused = fs::write(file, "").unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem, "{refused}");
    }
    // The cell's containerd has no blobs of the layers. It must find the image again after a
    // restart.
    let blobs = "containerd/io.containerd.content.v1.content/blobs/sha256";
    let blobs = fs::read_dir(kiyot.state().join("cells").join(&cell).join(blobs)).unwrap();
    let sizes: Vec<_> = blobs.map(|blob| blob.unwrap().metadata().unwrap().len()).collect();
    assert!(!sizes.is_empty() && sizes.iter().all(|&size| size < 100_000), "{sizes:?}");
    kill9(&processes(&["containerd", "containerd.toml", &cell]));
    let again = Container::of_image("again", "kiyot.test/two-layers:1");
    let again = wait_until("a container is created", LIMIT, async || {
        kubelet.create_container(&running, &again, 0).await.ok()
    })
    .await;
    kubelet.start_container(&again.id).await.unwrap();
    assert_eq!(run_script(&mut kubelet, &again.id, "cat /word").await, "upper");
    let main = running.container("main").id.clone();
    let script = "cat /word && echo own > /word && rm /etc/passwd && cat /word /etc/passwd";
    let output = run_script(&mut kubelet, &main, script).await;
    assert!(output.starts_with("upperown\ncat: "), "{output}");
    // The cell keeps its layers, even if the node's image is removed or changed.
    node.ctr(&["images", "remove", "--sync", "kiyot.test/two-layers:1"]);
    assert_eq!(run_script(&mut kubelet, &main, "cat /kept").await, "here");
    node.image("kiyot.test/two-layers:1", &image).await;
    let second = kubelet.run_pod(&spec("second")).await.unwrap();
    let main = second.container("main").id.clone();
    let output = run_script(&mut kubelet, &main, "cat /word /etc/passwd").await;
    assert!(output.starts_with("upperroot:"), "{output}");
    kubelet.stop_and_remove(&second).await.unwrap();
    assert_ne!(held(&node), Vec::<String>::new(), "the layers of the first cell are still held");
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    nothing_is_held(&node).await;
}

/// Verifies I23.
#[tokio::test]
async fn cells_with_an_image_share_what_the_node_holds() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let first = kubelet.run_pod(&pod("first", WAIT)).await.unwrap();
    let of_one = held(&node);
    assert_ne!(of_one, Vec::<String>::new());
    let second = kubelet.run_pod(&pod("second", WAIT)).await.unwrap();
    assert_eq!(held(&node), of_one);
    kubelet.stop_and_remove(&first).await.unwrap();
    // Layers are held for a second cell, and for a third cell after the end of the first.
    let third = kubelet.run_pod(&pod("third", WAIT)).await.unwrap();
    assert_eq!(held(&node), of_one);
    let main = second.container("main").id.clone();
    assert_eq!(run_script(&mut kubelet, &main, "echo here").await, "here\n");
    kubelet.stop_and_remove(&second).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &third).await;
    nothing_is_held(&node).await;
    // After all layers were released, they are held again.
    let fourth = kubelet.run_pod(&pod("fourth", WAIT)).await.unwrap();
    assert_eq!(held(&node), of_one);
    remove_and_assert_clean(&mut kubelet, &kiyot, &fourth).await;
    nothing_is_held(&node).await;
}

/// Verifies I23.
#[tokio::test]
async fn layers_held_by_an_earlier_daemon_are_released_with_its_cells() {
    let node = Node::start().await;
    let upper = vec![("/word".to_owned(), 0o644, b"upper".to_vec())];
    let image = ImageSpec { upper, ..ImageSpec::script(WAIT) };
    node.image("kiyot.test/two-layers:1", &image).await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let container = Container::of_image("main", "kiyot.test/two-layers:1");
    let doomed = Pod::new("doomed").in_cell().container(container);
    let doomed = kubelet.run_pod(&doomed).await.unwrap();
    let cell = kiyot.cells().remove(0);
    let left = kubelet.run_pod(&pod("left", WAIT)).await.unwrap();
    let before = held(&node);
    kiyot.kill9();
    kill9(&processes(&["kiyot-cell launch", &cell]));
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    wait_until("the pod without a cell is removed", LIMIT, async || {
        kubelet.stop_and_remove(&doomed).await.ok()
    })
    .await;
    let later = kubelet.run_pod(&pod("later", WAIT)).await.unwrap();
    assert_eq!(held(&node), before, "the remaining cell may use any of the layers");
    kubelet.stop_and_remove(&left).await.unwrap();
    wait_until("the image of the ended cells is released", LIMIT, async || {
        (held(&node).len() < before.len()).then_some(())
    })
    .await;
    assert!(held(&node).iter().all(|line| before.contains(line)));
    assert_ne!(held(&node), Vec::<String>::new(), "the layers of the later cell are held");
    remove_and_assert_clean(&mut kubelet, &kiyot, &later).await;
    nothing_is_held(&node).await;
}

/// Verifies I23.
#[tokio::test]
async fn layers_of_an_earlier_daemon_are_kept_if_containerd_was_down_at_the_start() {
    let node = Node::start().await;
    for word in ["kept", "other"] {
        let upper = vec![("/word".to_owned(), 0o644, word.as_bytes().to_vec())];
        let image = ImageSpec { upper, ..ImageSpec::script(WAIT) };
        node.image(&format!("kiyot.test/{word}:1"), &image).await;
    }
    let spec = |name: &str, image: &str| {
        Pod::new(name).in_cell().container(Container::of_image("main", image))
    };
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let kept = kubelet.run_pod(&spec("kept", "kiyot.test/kept:1")).await.unwrap();
    let before = held(&node);
    kiyot.kill9();
    node.kill_containerd();
    let log = kiyot.state().with_file_name("kiyot.log");
    let containerd = async {
        wait_until("the layers are not found", LIMIT, async || {
            let log = fs::read_to_string(&log).unwrap();
            log.contains("layers of an earlier daemon not found").then_some(())
        })
        .await;
        node.start_containerd().await;
    };
    tokio::join!(kiyot.start_again(), containerd);
    let mut kubelet = kiyot.kubelet().await;
    let same = kubelet.run_pod(&spec("same", "kiyot.test/kept:1")).await.unwrap();
    kubelet.stop_and_remove(&same).await.unwrap();
    // The layers of this pod are released after the layers of the previous pod.
    let other = kubelet.run_pod(&spec("other", "kiyot.test/other:1")).await.unwrap();
    assert_ne!(held(&node), before);
    kubelet.stop_and_remove(&other).await.unwrap();
    wait_until("the layers of the later cells are released", LIMIT, async || {
        (held(&node).len() == before.len()).then_some(())
    })
    .await;
    assert_eq!(held(&node), before);
    node.ctr(&["images", "remove", "--sync", "kiyot.test/kept:1"]);
    let main = kept.container("main").id.clone();
    assert_eq!(run_script(&mut kubelet, &main, "cat /word").await, "kept");
    remove_and_assert_clean(&mut kubelet, &kiyot, &kept).await;
    nothing_is_held(&node).await;
}
