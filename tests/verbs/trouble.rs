//! What does not work as it should.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use kiyot::backends::Method;
use kiyot_proto::cri;
use prost::Message;
use tonic::{Code, Status};

use crate::kit::{Fixture, LIMIT, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_that_cannot_be_made_leaves_no_cell() {
    let kiyot = Fixture::start().await;
    let mut request = kiyot.sandbox_request("web");
    request
        .config
        .as_mut()
        .unwrap()
        .annotations
        .insert("pod.elotl.co/launch-type".to_owned(), "Sport".to_owned());
    let status = kiyot
        .call::<cri::RunPodSandboxResponse>(Method::RunPodSandbox, request.clone())
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(
        status.message().contains("launch-type") && status.message().contains("Sport"),
        "{status}"
    );
    assert_eq!(kiyot.provider.launched(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_whose_cell_is_lost_has_exited() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let (runs, done) = (kiyot.create(&sandbox, "runs").await, kiyot.create(&sandbox, "done").await);
    kiyot.start_container(&runs).await;
    kiyot.start_container(&done).await;
    kiyot.provider.only().exit("c1", 0);
    kiyot.exited(&done).await;
    kiyot.provider.crash();
    let status = kiyot.exited(&runs).await;
    assert_eq!((status.exit_code, &*status.reason), (137, "CellLost"));
    assert_eq!(kiyot.status(&done).unwrap().exit_code, 0, "what had ended before stays as it was");
    until("the sandbox's end", || {
        kiyot.sandbox_status(&sandbox).unwrap().state() == cri::PodSandboxState::SandboxNotready
    })
    .await;
    let exec =
        cri::ExecSyncRequest { container_id: runs, cmd: vec!["true".to_owned()], timeout: 1 };
    assert_eq!(
        kiyot.call::<cri::ExecSyncResponse>(Method::ExecSync, exec).await.unwrap_err().code(),
        Code::FailedPrecondition
    );
    let status = kiyot
        .call::<cri::CreateContainerResponse>(
            Method::CreateContainer,
            kiyot.container_request(&sandbox, "late"),
        )
        .await
        .unwrap_err();
    assert!(status.message().contains("is not running"), "{status}");
    kiyot.stop_sandbox(&sandbox).await;
}

/// Verifies P4.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_pods_are_stopped_and_removed_and_nowhere() {
    let kiyot = Fixture::start().await;
    let unknown = format!("milpa{}", "z".repeat(59));
    kiyot.stop_sandbox(&unknown).await;
    let request = cri::StopContainerRequest { container_id: unknown.clone(), timeout: 0 };
    kiyot.call::<cri::StopContainerResponse>(Method::StopContainer, request).await.unwrap();
    let request = cri::RemoveContainerRequest { container_id: unknown.clone() };
    kiyot.call::<cri::RemoveContainerResponse>(Method::RemoveContainer, request).await.unwrap();
    assert_eq!(kiyot.status(&unknown).unwrap_err().code(), Code::NotFound);
    let request = cri::StartContainerRequest { container_id: unknown };
    assert_eq!(
        kiyot
            .call::<cri::StartContainerResponse>(Method::StartContainer, request)
            .await
            .unwrap_err()
            .code(),
        Code::NotFound
    );
    let status = kiyot
        .call::<cri::CheckpointContainerResponse>(
            Method::CheckpointContainer,
            cri::CheckpointContainerRequest::default(),
        )
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented);
    assert!(status.message().contains("CheckpointContainer"));
}

/// Verifies Y26.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_that_fails_because_the_container_has_just_ended_is_a_stop() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let main = kiyot.create(&sandbox, "main").await;
    kiyot.start_container(&main).await;
    let cell = kiyot.provider.only();
    cell.with(|state| {
        state.fixed_responses.insert(
            "StopContainer",
            Err(Status::unknown("failed to stop container: ttrpc: closed: unknown")),
        )
    });
    let stop = || {
        kiyot.call::<cri::StopContainerResponse>(
            Method::StopContainer,
            cri::StopContainerRequest { container_id: main.clone(), timeout: 0 },
        )
    };
    let status = stop().await.unwrap_err();
    assert!(
        status.message().contains("ttrpc: closed"),
        "it runs on, and nobody says otherwise: {status}"
    );
    // It has ended, and the news are still under way.
    cell.with(|state| {
        let ended = state.containers.values_mut().next().unwrap();
        (ended.state, ended.exit_code, ended.finished_at) =
            (cri::ContainerState::ContainerExited.into(), 3, ended.started_at + 1);
    });
    stop().await.unwrap();
    assert_eq!(
        (kiyot.status(&main).unwrap().state(), kiyot.status(&main).unwrap().exit_code),
        (cri::ContainerState::ContainerExited, 3)
    );
    kiyot.stop_sandbox(&sandbox).await;
}

/// After a restart of the daemon a cell may be a moment away: what its containers leave is worth
/// that moment.
/// Verifies X3, Y22.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cell_that_calls_home_again_is_waited_for_before_its_pod_is_stopped() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let main = kiyot.create(&sandbox, "main").await;
    kiyot.start_container(&main).await;
    let cell = kiyot.provider.only();
    cell.with(|state| state.unanswered.push("Hello"));
    let kiyot = kiyot.restart().await;
    // It has dialled: what is missing is its word.
    until("the cell calls home", || cell.with(|state| state.waiting_calls.contains("Hello"))).await;
    let mut stopping = std::pin::pin!(kiyot.stop_sandbox(&sandbox));
    assert!(
        tokio::time::timeout(Duration::from_secs(1), &mut stopping).await.is_err(),
        "it waits for the cell"
    );
    cell.with(|state| state.unanswered.clear());
    stopping.await;
    assert_eq!(kiyot.status(&main).unwrap().exit_code, 143, "it was stopped, not lost");
    assert_eq!(kiyot.provider.running(), 0);
}

/// Verifies X3, Y22.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cell_that_does_not_come_back_is_ended_and_only_then_its_pod_is_stopped() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let main = kiyot.create(&sandbox, "main").await;
    kiyot.start_container(&main).await;
    kiyot.provider.only().with(|state| state.unanswered.push("Hello"));
    let kiyot = kiyot.restart().await;
    let stop = cri::StopPodSandboxRequest { pod_sandbox_id: sandbox.clone() }.encode_to_vec();
    let hasty = kiyot
        .daemon
        .cri
        .call(
            Method::StopPodSandbox,
            stop.into(),
            Some(Instant::now() + Duration::from_millis(200)),
        )
        .await
        .unwrap_err();
    assert_eq!(
        (hasty.code(), hasty.message()),
        (Code::DeadlineExceeded, "StopPodSandbox takes longer and goes on")
    );
    assert_eq!(
        kiyot.sandbox_status(&sandbox).unwrap().state(),
        cri::PodSandboxState::SandboxReady,
        "it is not stopped yet, and nothing says so"
    );
    // The next try waits for the same work.
    kiyot.stop_sandbox(&sandbox).await;
    assert_eq!(kiyot.provider.running(), 0);
    assert_eq!(
        kiyot.sandbox_status(&sandbox).unwrap().state(),
        cri::PodSandboxState::SandboxNotready
    );
    assert_eq!(kiyot.status(&main).unwrap().exit_code, 137);
}

/// Neither a stop nor a removal says OK while the provider does not say that the cell is gone,
/// however often they are tried.
/// Verifies X3, Y25.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_whose_cell_can_not_be_ended_is_not_stopped() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let main = kiyot.create(&sandbox, "main").await;
    kiyot.start_container(&main).await;
    kiyot.provider.silence();
    kiyot.provider.refuses_to_end.store(true, Ordering::SeqCst);
    let (stop, remove) = (
        cri::StopPodSandboxRequest { pod_sandbox_id: sandbox.clone() }.encode_to_vec(),
        cri::RemovePodSandboxRequest { pod_sandbox_id: sandbox.clone() }.encode_to_vec(),
    );
    for (method, request) in [
        (Method::StopPodSandbox, &stop),
        (Method::StopPodSandbox, &stop),
        (Method::RemovePodSandbox, &remove),
    ] {
        let refused = kiyot
            .daemon
            .cri
            .call(method, request.clone().into(), Some(Instant::now() + LIMIT))
            .await
            .unwrap_err();
        assert!(
            refused.code() != Code::DeadlineExceeded
                && refused.message().contains("end a played cell"),
            "{method}: {refused}"
        );
        assert_eq!(
            kiyot.sandbox_status(&sandbox).unwrap().state(),
            cri::PodSandboxState::SandboxReady,
            "{method}"
        );
        assert_eq!(
            kiyot.status(&main).unwrap().state(),
            cri::ContainerState::ContainerRunning,
            "{method}"
        );
        assert_eq!(kiyot.provider.running(), 1);
    }
    // Nor after a restart; and then all of it is done.
    let kiyot = kiyot.restart().await;
    kiyot
        .daemon
        .cri
        .call(Method::StopPodSandbox, stop.into(), Some(Instant::now() + LIMIT))
        .await
        .unwrap_err();
    assert_eq!(kiyot.sandbox_status(&sandbox).unwrap().state(), cri::PodSandboxState::SandboxReady);
    kiyot.provider.refuses_to_end.store(false, Ordering::SeqCst);
    kiyot.stop_sandbox(&sandbox).await;
    assert_eq!((kiyot.provider.running(), kiyot.status(&main).unwrap().exit_code), (0, 137));
    assert_eq!(
        kiyot.sandbox_status(&sandbox).unwrap().state(),
        cri::PodSandboxState::SandboxNotready
    );
}

/// Whatever a cell does not answer, its caller is told in time.
/// Verifies F2.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_verb_that_asks_a_cell_ends_at_its_deadline() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let (running, made) =
        (kiyot.create(&sandbox, "running").await, kiyot.create(&sandbox, "made").await);
    kiyot.start_container(&running).await;
    let asked = [
        "ListContainers",
        "ImageStatus",
        "CreateContainer",
        "StartContainer",
        "StopContainer",
        "RemoveContainer",
        "ReopenContainerLog",
        "UpdateContainerResources",
        "ExecSync",
        "Exec",
        "Attach",
        "PortForward",
        "PullImage",
    ];
    kiyot.provider.only().with(|state| state.unanswered.extend(asked));
    let of = |id: &str| cri::StartContainerRequest { container_id: id.to_owned() }.encode_to_vec();
    let exec = || {
        cri::ExecRequest {
            container_id: running.clone(),
            cmd: vec!["true".to_owned()],
            stdout: true,
            ..Default::default()
        }
        .encode_to_vec()
    };
    let image = cri::ImageSpec {
        image: "elsewhere".to_owned(),
        annotations: kiyot.sandbox_request("web").config.unwrap().annotations,
        ..Default::default()
    };
    let pull = cri::PullImageRequest {
        image: Some(image.clone()),
        sandbox_config: kiyot.sandbox_request("web").config,
        ..Default::default()
    };
    let exec_sync = cri::ExecSyncRequest {
        container_id: running.clone(),
        cmd: vec!["true".to_owned()],
        timeout: 0,
    };
    let update = cri::UpdateContainerResourcesRequest {
        container_id: running.clone(),
        linux: Some(cri::LinuxContainerResources { cpu_shares: 2, ..Default::default() }),
        ..Default::default()
    };
    let calls = [
        (Method::CreateContainer, kiyot.container_request(&sandbox, "late").encode_to_vec()),
        (Method::StartContainer, of(&made)),
        (
            Method::StopContainer,
            cri::StopContainerRequest { container_id: running.clone(), timeout: 600 }
                .encode_to_vec(),
        ),
        (Method::UpdateContainerResources, update.encode_to_vec()),
        (Method::ExecSync, exec_sync.encode_to_vec()),
        (Method::Exec, exec()),
        (
            Method::Attach,
            cri::AttachRequest {
                container_id: running.clone(),
                stdout: true,
                ..Default::default()
            }
            .encode_to_vec(),
        ),
        (
            Method::PortForward,
            cri::PortForwardRequest { pod_sandbox_id: sandbox.clone(), port: vec![80] }
                .encode_to_vec(),
        ),
        (Method::PullImage, pull.encode_to_vec()),
        (Method::RemoveContainer, of(&made)),
        (
            Method::StopPodSandbox,
            cri::StopPodSandboxRequest { pod_sandbox_id: sandbox.clone() }.encode_to_vec(),
        ),
        (
            Method::RemovePodSandbox,
            cri::RemovePodSandboxRequest { pod_sandbox_id: sandbox.clone() }.encode_to_vec(),
        ),
    ];
    for (method, message) in calls {
        let deadline = Instant::now() + Duration::from_millis(300);
        let status = tokio::time::timeout(
            LIMIT,
            kiyot.daemon.cri.call(method, message.into(), Some(deadline)),
        )
        .await
        .unwrap_or_else(|_| panic!("{method} is never answered"))
        .unwrap_err();
        assert_eq!(status.code(), Code::DeadlineExceeded, "{method}: {status}");
    }
    kiyot.provider.only().with(|state| state.unanswered.clear());
    kiyot.stop_sandbox(&sandbox).await;
}
