//! Reported exits, which no later event changes.

use kiyot::backends::{Method, milpa::store::Batch};
use kiyot_proto::{cell::event::Event, cri};
use kiyot_testkit::wait_for;

use crate::kit::Fixture;

/// Runs a pod whose cell has reported that its container exited with 3, while the log stalls.
/// Returns the container, which does not read EXITED yet.
async fn reported(kiyot: &Fixture) -> String {
    let sandbox = kiyot.run("web").await;
    let container = kiyot.create(&sandbox, "main").await;
    // The exit of a container without a log is recorded at once.
    let mut request = kiyot.container_request(&sandbox, "other");
    request.config.as_mut().unwrap().log_path.clear();
    let other: cri::CreateContainerResponse =
        kiyot.call(Method::CreateContainer, request).await.unwrap();
    kiyot.start_container(&container).await;
    kiyot.start_container(&other.container_id).await;
    let cell = kiyot.provider.only();
    cell.with(|state| state.unanswered.push("ReadLog"));
    cell.write("c0", "last words\n");
    cell.exit("c0", 3);
    // Events are applied in order: the exit precedes this one.
    cell.exit("c1", 0);
    kiyot.exited(&other.container_id).await;
    let state = kiyot.status(&container).unwrap().state();
    assert_eq!(state, cri::ContainerState::ContainerRunning, "its log has not arrived yet");
    container
}

/// Verifies P13.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reported_exit_is_kept_when_the_cell_is_lost() {
    let kiyot = Fixture::start().await;
    let container = reported(&kiyot).await;
    kiyot.provider.crash();
    let status = kiyot.exited(&container).await;
    assert_eq!((status.exit_code, &*status.reason), (3, "Error"));
    let kiyot = kiyot.restart().await;
    assert_eq!(kiyot.status(&container).unwrap(), status);
}

/// Verifies P13.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reported_exit_is_kept_when_the_daemon_is_killed_and_the_cell_is_lost() {
    let kiyot = Fixture::start().await;
    let container = reported(&kiyot).await;
    let kiyot = kiyot.restart_after(Batch::default(), |cells| cells.crash()).await;
    let status = kiyot.exited(&container).await;
    assert_eq!((status.exit_code, &*status.reason), (3, "Error"));
}

/// Verifies P13.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn containers_of_a_stopped_sandbox_keep_their_codes_across_a_restart() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let (done, lost) = (kiyot.create(&sandbox, "done").await, kiyot.create(&sandbox, "lost").await);
    kiyot.start_container(&done).await;
    kiyot.start_container(&lost).await;
    let cell = kiyot.provider.only();
    // Its sandbox container ends by itself.
    cell.with(|state| {
        let told = cri::PodSandboxStatus { id: "5a".to_owned(), state: 1, ..Default::default() };
        state.tell(Event::Sandbox(told));
    });
    wait_for("the end of the sandbox", || {
        kiyot.sandbox_status(&sandbox).unwrap().state() == cri::PodSandboxState::SandboxNotready
    })
    .await;
    // Its containers exit while no daemon runs.
    let kiyot = kiyot
        .restart_after(Batch::default(), |_| {
            cell.exit("c0", 3);
            cell.exit("c1", 4);
        })
        .await;
    assert_eq!(kiyot.exited(&done).await.exit_code, 3);
    assert_eq!(kiyot.exited(&lost).await.exit_code, 4);
    kiyot.stop_sandbox(&sandbox).await;
    assert_eq!(kiyot.provider.running(), 0);
    let codes = [done, lost].map(|container| kiyot.status(&container).unwrap().exit_code);
    assert_eq!(codes, [3, 4]);
}

/// A daemon was killed during a start. The kubelet creates the next attempt while the start ends in
/// the cell.
/// Verifies Y4, X12.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempt_that_started_during_its_replacement_reads_killed() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let first = kiyot.create(&sandbox, "main").await;
    let cell = kiyot.provider.only();
    cell.with(|state| state.unanswered.push("RemoveContainer"));
    let mut next = kiyot.container_request(&sandbox, "main");
    next.config.as_mut().unwrap().metadata.as_mut().unwrap().attempt = 1;
    let next = kiyot.call::<cri::CreateContainerResponse>(Method::CreateContainer, next);
    let meanwhile = async {
        wait_for("the removal of the first attempt", || {
            cell.with(|state| state.waiting_calls.contains("RemoveContainer"))
        })
        .await;
        cell.with(|state| {
            let status = state.containers.get_mut("c0").unwrap();
            status.set_state(cri::ContainerState::ContainerRunning);
            let status = status.clone();
            state.tell(Event::Container(status));
            // The agent saw no exit: containerd had removed the container by then.
            state.tell(Event::ContainerGone("c0".to_owned()));
        });
        let status = kiyot.exited(&first).await;
        assert_eq!((status.exit_code, &*status.reason), (137, "Error"), "{status:?}");
        assert!(status.message.contains("next attempt"), "{status:?}");
        assert!(status.started_at > 0, "the attempt read RUNNING");
        cell.with(|state| state.unanswered.clear());
    };
    let (next, ()) = tokio::join!(next, meanwhile);
    kiyot.start_container(&next.unwrap().container_id).await;
}
