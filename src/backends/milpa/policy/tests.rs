use super::*;
use crate::{
    backends::milpa::providers::{Isolation, netns},
    config::{OfNode, Policy},
};

/// Cells with a kernel of their own.
const MACHINES: Isolation = Isolation { provider: "machines", privileges: true, users: true };

fn rules(policy: Policy) -> Rules {
    Rules { policy, isolation: netns::ISOLATION }
}

fn refusing() -> Rules {
    rules(Policy::default())
}

fn all(setting: OfNode, privileged: Privileged) -> Policy {
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

/// All that can be asked for, one by one, with a word of it and its key.
fn asking() -> [(cri::NamespaceOption, bool, &'static str, &'static str); 5] {
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
fn what_the_node_alone_has_is_refused_by_name() {
    for (options, privileged, word, key) in asking() {
        let status = check_sandbox(&refusing(), &sandbox(options.clone(), privileged)).unwrap_err();
        assert_eq!(status.code(), tonic::Code::InvalidArgument);
        assert!(
            status.message().contains(word) && status.message().contains("shop/web"),
            "{status}"
        );
        assert!(status.message().contains(&format!("policy.{key} is \"refuse\"")), "{status}");
        let status =
            check_container(&refusing(), &container(options, privileged, &[])).unwrap_err();
        assert!(status.message().contains(word), "{status}");
    }
}

/// Verifies R1.
#[test]
fn each_of_it_stays_on_the_node_if_the_policy_says_so() {
    let keep = rules(all(OfNode::KeepLocal, Privileged::KeepLocal));
    assert!(keep.keeps_any() && !refusing().keeps_any());
    for (options, privileged, word, key) in asking() {
        let config = sandbox(options, privileged);
        let why = keeps_local(&keep, &config).unwrap();
        assert!(
            why.contains(word) && why.contains(&format!("policy.{key} is \"keep-local\"")),
            "{why}"
        );
        assert_eq!(keeps_local(&refusing(), &config), None);
        // What comes to a cell all the same, past the sandbox, is refused there.
        assert!(check_sandbox(&keep, &config).is_err());
    }
    assert_eq!(keeps_local(&keep, &cri::PodSandboxConfig::default()), None);
}

/// Verifies R1.
#[test]
fn each_has_a_key_of_its_own() {
    for (at, (options, privileged, ..)) in asking().into_iter().enumerate() {
        let mut policy = Policy::default();
        match at {
            0 => policy.host_network = OfNode::KeepLocal,
            1 => policy.host_pid = OfNode::KeepLocal,
            2 => policy.host_ipc = OfNode::KeepLocal,
            3 => policy.host_users = OfNode::KeepLocal,
            _ => policy.privileged = Privileged::KeepLocal,
        }
        assert!(keeps_local(&rules(policy), &sandbox(options, privileged)).is_some());
        let others = asking().into_iter().enumerate().filter(|(other, _)| *other != at);
        for (_, (options, privileged, word, _)) in others {
            assert_eq!(keeps_local(&rules(policy), &sandbox(options, privileged)), None, "{word}");
        }
    }
}

/// Verifies R2.
#[test]
fn the_cells_own_is_given_where_cells_have_it() {
    let policy = all(OfNode::Cell, Privileged::Cell);
    let (machines, namespaces) = (Rules { policy, isolation: MACHINES }, rules(policy));
    for (options, privileged, word, key) in asking() {
        let (sandbox, container) =
            (sandbox(options.clone(), privileged), container(options, privileged, &[]));
        assert!(
            check_sandbox(&machines, &sandbox).is_ok()
                && check_container(&machines, &container).is_ok(),
            "{word}"
        );
        assert!(
            given(&machines, &sandbox).first().is_some_and(|given| given.contains(word)),
            "{word}"
        );
        let in_namespaces =
            [check_sandbox(&namespaces, &sandbox), check_container(&namespaces, &container)];
        if ["hostUsers", "privileged"].contains(&word) {
            // Never given as if it were so: in these cells it would be the node's.
            for result in in_namespaces {
                let status = result.unwrap_err();
                assert!(
                    status.message().contains(&format!(
                        "policy.{key} is \"cell\", but cells of the provider \"netns\""
                    )),
                    "{status}"
                );
                assert!(status.message().contains("root"), "{status}");
            }
            assert!(given(&namespaces, &sandbox).is_empty());
        } else {
            assert!(in_namespaces.iter().all(Result::is_ok), "{word}: {in_namespaces:?}");
        }
    }
    assert!(machines.unmet().is_empty() && !machines.keeps_any());
    let unmet = namespaces.unmet();
    assert!(
        unmet.len() == 2 && unmet[0].contains("host_users") && unmet[1].contains("privileged"),
        "{unmet:?}"
    );
}

#[test]
fn privileges_are_allowed_with_open_eyes() {
    let allow = rules(Policy { privileged: Privileged::Allow, ..Policy::default() });
    let config = sandbox(cri::NamespaceOption::default(), true);
    assert!(check_sandbox(&allow, &config).is_ok());
    assert!(given(&allow, &config)[0].contains("root on the node"));
    assert!(allow.unmet().is_empty());
}

/// Verifies R2.
#[test]
fn who_sees_the_cells_processes_may_not_reach_into_them_where_files_are_shared() {
    let policy = Policy { host_pid: OfNode::Cell, ..Policy::default() };
    let in_cell =
        || cri::NamespaceOption { pid: cri::NamespaceMode::Node.into(), ..Default::default() };
    for capability in ["SYS_PTRACE", "CAP_SYS_PTRACE", "sys_ptrace", "CHECKPOINT_RESTORE"] {
        let config = container(in_cell(), false, &["NET_ADMIN", capability]);
        let status = check_container(&rules(policy), &config).unwrap_err();
        assert!(
            status.message().contains(capability) && status.message().contains("hostPID"),
            "{status}"
        );
        assert!(check_container(&Rules { policy, isolation: MACHINES }, &config).is_ok());
        // Its own processes it may look into, as on any node.
        assert!(
            check_container(
                &rules(policy),
                &container(cri::NamespaceOption::default(), false, &[capability])
            )
            .is_ok()
        );
    }
    // With a kernel of its own, all of them stay in the cell.
    let all = container(in_cell(), false, &["ALL"]);
    assert!(check_container(&Rules { policy, isolation: MACHINES }, &all).is_ok());
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
        let status = check_sandbox(&refusing(), &config(server)).unwrap_err();
        assert!(
            status.message().contains(server) && status.message().contains("node_resolver"),
            "{status}"
        );
        let allow = rules(Policy { node_resolver: NodeResolver::Allow, ..Policy::default() });
        assert!(check_sandbox(&allow, &config(server)).is_ok());
    }
    for server in ["1.1.1.1", "2001:db8::1", "not an address"] {
        assert!(check_sandbox(&refusing(), &config(server)).is_ok());
    }
}

/// Verifies N6.
#[test]
fn name_servers_of_the_node_are_asked_for_the_pod() {
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
    assert_eq!(asked_for_it(&forward.policy, &some), ["127.0.0.53", "fe80::1%eth0"]);
    assert_eq!(
        asked_for_it(&Policy { node_resolver: NodeResolver::Allow, ..Policy::default() }, &some),
        Vec::<String>::new()
    );
    let many: Vec<_> = (0..=MAX_SERVERS).map(|number| format!("127.0.0.{number}")).collect();
    let status =
        check_sandbox(&forward, &config(&many.iter().map(String::as_str).collect::<Vec<_>>()))
            .unwrap_err();
    assert!(
        status.message().contains("9 name servers") && status.message().contains("at most 8"),
        "{status}"
    );
}

#[test]
fn an_ordinary_pod_is_fine() {
    let options =
        cri::NamespaceOption { pid: cri::NamespaceMode::Container.into(), ..Default::default() };
    assert!(check_sandbox(&refusing(), &sandbox(options, false)).is_ok());
    assert!(check_sandbox(&refusing(), &cri::PodSandboxConfig::default()).is_ok());
    assert!(check_container(&refusing(), &cri::ContainerConfig::default()).is_ok());
}

#[test]
fn a_device_of_the_node_is_refused() {
    let device = cri::Device { host_path: "/dev/kvm".to_owned(), ..Default::default() };
    let status = check_container(
        &refusing(),
        &cri::ContainerConfig { devices: vec![device], ..Default::default() },
    )
    .unwrap_err();
    assert!(status.message().contains("/dev/kvm"));
}

/// Containers that ask for access to the kernel, with a word of it.
fn with_kernel_access() -> [(cri::ContainerConfig, &'static str); 5] {
    let ordinary = || container(cri::NamespaceOption::default(), false, &["NET_ADMIN"]);
    fn context(config: &mut cri::ContainerConfig) -> &mut cri::LinuxContainerSecurityContext {
        config.linux.get_or_insert_default().security_context.get_or_insert_default()
    }
    let (mut ambient, mut writable, mut unmasked) = (ordinary(), ordinary(), ordinary());
    context(&mut ambient)
        .capabilities
        .get_or_insert_default()
        .add_ambient_capabilities
        .push("SYS_TIME".to_owned());
    context(&mut writable).readonly_paths.clear();
    context(&mut unmasked).masked_paths.clear();
    [
        (container(cri::NamespaceOption::default(), false, &["KILL", "all"]), "all"),
        (container(cri::NamespaceOption::default(), false, &["cap_sys_admin"]), "cap_sys_admin"),
        (ambient, "SYS_TIME"),
        (writable, "procMount: Unmasked"),
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
            let status = check_container(&rules(with(privileged)), &config).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            assert!(status.message().contains(word) && status.message().contains(key), "{status}");
            // A kernel of the cell's own is not the node's.
            let machines = Rules { policy: with(privileged), isolation: MACHINES };
            assert!(check_container(&machines, &config).is_ok(), "{word}");
            assert_eq!(moves_to_node(&machines, &config), None);
        }
        assert!(check_container(&rules(with(Privileged::Allow)), &config).is_ok(), "{word}");
    }
}

/// Verifies R9.
#[test]
fn kernel_access_moves_its_pod_to_the_node_under_keep_local_alone() {
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

#[test]
fn capability_name_is_bounded_and_escaped_in_an_error() {
    let name = format!("NO\n{}", "x".repeat(10_000));
    let config = container(cri::NamespaceOption::default(), false, &[&name]);
    let message = check_container(&refusing(), &config).unwrap_err().message().to_owned();
    assert!(message.len() < 400 && message.contains("NO\\nxx"), "{message}");
}

#[test]
fn device_of_an_annotation_is_refused() {
    let annotations = [("cdi.k8s.io/vendor_gpu".to_owned(), "vendor.example/gpu=0".to_owned())];
    let config = cri::ContainerConfig { annotations: annotations.into(), ..Default::default() };
    let status = check_container(&refusing(), &config).unwrap_err();
    assert!(status.message().contains("cdi.k8s.io/vendor_gpu"), "{status}");
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
    let status = check_sandbox(&refusing(), &config(1001)).unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
    for word in ["shop/web", "1001 hostPorts", "at most 1000"] {
        assert!(status.message().contains(word), "{status}");
    }
    assert!(check_sandbox(&refusing(), &config(65_536)).is_err());
}
