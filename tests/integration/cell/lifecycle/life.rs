//! The life of a pod in a cell, from start to removal.

use kiyot_testkit::{Container, Kiyot, LIMIT, Node, Pod, cri};

use crate::cell::{
    WAIT, address, assert_nothing_left,
    lifecycle::endings::{Ending, wait_for_cell_log},
    options, pod, remove_and_assert_clean,
};

/// Verifies P1.
#[tokio::test]
async fn pod_runs_in_a_cell_of_its_own() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;

    let running = kubelet
        .run_pod(
            &pod("first", &format!("echo hello from $(hostname); {WAIT}")).label("app", "demo"),
        )
        .await
        .unwrap();
    let main = running.container("main").clone();
    assert!(
        running.sandbox.starts_with("milpa") && running.sandbox.len() == 64,
        "{}",
        running.sandbox
    );
    assert!(main.id.starts_with("milpa") && main.id.len() == 64, "{}", main.id);
    assert_eq!(kiyot.cells().len(), 1);
    kubelet.logged(&main, "hello from first").await;

    let status = kubelet.sandbox_status(&running.sandbox).await.unwrap();
    assert_eq!(status.state(), cri::PodSandboxState::SandboxReady);
    assert_eq!(status.labels.get("app").map(String::as_str), Some("demo"));
    assert_eq!(status.annotations, running.config.annotations);
    assert_eq!(status.metadata, running.config.metadata);
    let ip = status.network.unwrap().ip;
    assert!(ip.starts_with("10.88."), "the pod has an address of the node's CNI: {ip}");

    let container = kubelet.container_status(&main.id).await.unwrap();
    assert_eq!(container.state(), cri::ContainerState::ContainerRunning);
    assert_eq!(container.log_path, main.log.display().to_string());
    assert_eq!(container.labels, main.config.labels);
    assert_eq!(container.annotations, main.config.annotations);
    let host_paths: Vec<_> = container.mounts.iter().map(|mount| &mount.host_path).collect();
    let sent: Vec<_> = main.config.mounts.iter().map(|mount| &mount.host_path).collect();
    assert_eq!(host_paths, sent, "mounts are reported with the node's paths");
    assert!(!container.image_ref.is_empty());

    let result =
        kubelet.exec_sync(&main.id, &["sh", "-c", "hostname; echo no >&2; exit 3"]).await.unwrap();
    assert_eq!(
        (result.stdout.as_str(), result.stderr.as_str(), result.code),
        ("first\n", "no\n", 3)
    );

    kubelet.stop_pod(&running).await.unwrap();
    let status = kubelet.sandbox_status(&running.sandbox).await.unwrap();
    assert_eq!(status.state(), cri::PodSandboxState::SandboxNotready);
    assert_eq!(
        kubelet.container_status(&main.id).await.unwrap().state(),
        cri::ContainerState::ContainerExited
    );
    assert_eq!(kiyot.cells(), Vec::<String>::new(), "a stopped pod has no cell");
    kubelet.remove_pod(&running).await.unwrap();
    assert_eq!(
        kubelet.sandbox_status(&running.sandbox).await.unwrap_err().code(),
        tonic::Code::NotFound
    );
    assert_eq!(kubelet.container_status(&main.id).await.unwrap_err().code(), tonic::Code::NotFound);

    assert!(kiyot.stop().await.success());
    drop(kiyot);
    assert_nothing_left(node);
}

#[tokio::test]
async fn containers_of_a_pod_share_its_network() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("two")
        .in_cell()
        .container(Container::script(
            "server",
            "mkdir -p /www; echo served > /www/index.html; exec httpd -f -p 8080 -h /www",
        ))
        .container(Container::script(
            "client",
            "until wget -q -O - http://127.0.0.1:8080/; do sleep 0.1; done; sleep 1000",
        ));
    let running = kubelet.run_pod(&spec).await.unwrap();
    kubelet.logged(running.container("client"), "served").await;

    // The kubelet's HTTP probe connects from the node to the pod's address.
    let ip = address(&mut kubelet, &running.sandbox).await;
    let page =
        kiyot_testkit::output("busybox", &["wget", "-q", "-O", "-", &format!("http://{ip}:8080/")]);
    assert_eq!(page.as_deref().map(str::trim), Ok("served"));
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies P3.
#[tokio::test]
async fn exit_is_reported_with_its_code_and_message() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let ending = Ending::new();
    let script =
        format!("echo last words; echo -n why > /dev/termination-log; {}; exit 7", ending.script());
    let running = kubelet.run_pod(&pod("short", &script)).await.unwrap();
    let main = running.container("main");
    wait_for_cell_log(&kiyot, main, "last words").await;
    ending.release().await;
    let status = kubelet.exited(&main.id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (7, "Error"));
    assert!(
        status.started_at > 0 && status.finished_at >= status.started_at && status.created_at > 0
    );
    // No wait is needed: log and termination message are on the node before the exit is reported.
    assert_eq!(std::fs::read_to_string(&main.termination).unwrap(), "why");
    assert_eq!(
        kubelet.log_lines(main).iter().map(|line| line.text.as_str()).collect::<Vec<_>>(),
        ["last words"]
    );
    // The kubelet creates the next attempt in the same sandbox.
    let again = kubelet.create_container(&running, &running.spec.containers[0], 1).await.unwrap();
    kubelet.start_container(&again.id).await.unwrap();
    kubelet.logged(&again, "last words").await;
    ending.release().await;
    assert_eq!(kubelet.exited(&again.id).await.exit_code, 7);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies P4.
#[tokio::test]
async fn repeated_stop_and_removal_succeed() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let script = "trap 'exit 0' TERM; echo ready; while :; do sleep 0.1; done";
    let running = kubelet.run_pod(&pod("twice", script)).await.unwrap();
    let main = running.container("main").id.clone();
    // Until its trap is set, the shell ignores SIGTERM, because it is the container's first
    // process.
    kubelet.logged(running.container("main"), "ready").await;
    for _ in 0..2 {
        kubelet.stop_container(&main, i64::try_from(LIMIT.as_secs()).unwrap()).await.unwrap();
    }
    assert_eq!(
        kubelet.container_status(&main).await.unwrap().exit_code,
        0,
        "the container had its grace period"
    );
    for _ in 0..2 {
        kubelet
            .runtime
            .stop_pod_sandbox(cri::StopPodSandboxRequest {
                pod_sandbox_id: running.sandbox.clone(),
            })
            .await
            .unwrap();
    }
    for _ in 0..2 {
        kubelet
            .runtime
            .remove_container(cri::RemoveContainerRequest { container_id: main.clone() })
            .await
            .unwrap();
    }
    for _ in 0..2 {
        kubelet
            .runtime
            .remove_pod_sandbox(cri::RemovePodSandboxRequest {
                pod_sandbox_id: running.sandbox.clone(),
            })
            .await
            .unwrap();
    }
    assert_eq!(kiyot.cells(), Vec::<String>::new());
}

/// Verifies P1.
#[tokio::test]
async fn runtime_handler_requests_a_cell() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut spec = Pod::new("by-handler").container(Container::script("main", WAIT));
    spec.runtime_handler = "kiyot".to_owned();
    let running = kubelet.run_pod(&spec).await.unwrap();
    assert_eq!(kubelet.sandbox_status(&running.sandbox).await.unwrap().runtime_handler, "kiyot");
    assert_eq!(kiyot.cells().len(), 1);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies P2.
#[tokio::test]
async fn retried_run_returns_the_same_sandbox() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let config = kubelet.prepare(&pod("retried", WAIT));
    let (mut one, mut other) = (kubelet.clone(), kubelet.clone());
    let (first, second) =
        tokio::join!(one.run_sandbox(&config, ""), other.run_sandbox(&config, ""));
    let sandbox = first.unwrap();
    assert_eq!(second.unwrap(), sandbox, "concurrent calls return the same sandbox");
    assert_eq!(
        kubelet.run_sandbox(&config, "").await.unwrap(),
        sandbox,
        "a later call returns the same sandbox"
    );
    assert_eq!(kiyot.cells().len(), 1);
    kubelet
        .runtime
        .stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id: sandbox.clone() })
        .await
        .unwrap();
    kubelet
        .runtime
        .remove_pod_sandbox(cri::RemovePodSandboxRequest { pod_sandbox_id: sandbox })
        .await
        .unwrap();
    assert_eq!(kiyot.cells(), Vec::<String>::new());
}
