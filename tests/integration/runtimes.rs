//! Two container runtimes behind a daemon.

use kiyot_testkit::{
    Container, Kiyot, KiyotOptions, Kubelet, LIMIT, Node, Pod, RunningPod, cri, image::ImageSpec,
    wait_until,
};
use tonic::Code;

/// Starts a daemon with two containerds. Pods with the label `runtime: second` go to the second.
async fn start<'a>(node: &'a Node, second: &Node) -> Kiyot<'a> {
    start_with(node, second, "containerd").await
}

/// Starts the same daemon with a given node backend.
async fn start_with<'a>(node: &'a Node, second: &Node, node_backend: &str) -> Kiyot<'a> {
    let sections = format!(
        "[[routing.rule]]\nname = \"second\"\nlabel = {{ runtime = \"second\" }}\n\
         backend = \"second\"\n\n[backends.second]\ntype = \"cri\"\nsocket = \"{}\"\n",
        second.socket().display()
    );
    let options = KiyotOptions::new(env!("CARGO_BIN_EXE_kiyot"));
    Kiyot::start(
        node,
        KiyotOptions {
            cells: false,
            server: format!("node_backend = {node_backend:?}"),
            sections,
            ..options
        },
    )
    .await
}

fn pod(name: &str) -> Pod {
    Pod::new(name)
        .container(Container::script("main", "trap 'exit 0' TERM; while :; do sleep 0.1; done"))
}

fn on_second(pod: Pod) -> Pod {
    pod.label("runtime", "second")
}

async fn ids(kubelet: &mut Kubelet) -> Vec<String> {
    let mut ids: Vec<_> =
        kubelet.sandboxes().await.unwrap().into_iter().map(|sandbox| sandbox.id).collect();
    ids.sort();
    ids
}

async fn hostname(kubelet: &mut Kubelet, pod: &RunningPod) -> String {
    kubelet
        .exec_sync(&pod.container("main").id, &["hostname"])
        .await
        .unwrap()
        .stdout
        .trim()
        .to_owned()
}

/// Verifies R5.
#[tokio::test]
async fn rule_routes_pods_to_its_runtime_and_lists_have_all_pods() {
    let (node, other) = (Node::start().await, Node::start().await);
    // Only the second runtime has the image.
    other.image("kiyot.test/elsewhere:1", &ImageSpec::script("echo only here; sleep 100000")).await;
    let kiyot = start(&node, &other).await;
    let mut kubelet = kiyot.kubelet().await;
    let (mut first, mut second) = (
        node.kubelet(&node.socket()).await.unwrap(),
        other.kubelet(&other.socket()).await.unwrap(),
    );
    let one = kubelet.run_pod(&pod("one")).await.unwrap();
    let two = kubelet.run_pod(&on_second(pod("two"))).await.unwrap();
    assert_eq!(
        (ids(&mut first).await, ids(&mut second).await),
        (vec![one.sandbox.clone()], vec![two.sandbox.clone()])
    );
    let mut both = vec![one.sandbox.clone(), two.sandbox.clone()];
    both.sort();
    assert_eq!(ids(&mut kubelet).await, both);
    assert_eq!(kubelet.containers().await.unwrap().len(), 2);
    assert_eq!(
        (hostname(&mut kubelet, &one).await, hostname(&mut kubelet, &two).await),
        ("one".to_owned(), "two".to_owned())
    );
    assert_eq!(
        kubelet.sandbox_status(&two.sandbox).await.unwrap(),
        second.sandbox_status(&two.sandbox).await.unwrap()
    );

    // The image of a pod is requested from the pod's runtime.
    let seen = on_second(Pod::new("three"))
        .annotation("kubernetes.io/config.seen", "2026-01-02T03:04:05.000000006Z");
    let three = kubelet
        .run_pod(&seen.container(Container::of_image("main", "kiyot.test/elsewhere:1")))
        .await
        .unwrap();
    kubelet.logged(three.container("main"), "only here").await;

    // While a runtime is down, its calls and all lists are unavailable, because a list must be
    // complete. Calls of the other runtime succeed.
    other.kill_containerd();
    assert_eq!(kubelet.sandboxes().await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(kubelet.sandbox_status(&two.sandbox).await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(hostname(&mut kubelet, &one).await, "one");
    let of_one = cri::PodSandboxFilter { id: one.sandbox.clone(), ..Default::default() };
    let listed = kubelet
        .runtime
        .list_pod_sandbox(cri::ListPodSandboxRequest { filter: Some(of_one) })
        .await
        .unwrap()
        .into_inner()
        .items;
    assert_eq!(listed.len(), 1);
    let unknown = kubelet.sandbox_status("0123456789abcdef").await.unwrap_err();
    assert_eq!(unknown.code(), Code::Unavailable, "the dead runtime may have it: {unknown:?}");
    other.start_containerd().await;
    wait_until("lists are complete again", LIMIT, async || kubelet.sandboxes().await.ok()).await;
    assert_eq!(
        kubelet.sandbox_status("0123456789abcdef").await.unwrap_err().code(),
        Code::NotFound
    );

    for pod in [&one, &two, &three] {
        kubelet.stop_and_remove(pod).await.unwrap();
    }
    assert!(
        first.sandboxes().await.unwrap().is_empty() && second.sandboxes().await.unwrap().is_empty()
    );
}

/// Verifies R8.
#[tokio::test]
async fn node_backend_answers_for_the_node() {
    let (node, other) = (Node::start().await, Node::start().await);
    other.image("kiyot.test/elsewhere:1", &ImageSpec::script("echo only here")).await;
    for (name, has_it) in [("containerd", false), ("second", true)] {
        let kiyot = start_with(&node, &other, name).await;
        let mut kubelet = kiyot.kubelet().await;
        let images = kubelet
            .image
            .list_images(cri::ListImagesRequest::default())
            .await
            .unwrap()
            .into_inner()
            .images;
        assert_eq!(
            images
                .iter()
                .any(|image| image.repo_tags.contains(&"kiyot.test/elsewhere:1".to_owned())),
            has_it,
            "{name}"
        );
        assert_eq!(
            kubelet.image_status_without_pod("kiyot.test/elsewhere:1").await.unwrap().is_some(),
            has_it,
            "{name}"
        );
        let own = if has_it {
            other.kubelet(&other.socket()).await
        } else {
            node.kubelet(&node.socket()).await
        };
        let directory = async |mut kubelet: Kubelet| {
            let info =
                kubelet.image.image_fs_info(cri::ImageFsInfoRequest {}).await.unwrap().into_inner();
            info.image_filesystems[0].fs_id.clone().unwrap().mountpoint
        };
        assert_eq!(directory(kubelet).await, directory(own.unwrap()).await, "{name}");
    }
}

/// Verifies R5.
#[tokio::test]
async fn restart_keeps_each_pod_at_its_runtime() {
    let (node, other) = (Node::start().await, Node::start().await);
    let mut kiyot = start(&node, &other).await;
    let mut kubelet = kiyot.kubelet().await;
    let one = kubelet.run_pod(&pod("one")).await.unwrap();
    let two = kubelet.run_pod(&on_second(pod("two"))).await.unwrap();
    kiyot.kill9();
    kiyot.start_again().await;
    // Before any list, the test calls by the id of a container, by the id of a sandbox, and by a
    // prefix of an id, which crictl sends.
    let mut kubelet = kiyot.kubelet().await;
    assert_eq!(
        (hostname(&mut kubelet, &two).await, hostname(&mut kubelet, &one).await),
        ("two".to_owned(), "one".to_owned())
    );
    assert_eq!(kubelet.sandbox_status(&two.sandbox[..13]).await.unwrap().id, two.sandbox);
    let more = kubelet
        .create_container(&two, &Container::script("more", "sleep 100000"), 0)
        .await
        .unwrap();
    kubelet.start_container(&more.id).await.unwrap();
    assert_eq!(kubelet.exec_sync(&more.id, &["echo", "here"]).await.unwrap().stdout, "here\n");
    kubelet.stop_and_remove(&two).await.unwrap();
    kubelet.stop_and_remove(&one).await.unwrap();
    assert!(other.kubelet(&other.socket()).await.unwrap().sandboxes().await.unwrap().is_empty());
}
