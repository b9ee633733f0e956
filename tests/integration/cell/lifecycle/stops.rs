//! Stops, which succeed only after the end of the stopped object.

use std::fs;

use kiyot_testkit::{Kiyot, LIMIT, Leftovers, Node, cri, wait_until};
use tonic::Code;

use crate::cell::{
    WAIT,
    failures::faults::{kill9, processes},
    is_ready, options, pod, remove_and_assert_clean,
};

/// Stops processes with SIGSTOP.
pub(crate) fn freeze(pids: &[String]) {
    assert!(!pids.is_empty(), "no process to freeze");
    for pid in pids {
        let _ = std::process::Command::new("kill").args(["-STOP", pid]).status();
    }
}

/// Continues processes. Ended processes are skipped.
pub(crate) fn thaw(pids: &[String]) {
    for pid in pids {
        let _ = std::process::Command::new("kill").args(["-CONT", pid]).status();
    }
}

/// Returns all processes of a cell. Processes in its namespaces count whatever their command lines.
pub(crate) fn processes_of(cell: &str) -> Vec<String> {
    let network = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    let agent = processes(&["kiyot-cell agent", cell]).remove(0);
    let cell_network = network(&agent);
    let entries = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok());
    let inside = entries.filter(|name| {
        name.bytes().all(|byte| byte.is_ascii_digit()) && network(name) == cell_network
    });
    inside.chain(processes(&["kiyot-cell launch", cell])).collect()
}

fn assert_nothing_left_of(cell: &str, uid: &str) {
    let left = Leftovers::of_host().about(&[cell.to_owned(), uid.to_owned()]);
    assert!(left.is_empty(), "left:\n{left}");
}

/// Verifies X3.
#[tokio::test]
async fn frozen_cell_is_ended_before_its_pod_reads_stopped() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("frozen", WAIT)).await.unwrap();
    let cell = kiyot.cells().remove(0);
    freeze(&processes_of(&cell));
    kubelet
        .runtime
        .stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id: running.sandbox.clone() })
        .await
        .unwrap();
    assert_eq!(processes(&[&cell]), Vec::<String>::new());
    assert_eq!(kiyot.cells(), Vec::<String>::new());
    assert!(!is_ready(&mut kubelet, &running.sandbox).await);
    let status = kubelet.container_status(&running.container("main").id).await.unwrap();
    assert_eq!((status.state(), status.exit_code), (cri::ContainerState::ContainerExited, 137));
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    assert_nothing_left_of(&cell, &running.spec.uid);
}

/// Verifies X3.
#[tokio::test]
async fn cell_in_a_frozen_cgroup_is_ended() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("cold", WAIT)).await.unwrap();
    let cell = kiyot.cells().remove(0);
    let v1 = format!("/sys/fs/cgroup/freezer/kiyot/{cell}/freezer.state");
    match fs::write(&v1, "FROZEN") {
        Ok(()) => {}
        Err(_) => fs::write(format!("/sys/fs/cgroup/kiyot/{cell}/cgroup.freeze"), "1").unwrap(),
    }
    kubelet
        .runtime
        .stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id: running.sandbox.clone() })
        .await
        .unwrap();
    assert_eq!(processes(&[&cell]), Vec::<String>::new());
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    assert_nothing_left_of(&cell, &running.spec.uid);
}

/// Verifies X3, Y24.
#[tokio::test]
async fn container_of_a_silent_agent_reads_running_until_its_pod_is_stopped() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("unreachable", WAIT)).await.unwrap();
    let main = running.container("main").id.clone();
    let cell = kiyot.cells().remove(0);
    freeze(&processes(&["kiyot-cell agent", &cell]));
    let refused = kubelet.stop_container(&main, 0).await.unwrap_err();
    assert!(matches!(refused.code(), Code::Unavailable | Code::DeadlineExceeded), "{refused:?}");
    assert_eq!(
        kubelet.container_status(&main).await.unwrap().state(),
        cri::ContainerState::ContainerRunning
    );
    assert!(is_ready(&mut kubelet, &running.sandbox).await);
    kubelet
        .runtime
        .stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id: running.sandbox.clone() })
        .await
        .unwrap();
    assert_eq!(
        kubelet.container_status(&main).await.unwrap().state(),
        cri::ContainerState::ContainerExited
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    assert_nothing_left_of(&cell, &running.spec.uid);
}

/// Verifies X3.
#[tokio::test]
async fn stop_of_a_container_whose_cell_dies_waits_for_the_confirmed_end() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet
        .run_pod(&pod("stubborn", "trap 'echo told' TERM; echo ready; while :; do sleep 0.1; done"))
        .await
        .unwrap();
    let main = running.container("main").clone();
    kubelet.logged(&main, "ready").await;
    let cell = kiyot.cells().remove(0);
    let (mut caller, id) = (kubelet.clone(), main.id.clone());
    let stopping = tokio::spawn(async move {
        let answer = caller.stop_container(&id, 60).await;
        (answer, caller.container_status(&id).await.unwrap().state())
    });
    kubelet.logged(&main, "told").await;
    kill9(&processes(&["kiyot-cell launch", &cell]));
    let (answer, state) = stopping.await.unwrap();
    assert!(
        answer.is_err() || state == cri::ContainerState::ContainerExited,
        "the stop succeeded, but the container is {state:?}"
    );
    // The kubelet retries.
    wait_until("the container reads stopped", LIMIT, async || {
        kubelet.stop_container(&main.id, 1).await.ok()
    })
    .await;
    assert_eq!(
        kubelet.container_status(&main.id).await.unwrap().state(),
        cri::ContainerState::ContainerExited
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    assert_nothing_left_of(&cell, &running.spec.uid);
}

/// A kubelet with the cgroup driver `systemd` names the slice.
///
/// Verifies U17.
#[tokio::test]
async fn containers_of_a_cell_are_in_the_slice_of_their_pod() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = pod("sliced", WAIT);
    let mut config = kubelet.prepare(&spec);
    let (name, uid) = (node.name(), spec.uid.replace('-', "_"));
    let slice = format!("/{name}.slice/{name}-besteffort.slice/{name}-besteffort-pod{uid}.slice");
    config.linux.as_mut().unwrap().cgroup_parent = slice.clone();
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let mut running = kubelet.running(&spec, config, sandbox);
    let created = kubelet.create_container(&running, &spec.containers[0], 0).await.unwrap();
    kubelet.start_container(&created.id).await.unwrap();
    running.containers.insert("main".to_owned(), created.clone());
    let groups = |found: Leftovers| {
        found
            .to_string()
            .lines()
            .filter(|line| line.contains("control group"))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let found = groups(node.leftovers());
    let of_containers = found.iter().filter(|group| group.contains(&format!("{slice}/"))).count();
    assert!(of_containers > 0 && !found.iter().any(|group| group.contains(".slice:")), "{found:?}");
    let cell = kiyot.cells().remove(0);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    assert_nothing_left_of(&cell, &running.spec.uid);
    // The kubelet removes the slice itself.
    let left = groups(node.leftovers());
    assert!(!left.iter().any(|group| group.contains(&format!("{slice}/"))), "{left:?}");
}

/// Verifies X10.
#[tokio::test]
async fn lost_cell_leaves_no_cgroup_wherever_its_containers_were() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = pod("elsewhere", WAIT);
    let mut config = kubelet.prepare(&spec);
    config.linux.as_mut().unwrap().cgroup_parent = format!("/of-nobody-{}/deeper", node.name());
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let mut running = kubelet.running(&spec, config, sandbox);
    let created = kubelet.create_container(&running, &spec.containers[0], 0).await.unwrap();
    kubelet.start_container(&created.id).await.unwrap();
    running.containers.insert("main".to_owned(), created.clone());
    let cell = kiyot.cells().remove(0);
    let groups = |found: Leftovers| {
        found
            .to_string()
            .lines()
            .filter(|line| line.contains("control group") && line.contains("deeper/"))
            .count()
    };
    assert!(groups(node.leftovers()) > 0, "its containers have cgroups");
    kill9(&processes(&["kiyot-cell launch", &cell]));
    kubelet.exited(&created.id).await;
    assert_eq!(groups(node.leftovers()), 0, "{}", node.leftovers());
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    assert_nothing_left_of(&cell, &running.spec.uid);
}
