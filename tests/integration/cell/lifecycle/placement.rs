//! Placement of pods: by the policy, by the examples, and after a reload.

use std::path::Path;

use kiyot_testkit::{Container, Kiyot, KiyotOptions, Kubelet, Node, Pod, RunningPod, cri};

use crate::cell::{WAIT, assert_nothing_left, options};

fn local_pod(name: &str) -> Pod {
    Pod::new(name).container(Container::script("main", WAIT))
}

fn is_in_a_cell(pod: &RunningPod) -> bool {
    pod.sandbox.starts_with("milpa")
}

async fn run(kubelet: &mut Kubelet, pod: &Pod) -> RunningPod {
    kubelet.run_pod(pod).await.unwrap_or_else(|status| panic!("{}: {status:?}", pod.name))
}

async fn remove_all(kubelet: &mut Kubelet, pods: &[RunningPod]) {
    for pod in pods {
        kubelet.stop_and_remove(pod).await.unwrap();
    }
    assert!(kubelet.sandboxes().await.unwrap().is_empty());
}

/// Verifies R1, R6.
#[tokio::test]
async fn pod_with_host_access_stays_on_the_node_by_policy() {
    let node = Node::start().await;
    let policy = "[backends.milpa.policy]\nhost_pid = \"keep-local\"\n\
        host_network = \"keep-local\"\nprivileged = \"keep-local\"\n";
    let kiyot =
        Kiyot::start(&node, KiyotOptions { sections: policy.to_owned(), ..options() }).await;
    let mut kubelet = kiyot.kubelet().await;
    let (mut in_pids, mut on_network, mut privileged) = (
        local_pod("in-pids").in_cell(),
        local_pod("on-network").in_cell(),
        local_pod("mighty").in_cell(),
    );
    in_pids.host_pid = true;
    on_network.host_network = true;
    privileged.containers[0].privileged = true;
    let mut running = Vec::new();
    for (pod, handler, why) in [
        (&in_pids, "", "asks for the node's processes (hostPID), and policy.host_pid is"),
        // The node's containerd does not have the handler.
        (
            &on_network,
            "kiyot",
            "asks for the node's network (hostNetwork), and policy.host_network is",
        ),
        (&privileged, "", "has a privileged container, and policy.privileged is"),
    ] {
        let config = kubelet.prepare(pod);
        let sandbox = kubelet
            .run_sandbox(&config, handler)
            .await
            .unwrap_or_else(|status| panic!("{}: {status:?}", pod.name));
        assert!(!sandbox.starts_with("milpa"), "{}", pod.name);
        running.push(kubelet.running(pod, config, sandbox));
        let log = kiyot.log();
        let line = log.lines().find(|line| {
            line.contains("pod sandbox stays on the node") && line.contains(&pod.name)
        });
        assert!(line.is_some_and(|line| line.contains(why)), "{}: {line:?}", pod.name);
    }
    // The pod's runtime class selects the cell. The node's runtime does not have the handler of the
    // class.
    let mut by_class = local_pod("by-class");
    by_class.host_network = true;
    let config = kubelet.prepare(&by_class);
    let sandbox =
        kubelet.run_sandbox(&config, "kiyot").await.unwrap_or_else(|status| panic!("{status:?}"));
    assert!(!sandbox.starts_with("milpa"));
    running.push(kubelet.running(&by_class, config, sandbox));
    assert_eq!(kiyot.cells(), Vec::<String>::new());
    let cell = run(&mut kubelet, &local_pod("modest").in_cell()).await;
    assert!(is_in_a_cell(&cell));
    running.push(cell);
    remove_all(&mut kubelet, &running).await;
    drop(kiyot);
    assert_nothing_left(node);
}

/// Adds a capability that no namespace contains.
fn add_kernel_capability(config: &mut cri::ContainerConfig) {
    let context = config.linux.get_or_insert_default().security_context.get_or_insert_default();
    context.capabilities.get_or_insert_default().add_capabilities.push("SYS_ADMIN".to_owned());
}

/// Verifies R9.
#[tokio::test]
async fn pod_with_kernel_capability_moves_to_the_node_under_keep_local() {
    let node = Node::start().await;
    let policy = "[backends.milpa.policy]\nprivileged = \"keep-local\"\n";
    let kiyot =
        Kiyot::start(&node, KiyotOptions { sections: policy.to_owned(), ..options() }).await;
    let mut kubelet = kiyot.kubelet().await;
    let container = Container::script("mighty", WAIT);
    let mut pod = Pod::new("moving").in_cell();
    let in_cell = run(&mut kubelet, &pod).await;
    assert!(is_in_a_cell(&in_cell), "a request for a sandbox names no capability");

    let status = kubelet
        .create_container_with(&in_cell, &container, 0, add_kernel_capability)
        .await
        .unwrap_err();
    assert!(
        status.message().contains("SYS_ADMIN") && status.message().contains("keep-local"),
        "{status:?}"
    );
    // The kubelet creates a new sandbox for a pod whose sandbox is not ready.
    let status = kubelet.sandbox_status(&in_cell.sandbox).await.unwrap();
    assert_eq!(status.state(), cri::PodSandboxState::SandboxNotready);
    assert_eq!(
        kiyot.cells(),
        Vec::<String>::new(),
        "the cell has ended before the sandbox reads not ready"
    );
    kubelet.stop_pod(&in_cell).await.unwrap();
    pod.attempt = 1;
    let mut on_node = run(&mut kubelet, &pod).await;
    assert!(!is_in_a_cell(&on_node), "{}", on_node.sandbox);
    let created = kubelet
        .create_container_with(&on_node, &container, 0, add_kernel_capability)
        .await
        .unwrap();
    kubelet.start_container(&created.id).await.unwrap();
    let grep_capabilities = ["sh", "-c", "grep CapEff /proc/self/status"];
    let effective = kubelet.exec_sync(&created.id, &grep_capabilities).await.unwrap().stdout;
    let effective = effective.split_whitespace().last().unwrap();
    let cap_sys_admin = 1_u64 << 21;
    assert_ne!(u64::from_str_radix(effective, 16).unwrap() & cap_sys_admin, 0, "{effective}");
    on_node.containers.insert("mighty".to_owned(), created);
    let log = kiyot.log();
    let line = log
        .lines()
        .find(|line| line.contains("pod sandbox stays on the node") && line.contains("moving"));
    assert!(line.is_some_and(|line| line.contains("SYS_ADMIN")), "{line:?}");

    // Adding a container to a running pod, for example by `kubectl debug`, does not end the pod.
    let modest = run(&mut kubelet, &local_pod("modest").in_cell()).await;
    let status = kubelet
        .create_container_with(&modest, &container, 0, add_kernel_capability)
        .await
        .unwrap_err();
    assert!(status.message().contains("SYS_ADMIN"), "{status:?}");
    let main = &modest.container("main").id;
    assert_eq!(kubelet.exec_sync(main, &["true"]).await.unwrap().code, 0);

    kubelet.stop_and_remove(&on_node).await.unwrap();
    kubelet
        .runtime
        .remove_pod_sandbox(cri::RemovePodSandboxRequest {
            pod_sandbox_id: in_cell.sandbox.clone(),
        })
        .await
        .unwrap();
    remove_all(&mut kubelet, &[modest]).await;
    drop(kiyot);
    assert_nothing_left(node);
}

fn example_options(name: &str) -> KiyotOptions {
    KiyotOptions {
        file: Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name)),
        ..options()
    }
}

/// Verifies R3.
#[tokio::test]
async fn opt_in_gives_cells_only_to_pods_that_request_them() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, example_options("opt-in.toml")).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut by_class = local_pod("by-class");
    by_class.runtime_handler = "kiyot".to_owned();
    let mut running = Vec::new();
    for (pod, in_a_cell) in
        [(local_pod("plain"), false), (local_pod("asks").in_cell(), true), (by_class, true)]
    {
        let pod = run(&mut kubelet, &pod).await;
        assert_eq!(is_in_a_cell(&pod), in_a_cell, "{}", pod.spec.name);
        running.push(pod);
    }
    remove_all(&mut kubelet, &running).await;
}

/// Verifies R3.
#[tokio::test]
async fn opt_out_keeps_the_nodes_own_pods_on_the_node() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, example_options("opt-out.toml")).await;
    let mut kubelet = kiyot.kubelet().await;
    let of_daemonset = local_pod("of-daemonset")
        .label("controller-revision-hash", "5d8c")
        .label("pod-template-generation", "1");
    let is_static = local_pod("static").annotation("kubernetes.io/config.source", "file");
    let mut of_system = local_pod("of-system");
    of_system.namespace = "kube-system".to_owned();
    let asks = local_pod("asks").annotation("kubernetes.io/target-runtime", "containerd");
    let mut on_network = local_pod("on-network");
    on_network.host_network = true;
    let mut running = Vec::new();
    for pod in [of_daemonset, is_static, of_system, asks] {
        let pod = run(&mut kubelet, &pod).await;
        assert!(!is_in_a_cell(&pod), "{}", pod.spec.name);
        running.push(pod);
    }
    let config = kubelet.prepare(&on_network);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    assert!(!sandbox.starts_with("milpa"), "the policy keeps the pod on the node");
    running.push(kubelet.running(&on_network, config, sandbox));
    let other = run(&mut kubelet, &local_pod("other")).await;
    assert!(is_in_a_cell(&other), "{}", other.sandbox);
    running.push(other);
    remove_all(&mut kubelet, &running).await;
}

/// Verifies R4.
#[tokio::test]
async fn reload_changes_rules_and_limits_all_or_nothing() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(
        &node,
        KiyotOptions {
            server: "client_timeout = \"29s\"\nnode_backend = \"containerd\"".to_owned(),
            ..options()
        },
    )
    .await;
    let mut kubelet = kiyot.kubelet().await;
    let before = run(&mut kubelet, &local_pod("before")).await;
    assert!(!is_in_a_cell(&before));

    // An invalid file changes nothing: its valid keys are not applied either.
    kiyot.reload("default = \"containerd\"", "default = \"milpa\"\nrules = 3").await;
    assert!(kiyot.log().contains("configuration reload failed, nothing changed"));
    let still = run(&mut kubelet, &local_pod("still")).await;
    assert!(!is_in_a_cell(&still));
    // A valid file changes nothing if the backend of its `default` does not run.
    let elsewhere = "default = \"elsewhere\"\n[backends.elsewhere]\ntype = \"cri\"\n\
        socket = \"/run/elsewhere.sock\"\n";
    kiyot.reload("default = \"milpa\"\nrules = 3", elsewhere).await;
    assert!(kiyot.log().contains("no backend of this name and type runs now"));
    kiyot.reload(elsewhere, "default = \"containerd\"").await;

    // The change applies at once, also to open connections. Running pods stay where they are.
    kiyot.reload("default = \"containerd\"", "default = \"milpa\"").await;
    kiyot
        .reload("client_timeout = \"29s\"", "client_timeout = \"28s\"\nmax_concurrent_calls = 1000")
        .await;
    let after = run(&mut kubelet, &local_pod("after")).await;
    assert!(is_in_a_cell(&after));
    assert!(kubelet.sandbox_status(&before.sandbox).await.is_ok());
    let log = kiyot.log();
    for change in [
        "routing.default: \\\"containerd\\\" -> \\\"milpa\\\"",
        "server.client_timeout: 29s -> 28s",
        "server.max_concurrent_calls: 10000 -> 1000",
    ] {
        assert!(
            log.contains(change) || log.contains(&change.replace('\\', "")),
            "{change} is not in the log:\n{log}"
        );
    }

    // The log names keys that need a restart.
    kiyot.reload("kiyot.sock\"", "other.sock\"").await;
    assert!(kiyot.log().lines().any(|line| line.contains("configuration change needs a restart")
        && line.contains("server.listen")));
    assert_eq!(kubelet.sandboxes().await.unwrap().len(), 3);
    remove_all(&mut kubelet, &[before, still, after]).await;
}

/// Verifies R4.
#[tokio::test]
async fn reload_changes_the_policy() {
    let node = Node::start().await;
    let sections =
        "[backends.milpa.policy]\nhost_network = \"refuse\"\nhost_path = \"refuse\"\n".to_owned();
    let kiyot = Kiyot::start(&node, KiyotOptions { sections, ..options() }).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut pod = local_pod("on-network").in_cell();
    pod.host_network = true;
    let config = kubelet.prepare(&pod);
    let refused = kubelet.run_sandbox(&config, "").await.unwrap_err();
    assert!(refused.message().contains("policy.host_network is \"refuse\""), "{refused:?}");
    // The reload is all or nothing: with an invalid key, the valid key is not applied.
    kiyot
        .reload(
            "host_network = \"refuse\"\nhost_path = \"refuse\"",
            "host_network = \"keep-local\"\nhost_path = \"allow\"",
        )
        .await;
    kubelet.run_sandbox(&config, "").await.unwrap_err();
    kiyot.reload("host_path = \"allow\"", "host_path = \"copy-read-only\"").await;
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    assert!(!sandbox.starts_with("milpa"), "the pod stays on the node");
    assert!(
        kiyot.log().contains("policy.host_network: Refuse -> KeepLocal")
            && kiyot.log().contains("policy.host_path: Refuse -> CopyReadOnly")
    );
    let running = kubelet.running(&pod, config, sandbox);
    remove_all(&mut kubelet, &[running]).await;
}

/// Verifies R4.
#[tokio::test]
async fn reload_changes_max_cells() {
    let node = Node::start().await;
    let kiyot =
        Kiyot::start(&node, KiyotOptions { milpa: "max_cells = 1".to_owned(), ..options() }).await;
    let mut kubelet = kiyot.kubelet().await;
    let one = run(&mut kubelet, &local_pod("one").in_cell()).await;
    let two = local_pod("two").in_cell();
    let config = kubelet.prepare(&two);
    let refused = kubelet.run_sandbox(&config, "").await.unwrap_err();
    assert!(refused.message().contains("max_cells"), "{refused:?}");
    kiyot.reload("max_cells = 1", "max_cells = 2").await;
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let two = kubelet.running(&two, config, sandbox);
    remove_all(&mut kubelet, &[one, two]).await;
}
