//! Lost records: broken, or of a later version after a rollback.

use kiyot::backends::{
    Method,
    milpa::store::{Batch, Table},
};
use kiyot_proto::{cell, cri, store::SandboxMeta};
use kiyot_testkit::wait_for;

use crate::kit::Fixture;

/// Verifies X17.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn container_with_a_lost_status_has_the_state_of_its_cell() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let (runs, done) = (kiyot.create(&sandbox, "runs").await, kiyot.create(&sandbox, "done").await);
    kiyot.start_container(&runs).await;
    kiyot.start_container(&done).await;
    kiyot.provider.only().exit("c1", 7);
    kiyot.exited(&done).await;
    let mut lost = Batch::default();
    lost.remove(Table::ContainerStatuses, &runs).remove(Table::ContainerStatuses, &done);
    let kiyot = kiyot.restart_with(lost).await;
    // If the container read EXITED, its next attempt would run beside it.
    wait_for("the state of a container that runs", || match kiyot.status(&runs).unwrap().state() {
        cri::ContainerState::ContainerExited => {
            panic!("a running container was reported as ended")
        }
        state => state == cri::ContainerState::ContainerRunning,
    })
    .await;
    assert_eq!(kiyot.exited(&done).await.exit_code, 7);
    kiyot.stop_sandbox(&sandbox).await;
}

/// Verifies V20.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sandbox_of_a_previous_version_keeps_its_cgroup_parent() {
    let kiyot = Fixture::start().await;
    let mut request = kiyot.sandbox_request("web");
    let linux = cri::LinuxPodSandboxConfig {
        cgroup_parent: "/kubepods/poduid-web".to_owned(),
        ..Default::default()
    };
    request.config.as_mut().unwrap().linux = Some(linux);
    let response: cri::RunPodSandboxResponse =
        kiyot.call(Method::RunPodSandbox, request).await.unwrap();
    let sandbox = response.pod_sandbox_id;
    kiyot.create(&sandbox, "new").await;
    // The record of a version that used the kubelet's cgroup parent in machines.
    let mut records: Vec<(String, SandboxMeta)> =
        kiyot.daemon.store.load(Table::Sandboxes).await.unwrap();
    let (id, meta) = records.pop().unwrap();
    let mut earlier = Batch::default();
    earlier.put(Table::Sandboxes, &id, &SandboxMeta { cgroup_parent: String::new(), ..meta });
    let kiyot = kiyot.restart_with(earlier).await;
    kiyot.create(&sandbox, "old").await;
    let parents = kiyot.provider.only().with(|state| {
        let parent = |request: &cri::CreateContainerRequest| {
            request.sandbox_config.clone().unwrap().linux.unwrap().cgroup_parent
        };
        state.created.iter().map(parent).collect::<Vec<_>>()
    });
    assert_eq!(parents, ["/pod", "/kubepods/poduid-web"]);
    kiyot.stop_sandbox(&sandbox).await;
}

/// Verifies X17.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn container_without_a_record_is_removed_from_its_cell() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let (lost, kept) = (kiyot.create(&sandbox, "lost").await, kiyot.create(&sandbox, "kept").await);
    kiyot.start_container(&lost).await;
    kiyot.start_container(&kept).await;
    let mut records = Batch::default();
    records.remove(Table::Containers, &lost).remove(Table::ContainerStatuses, &lost);
    let kiyot = kiyot.restart_with(records).await;
    assert_eq!(kiyot.status(&lost).unwrap_err().code(), tonic::Code::NotFound);
    let cell = kiyot.provider.only();
    wait_for("the end of a container without a record", || {
        cell.with(|state| state.containers.len() == 1)
    })
    .await;
    assert_eq!(kiyot.status(&kept).unwrap().state(), cri::ContainerState::ContainerRunning);
    // The kubelet lists no attempt, so that it begins with the first.
    let again = kiyot.create(&sandbox, "lost").await;
    kiyot.start_container(&again).await;
    let request = cri::RemovePodSandboxRequest { pod_sandbox_id: sandbox };
    kiyot.call::<cri::RemovePodSandboxResponse>(Method::RemovePodSandbox, request).await.unwrap();
}

/// Verifies X17.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn container_during_its_creation_is_not_removed() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let other = kiyot.create(&sandbox, "other").await;
    kiyot.start_container(&other).await;
    let cell = kiyot.provider.only();
    cell.with(|state| state.unanswered.push("ContainerStatus"));
    let made = kiyot.call::<cri::CreateContainerResponse>(
        Method::CreateContainer,
        kiyot.container_request(&sandbox, "main"),
    );
    let meanwhile = async {
        wait_for("a container in the cell", || cell.with(|state| state.containers.len() == 2))
            .await;
        cell.with(|state| {
            let sandbox = cri::PodSandboxStatus { id: "5a".to_owned(), ..Default::default() };
            let containers = state.containers.values().cloned().collect();
            state.tell(cell::event::Event::Snapshot(cell::Snapshot {
                sandboxes: vec![sandbox],
                containers,
                logs: Vec::new(),
            }));
        });
        // Events are applied in order: the snapshot precedes this one.
        cell.exit("c0", 3);
        kiyot.exited(&other).await;
        cell.with(|state| state.unanswered.clear());
    };
    let (made, ()) = tokio::join!(made, meanwhile);
    kiyot.start_container(&made.unwrap().container_id).await;
}

/// An agent that has just started may report a list from before a creation.
/// Verifies Y97.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn container_absent_from_an_old_list_is_not_ended() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let other = kiyot.create(&sandbox, "other").await;
    let main = kiyot.create(&sandbox, "main").await;
    let removed = kiyot.create(&sandbox, "removed").await;
    for container in [&other, &removed] {
        kiyot.start_container(container).await;
    }
    let cell = kiyot.provider.only();
    cell.with(|state| {
        state.containers.remove("c2");
        state.old_snapshot = Some(cell::Snapshot::default());
        state.end_watch();
    });
    let ended = kiyot.exited(&removed).await;
    assert_eq!((ended.exit_code, &*ended.reason), (255, "ContainerGone"));
    // Events are applied in order: the snapshot precedes this one.
    cell.exit("c0", 3);
    assert_eq!(kiyot.exited(&other).await.exit_code, 3);
    assert_eq!(kiyot.sandbox_status(&sandbox).unwrap().state(), cri::PodSandboxState::SandboxReady);
    kiyot.start_container(&main).await;
}
