//! Pods on the node, which behave with the daemon as without it.

use std::{fs, os::unix::fs::PermissionsExt, time::Duration};

use kiyot_testkit::{
    Container, Kiyot, KiyotOptions, Kubelet, LIMIT, Node, Pod, Source, cri, wait_until,
};
use tonic::{Code, Request};

fn options() -> KiyotOptions {
    KiyotOptions::new(env!("CARGO_BIN_EXE_kiyot"))
}

fn sleeper(name: &str) -> Pod {
    Pod::new(name).container(Container::script("main", "echo up; sleep 100000"))
}

async fn direct(node: &Node) -> Kubelet {
    node.kubelet(&node.socket()).await.unwrap()
}

#[tokio::test]
async fn unannotated_pod_runs_on_the_node() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let pod = Pod::new("plain")
        .volume("settings", Source::ConfigMap(Source::files(&[("colour", "blue")])))
        .container(
            Container::script(
                "main",
                "cat /settings/colour; echo; echo done > /dev/termination-log; sleep 100000",
            )
            .mount("settings", "/settings"),
        );
    let running = kubelet.run_pod(&pod).await.unwrap();
    let main = running.container("main");
    kubelet.logged(main, "blue").await;
    assert_eq!(kubelet.exec_sync(&main.id, &["hostname"]).await.unwrap().stdout, "plain\n");
    wait_until("the container has written its termination message", LIMIT, async || {
        (fs::read_to_string(&main.termination).ok()? == "done\n").then_some(())
    })
    .await;

    let mut beside = direct(&node).await;
    assert_eq!(beside.sandboxes().await.unwrap().len(), 1, "the pod is in containerd");
    assert_eq!(
        kubelet.sandbox_status(&running.sandbox).await.unwrap(),
        beside.sandbox_status(&running.sandbox).await.unwrap()
    );
    assert_eq!(
        kubelet.container_status(&main.id).await.unwrap(),
        beside.container_status(&main.id).await.unwrap()
    );
    assert_eq!(kubelet.sandboxes().await.unwrap(), beside.sandboxes().await.unwrap());
    assert_eq!(kubelet.containers().await.unwrap(), beside.containers().await.unwrap());
    assert!(kiyot.cells().is_empty());

    kubelet.stop_and_remove(&running).await.unwrap();
    assert!(kubelet.sandboxes().await.unwrap().is_empty());
    drop(kiyot);
    let left = node.stop();
    assert!(left.is_empty(), "leftovers:\n{left}");
}

#[tokio::test]
async fn errors_of_the_node_are_forwarded_unchanged() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let (mut through, mut beside) = (kiyot.kubelet().await, direct(&node).await);
    for id in ["0123456789abcdef", ""] {
        let (one, other) = (
            through.container_status(id).await.unwrap_err(),
            beside.container_status(id).await.unwrap_err(),
        );
        assert_eq!(
            (one.code(), one.message(), one.details()),
            (other.code(), other.message(), other.details())
        );
        let (one, other) = (
            through.sandbox_status(id).await.unwrap_err(),
            beside.sandbox_status(id).await.unwrap_err(),
        );
        assert_eq!(
            (one.code(), one.message(), one.details()),
            (other.code(), other.message(), other.details())
        );
    }
}

#[tokio::test]
async fn undeclared_target_runtime_is_refused() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let pod = sleeper("elsewhere").annotation("kubernetes.io/target-runtime", "nowhere");
    let config = kubelet.prepare(&pod);
    let refused = kubelet.run_sandbox(&config, "").await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    for word in ["kubernetes.io/target-runtime", "nowhere", "kiyot"] {
        assert!(refused.message().contains(word), "{word} is not in {:?}", refused.message());
    }
    assert!(kubelet.sandboxes().await.unwrap().is_empty());
    assert!(kiyot.cells().is_empty());
}

#[tokio::test]
async fn socket_has_mode_0600() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    assert_eq!(fs::metadata(kiyot.socket()).unwrap().permissions().mode() & 0o777, 0o600);
}

#[tokio::test]
async fn daemon_restart_keeps_pods_of_the_node_running() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&sleeper("steady")).await.unwrap();
    let id = &running.container("main").id;
    let before = kubelet.container_status(id).await.unwrap();

    kiyot.kill9();
    kiyot.start_again().await;
    assert_eq!(kiyot.kubelet().await.container_status(id).await.unwrap(), before);

    assert!(kiyot.stop().await.success());
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    assert_eq!(kubelet.container_status(id).await.unwrap(), before);
    assert_eq!(kubelet.exec_sync(id, &["echo", "still"]).await.unwrap().stdout, "still\n");
}

#[tokio::test]
async fn list_is_unavailable_while_containerd_is_down_and_complete_afterwards() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&sleeper("steady")).await.unwrap();

    node.kill_containerd();
    assert_eq!(kubelet.sandboxes().await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(kubelet.containers().await.unwrap_err().code(), Code::Unavailable);

    node.start_containerd().await;
    let listed =
        wait_until("lists are available again", LIMIT, async || kubelet.sandboxes().await.ok())
            .await;
    assert_eq!(listed.iter().map(|sandbox| &sandbox.id).collect::<Vec<_>>(), [&running.sandbox]);
    kubelet.stop_and_remove(&running).await.unwrap();
}

#[tokio::test]
async fn list_streams_beside_cells_are_unimplemented() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    for refused in [
        kubelet
            .runtime
            .stream_pod_sandboxes(cri::StreamPodSandboxesRequest::default())
            .await
            .map(drop),
        kubelet.runtime.stream_containers(cri::StreamContainersRequest::default()).await.map(drop),
        kubelet
            .runtime
            .stream_container_stats(cri::StreamContainerStatsRequest::default())
            .await
            .map(drop),
    ] {
        assert_eq!(refused.unwrap_err().code(), Code::Unimplemented);
    }
}

#[tokio::test]
async fn deadline_of_the_caller_ends_the_program_on_the_node() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&sleeper("slow")).await.unwrap();
    let id = &running.container("main").id;
    let cmd = ["sleep", "54321"].map(str::to_owned).to_vec();
    let mut request =
        Request::new(cri::ExecSyncRequest { container_id: id.clone(), cmd, timeout: 0 });
    // The deadline is longer than a program needs to start on a busy machine, because containerd
    // reports an interrupted start as `Unknown`.
    request.set_timeout(Duration::from_secs(8));
    let late = kubelet.runtime.exec_sync(request).await.unwrap_err();
    assert!(matches!(late.code(), Code::DeadlineExceeded | Code::Cancelled), "{late:?}");
    // containerd has received the deadline or the cancellation.
    wait_until("the program has ended", LIMIT, async || {
        let listed = kubelet.exec_sync(id, &["ps", "-o", "args"]).await.ok()?.stdout;
        (!listed.contains("54321")).then_some(())
    })
    .await;
}

#[tokio::test]
async fn exec_url_of_the_node_is_unchanged() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&sleeper("talker")).await.unwrap();
    let request = cri::ExecRequest {
        container_id: running.container("main").id.clone(),
        cmd: vec!["sh".to_owned()],
        stdout: true,
        ..Default::default()
    };
    let port = |url: &str| url.split('/').nth(2).map(str::to_owned).unwrap();
    let through = kubelet.runtime.exec(request.clone()).await.unwrap().into_inner().url;
    let beside = direct(&node).await.runtime.exec(request).await.unwrap().into_inner().url;
    assert_eq!(port(&through), port(&beside));
}
