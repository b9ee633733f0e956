//! Image volumes: containerd 2.1 and later mount them; with older versions they are refused by
//! name.

use kiyot_testkit::{Container, Kiyot, Node, Pod, RunningPod, cri, image::ImageSpec};
use tonic::Code;

use crate::cell::{WAIT, containerd_version, options, remove_and_assert_clean};

const MODEL: &str = "kiyot.test/model:1";

/// Returns the mount that a kubelet sends after pulling the image. The source of the mount is the
/// id of the image.
fn mount(id: &str, at: &str, sub_path: &str) -> cri::Mount {
    let image = cri::ImageSpec {
        image: id.to_owned(),
        user_specified_image: MODEL.to_owned(),
        ..Default::default()
    };
    cri::Mount {
        container_path: at.to_owned(),
        readonly: true,
        image: Some(image),
        image_sub_path: sub_path.to_owned(),
        ..Default::default()
    }
}

/// Verifies D22.
#[tokio::test]
async fn image_volume_follows_the_cells_containerd() {
    let node = Node::start().await;
    let files = vec![
        ("weights/small".to_owned(), 0o644, b"0 1 2".to_vec()),
        ("readme".to_owned(), 0o644, b"a model".to_vec()),
    ];
    node.image(MODEL, &ImageSpec { files, ..Default::default() }).await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("model").in_cell();
    let config = kubelet.prepare(&spec);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let mut running = kubelet.running(&spec, config, sandbox);
    let id = kubelet.ensure_image(&spec, &running.config, MODEL).await.unwrap();
    let mut main = Container::script("main", WAIT);
    main.more_mounts = vec![mount(&id, "/model", ""), mount(&id, "/weights", "weights")];
    if containerd_version(&mut kubelet).await < (2, 1) {
        let refused = kubelet.create_container(&running, &main, 0).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unimplemented, "{refused:?}");
        assert!(
            refused.message().contains(MODEL) && refused.message().contains("2.1"),
            "{refused:?}"
        );
    } else {
        assert_mounts(&mut kubelet, &mut running, &main, &id).await;
    }
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

async fn assert_mounts(
    kubelet: &mut kiyot_testkit::Kubelet,
    running: &mut RunningPod,
    main: &Container,
    id: &str,
) {
    let created = kubelet.create_container(running, main, 0).await.unwrap();
    kubelet.start_container(&created.id).await.unwrap();
    for (file, content) in [
        ("/model/readme", "a model"),
        ("/model/weights/small", "0 1 2"),
        ("/weights/small", "0 1 2"),
    ] {
        assert_eq!(kubelet.exec_sync(&created.id, &["cat", file]).await.unwrap().stdout, content);
    }
    let written = kubelet.exec_sync(&created.id, &["touch", "/model/more"]).await.unwrap();
    assert!(written.code != 0 && written.stderr.contains("Read-only"), "{written:?}");
    // The status has the name with which the kubelet requested the image.
    let status = kubelet.container_status(&created.id).await.unwrap();
    let image_mounts: Vec<_> = status
        .mounts
        .iter()
        .filter_map(|mount| Some((&*mount.container_path, &*mount.image.as_ref()?.image_ref)))
        .collect();
    assert_eq!(image_mounts, [("/model", id), ("/weights", id)]);
    let mut other = Container::script("other", WAIT);
    other.more_mounts = vec![mount(id, "/model", "nowhere")];
    let refused = kubelet.create_container(running, &other, 0).await.unwrap_err();
    assert!(refused.message().contains("nowhere"), "{refused:?}");
    running.containers.insert("main".to_owned(), created);
}
