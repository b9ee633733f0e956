//! Ends of containers and other results, reported for a cell as for the node. Each case runs on
//! both.

use std::collections::BTreeMap;

use kiyot_testkit::{
    Container, Kiyot, KiyotOptions, Kubelet, Node, Pod, RunningPod, cri, image::ImageSpec,
};
use tonic::Code;

use crate::cell::{WAIT, options, remove_and_assert_clean};

/// Runs a sandbox without containers on the node and another in a cell.
async fn run_on_both(kubelet: &mut Kubelet, name: &str) -> [RunningPod; 2] {
    let mut pods = Vec::new();
    for spec in [Pod::new(&format!("{name}-local")), Pod::new(&format!("{name}-remote")).in_cell()]
    {
        let config = kubelet.prepare(&spec);
        let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
        pods.push(kubelet.running(&spec, config, sandbox));
    }
    pods.try_into().unwrap()
}

async fn remove_both(kubelet: &mut Kubelet, kiyot: &Kiyot<'_>, [local, remote]: [RunningPod; 2]) {
    kubelet.stop_and_remove(&local).await.unwrap();
    remove_and_assert_clean(kubelet, kiyot, &remote).await;
}

type Change = fn(&mut cri::ContainerConfig);

/// Creates and starts a container. In the text of an error, placeholders replace ids.
async fn create_and_start(
    kubelet: &mut Kubelet,
    pod: &mut RunningPod,
    container: &Container,
    change: Change,
) -> Result<String, (Code, String)> {
    let without_ids = |status: tonic::Status| {
        (
            status.code(),
            status.message().split(['"', ':']).next_back().unwrap_or_default().to_owned(),
        )
    };
    let created =
        kubelet.create_container_with(pod, container, 0, change).await.map_err(without_ids)?;
    let id = created.id.clone();
    pod.containers.insert(container.name.clone(), created);
    kubelet.start_container(&id).await.map_err(without_ids)?;
    Ok(id)
}

/// Verifies U18.
#[tokio::test]
async fn exits_are_reported_as_on_the_node() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut pods = run_on_both(&mut kubelet, "ending").await;
    let small = |script: &str| {
        let mut container = Container::script("", script);
        container.resources.memory_limit_in_bytes = 32 << 20;
        container
    };
    let mut missing = Container::script("", "");
    missing.command = vec!["/no/such/program".to_owned()];
    let mut nowhere = Container::script("", "exit 0");
    nowhere.working_dir = "/etc/passwd/not/a/directory".to_owned();
    // Each case has the grace period of a stop, if the container must be stopped, and the result on
    // the node in containerd's words.
    let cases = [
        ("completed", Container::script("", "exit 0"), None, Some((0, "Completed"))),
        ("failed", Container::script("", "exit 42"), None, Some((42, "Error"))),
        (
            "outside",
            Container::script("", "sh -c 'kill -SEGV $$'; exit $?"),
            None,
            Some((139, "Error")),
        ),
        (
            "greedy",
            small("x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo survived"),
            None,
            Some((137, "OOMKilled")),
        ),
        // The child is killed. Its parent then chooses its own exit code.
        (
            "parent",
            small("sh -c 'x=$(head -c 200000000 /dev/zero | tr \"\\0\" x)'; exit 9"),
            None,
            None,
        ),
        (
            "polite",
            Container::script("", "trap 'exit 7' TERM; echo ready; while :; do sleep 0.1; done"),
            Some(30),
            Some((7, "Error")),
        ),
        ("killed", Container::script("", WAIT), Some(0), Some((137, "Error"))),
        ("missing", missing, None, Some((128, "StartError"))),
        ("nowhere", nowhere, None, None),
    ];
    for (name, mut container, grace, expected) in cases {
        container.name = name.to_owned();
        let mut ends = Vec::new();
        for pod in &mut pods {
            let begun = create_and_start(&mut kubelet, pod, &container, |_| {}).await;
            if let (Ok(id), Some(grace)) = (&begun, grace) {
                if name == "polite" {
                    kubelet.logged(pod.container(name), "ready").await;
                }
                kubelet.stop_container(id, grace).await.unwrap();
            }
            let end = match pod.containers.get(name) {
                Some(created) => {
                    let status = kubelet.exited(&created.id.clone()).await;
                    // The memory freed by the child may be too little for the kernel, which then
                    // kills the parent too.
                    let code = if name == "parent" && status.exit_code == 137 {
                        9
                    } else {
                        status.exit_code
                    };
                    Some((code, status.reason, status.started_at > 0, status.finished_at > 0))
                }
                None => None,
            };
            ends.push((begun.map(drop).map_err(|(code, _)| code), end));
        }
        assert_eq!(ends[1], ends[0], "{name}: in the cell (left) and on the node (right)");
        if let Some((code, reason)) = expected {
            let (found, why, ..) = ends[1].1.clone().unwrap();
            assert_eq!((found, why.as_str()), (code, reason), "{name}");
        }
    }
    remove_both(&mut kubelet, &kiyot, pods).await;
}

/// Verifies U19.
#[tokio::test]
async fn users_of_the_image_and_odd_limits_are_as_on_the_node() {
    let node = Node::start().await;
    let file = |path: &str, text: &str| (path.to_owned(), 0o644, text.into());
    let image = ImageSpec {
        files: vec![
            file("etc/passwd", "root:x:0:0::/:/bin/sh\nworker:x:1500:1501::/:/bin/sh\n"),
            file("etc/group", "root:x:0:\nworker:x:1501:\nextra:x:1600:worker\n"),
        ],
        ..ImageSpec::script(WAIT)
    };
    node.image("kiyot.test/users:1", &image).await;
    // An unmasked /proc reaches the node's kernel: only this policy allows it.
    let sections = "[backends.milpa.policy]\nprivileged = \"allow\"\n".to_owned();
    let kiyot = Kiyot::start(&node, KiyotOptions { sections, ..options() }).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut pods = run_on_both(&mut kubelet, "users").await;
    fn context(config: &mut cri::ContainerConfig) -> &mut cri::LinuxContainerSecurityContext {
        config.linux.get_or_insert_default().security_context.get_or_insert_default()
    }
    let script = "id -u; id -g; id -G; head -c 1 /proc/kcore | wc -c; \
        cat /sys/fs/cgroup/hugetlb*/hugetlb.2MB.limit_in_bytes \
        /sys/fs/cgroup/hugetlb.2MB.max 2>/dev/null; \
        grep -E '^(CapEff|NoNewPrivs)' /proc/self/status; \
        test -w /proc/sys/kernel/core_pattern && echo writable";
    let cases: [(&str, Change); 9] = [
        ("named", |config| context(config).run_as_username = "worker".to_owned()),
        ("numbered", |config| context(config).run_as_user = Some(cri::Int64Value { value: 1500 })),
        ("unknown", |config| context(config).run_as_username = "nobody-at-all".to_owned()),
        ("grouped", |config| {
            context(config).run_as_username = "worker".to_owned();
            context(config).supplemental_groups = vec![7000];
        }),
        ("strict", |config| {
            context(config).run_as_username = "worker".to_owned();
            context(config).supplemental_groups = vec![7000];
            context(config).supplemental_groups_policy =
                cri::SupplementalGroupsPolicy::Strict.into();
        }),
        ("unmasked", |config| {
            context(config).masked_paths.clear();
            context(config).readonly_paths.clear();
        }),
        ("bare", |config| {
            context(config).capabilities = Some(cri::Capability {
                drop_capabilities: vec!["ALL".to_owned()],
                ..Default::default()
            });
            context(config).no_new_privs = true;
        }),
        ("huge", |config| {
            let limit = cri::HugepageLimit { page_size: "2MB".to_owned(), limit: 4 << 20 };
            config
                .linux
                .get_or_insert_default()
                .resources
                .get_or_insert_default()
                .hugepage_limits = vec![limit];
        }),
        ("absurd", |config| {
            let limit = cri::HugepageLimit { page_size: "3 elephants".to_owned(), limit: 1 };
            config
                .linux
                .get_or_insert_default()
                .resources
                .get_or_insert_default()
                .hugepage_limits = vec![limit];
        }),
    ];
    let status = kubelet.runtime.status(cri::StatusRequest::default()).await.unwrap().into_inner();
    let knows_strict = status.features.is_some_and(|features| features.supplemental_groups_policy);
    let mut shown = BTreeMap::new();
    for (name, change) in cases {
        let container = Container::of_image(name, "kiyot.test/users:1");
        let mut outputs = Vec::new();
        for pod in &mut pods {
            outputs.push(match create_and_start(&mut kubelet, pod, &container, change).await {
                Ok(id) => Ok(kubelet.exec_sync(&id, &["sh", "-c", script]).await.unwrap().stdout),
                Err((code, _)) => Err(code),
            });
        }
        if name == "strict" && !knows_strict {
            // The node's containerd ignores the field.
            assert_eq!(outputs[1], Err(Code::Unimplemented));
            continue;
        }
        assert_eq!(outputs[1], outputs[0], "{name}: in the cell (left) and on the node (right)");
        shown.insert(name, outputs.remove(1));
    }
    let shows = |name: &str, what: &str| {
        let output = shown[name].as_ref().unwrap();
        assert!(output.contains(what), "{name}: {output}");
    };
    shows("named", "1500\n1501\n1501 1600\n");
    shows("numbered", "1500\n1501\n");
    shows("grouped", " 7000\n");
    shows("unmasked", "writable\n");
    shows("bare", "CapEff:\t0000000000000000\n");
    shows("bare", "NoNewPrivs:\t1\n");
    assert!(shown["unknown"].is_err() && !shown["named"].as_ref().unwrap().contains("writable"));
    remove_both(&mut kubelet, &kiyot, pods).await;
}

/// Verifies U20.
#[tokio::test]
async fn calls_of_later_runtimes_are_refused_for_a_cell_by_name() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let (mut kubelet, mut direct) =
        (kiyot.kubelet().await, node.kubelet(&node.socket()).await.unwrap());
    let [mut local, mut remote] = run_on_both(&mut kubelet, "later").await;
    let container = Container::script("main", WAIT);
    let on_node = create_and_start(&mut kubelet, &mut local, &container, |_| {}).await.unwrap();
    let in_cell = create_and_start(&mut kubelet, &mut remote, &container, |_| {}).await.unwrap();

    let checkpoint = |id: &str| cri::CheckpointContainerRequest {
        container_id: id.to_owned(),
        ..Default::default()
    };
    let refused = kubelet.runtime.checkpoint_container(checkpoint(&in_cell)).await.unwrap_err();
    assert!(
        refused.code() == Code::Unimplemented && refused.message().contains("CheckpointContainer"),
        "{refused:?}"
    );
    let resources = |id: &str| cri::UpdatePodSandboxResourcesRequest {
        pod_sandbox_id: id.to_owned(),
        ..Default::default()
    };
    // The kubelet tolerates this refusal.
    let refused =
        kubelet.runtime.update_pod_sandbox_resources(resources(&remote.sandbox)).await.unwrap_err();
    assert!(
        refused.code() == Code::Unimplemented
            && refused.message().contains("UpdatePodSandboxResources"),
        "{refused:?}"
    );
    // Calls for the node and its pods are answered by the node's containerd.
    let code = |answer: Result<(), tonic::Status>| {
        answer.map_err(|status| (status.code(), status.message().to_owned()))
    };
    let through = code(kubelet.runtime.checkpoint_container(checkpoint(&on_node)).await.map(drop));
    assert_eq!(
        through,
        code(direct.runtime.checkpoint_container(checkpoint(&on_node)).await.map(drop))
    );
    let through = code(
        kubelet.runtime.update_pod_sandbox_resources(resources(&local.sandbox)).await.map(drop),
    );
    assert_eq!(
        through,
        code(
            direct.runtime.update_pod_sandbox_resources(resources(&local.sandbox)).await.map(drop)
        )
    );
    let network = cri::NetworkConfig { pod_cidr: "10.99.0.0/24".to_owned() };
    let update = cri::UpdateRuntimeConfigRequest {
        runtime_config: Some(cri::RuntimeConfig { network_config: Some(network) }),
    };
    let through = code(kubelet.runtime.update_runtime_config(update.clone()).await.map(drop));
    assert_eq!(through, code(direct.runtime.update_runtime_config(update).await.map(drop)));
    assert_eq!(through, Ok(()));

    // Resources of the node are refused by name.
    let more = Container::script("more", WAIT);
    let device = |config: &mut cri::ContainerConfig| {
        config.cdi_devices.push(cri::CdiDevice { name: "vendor.example/gpu=0".to_owned() })
    };
    let refused = kubelet.create_container_with(&remote, &more, 0, device).await.unwrap_err();
    assert!(
        refused.code() == Code::InvalidArgument
            && refused.message().contains("vendor.example/gpu=0"),
        "{refused:?}"
    );
    remove_both(&mut kubelet, &kiyot, [local, remote]).await;
}

/// Verifies U21.
#[tokio::test]
async fn names_and_resolv_conf_are_as_on_the_node() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    // With setHostnameAsFQDN the kubelet sends the full name as the host name. With dnsPolicy None
    // it sends the entries of dnsConfig.
    let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
    let dns = [
        cri::DnsConfig {
            servers: words(&["10.96.0.10", "192.0.2.1", "2001:db8::53"]),
            searches: words(&[
                "one.example",
                "two.example",
                "a.very.long.domain.of.many.labels.example",
            ]),
            options: words(&["ndots:2", "timeout:1", "attempts:3", "edns0", "use-vc"]),
        },
        cri::DnsConfig { servers: words(&["10.96.0.10"]), ..Default::default() },
    ];
    for (number, dns) in dns.into_iter().enumerate() {
        let mut outputs = Vec::new();
        for spec in
            [Pod::new(&format!("web-{number}")), Pod::new(&format!("web-{number}")).in_cell()]
        {
            let mut config = kubelet.prepare(&spec);
            config.hostname = "web-0.nginx.default.svc.cluster.local".to_owned();
            config.dns_config = Some(dns.clone());
            let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
            let mut pod = kubelet.running(&spec, config, sandbox);
            let id =
                create_and_start(&mut kubelet, &mut pod, &Container::script("main", WAIT), |_| {})
                    .await
                    .unwrap();
            outputs.push(
                kubelet
                    .exec_sync(&id, &["sh", "-c", "hostname; cat /etc/hostname /etc/resolv.conf"])
                    .await
                    .unwrap()
                    .stdout,
            );
            kubelet.stop_and_remove(&pod).await.unwrap();
        }
        assert_eq!(outputs[1], outputs[0]);
        assert!(
            outputs[1].starts_with("web-0.nginx.default.svc.cluster.local\n"),
            "{}",
            outputs[1]
        );
        assert!(
            dns.options
                .iter()
                .chain(&dns.searches)
                .chain(&dns.servers)
                .all(|word| outputs[1].contains(word.as_str())),
            "{}",
            outputs[1]
        );
    }
    assert_eq!(kiyot.cells(), Vec::<String>::new());
}

/// Verifies U24.
#[tokio::test]
async fn stop_signal_of_a_container_is_used_as_on_the_node() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut pods = run_on_both(&mut kubelet, "signalled").await;
    let main = Container::script(
        "main",
        "trap 'exit 5' USR1; trap 'exit 7' TERM; echo ready; while :; do sleep 0.1; done",
    );
    let mut ends = Vec::new();
    for pod in &mut pods {
        let id = create_and_start(&mut kubelet, pod, &main, |config| {
            config.stop_signal = cri::Signal::Sigusr1.into()
        })
        .await
        .unwrap();
        kubelet.logged(pod.container("main"), "ready").await;
        let without_ids = kubelet.container_status(&id).await.unwrap().stop_signal();
        kubelet.stop_container(&id, 30).await.unwrap();
        ends.push((without_ids, kubelet.exited(&id).await.exit_code));
    }
    // containerd before 2.2 neither uses nor reports the stop signal.
    assert!(
        [(cri::Signal::RuntimeDefault, 7), (cri::Signal::Sigusr1, 5)].contains(&ends[0]),
        "{ends:?}"
    );
    assert_eq!(ends[1], ends[0], "in the cell (left) and on the node (right)");
    remove_both(&mut kubelet, &kiyot, pods).await;
}
