//! What does not work as it should.

use kiyot::backends::Method;
use kiyot_proto::cri;
use tonic::Code;

use crate::kit::{Fixture, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_that_cannot_be_made_leaves_no_cell() {
    let kiyot = Fixture::start().await;
    let mut request = kiyot.sandbox_request("web");
    request.config.as_mut().unwrap().annotations.insert("pod.elotl.co/launch-type".to_owned(), "Sport".to_owned());
    let status = kiyot.call::<cri::RunPodSandboxResponse>(Method::RunPodSandbox, request.clone()).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("launch-type") && status.message().contains("Sport"), "{status}");
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
    until("the sandbox's end", || kiyot.sandbox_status(&sandbox).unwrap().state() == cri::PodSandboxState::SandboxNotready).await;
    let exec = cri::ExecSyncRequest { container_id: runs, cmd: vec!["true".to_owned()], timeout: 1 };
    assert_eq!(kiyot.call::<cri::ExecSyncResponse>(Method::ExecSync, exec).await.unwrap_err().code(), Code::FailedPrecondition);
    let status = kiyot.call::<cri::CreateContainerResponse>(Method::CreateContainer, kiyot.container_request(&sandbox, "late")).await.unwrap_err();
    assert!(status.message().contains("is not running"), "{status}");
    kiyot.stop_sandbox(&sandbox).await;
}

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
    assert_eq!(kiyot.call::<cri::StartContainerResponse>(Method::StartContainer, request).await.unwrap_err().code(), Code::NotFound);
    let status =
        kiyot.call::<cri::CheckpointContainerResponse>(Method::CheckpointContainer, cri::CheckpointContainerRequest::default()).await.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented);
    assert!(status.message().contains("CheckpointContainer"));
}
