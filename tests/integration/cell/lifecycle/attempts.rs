//! Sequences of containers: init containers, attempts, and containers that can't start.

use kiyot_testkit::{
    Container, Kiyot, Kubelet, LIMIT, Node, Pod, RunningPod, cri, image::ImageSpec,
};

use crate::cell::{
    WAIT,
    lifecycle::endings::{Ending, wait_for_cell_log},
    options, remove_and_assert_clean, wait_until_connected,
};

/// Runs a sandbox without containers in a cell.
async fn empty_pod(kubelet: &mut Kubelet, name: &str) -> RunningPod {
    let spec = Pod::new(name).in_cell();
    let config = kubelet.prepare(&spec);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    kubelet.running(&spec, config, sandbox)
}

/// Returns the listed attempts of a container with their states.
async fn listed(kubelet: &mut Kubelet, name: &str) -> Vec<(u32, cri::ContainerState)> {
    let all = kubelet.containers().await.unwrap();
    let of_name = all.iter().filter_map(|container| {
        let metadata = container.metadata.as_ref()?;
        (metadata.name == name).then(|| (metadata.attempt, container.state()))
    });
    let mut attempts: Vec<_> = of_name.collect();
    attempts.sort_by_key(|(attempt, _)| *attempt);
    attempts
}

/// Verifies U7.
#[tokio::test]
async fn init_containers_run_first_and_attempts_stay_until_they_are_removed() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut running = empty_pod(&mut kubelet, "ordered").await;

    for name in ["first", "second"] {
        let ending = Ending::new();
        let container =
            Container::script(name, &format!("echo {name} is done; {}", ending.script()));
        let created = kubelet.create_container(&running, &container, 0).await.unwrap();
        kubelet.start_container(&created.id).await.unwrap();
        wait_for_cell_log(&kiyot, &created, &format!("{name} is done")).await;
        ending.release().await;
        let status = kubelet.exited(&created.id).await;
        assert_eq!((status.exit_code, status.reason.as_str()), (0, "Completed"));
        assert_eq!(
            kubelet.log_lines(&created).len(),
            1,
            "the log is complete when the exit is reported"
        );
        running.containers.insert(name.to_owned(), created);
    }

    let app = Container::script("app", "exit 3");
    let failed = kubelet.create_container(&running, &app, 0).await.unwrap();
    kubelet.start_container(&failed.id).await.unwrap();
    let first_end = kubelet.exited(&failed.id).await;
    let again =
        kubelet.create_container(&running, &Container::script("app", WAIT), 1).await.unwrap();
    kubelet.start_container(&again.id).await.unwrap();
    let both =
        [(0, cri::ContainerState::ContainerExited), (1, cri::ContainerState::ContainerRunning)];
    assert_eq!(listed(&mut kubelet, "app").await, both);
    // The kubelet counts restarts by the listed attempts.
    kiyot.restart().await;
    let mut kubelet = kiyot.kubelet().await;
    assert_eq!(listed(&mut kubelet, "app").await, both);
    let end = kubelet.container_status(&failed.id).await.unwrap();
    assert_eq!(end, first_end);
    kubelet
        .runtime
        .remove_container(cri::RemoveContainerRequest { container_id: failed.id.clone() })
        .await
        .unwrap();
    assert_eq!(listed(&mut kubelet, "app").await, both[1..]);
    running.containers.insert("app".to_owned(), again);
    wait_until_connected(&mut kubelet, running.container("app")).await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies U7.
#[tokio::test]
async fn absent_program_is_reported_as_the_start_error() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut running = empty_pod(&mut kubelet, "missing").await;
    let mut container = Container::script("main", "");
    container.command = vec!["/no/such/program".to_owned()];
    let created = kubelet.create_container(&running, &container, 0).await.unwrap();
    let failure = kubelet.start_container(&created.id).await.unwrap_err();
    assert!(failure.message().contains("/no/such/program"), "{failure:?}");
    let status = kubelet.exited(&created.id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (128, "StartError"), "{status:?}");
    assert!(status.message.contains("/no/such/program"), "{status:?}");
    running.containers.insert("main".to_owned(), created);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies U8.
#[tokio::test]
async fn image_sets_the_user_and_the_stop_signal() {
    let node = Node::start().await;
    let image = ImageSpec {
        user: "1001:1002".to_owned(),
        stop_signal: "SIGUSR1".to_owned(),
        ..ImageSpec::script(
            "trap 'exit 5' USR1; echo ready as $(id -u):$(id -g); while :; do sleep 0.1; done",
        )
    };
    node.image("kiyot.test/usual-user:1", &image).await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("signalled")
        .in_cell()
        .container(Container::of_image("main", "kiyot.test/usual-user:1"));
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").clone();
    kubelet.logged(&main, "ready as 1001:1002").await;

    // For runAsNonRoot, the kubelet requests the user of the image without naming a pod. The daemon
    // must answer even if only a cell still has the image.
    let image =
        cri::ImageSpec { image: "kiyot.test/usual-user:1".to_owned(), ..Default::default() };
    for only_in_the_cell in [false, true] {
        let request = cri::ImageStatusRequest { image: Some(image.clone()), verbose: false };
        let found = kubelet.image.image_status(request).await.unwrap().into_inner().image.unwrap();
        assert_eq!(
            found.uid.map(|uid| uid.value),
            Some(1001),
            "only in the cell: {only_in_the_cell}"
        );
        kubelet
            .image
            .remove_image(cri::RemoveImageRequest { image: Some(image.clone()) })
            .await
            .unwrap();
    }

    kubelet.stop_container(&main.id, i64::try_from(LIMIT.as_secs()).unwrap()).await.unwrap();
    let status = kubelet.exited(&main.id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (5, "Error"));
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
