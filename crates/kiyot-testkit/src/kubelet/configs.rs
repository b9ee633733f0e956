//! Sandbox and container configs of a pod, as a kubelet generates them (kuberuntime_sandbox.go,
//! kuberuntime_container.go, labels.go, helpers.go).

use std::{collections::HashMap, fs, sync::atomic::Ordering};

use kiyot_proto::kernel_paths;

use super::{Container, Directories, Kubelet, Pod, RunningContainer, RunningPod, cgroups, volumes};
use crate::cri::{self, NamespaceMode};

/// The annotation with the time at which the kubelet first saw the pod. In tests it contains the
/// uid, so that it differs between pods.
const CONFIG_SEEN: &str = "kubernetes.io/config.seen";

/// Path of the termination message in a container.
const TERMINATION_PATH: &str = "/dev/termination-log";

impl Kubelet {
    /// Returns the config of a pod's sandbox.
    pub(super) fn sandbox_config(
        &self,
        pod: &Pod,
        directories: &Directories,
    ) -> cri::PodSandboxConfig {
        cri::PodSandboxConfig {
            metadata: Some(cri::PodSandboxMetadata {
                name: pod.name.clone(),
                uid: pod.uid.clone(),
                namespace: pod.namespace.clone(),
                attempt: pod.attempt,
            }),
            hostname: if pod.host_network { String::new() } else { pod.name.clone() },
            log_directory: self.log_directory(pod).display().to_string(),
            dns_config: Some(cri::DnsConfig {
                servers: vec!["10.96.0.10".to_owned()],
                searches: vec![
                    format!("{}.svc.cluster.local", pod.namespace),
                    "svc.cluster.local".to_owned(),
                    "cluster.local".to_owned(),
                ],
                options: vec!["ndots:5".to_owned()],
            }),
            port_mappings: pod.ports.clone(),
            labels: pod.labels.clone().into_iter().chain(pod_labels(pod)).collect(),
            annotations: self.annotations(pod),
            linux: Some(cri::LinuxPodSandboxConfig {
                cgroup_parent: cgroups::parent(directories, pod),
                security_context: Some(cri::LinuxSandboxSecurityContext {
                    namespace_options: Some(namespaces(pod)),
                    privileged: pod.containers.iter().any(|container| container.privileged),
                    seccomp: Some(runtime_default()),
                    ..Default::default()
                }),
                sysctls: pod.sysctls.clone().into_iter().collect(),
                overhead: Some(cri::LinuxContainerResources::default()),
                resources: Some(cri::LinuxContainerResources {
                    cpu_period: 100_000,
                    cpu_shares: 2,
                    ..Default::default()
                }),
            }),
            windows: None,
        }
    }

    /// Returns the config of a container, and creates its log directory and its termination message
    /// file.
    pub(super) fn container_config(
        &self,
        pod: &RunningPod,
        container: &Container,
        attempt: u32,
        image: String,
    ) -> RunningContainer {
        let (spec, directory) = (&pod.spec, self.pod_directory(&pod.spec.uid));
        let log_path = format!("{}/{attempt}.log", container.name);
        let log = self.log_directory(spec).join(&log_path);
        fs::create_dir_all(self.log_directory(spec).join(&container.name))
            .expect("a log directory can be made");
        let termination =
            directory.join("containers").join(&container.name).join(format!("{attempt:08x}"));
        fs::create_dir_all(directory.join("containers").join(&container.name))
            .expect("a container's directory can be made");
        fs::write(&termination, "").expect("a termination message's file can be made");

        let mut mounts: Vec<_> = container
            .mounts
            .iter()
            .map(|(name, path, readonly)| self.mount(spec, name, path, *readonly))
            .collect();
        mounts.extend(container.more_mounts.iter().cloned());
        mounts.push(mount("/etc/hosts", directory.join("etc-hosts").display().to_string(), false));
        mounts.push(mount(TERMINATION_PATH, termination.display().to_string(), false));

        let paths = |paths: &[&str]| {
            let masked = paths.iter().filter(|_| !container.privileged);
            masked.map(|path| (*path).to_owned()).collect()
        };
        let config = cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: container.name.clone(), attempt }),
            image: Some(cri::ImageSpec {
                image,
                user_specified_image: container.image.clone(),
                annotations: self.annotations(spec),
                ..Default::default()
            }),
            command: container.command.clone(),
            args: container.args.clone(),
            working_dir: container.working_dir.clone(),
            envs: container
                .env
                .iter()
                .map(|(key, value)| cri::KeyValue { key: key.clone(), value: value.clone().into() })
                .collect(),
            mounts,
            labels: pod_labels(spec)
                .into_iter()
                .chain([("io.kubernetes.container.name".to_owned(), container.name.clone())])
                .collect(),
            annotations: container_annotations(spec, attempt),
            log_path,
            stdin: container.stdin,
            tty: container.tty,
            linux: Some(cri::LinuxContainerConfig {
                resources: Some(container.resources.clone()),
                security_context: Some(cri::LinuxContainerSecurityContext {
                    privileged: container.privileged,
                    namespace_options: Some(namespaces(spec)),
                    masked_paths: paths(&kernel_paths::MASKED),
                    readonly_paths: paths(&kernel_paths::READ_ONLY),
                    seccomp: Some(runtime_default()),
                    ..Default::default()
                }),
            }),
            ..Default::default()
        };
        RunningContainer { id: String::new(), log, termination, config }
    }

    /// Returns the pod's current annotations and the kubelet's own. The kubelet sends them for
    /// every image of the pod.
    pub(super) fn annotations(&self, pod: &Pod) -> HashMap<String, String> {
        let restarts = self.restarts.load(Ordering::Relaxed);
        let own = [
            (
                CONFIG_SEEN.to_owned(),
                format!("2026-01-02T03:04:05.678901234Z {} {restarts}", pod.uid),
            ),
            ("kubernetes.io/config.source".to_owned(), "api".to_owned()),
        ];
        // The pod's annotations override the kubelet's, so that a test can make a static pod.
        own.into_iter().chain(pod.annotations.clone()).collect()
    }

    fn mount(&self, pod: &Pod, name: &str, path: &str, readonly: bool) -> cri::Mount {
        let volume = pod
            .volumes
            .iter()
            .find(|volume| volume.name == name)
            .unwrap_or_else(|| panic!("the pod {} has no volume {name}", pod.name));
        mount(
            path,
            volumes::path(&self.pod_directory(&pod.uid), volume).display().to_string(),
            readonly,
        )
    }
}

fn container_annotations(pod: &Pod, attempt: u32) -> HashMap<String, String> {
    HashMap::from([
        ("io.kubernetes.container.hash".to_owned(), "5a1b2c3d".to_owned()),
        ("io.kubernetes.container.restartCount".to_owned(), attempt.to_string()),
        ("io.kubernetes.container.terminationMessagePath".to_owned(), TERMINATION_PATH.to_owned()),
        ("io.kubernetes.container.terminationMessagePolicy".to_owned(), "File".to_owned()),
        ("io.kubernetes.pod.terminationGracePeriod".to_owned(), pod.grace.to_string()),
    ])
}

fn pod_labels(pod: &Pod) -> HashMap<String, String> {
    HashMap::from([
        ("io.kubernetes.pod.name".to_owned(), pod.name.clone()),
        ("io.kubernetes.pod.namespace".to_owned(), pod.namespace.clone()),
        ("io.kubernetes.pod.uid".to_owned(), pod.uid.clone()),
    ])
}

fn namespaces(pod: &Pod) -> cri::NamespaceOption {
    let network = if pod.host_network { NamespaceMode::Node } else { NamespaceMode::Pod };
    let pid = if pod.host_pid { NamespaceMode::Node } else { NamespaceMode::Container };
    cri::NamespaceOption {
        network: network.into(),
        pid: pid.into(),
        ipc: NamespaceMode::Pod.into(),
        ..Default::default()
    }
}

fn runtime_default() -> cri::SecurityProfile {
    cri::SecurityProfile {
        profile_type: cri::security_profile::ProfileType::RuntimeDefault.into(),
        localhost_ref: String::new(),
    }
}

fn mount(container_path: &str, host_path: String, readonly: bool) -> cri::Mount {
    cri::Mount {
        container_path: container_path.to_owned(),
        host_path,
        readonly,
        ..Default::default()
    }
}
