//! Callers that cancel calls and retry them.

use std::time::Duration;

use kiyot_testkit::{Kiyot, KiyotOptions, LIMIT, Node, cri, wait_until, websocket::Streams};

use crate::cell::{WAIT, options, pod, remove_and_assert_clean};

/// Verifies X46.
#[tokio::test]
async fn pod_whose_sandboxes_fail_gets_no_cell_at_each_retry() {
    let node = Node::start().await;
    // No registry listens at this address.
    let absent = "127.0.0.1:1/absent:1".to_owned();
    let key = "KIYOT_BACKENDS__MILPA__PAUSE_IMAGE".to_owned();
    let environment = vec![(key, format!("{absent:?}"))];
    let kiyot = Kiyot::start(&node, KiyotOptions { environment, ..options() }).await;
    let mut kubelet = kiyot.kubelet().await;
    let config = kubelet.prepare(&pod("unlucky", WAIT));
    let launches = || kiyot.log().matches("cell launch started").count();
    for number in 1..=2 {
        let failed = kubelet.run_sandbox(&config, "").await.unwrap_err();
        assert!(failed.message().contains(&absent), "{failed:?}");
        assert!(!failed.message().contains("the next is launched"), "{failed:?}");
        assert_eq!(launches(), number);
    }
    let refused = kubelet.run_sandbox(&config, "").await.unwrap_err();
    for part in [&absent, "2 cells of the pod failed in a row, the next is launched in"] {
        assert!(refused.message().contains(part), "{part} is not in {refused:?}");
    }
    assert_eq!(launches(), 2, "no cell was launched");
    let other = kubelet.prepare(&pod("other", WAIT));
    let failed = kubelet.run_sandbox(&other, "").await.unwrap_err();
    assert!(!failed.message().contains("the next is launched"), "{failed:?}");
    assert_eq!((launches(), kiyot.cells()), (3, Vec::new()));
}

/// Verifies X8.
#[tokio::test]
async fn abandoned_sandbox_is_adopted_by_the_next_attempt() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = pod("abandoned", WAIT);
    let config = kubelet.prepare(&spec);
    for _ in 0..3 {
        let (mut caller, config) = (kubelet.clone(), config.clone());
        let call = tokio::spawn(async move { caller.run_sandbox(&config, "").await });
        wait_until("a cell is being launched", LIMIT, async || {
            (!kiyot.cells().is_empty()).then_some(())
        })
        .await;
        call.abort();
        let _ = call.await;
        assert_eq!(kiyot.cells().len(), 1);
    }
    let running = kubelet.run_pod(&spec).await.unwrap();
    assert_eq!(kiyot.cells().len(), 1, "a pod has a single cell");
    assert_eq!(kubelet.sandboxes().await.unwrap().len(), 1);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies X8.
#[tokio::test]
async fn container_is_created_once_for_repeated_requests() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = pod("asked-twice", WAIT);
    let config = kubelet.prepare(&spec);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let mut running = kubelet.running(&spec, config, sandbox);
    let mut calls = tokio::task::JoinSet::new();
    for at in 0..5 {
        let (mut caller, running, container) =
            (kubelet.clone(), running.clone(), spec.containers[0].clone());
        calls.spawn(async move {
            let call = caller.create_container(&running, &container, 0);
            // Half of the callers cancel before the response.
            if at % 2 == 0 {
                call.await.map(Some)
            } else {
                tokio::time::timeout(Duration::from_millis(50), call)
                    .await
                    .map_or(Ok(None), |made| made.map(Some))
            }
        });
    }
    let made: Vec<_> = calls.join_all().await.into_iter().filter_map(Result::unwrap).collect();
    let created = kubelet.create_container(&running, &spec.containers[0], 0).await.unwrap();
    assert!(made.iter().all(|one| one.id == created.id), "all calls return the same container");
    assert_eq!(kubelet.containers().await.unwrap().len(), 1);
    kubelet.start_container(&created.id).await.unwrap();
    kubelet.start_container(&created.id).await.unwrap();
    running.containers.insert("main".to_owned(), created.clone());
    let refused = kubelet.create_container(&running, &spec.containers[0], 0).await.unwrap_err();
    assert!(refused.message().contains("is reserved for"), "{refused:?}");
    assert_eq!(
        kubelet.container_status(&created.id).await.unwrap().state(),
        cri::ContainerState::ContainerRunning
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies X7.
#[tokio::test]
async fn unread_execs_delay_no_other_stream() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet
        .run_pod(&pod("loud", "i=0; while :; do i=$((i+1)); echo line $i; sleep 0.05; done"))
        .await
        .unwrap();
    let main = running.container("main").clone();
    let mut unread = Vec::new();
    for number in 0..8 {
        let script = format!("touch /tmp/began-{number}; yes 'output without a reader'");
        let request = cri::ExecRequest {
            container_id: main.id.clone(),
            cmd: ["sh", "-c", &script].map(str::to_owned).to_vec(),
            tty: false,
            stdin: false,
            stdout: true,
            stderr: true,
        };
        let url = kubelet.runtime.exec(request).await.unwrap().into_inner().url;
        unread.push(Streams::open(&url).await.unwrap());
    }
    wait_until("all execs have begun", LIMIT, async || {
        let listed = kubelet.exec_sync(&main.id, &["sh", "-c", "ls /tmp/began-*"]).await.unwrap();
        (listed.stdout.lines().count() == 8).then_some(())
    })
    .await;
    for _ in 0..20 {
        assert_eq!(kubelet.exec_sync(&main.id, &["echo", "here"]).await.unwrap().stdout, "here\n");
        assert_eq!(kubelet.sandboxes().await.unwrap().len(), 1);
    }
    let now = kubelet.log_lines(&main).len();
    kubelet.logged(&main, &format!("line {}", now + 20)).await;
    let request = cri::ExecRequest {
        container_id: main.id.clone(),
        cmd: vec!["hostname".to_owned()],
        tty: false,
        stdin: false,
        stdout: true,
        stderr: false,
    };
    let mut read = Streams::open(&kubelet.runtime.exec(request).await.unwrap().into_inner().url)
        .await
        .unwrap();
    read.read_to_end().await;
    assert_eq!(read.text(1), "loud\n");
    drop(unread);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies C9, X9.
#[tokio::test]
async fn cells_and_copies_survive_a_kill_of_the_nodes_containerd() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("steady", WAIT)).await.unwrap();
    let main = running.container("main").id.clone();
    // The layer is so large that its copy takes a while.
    let mut noise = vec![0_u8; 48 << 20];
    let mut state = 1_u32;
    noise.iter_mut().for_each(|byte| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *byte = (state >> 24) as u8;
    });
    let spec = kiyot_testkit::image::ImageSpec {
        files: vec![("/noise".to_owned(), 0o644, noise)],
        ..kiyot_testkit::image::ImageSpec::script("trap 'exit 0' TERM; while :; do sleep 0.1; done")
    };
    node.image("kiyot.test/large:1", &spec).await;
    let copied = kiyot_testkit::Pod::new("copied")
        .in_cell()
        .container(kiyot_testkit::Container::of_image("main", "kiyot.test/large:1"));
    let config = kubelet.prepare(&copied);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let mut second = kubelet.running(&copied, config, sandbox);
    let (mut caller, at, container) =
        (kubelet.clone(), second.clone(), copied.containers[0].clone());
    let copying = tokio::spawn(async move { caller.create_container(&at, &container, 0).await });
    wait_until("the copy has begun", LIMIT, async || {
        (copying.is_finished() || kiyot.log().contains("kiyot.test/large:1")).then_some(())
    })
    .await;
    node.kill_containerd();

    // Without its containerd the node does not answer, because a list without the node's pods would
    // be wrong. Pods in cells still answer.
    assert!(kubelet.sandboxes().await.is_err(), "a list is complete or an error");
    assert_eq!(kubelet.exec_sync(&main, &["echo", "here"]).await.unwrap().stdout, "here\n");
    assert_eq!(
        kubelet.container_status(&main).await.unwrap().state(),
        cri::ContainerState::ContainerRunning
    );
    for _ in 0..10 {
        assert!(kubelet.sandboxes().await.is_err());
    }
    assert_eq!(
        kiyot.log().matches("container runtime unavailable").count(),
        1,
        "an outage is logged once"
    );
    let first = copying.await.unwrap();
    node.start_containerd().await;
    let created = match first {
        Ok(created) => created,
        Err(_) => {
            wait_until("the container is created", LIMIT, async || {
                kubelet.create_container(&second, &copied.containers[0], 0).await.ok()
            })
            .await
        }
    };
    kubelet.start_container(&created.id).await.unwrap();
    second.containers.insert("main".to_owned(), created);
    assert_eq!(
        wait_until("lists are complete again", LIMIT, async || kubelet.sandboxes().await.ok())
            .await
            .len(),
        2
    );
    assert_eq!(kiyot.log().matches("container runtime available again").count(), 1);
    kubelet.stop_and_remove(&second).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
