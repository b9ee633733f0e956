//! Powers that a pod gets by a kernel of its own, compared with the same pod on the node.

use std::fs;

use kiyot_testkit::{
    Container, Kiyot, KiyotOptions, Kubelet, Node, Pod, RunningPod,
    cri::{self, security_profile::ProfileType},
};

use super::{
    WAIT,
    network::{BRIDGE, widen_network},
    options, run,
};

/// Sysctls of a pod, the unsafe ones of Kubernetes among them.
const SYSCTLS: [(&str, &str); 7] = [
    ("kernel.shm_rmid_forced", "1"),
    ("kernel.msgmax", "4096"),
    ("fs.mqueue.msg_max", "20"),
    ("net.core.somaxconn", "777"),
    ("net.ipv4.tcp_syncookies", "0"),
    ("net.ipv4.ip_local_port_range", "20000\t30000"),
    // Needs a pod with an IPv6 address.
    ("net.ipv6.conf.all.disable_ipv6", "1"),
];
/// Powers of a privileged container, each with a script that succeeds.
const POWERS: [&str; 6] = [
    "mkdir -p /mnt && mount -t tmpfs none /mnt && umount /mnt",
    "mknod /tmp/block b 7 99 && mknod /tmp/char c 1 3 && echo x > /tmp/char",
    "unshare -n ip link add dummy9 type bridge",
    "test -c /dev/kmsg && test -w /proc/sys/kernel/core_pattern",
    "grep -q 'NoNewPrivs:.*0' /proc/self/status && grep -q 'Seccomp:.*0' /proc/self/status",
    "mount -o remount,rw /sys && mount -t proc proc /proc",
];
/// Seccomp profile that allows everything but creating directories.
const NO_DIRECTORIES: &str = r#"{"defaultAction": "SCMP_ACT_ALLOW",
    "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO"}]}"#;
/// Powers of a container without privileges.
const PLAIN_POWERS: [&str; 1] = ["mknod /tmp/char c 1 3 && echo x > /tmp/char"];

/// Runs a pod that requests a user namespace. In a machine, containers without privileges have
/// AppArmor's default profile.
async fn run_pod(kubelet: &mut Kubelet, spec: &Pod) -> RunningPod {
    let mapping = cri::IdMapping { host_id: 165_536, container_id: 0, length: 65_536 };
    let users = cri::UserNamespace {
        mode: cri::NamespaceMode::Pod.into(),
        uids: vec![mapping],
        gids: vec![mapping],
    };
    let mut config = kubelet.prepare(spec);
    let set = |options: &mut Option<cri::NamespaceOption>| {
        options.as_mut().unwrap().userns_options = Some(users.clone());
    };
    let linux = config.linux.as_mut().unwrap();
    set(&mut linux.security_context.as_mut().unwrap().namespace_options);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let mut running = kubelet.running(spec, config, sandbox);
    for container in &spec.containers {
        let created = kubelet
            .create_container_with(&running, container, 0, |config| {
                let linux = config.linux.as_mut().unwrap();
                let context = linux.security_context.as_mut().unwrap();
                set(&mut context.namespace_options);
                // The node's kernel may lack AppArmor.
                if !spec.annotations.is_empty() && !context.privileged {
                    context.apparmor = Some(cri::SecurityProfile::default());
                }
            })
            .await
            .unwrap();
        kubelet.start_container(&created.id).await.unwrap();
        running.containers.insert(container.name.clone(), created);
    }
    running
}

/// Returns the sysctls that a pod sees, and its map of users.
async fn settings(kubelet: &mut Kubelet, pod: &RunningPod) -> String {
    let paths = SYSCTLS.map(|(name, _)| format!("/proc/sys/{}", name.replace('.', "/")));
    let script = format!("cat {} /proc/self/uid_map", paths.join(" "));
    run(kubelet, &pod.container("plain").id, &script).await
}

/// Returns the scripts that succeed in a container.
async fn powers(kubelet: &mut Kubelet, container: &str, scripts: &[&'static str]) -> Vec<String> {
    let mut powers = Vec::new();
    for script in scripts {
        let ended = kubelet.exec_sync(container, &["sh", "-c", script]).await.unwrap();
        if ended.code == 0 {
            powers.push((*script).to_owned());
        }
    }
    powers
}

/// Checks that a seccomp profile in a file of the node confines a container of a machine, although
/// the machine does not see the file.
async fn check_profile_of_the_node(node: &Node, kubelet: &mut Kubelet, machine: &RunningPod) {
    let directory = node.kubelet_directory().join("seccomp");
    fs::create_dir_all(&directory).unwrap();
    let profile = directory.join("no-directories.json").display().to_string();
    fs::write(&profile, NO_DIRECTORIES).unwrap();
    let profiled = |config: &mut cri::ContainerConfig| {
        let context = config.linux.as_mut().unwrap().security_context.as_mut().unwrap();
        context.seccomp = Some(cri::SecurityProfile {
            profile_type: ProfileType::Localhost.into(),
            localhost_ref: profile,
        });
    };
    let container = Container::script("profiled", WAIT);
    let created = kubelet.create_container_with(machine, &container, 0, profiled).await.unwrap();
    kubelet.start_container(&created.id).await.unwrap();
    let script = "mkdir /tmp/new 2>&1; touch /tmp/file && grep Seccomp: /proc/self/status";
    let confined = run(kubelet, &created.id, script).await;
    assert!(confined.ends_with("Operation not permitted\nSeccomp:\t2\n"), "{confined}");
}

/// Verifies V20, U14.
#[tokio::test]
#[ignore = "takes long without KVM; make test-vm"]
async fn powers_of_a_pod_in_a_machine_are_those_of_the_node() {
    let node = Node::start().await;
    widen_network(&node, BRIDGE);
    let sections = "[backends.milpa.policy]\nprivileged = \"cell\"\nhost_users = \"cell\"\n";
    let options = KiyotOptions { sections: sections.to_owned(), ..options() };
    let kiyot = Kiyot::start(&node, options).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = |name: &str| {
        let mut strong = Container::script("strong", WAIT);
        strong.privileged = true;
        let mut spec = Pod::new(name).container(Container::script("plain", WAIT)).container(strong);
        spec.sysctls = SYSCTLS.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        spec
    };
    let local = run_pod(&mut kubelet, &spec("local")).await;
    let machine = run_pod(&mut kubelet, &spec("machine").in_cell()).await;

    let set: String = SYSCTLS.map(|(_, value)| format!("{value}\n")).concat();
    let (of_local, of_machine) =
        (settings(&mut kubelet, &local).await, settings(&mut kubelet, &machine).await);
    assert!(of_machine.starts_with(&set), "{of_machine}");
    assert_eq!(of_machine, of_local, "sysctls and users");

    for (name, scripts) in [("strong", &POWERS[..]), ("plain", &PLAIN_POWERS[..])] {
        let on_node = powers(&mut kubelet, &local.container(name).id, scripts).await;
        let in_machine = powers(&mut kubelet, &machine.container(name).id, scripts).await;
        let all: Vec<_> = scripts.iter().map(|script| (*script).to_owned()).collect();
        assert_eq!(in_machine, all, "{name}; on the node: {on_node:?}");
    }
    let denied = powers(&mut kubelet, &machine.container("plain").id, &POWERS[..5]).await;
    assert_eq!(denied, powers(&mut kubelet, &local.container("plain").id, &POWERS[..5]).await);

    // The container has all capabilities of the machine's kernel. The node may lack some of them.
    let all = "last=$(cat /proc/sys/kernel/cap_last_cap); cap=$(grep CapEff /proc/self/status | \
               cut -f 2); printf '%x %x' 0x$cap $(( (1 << (last + 1)) - 1 ))";
    let capabilities = run(&mut kubelet, &machine.container("strong").id, all).await;
    let (own, full) = capabilities.split_once(' ').unwrap();
    assert_eq!(own, full, "capabilities");

    let confined = "cat /proc/self/attr/current; cat /sys/module/apparmor/parameters/enabled";
    let apparmor = run(&mut kubelet, &machine.container("plain").id, confined).await;
    assert_eq!(apparmor, "cri-containerd.apparmor.d (enforce)\nY\n", "AppArmor of its kernel");
    check_profile_of_the_node(&node, &mut kubelet, &machine).await;
    for pod in [&local, &machine] {
        kubelet.stop_and_remove(pod).await.unwrap();
    }
    assert_eq!(kiyot.cells(), Vec::<String>::new());
}
