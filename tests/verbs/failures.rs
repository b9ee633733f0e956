//! Failures of cells, of providers and of calls.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use kiyot::backends::{Method, milpa::store::Batch};
use kiyot_proto::cri;
use kiyot_testkit::{log::CapturedLog, wait_for};
use prost::Message;
use tonic::{Code, Status};

use crate::kit::{Fixture, LIMIT};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_sandbox_leaves_no_cell() {
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

/// Verifies A6.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn misspelt_annotation_launches_nothing_and_is_named_with_the_known_one() {
    let kiyot = Fixture::start().await;
    for (key, known) in [
        ("pod.elotl.co/launch-typ", "pod.elotl.co/launch-type"),
        ("pods.elotl.co/cpu", "pod.elotl.co/cpu"),
    ] {
        let mut request = kiyot.sandbox_request("web");
        let annotations = &mut request.config.as_mut().unwrap().annotations;
        annotations.insert(key.to_owned(), "1".to_owned());
        let call = kiyot.call::<cri::RunPodSandboxResponse>(Method::RunPodSandbox, request);
        let status = call.await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        let named = format!("{key}: is unknown; did you mean {known}?");
        assert!(status.message().contains(&named), "{status}");
    }
    assert_eq!(kiyot.provider.launched(), 0);
}

/// Runs on a single thread, whose log is captured.
/// Verifies A6.
#[tokio::test]
async fn unknown_annotations_are_logged_in_one_bounded_line() {
    let log = CapturedLog::start();
    let kiyot = Fixture::start().await;
    let mut request = kiyot.sandbox_request("web");
    let annotations = &mut request.config.as_mut().unwrap().annotations;
    for number in 0..1000 {
        annotations.insert(format!("pod.elotl.co/{number:03}{}", "x".repeat(1000)), String::new());
    }
    annotations.insert("example.org/foreign".to_owned(), String::new());
    let run = || kiyot.call::<cri::RunPodSandboxResponse>(Method::RunPodSandbox, request.clone());
    let first = run().await.unwrap();
    assert_eq!(run().await.unwrap(), first);
    let lines = log.lines();
    let of_keys: Vec<&String> = lines
        .iter()
        .filter(|line| line.contains("annotations with unknown keys ignored"))
        .collect();
    let [line] = of_keys[..] else { panic!("{of_keys:?}") };
    assert!(line.contains("pod.elotl.co/000xxx") && line.contains("and 992 more"), "{line}");
    assert!(line.contains("WARN") && line.contains(&first.pod_sandbox_id), "{line}");
    assert!(line.len() < 2000 && !line.contains("foreign"), "{line}");
}

/// Verifies P7.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn containers_of_a_lost_cell_read_exited() {
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
    assert_eq!(kiyot.status(&done).unwrap().exit_code, 0, "an earlier exit is kept");
    wait_for("the sandbox's end", || {
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
async fn unknown_pods_are_stopped_and_removed_and_not_found() {
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
async fn stop_succeeds_if_the_container_exits_during_it() {
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
        "the container is not reported as ended: {status}"
    );
    // It has exited, and the event is delayed.
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

/// After a restart of the daemon a cell may still be dialling. The stop waits for it, to keep the
/// last output of its containers.
/// Verifies X3, Y22.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_waits_for_a_cell_that_is_dialling() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let main = kiyot.create(&sandbox, "main").await;
    kiyot.start_container(&main).await;
    let cell = kiyot.provider.only();
    cell.with(|state| state.unanswered.push("Hello"));
    let kiyot = kiyot.restart().await;
    // The cell has dialled, but sends no events.
    wait_for("the cell calls home", || cell.with(|state| state.waiting_calls.contains("Hello")))
        .await;
    let mut stopping = std::pin::pin!(kiyot.stop_sandbox(&sandbox));
    assert!(
        tokio::time::timeout(Duration::from_secs(1), &mut stopping).await.is_err(),
        "the stop waits for the cell"
    );
    cell.with(|state| state.unanswered.clear());
    stopping.await;
    assert_eq!(kiyot.status(&main).unwrap().exit_code, 143, "the container was stopped, not lost");
    assert_eq!(kiyot.provider.running(), 0);
}

/// Verifies X3, Y22.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_of_a_silent_cell_ends_the_cell_first() {
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
        (Code::DeadlineExceeded, "StopPodSandbox exceeded its deadline and continues")
    );
    assert_eq!(
        kiyot.sandbox_status(&sandbox).unwrap().state(),
        cri::PodSandboxState::SandboxReady,
        "the sandbox does not read as stopped yet"
    );
    // A retry waits for the same work.
    kiyot.stop_sandbox(&sandbox).await;
    assert_eq!(kiyot.provider.running(), 0);
    assert_eq!(
        kiyot.sandbox_status(&sandbox).unwrap().state(),
        cri::PodSandboxState::SandboxNotready
    );
    assert_eq!(kiyot.status(&main).unwrap().exit_code, 137);
}

/// Returns a pod with a running container, whose cell is silent and can't be terminated.
async fn pod_that_cannot_end() -> (Fixture, String, String) {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let main = kiyot.create(&sandbox, "main").await;
    kiyot.start_container(&main).await;
    kiyot.provider.silence();
    kiyot.provider.refuses_to_end.store(true, Ordering::SeqCst);
    (kiyot, sandbox, main)
}

/// Stops and removals fail until the provider confirms the end of the cell.
/// Verifies X3, Y25.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_is_not_stopped_until_the_end_of_its_cell_is_confirmed() {
    let (kiyot, sandbox, main) = pod_that_cannot_end().await;
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
                && refused.message().contains("end a fake cell"),
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
}

/// Verifies X3, Y25.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restart_does_not_confirm_the_end_of_a_cell() {
    let (kiyot, sandbox, main) = pod_that_cannot_end().await;
    let stop = cri::StopPodSandboxRequest { pod_sandbox_id: sandbox.clone() };
    let refused = async |kiyot: &Fixture| {
        let (request, deadline) = (stop.encode_to_vec().into(), Some(Instant::now() + LIMIT));
        kiyot.daemon.cri.call(Method::StopPodSandbox, request, deadline).await.unwrap_err();
    };
    refused(&kiyot).await;
    let kiyot = kiyot.restart().await;
    refused(&kiyot).await;
    assert_eq!(kiyot.sandbox_status(&sandbox).unwrap().state(), cri::PodSandboxState::SandboxReady);
    kiyot.provider.refuses_to_end.store(false, Ordering::SeqCst);
    kiyot.stop_sandbox(&sandbox).await;
    assert_eq!((kiyot.provider.running(), kiyot.status(&main).unwrap().exit_code), (0, 137));
    assert_eq!(
        kiyot.sandbox_status(&sandbox).unwrap().state(),
        cri::PodSandboxState::SandboxNotready
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_that_was_interrupted_by_a_restart_reads_as_a_stop() {
    let (kiyot, sandbox, main) = pod_that_cannot_end().await;
    let stop = cri::StopPodSandboxRequest { pod_sandbox_id: sandbox.clone() };
    kiyot.call::<cri::StopPodSandboxResponse>(Method::StopPodSandbox, stop).await.unwrap_err();
    let kiyot = kiyot
        .restart_after(Batch::default(), |cells| {
            cells.refuses_to_end.store(false, Ordering::SeqCst);
        })
        .await;
    let status = kiyot.exited(&main).await;
    assert_eq!(
        (status.exit_code, &*status.reason, &*status.message),
        (137, "Error", "its sandbox was stopped")
    );
}

/// A caller does not wait for an unanswered call beyond its deadline.
/// Verifies F2.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_to_a_silent_cell_end_at_their_deadline() {
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
