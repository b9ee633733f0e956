//! The pause image of cells, which is the pause image of the node's runtime.

use std::fs;

use kiyot_testkit::{
    Access, Kiyot, KiyotOptions, Node, Provider, Registry, cri,
    image::{ImageSpec, PAUSE_IMAGE},
    processes,
};

use crate::cell::{WAIT, options, pod, remove_and_assert_clean};

/// An argument of the pause image's program. No other process has it.
const SECONDS: &str = "2147480053";

/// Verifies I29.
#[tokio::test]
async fn cell_runs_the_pause_image_of_the_nodes_runtime_even_after_a_prune() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Open);
    let entrypoint = ["/bin/busybox", "sleep", SECONDS].map(str::to_owned).to_vec();
    let (name, _) = registry.image("other:1", &ImageSpec { entrypoint, ..Default::default() });
    let path = node.directory().join("containerd.toml");
    let toml = fs::read_to_string(&path).unwrap().replace(PAUSE_IMAGE, &name);
    fs::write(&path, toml).unwrap();
    node.restart_containerd().await;

    let kiyot = Kiyot::start(&node, KiyotOptions { pause_image: None, ..options() }).await;
    let mut kubelet = kiyot.kubelet().await;
    // Before each pod, the node does not have the image, as after a prune.
    for pulls in 1..=2 {
        let running = kubelet.run_pod(&pod("paused", WAIT)).await.unwrap();
        if matches!(Provider::of_environment(), Provider::Netns) {
            assert_eq!(processes(&[SECONDS]).len(), 1, "the cell runs one sandbox container");
        }
        let log = kiyot.log();
        let (pulled, copied) =
            ("pause image was absent on the node, pulled", "copied from the node");
        for event in [pulled, copied] {
            let lines = log.lines().filter(|line| line.contains(event) && line.contains(&name));
            assert_eq!(lines.count(), pulls, "{event}: {log}");
        }
        remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
        let image = Some(cri::ImageSpec { image: name.clone(), ..Default::default() });
        kubelet.image.remove_image(cri::RemoveImageRequest { image }).await.unwrap();
    }
}
