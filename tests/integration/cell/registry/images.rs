//! Images of pods in cells.

use kiyot_testkit::{Container, Kiyot, Node, Pod, cri, image::ImageSpec};

use crate::cell::{WAIT, lifecycle::endings::Ending, options, pod, remove_and_assert_clean};

/// Verifies D1.
#[tokio::test]
async fn image_of_the_node_is_copied() {
    let node = Node::start().await;
    let ending = Ending::new();
    node.image(
        "kiyot.test/greeter:1",
        &ImageSpec::script(&format!("echo greeted; {}; exit 0", ending.script())),
    )
    .await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    // Without a registry, the image can only come from the node.
    let spec = Pod::new("greeter")
        .in_cell()
        .container(Container::of_image("main", "kiyot.test/greeter:1"));
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main");
    kubelet.logged(main, "greeted").await;
    ending.release().await;
    assert_eq!(kubelet.exited(&main.id).await.exit_code, 0);
    let on_node = kubelet
        .image
        .image_status(image_status("kiyot.test/greeter:1"))
        .await
        .unwrap()
        .into_inner()
        .image
        .unwrap();
    let status = kubelet.container_status(&main.id).await.unwrap();
    assert_eq!(
        status.image_ref, on_node.id,
        "the image's id is the same on the node and in the cell"
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

fn image_status(name: &str) -> cri::ImageStatusRequest {
    cri::ImageStatusRequest {
        image: Some(cri::ImageSpec { image: name.to_owned(), ..Default::default() }),
        verbose: false,
    }
}

/// Verifies D1.
#[tokio::test]
async fn second_container_needs_no_second_copy() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = pod("two-of-one", WAIT).container(Container::script("other", WAIT));
    let running = kubelet.run_pod(&spec).await.unwrap();
    let id = kubelet.container_status(&running.container("main").id).await.unwrap().image_ref;
    let log = kiyot.log();
    let copies = log
        .lines()
        .filter(|line| line.contains("image copied from the node") && line.contains(&id))
        .count();
    assert_eq!(copies, 1, "{log}");
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D1.
#[tokio::test]
async fn absent_image_is_named_in_the_error() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("imageless")
        .in_cell()
        .container(Container::of_image("main", "registry.invalid/nobody/has:this"));
    let status = kubelet.run_pod(&spec).await.unwrap_err();
    assert!(status.message().contains("registry.invalid/nobody/has:this"), "{status:?}");
}

/// Verifies D6.
#[tokio::test]
async fn pull_by_digest_asks_the_registry_although_the_node_has_the_image() {
    let node = Node::start().await;
    node.image("private.invalid/app:1", &ImageSpec::script("exit 0")).await;
    let listed = node.ctr(&["images", "ls"]);
    let line = listed.lines().find(|line| line.starts_with("private.invalid/app:1 ")).unwrap();
    let digest = line.split_whitespace().find(|word| word.starts_with("sha256:")).unwrap();
    let pinned = format!("private.invalid/app@{digest}");
    node.ctr(&["images", "tag", "private.invalid/app:1", &pinned]);
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("stranger", WAIT)).await.unwrap();
    // Another pod pulled the image. Without credentials, this pod must not get it.
    let image = Some(cri::ImageSpec {
        image: pinned,
        annotations: running.config.annotations.clone(),
        ..Default::default()
    });
    let request =
        cri::PullImageRequest { image, auth: None, sandbox_config: Some(running.config.clone()) };
    let refused = kubelet.image.pull_image(request).await.unwrap_err();
    assert!(refused.message().contains("private.invalid"), "{refused:?}");
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
