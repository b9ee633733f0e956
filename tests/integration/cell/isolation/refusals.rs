//! Requests that a cell does not support: they are refused by name, without a launch.

use kiyot_testkit::{Container, Kiyot, Kubelet, Node, Pod, Source, cri};
use tonic::Code;

use crate::cell::{WAIT, options, pod};

/// Returns the error of a pod. Asserts that no cell is launched for the pod.
async fn run_refused(kubelet: &mut Kubelet, kiyot: &Kiyot<'_>, pod: &Pod) -> tonic::Status {
    let status = kubelet.run_pod(pod).await.expect_err("the pod is refused");
    assert_eq!(kiyot.cells(), Vec::<String>::new(), "no cell was launched");
    assert_eq!(kubelet.sandboxes().await.unwrap(), Vec::new(), "no sandbox is listed");
    kubelet.forget(pod);
    status
}

#[track_caller]
fn assert_names(status: &tonic::Status, code: Code, words: &[&str]) {
    assert_eq!(status.code(), code, "{status:?}");
    for word in words {
        assert!(status.message().contains(word), "{word:?} is not in {:?}", status.message());
    }
}

/// Verifies P10.
#[tokio::test]
async fn bad_annotations_are_named_with_what_is_allowed() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let status = run_refused(
        &mut kubelet,
        &kiyot,
        &pod("odd", WAIT).annotation("pod.elotl.co/launch-type", "Cheap"),
    )
    .await;
    assert_names(
        &status,
        Code::InvalidArgument,
        &["pod.elotl.co/launch-type", "Cheap", "Spot", "On-Demand"],
    );
    let status = run_refused(
        &mut kubelet,
        &kiyot,
        &pod("odder", WAIT).annotation("pod.elotl.co/volume-size", "big"),
    )
    .await;
    assert_names(&status, Code::InvalidArgument, &["pod.elotl.co/volume-size", "big"]);
}

/// Verifies P10.
#[tokio::test]
async fn unknown_target_runtime_is_named_in_the_error() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("lost")
        .annotation("kubernetes.io/target-runtime", "virtlet")
        .container(Container::script("main", WAIT));
    let status = run_refused(&mut kubelet, &kiyot, &spec).await;
    assert_names(
        &status,
        Code::InvalidArgument,
        &["kubernetes.io/target-runtime", "virtlet", "kiyot"],
    );
}

/// Verifies P10, R1.
#[tokio::test]
async fn namespaces_of_the_node_are_refused() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut on_network = pod("on-network", WAIT);
    on_network.host_network = true;
    let status = run_refused(&mut kubelet, &kiyot, &on_network).await;
    assert!(status.message().contains("etwork"), "{status:?}");
    let mut in_pids = pod("in-pids", WAIT);
    in_pids.host_pid = true;
    let status = run_refused(&mut kubelet, &kiyot, &in_pids).await;
    assert!(status.message().to_lowercase().contains("pid"), "{status:?}");
}

fn context(config: &mut cri::ContainerConfig) -> &mut cri::LinuxContainerSecurityContext {
    config.linux.get_or_insert_default().security_context.get_or_insert_default()
}

/// Verifies R9.
#[tokio::test]
async fn capability_that_reaches_the_kernel_is_refused_by_name() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&Pod::new("mighty").in_cell()).await.unwrap();
    let container = Container::script("main", WAIT);
    let mut not_refused = Vec::new();
    for name in ["ALL", "SYS_ADMIN", "cap_sys_module", "DAC_READ_SEARCH", "BPF", "NOT_YET_KNOWN"] {
        let ambient = name == "BPF";
        let created = kubelet
            .create_container_with(&running, &container, 0, |config| {
                let capabilities = context(config).capabilities.get_or_insert_default();
                let names = if ambient {
                    &mut capabilities.add_ambient_capabilities
                } else {
                    &mut capabilities.add_capabilities
                };
                names.push(name.to_owned());
            })
            .await;
        match created {
            Ok(created) => {
                kubelet
                    .runtime
                    .remove_container(cri::RemoveContainerRequest { container_id: created.id })
                    .await
                    .unwrap();
                not_refused.push(name);
            }
            Err(status) => {
                assert_names(&status, Code::InvalidArgument, &["main", name, "policy.privileged"]);
            }
        }
    }
    assert_eq!(not_refused, Vec::<&str>::new());
    let status = kubelet
        .create_container_with(&running, &container, 0, |config| {
            context(config).masked_paths.clear();
            context(config).readonly_paths.clear();
        })
        .await
        .unwrap_err();
    assert_names(
        &status,
        Code::InvalidArgument,
        &["main", "procMount: Unmasked", "policy.privileged"],
    );
    // Requests that the cell's namespaces can contain are granted.
    let created = kubelet
        .create_container_with(&running, &container, 0, |config| {
            context(config).capabilities.get_or_insert_default().add_capabilities =
                ["NET_ADMIN", "SYS_PTRACE"].map(str::to_owned).to_vec();
        })
        .await
        .unwrap();
    kubelet.start_container(&created.id).await.unwrap();
    kubelet.stop_and_remove(&running).await.unwrap();
}

/// Verifies R9.
#[tokio::test]
async fn kernel_paths_stay_masked_whatever_paths_a_client_masks() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&Pod::new("bare").in_cell()).await.unwrap();
    type Change = fn(&mut cri::ContainerConfig);
    let cases: [(&str, Change); 3] = [
        ("without-context", |config| config.linux = Some(cri::LinuxContainerConfig::default())),
        ("without-lists", |config| {
            context(config).masked_paths.clear();
            context(config).readonly_paths.clear();
        }),
        ("harmless-lists", |config| {
            context(config).masked_paths = vec!["/harmless".to_owned()];
            context(config).readonly_paths = vec!["/harmless".to_owned()];
        }),
    ];
    for (name, change) in cases {
        let container = Container::script(name, WAIT);
        let created = kubelet
            .create_container_with(&running, &container, 0, |config| {
                config.labels.clear();
                change(config);
            })
            .await
            .unwrap();
        kubelet.start_container(&created.id).await.unwrap();
        let script = "head -c 1 /proc/kcore | wc -c; touch /proc/sys/kernel/shmmax 2>&1";
        let output = kubelet.exec_sync(&created.id, &["sh", "-c", script]).await.unwrap();
        assert!(output.stdout.starts_with("0\n"), "{name}: {output:?}");
        assert!(output.stdout.contains("Read-only file system"), "{name}: {output:?}");
    }
    kubelet.stop_and_remove(&running).await.unwrap();
}

/// Verifies D13, P10.
#[tokio::test]
async fn host_path_is_refused_by_name() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("nosy")
        .in_cell()
        .volume("host", Source::HostPath("/etc/ssl".into()))
        .container(Container::script("main", WAIT).mount("host", "/host"));
    let status = kubelet.run_pod(&spec).await.unwrap_err();
    assert!(
        status.message().contains("/etc/ssl") && status.message().contains("host_path"),
        "{status:?}"
    );
}

/// Verifies D18.
#[tokio::test]
async fn fields_that_the_cells_containerd_ignores_are_refused_by_name() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("much").in_cell().volume("scratch", Source::EmptyDir { memory: false });
    let config = kubelet.prepare(&spec);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let running = kubelet.running(&spec, config, sandbox);
    let version = crate::cell::containerd_version(&mut kubelet).await;
    let model =
        cri::ImageSpec { image: "registry.invalid/model:1".to_owned(), ..Default::default() };
    let scratch = kubelet
        .pod_directory(&spec.uid)
        .join("volumes/kubernetes.io~empty-dir/scratch")
        .display()
        .to_string();
    let image_volume = cri::Mount {
        container_path: "/model".to_owned(),
        image: Some(model.clone()),
        readonly: true,
        ..Default::default()
    };
    let image_subpath = cri::Mount { image_sub_path: "weights".to_owned(), ..image_volume.clone() };
    let on_volume = |path: &str| cri::Mount {
        container_path: path.to_owned(),
        host_path: scratch.clone(),
        readonly: true,
        ..Default::default()
    };
    let recursive = cri::Mount { recursive_read_only: true, ..on_volume("/recursive") };
    let mapped = cri::Mount {
        uid_mappings: vec![cri::IdMapping { host_id: 100_000, container_id: 0, length: 65_536 }],
        ..on_volume("/mapped")
    };
    // The containerd of this machine may not support image volumes; later versions mount them.
    let executable =
        cri::Mount { mount_options: vec!["noexec".to_owned()], ..on_volume("/executable") };
    let knows_options = kubelet
        .runtime
        .status(cri::StatusRequest::default())
        .await
        .unwrap()
        .into_inner()
        .features
        .is_some_and(|features| features.mount_options);
    let mut cases = vec![(mapped, vec!["/mapped", "mapped ids"])];
    if !knows_options {
        cases.push((executable, vec!["/executable", "noexec"]));
    }
    if version < (2, 1) {
        cases.push((image_volume, vec!["/model", "registry.invalid/model:1", "2.1"]));
        cases.push((image_subpath, vec!["/model", "weights", "registry.invalid/model:1", "2.1"]));
    }
    if version < (2, 0) {
        cases.push((recursive, vec!["/recursive", "recursively read-only"]));
    }
    for (mount, words) in cases {
        let mut main = Container::script("main", "exit 0");
        main.more_mounts.push(mount);
        let refused = kubelet.create_container(&running, &main, 0).await.unwrap_err();
        assert_names(&refused, Code::Unimplemented, &[&words[..], &["main"]].concat());
    }
    assert!(kubelet.containers().await.unwrap().is_empty());
    crate::cell::remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
