use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use prost::Message;
use prost_types::{DescriptorProto, FileDescriptorSet, field_descriptor_proto::Type};

use super::*;

/// Id fields that [`Addressed::to`] does not replace, and their treatment.
const HANDLED: &[(&str, &str, &str)] = &[
    ("CreateContainerRequest", "pod_sandbox_id", "create_container: the cell's"),
    ("NamespaceOption", "target_id", "create_container: mapped; in a sandbox it has no meaning"),
    ("IDMapping", "host_id", "a uid of the node: mappings are dropped"),
    ("IDMapping", "container_id", "a uid in the container: mappings are dropped"),
    ("ContainerFilter", "id", "never set"),
    (
        "ContainerFilter",
        "pod_sandbox_id",
        "create_container: the cell's, to find an unrecorded container",
    ),
];

/// Requests to a cell.
const SENT: &[&str] = &[
    "RunPodSandboxRequest",
    "CreateContainerRequest",
    "ListContainersRequest",
    "PullImageRequest",
    "ImageStatusRequest",
];

/// Verifies U17.
#[test]
fn slice_is_a_directory_in_the_cell() {
    let slice = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podu.slice";
    for requested in [slice.to_owned(), format!("{slice}/")] {
        let parent = cgroup_parent(&with_parent(&requested), false);
        assert_eq!(parent, format!("{slice}/kiyot"));
        assert_eq!(cgroup_parent(&with_parent(&parent), false), parent);
    }
    for plain in ["", "/kubepods/podu", "/a.slice/podu"] {
        assert_eq!(cgroup_parent(&with_parent(plain), false), plain);
    }
}

/// Verifies V20.
#[test]
fn cgroup_parent_of_the_kubelet_stays_on_the_node() {
    for requested in ["", "/kubepods/podu", "/kubepods.slice/kubepods-podu.slice"] {
        let config = with_parent(requested);
        let parent = cgroup_parent(&config, true);
        let request = run_sandbox(&config, "/pod", &[], &parent, None);
        assert_eq!(request.config.unwrap().linux.unwrap().cgroup_parent, "/pod");
    }
    assert_eq!(cgroup_parent(&cri::PodSandboxConfig::default(), true), "/pod");
}

fn with_parent(cgroup_parent: &str) -> cri::PodSandboxConfig {
    let linux = cri::LinuxPodSandboxConfig {
        cgroup_parent: cgroup_parent.to_owned(),
        ..Default::default()
    };
    cri::PodSandboxConfig { linux: Some(linux), ..Default::default() }
}

#[test]
fn ids_in_requests_to_a_cell_are_all_handled() {
    let files = FileDescriptorSet::decode(kiyot_proto::DESCRIPTORS).unwrap();
    let messages: BTreeMap<String, &DescriptorProto> = files
        .file
        .iter()
        .filter(|file| file.package() == "runtime.v1")
        .flat_map(|file| {
            file.message_type
                .iter()
                .map(|message| (format!(".runtime.v1.{}", message.name()), message))
        })
        .collect();
    let mut waiting: Vec<String> = SENT
        .iter()
        .copied()
        .chain(ADDRESSED.iter().map(|(request, _)| *request))
        .map(|request| format!(".runtime.v1.{request}"))
        .collect();
    let (mut seen, mut ids) = (BTreeSet::new(), BTreeSet::new());
    while let Some(name) = waiting.pop() {
        // Map entries are not in this list, and hold no messages in these requests.
        let Some(message) = messages.get(&name) else { continue };
        if !seen.insert(name) {
            continue;
        }
        for field in &message.field {
            let looks_like_one = ["id", "ids"].contains(&field.name())
                || field.name().ends_with("_id")
                || field.name().ends_with("_ids");
            if field.r#type() == Type::Message {
                waiting.push(field.type_name().to_owned());
            } else if looks_like_one {
                ids.insert((message.name().to_owned(), field.name().to_owned()));
            }
        }
    }
    let handled: BTreeSet<_> = ADDRESSED
        .iter()
        .copied()
        .chain(HANDLED.iter().map(|(message, field, _)| (*message, *field)))
        .map(|(message, field)| (message.to_owned(), field.to_owned()))
        .collect();
    assert_eq!(ids, handled, "left: ids in requests, right: ids that are handled");
}

fn options() -> impl Strategy<Value = Option<cri::NamespaceOption>> {
    prop::option::of((0..4_i32, 0..3_i32, 0..3_i32, prop::bool::ANY).prop_map(
        |(network, pid, ipc, userns)| cri::NamespaceOption {
            network,
            pid,
            ipc,
            target_id: String::new(),
            userns_options: userns.then(cri::UserNamespace::default),
        },
    ))
}

fn sandbox() -> impl Strategy<Value = cri::PodSandboxConfig> {
    let texts = || {
        prop::collection::hash_map("(net|kernel)[./][a-z]{1,4}|[a-z]{1,4}", "[a-z0-9]{0,3}", 0..4)
    };
    (options(), texts(), texts(), texts(), "[a-z]{0,5}", prop::bool::ANY).prop_map(
        |(options, sysctls, labels, annotations, hostname, linux)| cri::PodSandboxConfig {
            metadata: Some(cri::PodSandboxMetadata {
                name: "n".to_owned(),
                uid: "u".to_owned(),
                namespace: "s".to_owned(),
                attempt: 2,
            }),
            hostname,
            log_directory: "/var/log/pods/s_n_u".to_owned(),
            dns_config: Some(cri::DnsConfig {
                servers: vec!["10.0.0.10".to_owned()],
                ..Default::default()
            }),
            port_mappings: vec![cri::PortMapping { container_port: 80, ..Default::default() }],
            labels,
            annotations,
            linux: linux.then(|| cri::LinuxPodSandboxConfig {
                cgroup_parent: "/kubepods/podu".to_owned(),
                security_context: Some(cri::LinuxSandboxSecurityContext {
                    namespace_options: options,
                    ..Default::default()
                }),
                sysctls,
                ..Default::default()
            }),
            windows: None,
        },
    )
}

proptest! {
    #[test]
    fn sandbox_in_a_cell_uses_the_cells_network_and_keeps_the_rest(config in sandbox()) {
        let parent = cgroup_parent(&config, false);
        let request = run_sandbox(&config, "/pod/", &[], &parent, None);
        prop_assert_eq!(&request.runtime_handler, "");
        let rewritten = request.config.unwrap();
        let linux = rewritten.linux.clone().unwrap();
        let options = linux.security_context.unwrap().namespace_options.unwrap();
        prop_assert_eq!(options.network(), cri::NamespaceMode::Node);
        prop_assert_eq!(options.userns_options, None);
        prop_assert_eq!(&rewritten.hostname, "");
        prop_assert_eq!(&rewritten.log_directory, "/pod/logs");
        prop_assert!(rewritten.port_mappings.is_empty());
        prop_assert_eq!(&rewritten.metadata, &config.metadata);
        prop_assert_eq!(&rewritten.labels, &config.labels);
        prop_assert_eq!(&rewritten.annotations, &config.annotations);
        prop_assert_eq!(&rewritten.dns_config, &config.dns_config);
        let requested = config.linux.clone().unwrap_or_default();
        prop_assert_eq!(&linux.cgroup_parent, &requested.cgroup_parent);
        let context = requested.security_context;
        if let Some(before) = context.and_then(|context| context.namespace_options) {
            prop_assert_eq!((options.pid, options.ipc), (before.pid, before.ipc));
        }
        // Each sysctl is in the request or in the bind, never in both.
        let bound = bind(&config, &[], None, &NodeSettings::default());
        for (name, value) in &requested.sysctls {
            prop_assert_eq!(linux.sysctls.contains_key(name), !of_network(name));
            prop_assert_eq!(bound.sysctls.get(name) == Some(value), of_network(name));
        }
        // Rewriting is idempotent.
        prop_assert_eq!(sandbox_config(&rewritten, "/pod", &[], &parent), rewritten);
    }

    #[test]
    fn labels_and_annotations_do_not_identify_a_sandbox(
        config in sandbox(), label in "[a-z]{1,3}",
    ) {
        let request = cri::RunPodSandboxRequest {
            config: Some(config.clone()),
            runtime_handler: "kiyot".to_owned(),
        };
        let mut other = request.clone();
        other.config.as_mut().unwrap().labels.insert(label.clone(), "x".to_owned());
        other.config.as_mut().unwrap().annotations.insert(label, "y".to_owned());
        prop_assert!(same_sandbox(&request, &other));
        other.config.as_mut().unwrap().hostname.push('x');
        prop_assert!(!same_sandbox(&request, &other));
    }
}

#[test]
fn sysctl_of_the_pod_overrides_the_default() {
    let sysctls = [("net.ipv4.ip_unprivileged_port_start".to_owned(), "1024".to_owned())].into();
    let config = cri::PodSandboxConfig {
        linux: Some(cri::LinuxPodSandboxConfig { sysctls, ..Default::default() }),
        ..Default::default()
    };
    let bound = bind(&config, &[], None, &NodeSettings::default());
    assert_eq!(bound.sysctls["net.ipv4.ip_unprivileged_port_start"], "1024");
    assert_eq!(bound.sysctls["net.ipv4.ping_group_range"], "0 2147483647");
}

#[test]
fn forwarded_name_servers_have_addresses_of_the_cell() {
    let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    let servers = texts(&["127.0.0.53", "10.0.0.10", "fe80::1%eth0", "127.0.0.53"]);
    let dns =
        cri::DnsConfig { servers, searches: texts(&["a.test"]), options: texts(&["ndots:5"]) };
    let config = cri::PodSandboxConfig { dns_config: Some(dns.clone()), ..Default::default() };
    let resolvers = texts(&["127.0.0.53", "fe80::1%eth0"]);
    let rewritten = sandbox_config(&config, "/pod", &resolvers, "").dns_config.unwrap();
    assert_eq!(
        rewritten.servers,
        ["169.254.253.53", "10.0.0.10", "169.254.253.54", "169.254.253.53"]
    );
    assert_eq!((&rewritten.searches, &rewritten.options), (&dns.searches, &dns.options));
    assert_eq!(bind(&config, &resolvers, None, &NodeSettings::default()).resolvers, 2);
    assert_eq!(sandbox_config(&config, "/pod", &[], "").dns_config.unwrap(), dns);
}

/// Verifies U19.
#[test]
fn container_keeps_its_requested_user_and_limits() {
    let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
    let context = cri::LinuxContainerSecurityContext {
        capabilities: Some(cri::Capability {
            drop_capabilities: words(&["ALL"]),
            ..Default::default()
        }),
        run_as_username: "worker".to_owned(),
        run_as_group: Some(cri::Int64Value { value: 7 }),
        supplemental_groups: vec![7000, 7001],
        supplemental_groups_policy: cri::SupplementalGroupsPolicy::Strict.into(),
        no_new_privs: true,
        masked_paths: words(&["/proc/kcore"]),
        readonly_paths: words(&["/proc/sys"]),
        ..Default::default()
    };
    let limit = cri::HugepageLimit { page_size: "2MB".to_owned(), limit: 4 << 20 };
    let resources =
        cri::LinuxContainerResources { hugepage_limits: vec![limit], ..Default::default() };
    let mut linux =
        cri::LinuxContainerConfig { resources: Some(resources), security_context: Some(context) };
    let config = cri::ContainerConfig { linux: Some(linux.clone()), ..Default::default() };
    let request = cri::CreateContainerRequest { config: Some(config), ..Default::default() };
    let cell = InCell {
        sandbox: "aa",
        pod_dir: "/pod",
        resolvers: &[],
        cgroup_parent: "/kubepods/podu",
        image: "sha256:1",
        profile: None,
        mounts: Vec::new(),
        log_path: String::new(),
        target: "",
    };
    use_cell_network(
        linux.security_context.as_mut().unwrap().namespace_options.get_or_insert_default(),
    );
    assert_eq!(create_container(&request, cell).config.unwrap().linux, Some(linux));
}

#[test]
fn container_request_is_rewritten_for_the_cell() {
    let mapping = cri::IdMapping { host_id: 1, container_id: 2, length: 3 };
    let mount = cri::Mount {
        host_path: "/cell/etc-hosts".to_owned(),
        uid_mappings: vec![mapping],
        gid_mappings: vec![mapping],
        ..Default::default()
    };
    let options = cri::NamespaceOption {
        pid: cri::NamespaceMode::Target.into(),
        target_id: "milpatarget".to_owned(),
        ..Default::default()
    };
    let context = cri::LinuxContainerSecurityContext {
        namespace_options: Some(options),
        ..Default::default()
    };
    let config = cri::ContainerConfig {
        image: Some(cri::ImageSpec {
            image: "busybox".to_owned(),
            user_specified_image: "busybox".to_owned(),
            ..Default::default()
        }),
        envs: vec![cri::KeyValue { key: "PASSWORD".to_owned(), value: b"secret".to_vec() }],
        log_path: "web/0.log".to_owned(),
        linux: Some(cri::LinuxContainerConfig {
            security_context: Some(context),
            ..Default::default()
        }),
        ..Default::default()
    };
    assert_eq!(target(&config), Some("milpatarget"));
    let sandbox = cri::PodSandboxConfig {
        log_directory: "/var/log/pods/x/".to_owned(),
        hostname: "web".to_owned(),
        linux: Some(cri::LinuxPodSandboxConfig {
            cgroup_parent: "/kubepods/of-another-pod".to_owned(),
            ..Default::default()
        }),
        ..Default::default()
    };
    let logs = log_paths(&sandbox, &config, "milpaid").unwrap().unwrap();
    assert_eq!(
        (&*logs.node, &*logs.in_pod_dir),
        ("/var/log/pods/x/web/0.log", "logs/milpaid/0.log")
    );
    let request = cri::CreateContainerRequest {
        pod_sandbox_id: "milpax".to_owned(),
        config: Some(config.clone()),
        sandbox_config: Some(sandbox),
    };
    let cell = InCell {
        sandbox: "aa",
        pod_dir: "/pod",
        resolvers: &[],
        cgroup_parent: "/kubepods/podu",
        image: "sha256:1",
        profile: Some("/pod/seccomp/a.json".to_owned()),
        mounts: vec![mount],
        log_path: logs.in_logs,
        target: "bb",
    };
    let rewritten = create_container(&request, cell);
    assert_eq!(rewritten.pod_sandbox_id, "aa");
    let (rewritten, rewritten_sandbox) =
        (rewritten.config.unwrap(), rewritten.sandbox_config.unwrap());
    assert_eq!(
        (&*rewritten_sandbox.hostname, &*rewritten_sandbox.log_directory),
        ("", "/pod/logs")
    );
    assert_eq!(rewritten_sandbox.linux.unwrap().cgroup_parent, "/kubepods/podu");
    assert_eq!(
        (&*rewritten.image.unwrap().image, &*rewritten.log_path, &*rewritten.mounts[0].host_path),
        ("sha256:1", "milpaid/0.log", "/cell/etc-hosts")
    );
    assert!(
        rewritten.mounts[0].uid_mappings.is_empty() && rewritten.mounts[0].gid_mappings.is_empty()
    );
    let context = rewritten.linux.unwrap().security_context.unwrap();
    assert_eq!(
        (context.seccomp.clone().unwrap().profile_type(), &*context.seccomp.unwrap().localhost_ref),
        (ProfileType::Localhost, "/pod/seccomp/a.json")
    );
    let options = context.namespace_options.unwrap();
    assert_eq!(
        (options.network(), options.pid(), &*options.target_id),
        (cri::NamespaceMode::Node, cri::NamespaceMode::Target, "bb")
    );
    assert_eq!(rewritten.envs[0].value, b"secret");
    assert_eq!(
        without_secrets(&config).envs[0],
        cri::KeyValue { key: "PASSWORD".to_owned(), value: Vec::new() }
    );
}

/// Verifies X61.
#[test]
fn log_path_out_of_its_directory_is_refused() {
    let paths = |directory: &str, log: &str| {
        let sandbox =
            cri::PodSandboxConfig { log_directory: directory.to_owned(), ..Default::default() };
        let container = cri::ContainerConfig { log_path: log.to_owned(), ..Default::default() };
        log_paths(&sandbox, &container, "milpaid").map(|logs| logs.map(|logs| logs.node))
    };
    assert_eq!(paths("/var/log/x/", "/web/0.log"), Ok(Some("/var/log/x/web/0.log".to_owned())));
    assert_eq!(paths("", "web/0.log"), Ok(None));
    assert_eq!(paths("/var/log/x", ""), Ok(None));
    for log in ["../../../etc/cron.d/x", "web/../../0.log", "web/..", "a\0b", "/"] {
        let error = paths("/var/log/x", log).unwrap_err().to_string();
        assert!(error.contains("invalid; allowed: a relative path without"), "{error}");
    }
    for directory in ["relative", "/var/log/../../etc", "/var/./log"] {
        let error = paths(directory, "web/0.log").unwrap_err().to_string();
        assert!(error.contains("invalid; allowed: an absolute path without"), "{error}");
    }
}
