//! Images of running pods after a restart of the kubelet or a change of annotations. The
//! annotations in `ImageStatus` then differ from the annotations in `RunPodSandbox`.

use kiyot_testkit::{
    Access, Container, Kiyot, Kubelet, Node, Pod, Registry, RunningPod, wait_until,
};

use crate::cell::{
    LIMIT,
    registry::registries::{
        blob_requests, image_with_word, run_sandbox, run_until_word, with_mirrors,
    },
    remove_and_assert_clean,
};

/// Runs a sandbox without annotations. Its runtime class alone selects a cell.
async fn sandbox_by_class(kubelet: &mut Kubelet, name: &str) -> RunningPod {
    let pod = Pod { runtime_handler: "kiyot".to_owned(), ..Pod::new(name) };
    let config = kubelet.prepare(&pod);
    let sandbox = kubelet.run_sandbox(&config, &pod.runtime_handler).await.unwrap();
    kubelet.running(&pod, config, sandbox)
}

/// Asserts that the pod has an image and that the registry got no request. Returns the id of the
/// image.
async fn assert_present(
    kubelet: &mut Kubelet,
    registry: &Registry,
    pod: &RunningPod,
    image: &str,
    when: &str,
) -> String {
    let found = kubelet.image_status(&pod.spec, image).await.unwrap();
    let found = found.unwrap_or_else(|| panic!("{image} is not present {when}"));
    assert_eq!(registry.asked(), Vec::<String>::new(), "{when}");
    found.id
}

/// Verifies I19.
#[tokio::test]
async fn container_restart_after_a_kubelet_restart_pulls_nothing() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Open);
    let (name, _) = registry.image("app:1", &image_with_word("old"));
    let mut kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut annotated = run_sandbox(&mut kubelet, "annotated").await;
    let mut by_class = sandbox_by_class(&mut kubelet, "by-class").await;
    let pods = [&mut annotated, &mut by_class];
    let mut ids = Vec::new();
    for pod in pods {
        ids.push(run_until_word(&mut kubelet, pod, "first", &name, "old").await);
        let status = kubelet.sandbox_status(&pod.sandbox).await.unwrap();
        assert_eq!(status.annotations, pod.config.annotations);
    }
    // The tag has moved. A restarted container must keep its image.
    registry.image("app:1", &image_with_word("new"));
    registry.asked();

    kubelet.restart();
    for (pod, id) in [&mut annotated, &mut by_class].into_iter().zip(&ids) {
        assert_eq!(
            assert_present(&mut kubelet, &registry, pod, &name, "after a restart of the kubelet")
                .await,
            *id
        );
        assert_eq!(run_until_word(&mut kubelet, pod, "second", &name, "old").await, *id);
        assert_eq!(registry.asked(), Vec::<String>::new());
        let status = kubelet.sandbox_status(&pod.sandbox).await.unwrap();
        assert_eq!(
            status.annotations, pod.config.annotations,
            "the annotations are those of the first request"
        );
    }

    // The restarted daemon knows the images only from its records. Then the kubelet restarts again.
    kiyot.kill9();
    kiyot.start_again().await;
    let mut kubelet = wait_until("the daemon answers", LIMIT, async || {
        let mut kubelet = kiyot.kubelet().await;
        kubelet.sandboxes().await.ok().map(|_| kubelet)
    })
    .await;
    for restarts in ["the daemon", "the daemon and the kubelet"] {
        for (pod, id) in [&annotated, &by_class].into_iter().zip(&ids) {
            let when = format!("after a restart of {restarts}");
            assert_eq!(assert_present(&mut kubelet, &registry, pod, &name, &when).await, *id);
        }
        kubelet.restart();
        kubelet.restart();
    }
    kubelet.stop_and_remove(&by_class).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &annotated).await;
}

/// Verifies I19.
#[tokio::test]
async fn annotated_pod_still_has_its_images() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Open);
    let (name, _) = registry.image("app:1", &image_with_word("old"));
    let mut kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut pod = run_sandbox(&mut kubelet, "annotated").await;
    let id = run_until_word(&mut kubelet, &mut pod, "first", &name, "old").await;
    registry.image("app:1", &image_with_word("new"));
    registry.asked();

    // `kubectl annotate` is repeated, each time followed by a restart of the kubelet.
    for (n, when) in ["once", "twice"].into_iter().enumerate() {
        pod.spec.annotations.insert("team".to_owned(), when.to_owned());
        let when = format!("annotated {when}");
        assert_eq!(assert_present(&mut kubelet, &registry, &pod, &name, &when).await, id);
        let container = format!("main{n}");
        assert_eq!(run_until_word(&mut kubelet, &mut pod, &container, &name, "old").await, id);
        assert_eq!(registry.asked(), Vec::<String>::new(), "{when}");
        kubelet.restart();
        let when = format!("{when}, after a restart of the kubelet");
        assert_eq!(assert_present(&mut kubelet, &registry, &pod, &name, &when).await, id);
        // The first container after the restart brings the current annotations.
        assert_eq!(
            run_until_word(&mut kubelet, &mut pod, &format!("more{n}"), &name, "old").await,
            id
        );
    }
    kiyot.kill9();
    kiyot.start_again().await;
    wait_until("the pod's image is known after a restart of the daemon", LIMIT, async || {
        kubelet.image_status(&pod.spec, &name).await.ok()?.filter(|image| image.id == id)
    })
    .await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
}

/// Verifies I19.
#[tokio::test]
async fn pod_on_the_node_does_not_get_the_image_of_a_cell() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Open);
    let (name, _) = registry.image("app:1", &image_with_word("old"));
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut by_class = sandbox_by_class(&mut kubelet, "by-class").await;
    run_until_word(&mut kubelet, &mut by_class, "main", &name, "old").await;
    registry.asked();
    // The annotations equal those of the pod in the cell, except for the kubelet's own.
    let local = Pod::new("local").container(Container::of_image("main", &name));
    let config = kubelet.prepare(&local);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    assert_eq!(kubelet.image_status(&local, &name).await.unwrap(), None);
    // After its restart, the kubelet sends annotations that the daemon does not know. Whatever the
    // daemon answers, the pod must run by its next attempt at the latest.
    kubelet.restart();
    let running = kubelet.running(&local, config, sandbox);
    let created = wait_until("the container is created on the node", LIMIT, async || {
        kubelet.create_container(&running, &local.containers[0], 0).await.ok()
    })
    .await;
    kubelet.start_container(&created.id).await.unwrap();
    kubelet.logged(&created, "old").await;
    assert!(!blob_requests(&registry.asked()).is_empty(), "the node has pulled it");
    kubelet.stop_container(&created.id, 30).await.unwrap();
    kubelet.stop_and_remove(&running).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &by_class).await;
}
