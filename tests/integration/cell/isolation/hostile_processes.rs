//! Hostile processes in pods.

use std::fs;

use kiyot_testkit::{
    Container, Kiyot, KiyotOptions, Kubelet, LIMIT, Node, Pod, cri, kubelet, wait_until,
};

use crate::cell::{
    WAIT, assert_nothing_left, failures::faults::processes, options, pod, remove_and_assert_clean,
};

/// A fork bomb.
const FORK_BOMB: &str =
    "bomb() { while :; do bomb & done; }; bomb & echo begun; while :; do wait; done";
/// The maximal number of processes of the pod, as set by the kubelet's `podPidsLimit`.
const PIDS_LIMIT: u32 = 200;

/// Limits a pod's processes by its cgroup, as the kubelet does before it runs the sandbox.
fn limit_pids(config: &cri::PodSandboxConfig) {
    let parent = config.linux.as_ref().unwrap().cgroup_parent.trim_start_matches('/').to_owned();
    let mut root = std::path::PathBuf::from("/sys/fs/cgroup");
    if root.join("cgroup.controllers").exists() {
        for part in parent.split('/') {
            fs::write(root.join("cgroup.subtree_control"), "+pids").unwrap();
            root.push(part);
            fs::create_dir_all(&root).unwrap();
        }
    } else {
        root = root.join("pids").join(parent);
        fs::create_dir_all(&root).unwrap();
    }
    fs::write(root.join("pids.max"), PIDS_LIMIT.to_string()).unwrap();
}

/// Verifies N18.
#[tokio::test]
async fn fork_bomb_ends_with_its_pod_and_harms_no_other_pod() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let neighbour = kubelet.run_pod(&pod("neighbour", WAIT)).await.unwrap();
    let calm = kiyot.cells().remove(0);
    let spec = pod("bomb", FORK_BOMB);
    let config = kubelet.prepare(&spec);
    limit_pids(&config);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let mut running = kubelet.running(&spec, config, sandbox);
    let created = kubelet.create_container(&running, &spec.containers[0], 0).await.unwrap();
    kubelet.start_container(&created.id).await.unwrap();
    running.containers.insert("main".to_owned(), created.clone());
    kubelet.logged(&created, "begun").await;
    // The cell ends as after a failure of the node: no agent stops its containers first.
    let bomb = kiyot.cells().into_iter().find(|cell| *cell != calm).unwrap();
    crate::cell::failures::faults::kill9(&processes(&["kiyot-cell agent", &bomb]));
    let stop = cri::StopPodSandboxRequest { pod_sandbox_id: running.sandbox.clone() };
    kubelet.runtime.stop_pod_sandbox(stop).await.unwrap();
    kubelet.remove_pod(&running).await.unwrap();
    assert_eq!(kiyot.cells(), std::slice::from_ref(&calm));
    let result = kubelet.exec_sync(&neighbour.container("main").id, &["echo", "here"]).await;
    assert_eq!(result.unwrap().stdout, "here\n");
    remove_and_assert_clean(&mut kubelet, &kiyot, &neighbour).await;
    drop(kiyot);
    assert_nothing_left(node);
}

/// Verifies N15.
#[tokio::test]
async fn pod_that_claims_another_cell_stays_and_the_other_cell_ends() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let victim = kubelet.run_pod(&pod("victim", WAIT)).await.unwrap();
    let cell = kiyot.state().join("cells").join(kiyot.cells().remove(0));
    let claiming = Container::script("main", WAIT).env("KIYOT_INSTANCE", cell.to_str().unwrap());
    let claimant =
        kubelet.run_pod(&Pod::new("claimant").in_cell().container(claiming)).await.unwrap();
    kubelet.stop_and_remove(&victim).await.unwrap();
    assert!(!cell.exists());
    let main = &claimant.container("main").id;
    assert_eq!(kubelet.exec_sync(main, &["echo", "here"]).await.unwrap().stdout, "here\n");
    let status = kubelet.container_status(main).await.unwrap();
    assert_eq!(status.state(), cri::ContainerState::ContainerRunning);
    remove_and_assert_clean(&mut kubelet, &kiyot, &claimant).await;
}

/// Runs a script, and repeats it until the cell answers.
async fn run_when_connected(
    kubelet: &mut Kubelet,
    container: &str,
    script: &str,
) -> kubelet::ExecOutput {
    wait_until(format!("{script:?} returns"), LIMIT, async || {
        kubelet.exec_sync(container, &["sh", "-c", script]).await.ok()
    })
    .await
}

/// Returns the PID in the pod's namespace of the process whose command line begins with
/// `command_line`.
async fn pid_in_pod(kubelet: &mut Kubelet, container: &str, command_line: &str) -> String {
    let script = format!(
        "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline | grep -q '^{command_line}' && \
        echo ${{p#/proc/}}; done; true"
    );
    wait_until(format!("the pod sees {command_line}"), LIMIT, async || {
        let output = kubelet.exec_sync(container, &["sh", "-c", &script]).await.ok()?;
        output.stdout.lines().next().map(str::to_owned)
    })
    .await
}

/// Verifies N18.
#[tokio::test]
async fn pod_that_sees_its_cells_processes_harms_only_its_cell() {
    let node = Node::start().await;
    let policy = "[backends.milpa.policy]\nhost_pid = \"cell\"\n".to_owned();
    let kiyot = Kiyot::start(&node, KiyotOptions { sections: policy, ..options() }).await;
    let mut kubelet = kiyot.kubelet().await;
    let neighbour = kubelet.run_pod(&pod("neighbour", WAIT)).await.unwrap();
    let mut spec = pod("nosy", WAIT);
    spec.host_pid = true;
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").id.clone();

    // Without hostPID, a container sees only its own processes.
    let other = &neighbour.container("main").id;
    let process_names =
        run_when_connected(&mut kubelet, other, "cat /proc/[0-9]*/comm | sort -u").await.stdout;
    assert!(
        !process_names.contains("kiyot") && !process_names.contains("containerd"),
        "{process_names}"
    );

    let agent = pid_in_pod(&mut kubelet, &main, "kiyot-cell agent").await;
    let containerd = pid_in_pod(&mut kubelet, &main, "[^ ]*containerd --config").await;
    for process in ["1", &agent, &containerd] {
        // Each of these commands needs the permission to trace the process.
        for reach in [
            "head -c 1 /proc/P/mem",
            "cat /proc/P/environ",
            "ls /proc/P/root/",
            "readlink /proc/P/fd/0",
        ] {
            let output =
                run_when_connected(&mut kubelet, &main, &reach.replace('P', process)).await;
            assert!(
                output.code != 0 && output.stdout.is_empty(),
                "{reach} of {process}: {output:?}"
            );
        }
        let script = format!("nice -n -5 true; renice -n -5 -p {process}");
        let output = run_when_connected(&mut kubelet, &main, &script).await;
        assert_ne!(output.code, 0, "{output:?}");
    }
    // The first process of the cell can't be signalled, and restarts the other two.
    for process in ["1", &agent, &containerd] {
        let _ = kubelet.exec_sync(&main, &["kill", "-9", process]).await;
    }
    let again = |before: String| move |now: &String| *now != before;
    let (killed_agent, killed_containerd) = (again(agent), again(containerd));
    wait_until("a new agent and a new containerd run", LIMIT, async || {
        let agent = pid_in_pod(&mut kubelet, &main, "kiyot-cell agent").await;
        let containerd = pid_in_pod(&mut kubelet, &main, "[^ ]*containerd --config").await;
        (killed_agent(&agent) && killed_containerd(&containerd)).then_some(())
    })
    .await;
    assert_eq!(kiyot.cells().len(), 2, "both cells are the same");
    let here = run_when_connected(&mut kubelet, other, "echo here").await;
    assert_eq!(here.stdout, "here\n");

    // A stopped agent does not answer, but its pod still ends.
    let agent = pid_in_pod(&mut kubelet, &main, "kiyot-cell agent").await;
    let _ = kubelet.exec_sync(&main, &["kill", "-STOP", &agent]).await;
    let stop = cri::StopPodSandboxRequest { pod_sandbox_id: running.sandbox.clone() };
    kubelet.runtime.stop_pod_sandbox(stop).await.unwrap();
    kubelet.stop_and_remove(&running).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &neighbour).await;
}
