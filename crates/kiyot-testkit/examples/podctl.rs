//! Calls a CRI socket as a kubelet of this machine does, for tests that drive a whole node:
//! `podctl run cell|node NAME ATTEMPT SCRIPT`, `list`, `exec CONTAINER SCRIPT`, `stats CONTAINER`,
//! `logs NAME` and `remove SANDBOX`. Prints results to standard output: `exec` and `logs` as text,
//! all others as JSON.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failure ends the program with its reason"
)]

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::Path,
    process::exit,
};

use kiyot_testkit::{
    Container, Kubelet, Pod, cri,
    kubelet::{CgroupDriver, Directories},
};
use serde_json::json;

/// The socket in kiyot's own configuration.
const SOCKET: &str = "/run/kiyot/kiyot.sock";
/// The memory limit of each container, in bytes: more than a shell needs.
const MEMORY: i64 = 64 << 20;

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let directories = Directories {
        root: "/var/lib/kubelet".into(),
        logs: "/var/log/pods".into(),
        cgroup: "kubepods".to_owned(),
        driver: CgroupDriver::Systemd,
    };
    let mut kubelet = Kubelet::connect(Path::new(SOCKET), directories).await.expect(SOCKET);
    match arguments[..] {
        ["run", place, name, attempt, script] => {
            let mut pod = pod(name, script);
            pod.attempt = attempt.parse().expect("an attempt is a number");
            if place == "cell" {
                pod = pod.in_cell();
            }
            remove_remains(&mut kubelet, &pod, place == "node").await;
            let running = Box::pin(kubelet.run_pod(&pod)).await.expect("the pod runs");
            let status =
                kubelet.sandbox_status(&running.sandbox).await.expect("its sandbox has a status");
            println!(
                "{}",
                json!({
                    "sandbox": running.sandbox,
                    "container": running.container("main").id,
                    "address": status.network.map(|network| network.ip),
                    "cgroup": running.config.linux.map(|linux| linux.cgroup_parent),
                })
            );
        }
        ["list"] => list(&mut kubelet).await,
        ["exec", container, script] => {
            let output =
                kubelet.exec_sync(container, &["sh", "-c", script]).await.expect("it runs");
            print!("{}{}", output.stdout, output.stderr);
            exit(output.code);
        }
        ["stats", container] => {
            let request = cri::ContainerStatsRequest { container_id: container.to_owned() };
            let stats = kubelet.runtime.container_stats(request).await.expect("it has stats");
            let stats = stats.into_inner().stats.unwrap_or_default();
            let cpu = stats.cpu.and_then(|cpu| cpu.usage_core_nano_seconds);
            let memory = stats.memory.and_then(|memory| memory.working_set_bytes);
            println!(
                "{}",
                json!({
                    "cpu_nanoseconds": cpu.map(|value| value.value),
                    "memory_bytes": memory.map(|value| value.value),
                })
            );
        }
        ["logs", name] => {
            let logs = kubelet.log_directory(&pod(name, "")).join("main");
            print!("{}", fs::read_to_string(logs.join("0.log")).expect("the log can be read"));
        }
        ["remove", sandbox] => {
            let pod_sandbox_id = sandbox.to_owned();
            let stop = cri::StopPodSandboxRequest { pod_sandbox_id: pod_sandbox_id.clone() };
            kubelet.runtime.stop_pod_sandbox(stop).await.expect("it stops");
            let remove = cri::RemovePodSandboxRequest { pod_sandbox_id };
            kubelet.runtime.remove_pod_sandbox(remove).await.expect("it is removed");
        }
        _ => panic!("{arguments:?}: see the head of this file"),
    }
}

/// A pod whose uid is made of its name, so that a later call finds the pod again.
fn pod(name: &str, script: &str) -> Pod {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    let mut container = Container::script("main", script);
    container.resources.memory_limit_in_bytes = MEMORY;
    let mut pod = Pod::new(name).container(container);
    pod.uid = format!("00000000-0000-4000-8000-{:012x}", hasher.finish() >> 16);
    pod
}

/// Removes what an earlier call left after it timed out on a busy machine, because its names are in
/// use. The sandbox of a cell stays: a repeated call returns it.
async fn remove_remains(kubelet: &mut Kubelet, pod: &Pod, is_on_node: bool) {
    let sandboxes = kubelet.sandboxes().await.expect("sandboxes are listed");
    let is_of_pod = |listed: &cri::PodSandbox| {
        let metadata = listed.metadata.as_ref();
        metadata.is_some_and(|it| it.uid == pod.uid && it.attempt == pod.attempt)
    };
    for sandbox in sandboxes.into_iter().filter(is_of_pod) {
        for container in kubelet.containers().await.expect("containers are listed") {
            if container.pod_sandbox_id == sandbox.id {
                let remove = cri::RemoveContainerRequest { container_id: container.id };
                kubelet.runtime.remove_container(remove).await.expect("it is removed");
            }
        }
        if is_on_node {
            let remove = cri::RemovePodSandboxRequest { pod_sandbox_id: sandbox.id };
            kubelet.runtime.remove_pod_sandbox(remove).await.expect("it is removed");
        }
    }
}

async fn list(kubelet: &mut Kubelet) {
    let (mut sandboxes, mut containers) = (Vec::new(), Vec::new());
    for listed in kubelet.sandboxes().await.expect("sandboxes are listed") {
        sandboxes.push(json!({
            "id": listed.id,
            "name": listed.metadata.map(|metadata| metadata.name),
            "ready": listed.state == cri::PodSandboxState::SandboxReady as i32,
        }));
    }
    for listed in kubelet.containers().await.expect("containers are listed") {
        let status = kubelet.container_status(&listed.id).await.expect("it has a status");
        containers.push(json!({
            "id": listed.id,
            "sandbox": listed.pod_sandbox_id,
            "state": status.state().as_str_name(),
            "exit_code": status.exit_code,
            "reason": status.reason,
            "message": status.message,
        }));
    }
    println!("{}", json!({ "sandboxes": sandboxes, "containers": containers }));
}
