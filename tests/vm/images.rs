//! Images of cells that are not whole.

use std::fs;

use kiyot_testkit::{Kiyot, Node, cell_image};

use super::{WAIT, options, pod};

/// Verifies V10.
#[tokio::test]
#[ignore = "takes long without KVM; make test-vm"]
async fn half_written_image_refuses_pods_by_its_name_until_it_is_whole() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let image = node.directory().join("image");
    fs::create_dir(&image).unwrap();
    for name in ["kernel", "initramfs", "root.squashfs", "image.json"] {
        fs::copy(cell_image().join(name), image.join(name)).unwrap();
    }
    let (path, configured) = (image.join("root.squashfs"), cell_image().display().to_string());
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    let configuration = fs::read_to_string(kiyot.configuration()).unwrap();
    let configuration = configuration.replace(&configured, &image.display().to_string());
    fs::write(kiyot.configuration(), configuration).unwrap();
    kiyot.restart().await;
    assert!(kiyot.log().contains("root.squashfs"), "named at the start: {}", kiyot.log());

    let mut kubelet = kiyot.kubelet().await;
    let spec = pod("waiting", &format!("echo up; {WAIT}"));
    let config = kubelet.prepare(&spec);
    let refused = kubelet.run_sandbox(&config, "").await.unwrap_err();
    for word in ["root.squashfs", "image.json lists"] {
        assert!(refused.message().contains(word), "{refused:?}");
    }
    kiyot_testkit::wait_for("nothing is left", || kiyot.cells().is_empty()).await;

    fs::write(&path, &whole).unwrap();
    let running = kubelet.run_pod(&spec).await.unwrap();
    kubelet.logged(running.container("main"), "up").await;
    kubelet.stop_and_remove(&running).await.unwrap();
    assert_eq!(kiyot.cells(), Vec::<String>::new());
}
