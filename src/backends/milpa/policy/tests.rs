use kiyot_config::{HostAccessPolicy, Policy};
use kiyot_engine::provider::Capabilities;
use kiyot_local::netns;

use super::*;

/// Cells with a kernel of their own.
const MACHINES: Capabilities = Capabilities {
    provider: "machines",
    own_kernel: true,
    own_users: true,
    own_devices: true,
    ..netns::CAPABILITIES
};

fn rules(policy: Policy) -> Rules {
    Rules { policy, capabilities: netns::CAPABILITIES }
}

fn refusing() -> Rules {
    rules(Policy::default())
}

fn all(setting: HostAccessPolicy, privileged: Privileged) -> Policy {
    Policy {
        host_network: setting,
        host_pid: setting,
        host_ipc: setting,
        host_users: setting,
        privileged,
        ..Policy::default()
    }
}

fn sandbox(options: cri::NamespaceOption, privileged: bool) -> cri::PodSandboxConfig {
    let context = cri::LinuxSandboxSecurityContext {
        namespace_options: Some(options),
        privileged,
        ..Default::default()
    };
    cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: "web".to_owned(),
            namespace: "shop".to_owned(),
            ..Default::default()
        }),
        linux: Some(cri::LinuxPodSandboxConfig {
            security_context: Some(context),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn container(
    options: cri::NamespaceOption,
    privileged: bool,
    capabilities: &[&str],
) -> cri::ContainerConfig {
    let add_capabilities = capabilities.iter().map(|name| (*name).to_owned()).collect();
    let context = cri::LinuxContainerSecurityContext {
        namespace_options: Some(options),
        privileged,
        capabilities: Some(cri::Capability { add_capabilities, ..Default::default() }),
        masked_paths: vec!["/proc/kcore".to_owned()],
        readonly_paths: vec!["/proc/sys".to_owned()],
        ..Default::default()
    };
    cri::ContainerConfig {
        linux: Some(cri::LinuxContainerConfig {
            security_context: Some(context),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// All host access, each with a word of its text and its key.
fn host_access() -> [(cri::NamespaceOption, bool, &'static str, &'static str); 5] {
    let node = cri::NamespaceMode::Node.into();
    let mapping = cri::IdMapping { host_id: 100_000, container_id: 0, length: 65536 };
    let userns = cri::UserNamespace {
        mode: cri::NamespaceMode::Pod.into(),
        uids: vec![mapping],
        gids: vec![mapping],
    };
    [
        (
            cri::NamespaceOption { network: node, ..Default::default() },
            false,
            "hostNetwork",
            "host_network",
        ),
        (cri::NamespaceOption { pid: node, ..Default::default() }, false, "hostPID", "host_pid"),
        (cri::NamespaceOption { ipc: node, ..Default::default() }, false, "hostIPC", "host_ipc"),
        (
            cri::NamespaceOption { userns_options: Some(userns), ..Default::default() },
            false,
            "hostUsers",
            "host_users",
        ),
        (cri::NamespaceOption::default(), true, "privileged", "privileged"),
    ]
}

/// Verifies R1.
#[test]
fn host_access_is_refused_by_name() {
    for (options, privileged, word, key) in host_access() {
        let refusal =
            check_sandbox(&refusing(), &sandbox(options.clone(), privileged)).unwrap_err();
        assert!(refusal.0.contains(word) && refusal.0.contains("shop/web"), "{refusal}");
        assert!(refusal.0.contains(&format!("policy.{key} is \"refuse\"")), "{refusal}");
        let refusal =
            check_container(&refusing(), &container(options, privileged, &[])).unwrap_err();
        assert!(refusal.0.contains(word), "{refusal}");
    }
}

/// Verifies R1.
#[test]
fn user_namespace_of_any_kind_but_the_nodes_is_refused() {
    let refused = |mode: cri::NamespaceMode| {
        let userns = cri::UserNamespace { mode: mode.into(), ..Default::default() };
        let options = cri::NamespaceOption { userns_options: Some(userns), ..Default::default() };
        check_sandbox(&refusing(), &sandbox(options, false)).is_err()
    };
    use cri::NamespaceMode::{Container, Node, Pod, Target};
    assert!([Pod, Container, Target].map(refused).iter().all(|refused| *refused));
    assert!(!refused(Node));
}

/// Verifies R1.
#[test]
fn host_access_stays_on_the_node_under_keep_local() {
    let keep = rules(all(HostAccessPolicy::KeepLocal, Privileged::KeepLocal));
    assert!(keep.keeps_any_local() && !refusing().keeps_any_local());
    for (options, privileged, word, key) in host_access() {
        let config = sandbox(options, privileged);
        let why = keeps_local(&keep, &config).unwrap();
        assert!(
            why.contains(word) && why.contains(&format!("policy.{key} is \"keep-local\"")),
            "{why}"
        );
        assert_eq!(keeps_local(&refusing(), &config), None);
        // In a request to a cell it is refused.
        assert!(check_sandbox(&keep, &config).is_err());
    }
    assert_eq!(keeps_local(&keep, &cri::PodSandboxConfig::default()), None);
}

/// Verifies R1.
#[test]
fn host_access_is_decided_by_its_own_key() {
    for (at, (options, privileged, ..)) in host_access().into_iter().enumerate() {
        let mut policy = Policy::default();
        match at {
            0 => policy.host_network = HostAccessPolicy::KeepLocal,
            1 => policy.host_pid = HostAccessPolicy::KeepLocal,
            2 => policy.host_ipc = HostAccessPolicy::KeepLocal,
            3 => policy.host_users = HostAccessPolicy::KeepLocal,
            _ => policy.privileged = Privileged::KeepLocal,
        }
        assert!(keeps_local(&rules(policy), &sandbox(options, privileged)).is_some());
        let others = host_access().into_iter().enumerate().filter(|(other, _)| *other != at);
        for (_, (options, privileged, word, _)) in others {
            assert_eq!(keeps_local(&rules(policy), &sandbox(options, privileged)), None, "{word}");
        }
    }
}

/// Verifies R2.
#[test]
fn access_to_the_cell_is_granted_where_cells_have_their_own() {
    let policy = all(HostAccessPolicy::Cell, Privileged::Cell);
    let (machines, namespaces) = (Rules { policy, capabilities: MACHINES }, rules(policy));
    for (options, privileged, word, key) in host_access() {
        let (sandbox, container) =
            (sandbox(options.clone(), privileged), container(options, privileged, &[]));
        assert!(
            check_sandbox(&machines, &sandbox).is_ok()
                && check_container(&machines, &container).is_ok(),
            "{word}"
        );
        assert!(
            granted(&machines, &sandbox).first().is_some_and(|given| given.contains(word)),
            "{word}"
        );
        let in_namespaces =
            [check_sandbox(&namespaces, &sandbox), check_container(&namespaces, &container)];
        if ["hostUsers", "privileged"].contains(&word) {
            // These cells share the node's.
            for result in in_namespaces {
                let refusal = result.unwrap_err();
                assert!(
                    refusal.0.contains(&format!(
                        "policy.{key} is \"cell\", but cells of the provider \"netns\""
                    )),
                    "{refusal}"
                );
                assert!(refusal.0.contains("root"), "{refusal}");
            }
            assert!(granted(&namespaces, &sandbox).is_empty());
        } else {
            assert!(in_namespaces.iter().all(Result::is_ok), "{word}: {in_namespaces:?}");
        }
    }
    assert!(machines.unmet().is_empty() && !machines.keeps_any_local());
    let unmet = namespaces.unmet();
    assert!(
        unmet.len() == 2 && unmet[0].contains("host_users") && unmet[1].contains("privileged"),
        "{unmet:?}"
    );
}

#[test]
fn allowed_privileges_are_reported_as_root_on_the_node() {
    let allow = rules(Policy { privileged: Privileged::Allow, ..Policy::default() });
    let config = sandbox(cri::NamespaceOption::default(), true);
    assert!(check_sandbox(&allow, &config).is_ok());
    assert!(granted(&allow, &config)[0].contains("root on the node"));
    assert!(allow.unmet().is_empty());
}

/// Verifies R2.
#[test]
fn capability_into_the_cells_processes_is_refused_where_files_are_shared() {
    let policy = Policy { host_pid: HostAccessPolicy::Cell, ..Policy::default() };
    let in_cell =
        || cri::NamespaceOption { pid: cri::NamespaceMode::Node.into(), ..Default::default() };
    for capability in ["SYS_PTRACE", "CAP_SYS_PTRACE", "sys_ptrace", "CHECKPOINT_RESTORE"] {
        let config = container(in_cell(), false, &["NET_ADMIN", capability]);
        let refusal = check_container(&rules(policy), &config).unwrap_err();
        assert!(refusal.0.contains(capability) && refusal.0.contains("hostPID"), "{refusal}");
        assert!(check_container(&Rules { policy, capabilities: MACHINES }, &config).is_ok());
        // Its own processes are within reach, as on any node.
        assert!(
            check_container(
                &rules(policy),
                &container(cri::NamespaceOption::default(), false, &[capability])
            )
            .is_ok()
        );
    }
    // With a kernel of its own, a cell contains all capabilities.
    let all = container(in_cell(), false, &["ALL"]);
    assert!(check_container(&Rules { policy, capabilities: MACHINES }, &all).is_ok());
    assert!(check_container(&rules(policy), &container(in_cell(), false, &["NET_ADMIN"])).is_ok());
}

/// Verifies N6.
#[test]
fn name_servers_of_the_node_are_refused_by_address() {
    let config = |server: &str| {
        let servers = vec!["10.96.0.10".to_owned(), server.to_owned()];
        cri::PodSandboxConfig {
            dns_config: Some(cri::DnsConfig { servers, ..Default::default() }),
            ..Default::default()
        }
    };
    for server in [
        "127.0.0.53",
        "127.0.0.1",
        "169.254.20.10",
        "0.0.0.0",
        "::1",
        "fe80::1%eth0",
        "::ffff:127.0.0.1",
    ] {
        let refusal = check_sandbox(&refusing(), &config(server)).unwrap_err();
        assert!(refusal.0.contains(server) && refusal.0.contains("node_resolver"), "{refusal}");
        let allow = rules(Policy { node_resolver: NodeResolver::Allow, ..Policy::default() });
        assert!(check_sandbox(&allow, &config(server)).is_ok());
    }
    for server in ["1.1.1.1", "2001:db8::1", "not an address"] {
        assert!(check_sandbox(&refusing(), &config(server)).is_ok());
    }
}

/// Verifies N6.
#[test]
fn name_servers_of_the_node_are_forwarded_under_forward() {
    let config = |servers: &[&str]| {
        let servers = servers.iter().map(|server| (*server).to_owned()).collect();
        cri::PodSandboxConfig {
            dns_config: Some(cri::DnsConfig { servers, ..Default::default() }),
            ..Default::default()
        }
    };
    let forward = rules(Policy { node_resolver: NodeResolver::Forward, ..Policy::default() });
    let some = config(&["10.96.0.10", "127.0.0.53", "fe80::1%eth0", "127.0.0.53"]);
    assert!(check_sandbox(&forward, &some).is_ok());
    assert_eq!(forwarded_resolvers(&forward.policy, &some), ["127.0.0.53", "fe80::1%eth0"]);
    assert_eq!(
        forwarded_resolvers(
            &Policy { node_resolver: NodeResolver::Allow, ..Policy::default() },
            &some
        ),
        Vec::<String>::new()
    );
    let many: Vec<_> = (0..=MAX_SERVERS).map(|number| format!("127.0.0.{number}")).collect();
    let refusal =
        check_sandbox(&forward, &config(&many.iter().map(String::as_str).collect::<Vec<_>>()))
            .unwrap_err();
    assert!(refusal.0.contains("9 name servers") && refusal.0.contains("at most 8"), "{refusal}");
}

#[test]
fn pod_without_host_access_is_accepted() {
    let options =
        cri::NamespaceOption { pid: cri::NamespaceMode::Container.into(), ..Default::default() };
    assert!(check_sandbox(&refusing(), &sandbox(options, false)).is_ok());
    assert!(check_sandbox(&refusing(), &cri::PodSandboxConfig::default()).is_ok());
    assert!(check_container(&refusing(), &cri::ContainerConfig::default()).is_ok());
}

#[test]
fn device_of_the_node_is_refused() {
    let device = cri::Device { host_path: "/dev/kvm".to_owned(), ..Default::default() };
    let refusal = check_container(
        &refusing(),
        &cri::ContainerConfig { devices: vec![device], ..Default::default() },
    )
    .unwrap_err();
    assert!(refusal.0.contains("/dev/kvm"));
}

fn of_kubelet(config: cri::ContainerConfig) -> cri::ContainerConfig {
    let labels = [("io.kubernetes.container.name".to_owned(), "main".to_owned())].into();
    cri::ContainerConfig { labels, ..config }
}

/// Containers that request access to the kernel, each with a word of its text.
fn with_kernel_access() -> [(cri::ContainerConfig, &'static str); 4] {
    let ordinary = || container(cri::NamespaceOption::default(), false, &["NET_ADMIN"]);
    fn context(config: &mut cri::ContainerConfig) -> &mut cri::LinuxContainerSecurityContext {
        config.linux.get_or_insert_default().security_context.get_or_insert_default()
    }
    let (mut ambient, mut unmasked) = (ordinary(), of_kubelet(ordinary()));
    context(&mut ambient)
        .capabilities
        .get_or_insert_default()
        .add_ambient_capabilities
        .push("SYS_TIME".to_owned());
    context(&mut unmasked).readonly_paths.clear();
    context(&mut unmasked).masked_paths.clear();
    [
        (container(cri::NamespaceOption::default(), false, &["KILL", "all"]), "all"),
        (container(cri::NamespaceOption::default(), false, &["cap_sys_admin"]), "cap_sys_admin"),
        (ambient, "SYS_TIME"),
        (unmasked, "procMount: Unmasked"),
    ]
}

/// Verifies R9.
#[test]
fn kernel_access_is_decided_by_the_key_of_privileged_containers() {
    let with = |privileged| Policy { privileged, ..Policy::default() };
    for (config, word) in with_kernel_access() {
        for (privileged, key) in [
            (Privileged::Refuse, "policy.privileged is \"refuse\""),
            (Privileged::KeepLocal, "policy.privileged is \"keep-local\""),
            (
                Privileged::Cell,
                "policy.privileged is \"cell\", but cells of the provider \"netns\"",
            ),
        ] {
            let refusal = check_container(&rules(with(privileged)), &config).unwrap_err();
            assert!(refusal.0.contains(word) && refusal.0.contains(key), "{refusal}");
            // A cell with its own kernel keeps the container off the node's.
            let machines = Rules { policy: with(privileged), capabilities: MACHINES };
            assert!(check_container(&machines, &config).is_ok(), "{word}");
            assert_eq!(moves_to_node(&machines, &config), None);
        }
        assert!(check_container(&rules(with(Privileged::Allow)), &config).is_ok(), "{word}");
    }
}

/// Verifies R9.
#[test]
fn kernel_access_moves_its_pod_to_the_node_only_under_keep_local() {
    for (config, word) in with_kernel_access() {
        for privileged in
            [Privileged::Refuse, Privileged::KeepLocal, Privileged::Cell, Privileged::Allow]
        {
            let policy = Policy { privileged, ..Policy::default() };
            let why = moves_to_node(&rules(policy), &config);
            assert_eq!(why.is_some(), privileged == Privileged::KeepLocal, "{word}: {why:?}");
            assert!(why.is_none_or(|why| why.contains(word)));
        }
    }
    let keep = rules(Policy { privileged: Privileged::KeepLocal, ..Policy::default() });
    let ordinary = container(cri::NamespaceOption::default(), false, &["NET_ADMIN"]);
    assert_eq!(moves_to_node(&keep, &ordinary), None);
    assert_eq!(moves_to_node(&keep, &cri::ContainerConfig::default()), None);
}

/// Verifies R9.
#[test]
fn paths_to_the_kernel_are_closed_where_cells_share_it() {
    let paths = |paths: &[&str]| paths.iter().map(|path| (*path).to_owned()).collect::<Vec<_>>();
    let with = |masked: &[&str], read_only: &[&str]| {
        let mut config = container(cri::NamespaceOption::default(), false, &[]);
        let linux = config.linux.get_or_insert_default();
        let context = linux.security_context.get_or_insert_default();
        (context.masked_paths, context.readonly_paths) = (paths(masked), paths(read_only));
        config
    };
    let without_context = cri::ContainerConfig {
        linux: Some(cri::LinuxContainerConfig::default()),
        ..Default::default()
    };
    let allow = Policy { privileged: Privileged::Allow, ..Policy::default() };
    for config in [
        cri::ContainerConfig::default(),
        without_context,
        with(&[], &[]),
        with(&["/harmless"], &["/harmless"]),
        with(&["/proc/kcore"], &[]),
        of_kubelet(with(&["/harmless"], &[])),
    ] {
        for privileged in [Privileged::Refuse, Privileged::KeepLocal, Privileged::Cell] {
            let rules = rules(Policy { privileged, ..Policy::default() });
            assert_eq!(check_container(&rules, &config), Ok(()));
            assert_eq!(moves_to_node(&rules, &config), None);
            let mut closed = config.clone();
            close_kernel_paths(&rules, &mut closed);
            let context = closed.linux.clone().unwrap().security_context.unwrap();
            let count =
                |list: &[String], path| list.iter().filter(|listed| *listed == path).count();
            for path in ["/proc/kcore", "/proc/interrupts", "/sys/firmware"] {
                assert_eq!(count(&context.masked_paths, path), 1, "{path}");
            }
            for path in ["/proc/sys", "/proc/sysrq-trigger", "/proc/irq"] {
                assert_eq!(count(&context.readonly_paths, path), 1, "{path}");
            }
            let sent = config.linux.clone().unwrap_or_default().security_context;
            let sent = sent.unwrap_or_default();
            assert!(context.masked_paths.starts_with(&sent.masked_paths));
            assert!(context.readonly_paths.starts_with(&sent.readonly_paths));
        }
        // The lists stay the client's where root reaches the kernel anyway, or the cell has its
        // own.
        for rules in [rules(allow), Rules { policy: Policy::default(), capabilities: MACHINES }] {
            let mut same = config.clone();
            close_kernel_paths(&rules, &mut same);
            assert_eq!(same, config);
        }
    }
}

#[test]
fn capability_name_is_bounded_and_escaped_in_an_error() {
    let name = format!("NO\n{}", "x".repeat(10_000));
    let config = container(cri::NamespaceOption::default(), false, &[&name]);
    let message = check_container(&refusing(), &config).unwrap_err().0;
    assert!(message.len() < 400 && message.contains("NO\\nxx"), "{message}");
}

#[test]
fn device_of_an_annotation_is_refused() {
    let annotations = [("cdi.k8s.io/vendor_gpu".to_owned(), "vendor.example/gpu=0".to_owned())];
    let config = cri::ContainerConfig { annotations: annotations.into(), ..Default::default() };
    let refusal = check_container(&refusing(), &config).unwrap_err();
    assert!(refusal.0.contains("cdi.k8s.io/vendor_gpu"), "{refusal}");
}

/// Verifies N14.
#[test]
fn host_ports_beyond_the_limit_are_refused_by_number() {
    let config = |ports: i32| {
        let mapping =
            |port| cri::PortMapping { host_port: port, container_port: port, ..Default::default() };
        let informational = cri::PortMapping { container_port: 1, ..Default::default() };
        let port_mappings = (1..=ports).map(mapping).chain([informational]).collect();
        cri::PodSandboxConfig { port_mappings, ..sandbox(cri::NamespaceOption::default(), false) }
    };
    assert!(check_sandbox(&refusing(), &config(1000)).is_ok());
    let refusal = check_sandbox(&refusing(), &config(1001)).unwrap_err();
    for word in ["shop/web", "1001 hostPorts", "at most 1000"] {
        assert!(refusal.0.contains(word), "{refusal}");
    }
    assert!(check_sandbox(&refusing(), &config(65_536)).is_err());
}
