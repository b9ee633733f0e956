//! Security profiles, from the node's files or loaded into its kernel, in a cell and on the node.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{PermissionsExt, chown},
};

use kiyot_testkit::{
    Container, Kiyot, Kubelet, Node, Pod, RunningPod, Source,
    cri::{self, security_profile::ProfileType},
    kubelet::volumes,
};
use tonic::Code;

use crate::cell::{WAIT, options, remove_and_assert_clean};

/// A seccomp profile that forbids only creating directories.
const NO_DIRECTORIES: &str = r#"{"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"],
    "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO"}]}"#;

/// A seccomp profile that allows everything.
const ANYTHING: &str = r#"{"defaultAction": "SCMP_ACT_ALLOW"}"#;

fn context(config: &mut cri::ContainerConfig) -> &mut cri::LinuxContainerSecurityContext {
    config.linux.get_or_insert_default().security_context.get_or_insert_default()
}

fn localhost_profile(path: &str) -> Option<cri::SecurityProfile> {
    Some(cri::SecurityProfile {
        profile_type: ProfileType::Localhost.into(),
        localhost_ref: path.to_owned(),
    })
}

async fn run_sandbox(kubelet: &mut Kubelet, spec: &Pod) -> RunningPod {
    run_sandbox_with(kubelet, spec, |_| {}).await
}

/// Runs a sandbox with a changed configuration.
async fn run_sandbox_with(
    kubelet: &mut Kubelet,
    spec: &Pod,
    change: impl FnOnce(&mut cri::LinuxSandboxSecurityContext),
) -> RunningPod {
    let mut config = kubelet.prepare(spec);
    change(config.linux.get_or_insert_default().security_context.get_or_insert_default());
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    kubelet.running(spec, config, sandbox)
}

/// Verifies U14.
#[tokio::test]
async fn seccomp_profile_of_the_node_applies_in_a_cell() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let directory = node.kubelet_directory().join("seccomp");
    fs::create_dir_all(&directory).unwrap();
    let profile = directory.join("no-directories.json").to_str().unwrap().to_owned();
    fs::write(&profile, NO_DIRECTORIES).unwrap();
    let run = async |kubelet: &mut Kubelet, running: &mut RunningPod| {
        let named = |config: &mut cri::ContainerConfig| {
            context(config).seccomp = localhost_profile(&profile)
        };
        let created = kubelet
            .create_container_with(running, &Container::script("main", WAIT), 0, named)
            .await
            .unwrap();
        kubelet.start_container(&created.id).await.unwrap();
        let script = [
            "sh",
            "-c",
            "mkdir /tmp/new 2>&1; touch /tmp/file && echo fine; grep Seccomp: /proc/self/status",
        ];
        let output = kubelet.exec_sync(&created.id, &script).await.unwrap();
        running.containers.insert("main".to_owned(), created);
        output
    };
    let spec = Pod::new("profiled");
    let mut local = run_sandbox(&mut kubelet, &spec).await;
    let on_node = run(&mut kubelet, &mut local).await;
    kubelet.stop_and_remove(&local).await.unwrap();
    let mut spec = spec.in_cell();
    spec.attempt = 1;
    // Kubelets give sandboxes the default profile; other clients may give any profile.
    let of_sandbox = directory.join("any.json").to_str().unwrap().to_owned();
    fs::write(&of_sandbox, ANYTHING).unwrap();
    let mut running = run_sandbox_with(&mut kubelet, &spec, |context| {
        context.seccomp = localhost_profile(&of_sandbox);
    })
    .await;
    let in_cell = run(&mut kubelet, &mut running).await;
    assert_eq!(in_cell, on_node);
    assert!(in_cell.stdout.contains("Operation not permitted\nfine\nSeccomp:\t2"), "{in_cell:?}");
    // The cell has a copy of the profile, because cells read no files of the node.
    let copies =
        fs::read_dir(kiyot.state().join("cells").join(kiyot.cells().remove(0)).join("pod/seccomp"))
            .unwrap();
    let copies: BTreeSet<_> =
        copies.map(|file| fs::read_to_string(file.unwrap().path()).unwrap()).collect();
    assert_eq!(copies, [ANYTHING, NO_DIRECTORIES].map(str::to_owned).into());

    let missing = |config: &mut cri::ContainerConfig| {
        context(config).seccomp = localhost_profile("/no/such/profile.json")
    };
    let status = kubelet
        .create_container_with(&running, &Container::script("more", WAIT), 0, missing)
        .await
        .unwrap_err();
    assert!(
        status.code() == Code::FailedPrecondition
            && status.message().contains("/no/such/profile.json"),
        "{status:?}"
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies U15.
#[tokio::test]
async fn app_armor_profile_is_treated_as_on_the_node() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut answers = Vec::new();
    let spec = Pod::new("armoured");
    let mut in_cell = spec.clone().in_cell();
    in_cell.attempt = 1;
    for spec in [spec, in_cell] {
        let mut running = run_sandbox(&mut kubelet, &spec).await;
        for (name, profile) in [
            (
                "usual",
                Some(cri::SecurityProfile {
                    profile_type: ProfileType::RuntimeDefault.into(),
                    ..Default::default()
                }),
            ),
            (
                "unconfined",
                Some(cri::SecurityProfile {
                    profile_type: ProfileType::Unconfined.into(),
                    ..Default::default()
                }),
            ),
            ("absent", localhost_profile("no-such-profile")),
        ] {
            let named = |config: &mut cri::ContainerConfig| context(config).apparmor = profile;
            let created = kubelet
                .create_container_with(&running, &Container::script(name, WAIT), 0, named)
                .await;
            answers.push((
                name,
                created
                    .as_ref()
                    .map(|_| ())
                    .map_err(|status| (status.code(), status.message().to_owned())),
            ));
            if let Ok(created) = created {
                running.containers.insert(name.to_owned(), created);
            }
        }
        kubelet.stop_and_remove(&running).await.unwrap();
    }
    let (on_node, in_cell) = answers.split_at(3);
    assert_eq!(in_cell, on_node);
    // If the kernel has no AppArmor, containerd refuses the default profile too.
    assert!(on_node[1].1.is_ok() && on_node[2].1.is_err(), "{on_node:?}");
}

/// Verifies U16.
#[tokio::test]
async fn volumes_belong_to_the_pods_group() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("grouped")
        .in_cell()
        .volume("key", Source::Secret(Source::files(&[("key", "hush")])))
        .volume("scratch", Source::EmptyDir { memory: false })
        .volume("memory", Source::EmptyDir { memory: true });
    let config = kubelet.prepare(&spec);
    // The kubelet's SetVolumeOwnership makes these changes for fsGroup 2345.
    for volume in &spec.volumes {
        let directory = volumes::path(&kubelet.pod_directory(&spec.uid), volume);
        chown(&directory, None, Some(2345)).unwrap();
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o2775)).unwrap();
    }
    let key = fs::canonicalize(
        volumes::path(&kubelet.pod_directory(&spec.uid), &spec.volumes[0]).join("key"),
    )
    .unwrap();
    chown(&key, None, Some(2345)).unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o440)).unwrap();

    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let mut running = kubelet.running(&spec, config, sandbox);
    let container = |name: &str| {
        Container::script(name, WAIT)
            .mount("key", "/key")
            .mount("scratch", "/scratch")
            .mount("memory", "/memory")
    };
    for (name, groups) in [("member", vec![2345]), ("stranger", vec![])] {
        let who = |config: &mut cri::ContainerConfig| {
            let context = context(config);
            context.run_as_user = Some(cri::Int64Value { value: 1234 });
            context.run_as_group = Some(cri::Int64Value { value: 1234 });
            context.supplemental_groups = groups;
        };
        let created =
            kubelet.create_container_with(&running, &container(name), 0, who).await.unwrap();
        kubelet.start_container(&created.id).await.unwrap();
        running.containers.insert(name.to_owned(), created);
    }
    let script = "cat /key/key; for dir in scratch memory; do touch /$dir/file && \
        stat -c ' %u:%g' /$dir/file; done; stat -c %a:%g /scratch /memory";
    let output =
        kubelet.exec_sync(&running.container("member").id, &["sh", "-c", script]).await.unwrap();
    assert_eq!(output.stdout, "hush 1234:2345\n 1234:2345\n2775:2345\n2775:2345\n", "{output:?}");
    let output = kubelet
        .exec_sync(
            &running.container("stranger").id,
            &["sh", "-c", "cat /key/key || touch /scratch/other"],
        )
        .await
        .unwrap();
    assert!(
        output.code != 0 && output.stderr.matches("Permission denied").count() == 2,
        "{output:?}"
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
