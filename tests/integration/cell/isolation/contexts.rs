//! Security contexts, namespaces and kernel parameters in a cell, compared with the node.

use std::collections::HashMap;

use kiyot_testkit::{
    Container, Kiyot, Kubelet, LIMIT, Node, Pod, RunningPod,
    cri::{self, NamespaceMode, security_profile::ProfileType},
    wait_until,
};
use tonic::Code;

use crate::cell::{
    WAIT,
    failures::faults::{kill9, processes},
    options, pod, remove_and_assert_clean,
};

/// Prints credentials, limits, names and masked paths of a process. Leaves out the core dump limit,
/// because the daemon sets it in a cell (docs/differences.md).
const INSPECT_SCRIPT: &str = "\
    id -u; id -g; id -G; grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status; \
    touch /new 2>&1; hostname; echo $HOSTNAME; cat /etc/hostname /etc/resolv.conf; \
    cat /proc/sys/kernel/shm_rmid_forced /proc/sys/net/ipv4/ip_local_port_range; \
    cat /proc/sys/net/ipv4/ip_unprivileged_port_start /proc/sys/net/ipv4/ping_group_range; \
    for path in /proc/kcore /proc/keys; do head -c 1 $path | wc -c; done; \
    touch /proc/sys/kernel/shmmax 2>&1; ulimit -a | grep -v ^core";

type Change = fn(&mut cri::LinuxContainerSecurityContext);

/// Containers by name, each with its change of the security context.
const CONTEXTS: [(&str, Change); 5] = [
    ("usual", |_| {}),
    ("user", |context| {
        context.run_as_user = Some(cri::Int64Value { value: 1234 });
        context.run_as_group = Some(cri::Int64Value { value: 2345 });
        context.supplemental_groups = vec![3456, 4567];
    }),
    ("capable", |context| {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        context.capabilities = Some(cri::Capability {
            add_capabilities: names(&["NET_ADMIN", "SYS_PTRACE"]),
            drop_capabilities: names(&["ALL"]),
            ..Default::default()
        });
    }),
    ("unconfined", |context| {
        context.seccomp = Some(cri::SecurityProfile {
            profile_type: ProfileType::Unconfined.into(),
            localhost_ref: String::new(),
        });
    }),
    ("fixed", |context| {
        context.readonly_rootfs = true;
        context.no_new_privs = true;
    }),
];

fn context(config: &mut cri::ContainerConfig) -> &mut cri::LinuxContainerSecurityContext {
    config.linux.get_or_insert_default().security_context.get_or_insert_default()
}

/// Runs a pod with all containers of [`CONTEXTS`]. Returns the output of [`INSPECT_SCRIPT`] by
/// container.
async fn inspect(kubelet: &mut Kubelet, spec: &Pod) -> (RunningPod, HashMap<&'static str, String>) {
    let config = kubelet.prepare(spec);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let mut running = kubelet.running(spec, config, sandbox);
    let mut outputs = HashMap::new();
    for (name, change) in CONTEXTS {
        let created = kubelet
            .create_container_with(&running, &Container::script(name, WAIT), 0, |config| {
                change(context(config))
            })
            .await
            .unwrap();
        kubelet.start_container(&created.id).await.unwrap();
        outputs.insert(
            name,
            kubelet.exec_sync(&created.id, &["sh", "-c", INSPECT_SCRIPT]).await.unwrap().stdout,
        );
        running.containers.insert(name.to_owned(), created);
    }
    (running, outputs)
}

/// Verifies U4.
#[tokio::test]
async fn process_in_a_cell_has_the_permissions_of_the_node() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut spec = Pod::new("looking");
    let sysctls =
        [("net.ipv4.ip_local_port_range", "20000 30000"), ("kernel.shm_rmid_forced", "1")];
    spec.sysctls =
        sysctls.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    let (local, on_node) = inspect(&mut kubelet, &spec).await;
    kubelet.stop_and_remove(&local).await.unwrap();
    let mut spec = spec.in_cell();
    spec.attempt = 1;
    let (remote, in_cell) = inspect(&mut kubelet, &spec).await;
    for (name, _) in CONTEXTS {
        assert_eq!(in_cell[name], on_node[name], "{name}");
    }
    // Equal outputs prove nothing unless the settings have an effect.
    for (name, words) in [
        (
            "usual",
            vec![
                "looking\nlooking\nlooking\n",
                "nameserver 10.96.0.10",
                "ndots:5",
                "Seccomp:\t2",
                "NoNewPrivs:\t0",
                "\n1\n20000\t30000\n",
            ],
        ),
        ("user", vec!["1234\n2345\n2345 3456 4567\n", "CapEff:\t0000000000000000"]),
        ("capable", vec!["CapEff:\t0000000000081000"]),
        ("unconfined", vec!["Seccomp:\t0"]),
        ("fixed", vec!["Read-only file system", "NoNewPrivs:\t1"]),
    ] {
        for word in words {
            assert!(in_cell[name].contains(word), "{name}: {word:?} is not in\n{}", in_cell[name]);
        }
    }
    remove_and_assert_clean(&mut kubelet, &kiyot, &remote).await;
}

/// Verifies U5.
#[tokio::test]
async fn processes_are_shared_if_the_pod_requests_it() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("sharing").in_cell();
    let mut config = kubelet.prepare(&spec);
    let context_of_pod =
        config.linux.get_or_insert_default().security_context.get_or_insert_default();
    context_of_pod.namespace_options.get_or_insert_default().pid = NamespaceMode::Pod.into();
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let mut running = kubelet.running(&spec, config, sandbox);
    for (name, script) in [("worker", "exec sleep 31337"), ("looker", WAIT)] {
        let shared = |config: &mut cri::ContainerConfig| {
            context(config).namespace_options.get_or_insert_default().pid =
                NamespaceMode::Pod.into()
        };
        let created = kubelet
            .create_container_with(&running, &Container::script(name, script), 0, shared)
            .await
            .unwrap();
        kubelet.start_container(&created.id).await.unwrap();
        running.containers.insert(name.to_owned(), created);
    }
    wait_for_process(&mut kubelet, &running.container("looker").id, "sleep 31337").await;
    let options = kubelet
        .sandbox_status(&running.sandbox)
        .await
        .unwrap()
        .linux
        .unwrap()
        .namespaces
        .unwrap()
        .options
        .unwrap();
    assert_eq!(options.pid(), NamespaceMode::Pod);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

async fn wait_for_process(kubelet: &mut Kubelet, container: &str, process: &str) {
    kiyot_testkit::wait_until(
        format!("{process} is visible in {container}"),
        kiyot_testkit::LIMIT,
        async || {
            let listed = kubelet.exec_sync(container, &["ps", "-o", "args"]).await.unwrap().stdout;
            listed.lines().any(|line| line.trim() == process).then_some(())
        },
    )
    .await;
}

/// Verifies U5.
#[tokio::test]
async fn debug_container_sees_its_targets_processes() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut running = kubelet.run_pod(&pod("debugged", "exec sleep 31338")).await.unwrap();
    let target = running.container("main").id.clone();
    let targeting = |target: &str| {
        let target = target.to_owned();
        move |config: &mut cri::ContainerConfig| {
            let options = context(config).namespace_options.get_or_insert_default();
            options.pid = NamespaceMode::Target.into();
            options.target_id = target;
        }
    };
    let debugger = Container::script("debugger", WAIT);
    let created =
        kubelet.create_container_with(&running, &debugger, 0, targeting(&target)).await.unwrap();
    kubelet.start_container(&created.id).await.unwrap();
    wait_for_process(&mut kubelet, &created.id, "sleep 31338").await;
    running.containers.insert("debugger".to_owned(), created);
    let nothing = format!("milpa{}", "a".repeat(59));
    let another = Container::script("another", WAIT);
    let status = kubelet
        .create_container_with(&running, &another, 0, targeting(&nothing))
        .await
        .unwrap_err();
    assert!(status.code() == Code::NotFound && status.message().contains(&nothing), "{status:?}");
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies P10.
#[tokio::test]
async fn host_resources_absent_in_a_cell_are_refused_by_name() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("modest", WAIT)).await.unwrap();
    let more = Container::script("more", WAIT);
    let device = |config: &mut cri::ContainerConfig| {
        config.devices.push(cri::Device {
            container_path: "/dev/data".to_owned(),
            host_path: "/dev/loop7".to_owned(),
            permissions: "rw".to_owned(),
        });
    };
    let status = kubelet.create_container_with(&running, &more, 0, device).await.unwrap_err();
    assert!(
        status.code() == Code::InvalidArgument
            && ["\"more\"", "/dev/loop7", "/dev/data", "block volume", "policy"]
                .iter()
                .all(|word| status.message().contains(word)),
        "{status:?}"
    );
    let status = kubelet
        .create_container_with(&running, &more, 0, |config| context(config).privileged = true)
        .await
        .unwrap_err();
    assert!(
        status.code() == Code::InvalidArgument && status.message().contains("privileged"),
        "{status:?}"
    );
    let request = cri::CheckpointContainerRequest {
        container_id: running.container("main").id.clone(),
        ..Default::default()
    };
    assert_eq!(
        kubelet.runtime.checkpoint_container(request).await.unwrap_err().code(),
        Code::Unimplemented
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Reads a cgroup limit from its file of version 2, or otherwise of version 1.
async fn cgroup_limit(
    kubelet: &mut Kubelet,
    container: &str,
    version_2: &str,
    version_1: &str,
) -> String {
    let script =
        format!("cat /sys/fs/cgroup/{version_2} 2>/dev/null || cat /sys/fs/cgroup/{version_1}");
    kubelet.exec_sync(container, &["sh", "-c", &script]).await.unwrap().stdout.trim().to_owned()
}

/// Verifies U6.
#[tokio::test]
async fn resources_of_a_running_container_are_changed() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut container = Container::script("main", WAIT);
    container.resources.memory_limit_in_bytes = 64 << 20;
    let running =
        kubelet.run_pod(&Pod::new("growing").in_cell().container(container)).await.unwrap();
    let main = running.container("main").id.clone();
    let update = |linux: cri::LinuxContainerResources| cri::UpdateContainerResourcesRequest {
        container_id: main.clone(),
        linux: Some(linux),
        ..Default::default()
    };
    let memory = async |kubelet: &mut Kubelet| {
        cgroup_limit(kubelet, &main, "memory.max", "memory/memory.limit_in_bytes").await
    };
    assert_eq!(memory(&mut kubelet).await, (64 << 20).to_string());

    let more = cri::LinuxContainerResources {
        memory_limit_in_bytes: 128 << 20,
        cpu_period: 100_000,
        cpu_quota: 50_000,
        cpu_shares: 512,
        ..Default::default()
    };
    kubelet.runtime.update_container_resources(update(more)).await.unwrap();
    assert_eq!(memory(&mut kubelet).await, (128 << 20).to_string());
    let quota = cgroup_limit(&mut kubelet, &main, "cpu.max", "cpu/cpu.cfs_quota_us").await;
    assert!(quota == "50000" || quota == "50000 100000", "{quota}");
    // Some versions of containerd report no resources.
    if let Some(resources) = kubelet
        .container_status(&main)
        .await
        .unwrap()
        .resources
        .and_then(|resources| resources.linux)
    {
        assert_eq!((resources.memory_limit_in_bytes, resources.cpu_quota), (128 << 20, 50_000));
    }

    let invalid =
        cri::LinuxContainerResources { cpuset_cpus: "100000".to_owned(), ..Default::default() };
    let status = kubelet.runtime.update_container_resources(update(invalid)).await.unwrap_err();
    assert!(status.message().contains("cpuset"), "{status:?}");
    assert_eq!(
        memory(&mut kubelet).await,
        (128 << 20).to_string(),
        "a failed update changes nothing"
    );
    let nothing = cri::UpdateContainerResourcesRequest {
        container_id: format!("milpa{}", "a".repeat(59)),
        ..Default::default()
    };
    assert_eq!(
        kubelet.runtime.update_container_resources(nothing).await.unwrap_err().code(),
        Code::NotFound
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies U6, U23.
#[tokio::test]
async fn resized_container_keeps_its_resources_across_kills() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut container = Container::script("main", WAIT);
    container.resources.memory_limit_in_bytes = 64 << 20;
    let running =
        kubelet.run_pod(&Pod::new("resized").in_cell().container(container)).await.unwrap();
    let main = running.container("main").id.clone();
    let resources = cri::LinuxContainerResources {
        memory_limit_in_bytes: 128 << 20,
        cpu_period: 100_000,
        cpu_quota: 50_000,
        cpu_shares: 512,
        ..Default::default()
    };
    let request = cri::UpdateContainerResourcesRequest {
        container_id: main.clone(),
        linux: Some(resources),
        ..Default::default()
    };
    let memory = async |kubelet: &mut Kubelet| {
        cgroup_limit(kubelet, &main, "memory.max", "memory/memory.limit_in_bytes").await
    };
    kubelet.runtime.update_container_resources(request).await.unwrap();
    let before = kubelet.container_status(&main).await.unwrap();

    let cell = kiyot.cells().remove(0);
    for killed in ["daemon", "agent", "containerd"] {
        match killed {
            "daemon" => {
                kiyot.kill9();
                kiyot.start_again().await;
            }
            "agent" => kill9(&processes(&["kiyot-cell agent", &cell])),
            _ => kill9(&processes(&["containerd", "containerd.toml", &cell])),
        }
        let mut kubelet = kiyot.kubelet().await;
        wait_until("the cell takes exec again", LIMIT, async || {
            kubelet.exec_sync(&main, &["true"]).await.ok()
        })
        .await;
        assert_eq!(kubelet.container_status(&main).await.unwrap(), before, "{killed} killed");
        assert_eq!(memory(&mut kubelet).await, (128 << 20).to_string(), "{killed} killed");
        let quota = cgroup_limit(&mut kubelet, &main, "cpu.max", "cpu/cpu.cfs_quota_us").await;
        assert!(quota == "50000" || quota == "50000 100000", "{killed} killed: {quota}");
    }
    let mut kubelet = kiyot.kubelet().await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
