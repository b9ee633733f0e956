//! The test kit with containerd alone, without the daemon.

use std::fs;

use kiyot_testkit::{Container, LIMIT, Node, Pod, Source, cri, wait_until};

use crate::cell::lifecycle::endings::Ending;

#[tokio::test]
async fn pod_on_containerd_runs_and_leaves_nothing() {
    let node = Node::start().await;
    let mut kubelet = node.kubelet(&node.socket()).await.unwrap();
    let pod = Pod::new("whole")
        .volume("settings", Source::ConfigMap(Source::files(&[("colour", "blue")])))
        .volume("key", Source::Secret(Source::files(&[("key", "hush")])))
        .volume("scratch", Source::EmptyDir { memory: false })
        .container(
            Container::script(
                "main",
                "cat /settings/colour; echo; echo $WORD >&2; echo bye > /dev/termination-log; \
                 cat > /scratch/file < /key/key; sleep 1000",
            )
            .mount("settings", "/settings")
            .mount("key", "/key")
            .mount("scratch", "/scratch")
            .env("WORD", "sesame"),
        );
    let running = kubelet.run_pod(&pod).await.unwrap();
    let main = running.container("main");

    assert_eq!(kubelet.logged(main, "blue").await.stream, "stdout");
    assert_eq!(kubelet.logged(main, "sesame").await.stream, "stderr");
    let scratch =
        kubelet.pod_directory(&pod.uid).join("volumes/kubernetes.io~empty-dir/scratch/file");
    wait_until("the container has written to its volume", LIMIT, async || {
        (fs::read_to_string(&scratch).ok()? == "hush").then_some(())
    })
    .await;
    assert_eq!(fs::read_to_string(&main.termination).unwrap(), "bye\n");

    let output =
        kubelet.exec_sync(&main.id, &["sh", "-c", "hostname; echo no >&2; exit 3"]).await.unwrap();
    assert_eq!(
        (output.stdout.as_str(), output.stderr.as_str(), output.code),
        ("whole\n", "no\n", 3)
    );

    let status = kubelet.sandbox_status(&running.sandbox).await.unwrap();
    assert!(status.network.unwrap().ip.starts_with("10.88."));
    assert_eq!(kubelet.sandboxes().await.unwrap().len(), 1);
    assert!(!node.leftovers().is_empty());

    kubelet.stop_and_remove(&running).await.unwrap();
    assert!(kubelet.sandboxes().await.unwrap().is_empty());
    assert!(kubelet.containers().await.unwrap().is_empty());
    assert!(!kubelet.pod_directory(&pod.uid).exists());

    let left = node.stop();
    assert!(left.is_empty(), "leftovers:\n{left}");
}

#[tokio::test]
async fn volume_update_reaches_a_running_pod() {
    let node = Node::start().await;
    let mut kubelet = node.kubelet(&node.socket()).await.unwrap();
    let pod = Pod::new("reader")
        .volume("settings", Source::ConfigMap(Source::files(&[("colour", "blue")])))
        .container(Container::script("main", "sleep 1000").mount("settings", "/settings"));
    let running = kubelet.run_pod(&pod).await.unwrap();
    let id = running.container("main").id.clone();
    assert_eq!(kubelet.exec_sync(&id, &["cat", "/settings/colour"]).await.unwrap().stdout, "blue");
    kubelet.update_volume(&pod, "settings", &Source::files(&[("colour", "red")]));
    assert_eq!(kubelet.exec_sync(&id, &["cat", "/settings/colour"]).await.unwrap().stdout, "red");
}

#[tokio::test]
async fn node_stop_removes_running_pods() {
    let node = Node::start().await;
    let mut kubelet = node.kubelet(&node.socket()).await.unwrap();
    let port = cri::PortMapping { container_port: 80, host_port: 18086, ..Default::default() };
    let mut pod = Pod::new("abandoned")
        .volume("token", Source::Projected(Source::files(&[("token", "t")])))
        .container(Container::script("main", "sleep 1000"));
    pod.ports = vec![port];
    kubelet.run_pod(&pod).await.unwrap();
    node.restart_containerd().await;
    assert_eq!(count_sandboxes(&node).await, 1);
    let left = node.stop();
    assert!(left.is_empty(), "leftovers:\n{left}");
}

async fn count_sandboxes(node: &Node) -> usize {
    node.kubelet(&node.socket()).await.unwrap().sandboxes().await.unwrap().len()
}

#[tokio::test]
async fn built_image_runs_with_its_user_and_exit_code() {
    let node = Node::start().await;
    let mut kubelet = node.kubelet(&node.socket()).await.unwrap();
    let ending = Ending::new();
    let spec = kiyot_testkit::image::ImageSpec {
        files: vec![("/srv/greeting".to_owned(), 0o644, b"hello".to_vec())],
        user: "65534".to_owned(),
        working_dir: "/srv".to_owned(),
        ..kiyot_testkit::image::ImageSpec::script(&format!(
            "cat greeting; echo; id -u; {}; exit 7",
            ending.script()
        ))
    };
    node.image("kiyot.test/greeter:1", &spec).await;
    let running = kubelet
        .run_pod(
            &Pod::new("greeter").container(Container::of_image("main", "kiyot.test/greeter:1")),
        )
        .await
        .unwrap();
    let main = running.container("main");
    kubelet.logged(main, "65534").await;
    ending.release().await;
    assert_eq!(kubelet.exited(&main.id).await.exit_code, 7);
    let lines: Vec<_> = kubelet.log_lines(main).into_iter().map(|line| line.text).collect();
    assert_eq!(lines, ["hello", "65534"]);
}
