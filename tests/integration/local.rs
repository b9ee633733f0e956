//! Pods that stay on the node, through the daemon: as if it were not there.

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
async fn an_unannotated_pod_runs_on_the_node() {
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
    wait_until("the container has said its last words", LIMIT, async || {
        (fs::read_to_string(&main.termination).ok()? == "done\n").then_some(())
    })
    .await;

    let mut beside = direct(&node).await;
    assert_eq!(beside.sandboxes().await.unwrap().len(), 1, "it is containerd's own");
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
    assert!(left.is_empty(), "left:\n{left}");
}

#[tokio::test]
async fn errors_of_the_node_come_as_they_are() {
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
async fn a_target_runtime_that_nobody_has_is_refused() {
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
async fn the_socket_is_for_its_owner_alone() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    assert_eq!(fs::metadata(kiyot.socket()).unwrap().permissions().mode() & 0o777, 0o600);
}

#[tokio::test]
async fn pods_go_on_while_the_daemon_is_killed_and_restarted() {
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
async fn a_list_is_an_error_while_containerd_is_down_and_whole_afterwards() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&sleeper("steady")).await.unwrap();

    node.kill_containerd();
    assert_eq!(kubelet.sandboxes().await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(kubelet.containers().await.unwrap_err().code(), Code::Unavailable);

    node.start_containerd().await;
    let listed =
        wait_until("lists are answered again", LIMIT, async || kubelet.sandboxes().await.ok())
            .await;
    assert_eq!(listed.iter().map(|sandbox| &sandbox.id).collect::<Vec<_>>(), [&running.sandbox]);
    kubelet.stop_and_remove(&running).await.unwrap();
}

#[tokio::test]
async fn streams_of_lists_are_unimplemented_beside_cells() {
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
async fn the_callers_deadline_holds_on_the_node() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&sleeper("slow")).await.unwrap();
    let id = &running.container("main").id;
    let cmd = ["sleep", "54321"].map(str::to_owned).to_vec();
    let mut request =
        Request::new(cri::ExecSyncRequest { container_id: id.clone(), cmd, timeout: 0 });
    // Longer than a start takes on a busy machine: one that is cut short fails in containerd's
    // other words (`Unknown`).
    request.set_timeout(Duration::from_secs(8));
    let late = kubelet.runtime.exec_sync(request).await.unwrap_err();
    assert!(matches!(late.code(), Code::DeadlineExceeded | Code::Cancelled), "{late:?}");
    // containerd has ended the program, because it got the deadline or the cancellation.
    wait_until("the program has ended", LIMIT, async || {
        let listed = kubelet.exec_sync(id, &["ps", "-o", "args"]).await.ok()?.stdout;
        (!listed.contains("54321")).then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_exec_stream_of_the_node_keeps_its_url() {
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
