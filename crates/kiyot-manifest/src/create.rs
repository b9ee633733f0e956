//! `ContainerConfig` of CreateContainer, as in pkg/kubelet/kuberuntime/kuberuntime_container.go.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use k8s_openapi::api::core::v1 as api;
use kiyot_proto::{cri, kernel_paths};
use ring::digest::{SHA256, digest};
use serde_json::json;

use super::{
    Container, Node, Pod, Volume, VolumeKind, expand,
    node::text,
    run::{POD_NAME, POD_NAMESPACE, POD_UID},
    security,
};

const ETC_HOSTS: &str = "/etc/hosts";

impl Pod {
    /// Returns a container's configuration.
    pub fn container_config(
        &self,
        container: &Container,
        node: &Node,
        sandbox: &cri::PodSandboxConfig,
        image: &str,
        attempt: u32,
    ) -> cri::ContainerConfig {
        let mut variables: HashMap<String, String> = HashMap::new();
        let mut names = Vec::new();
        for (name, value) in &container.env {
            let value = expand(value, &variables);
            if variables.insert(name.clone(), value).is_none() {
                names.push(name);
            }
        }
        let env = |name: &String| cri::KeyValue {
            key: name.clone(),
            value: variables[name].clone().into(),
        };
        let envs = names.into_iter().map(env).collect();
        let expanded =
            |texts: &[String]| texts.iter().map(|text| expand(text, &variables)).collect();
        let meta = &self.metadata;
        let labels = [
            ("io.kubernetes.container.name", &container.name),
            (POD_NAME, &meta.name),
            (POD_NAMESPACE, &meta.namespace),
            (POD_UID, &meta.uid),
        ];
        cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: container.name.clone(), attempt }),
            image: Some(cri::ImageSpec {
                image: image.into(),
                user_specified_image: container.image.clone(),
                annotations: sandbox.annotations.clone(),
                ..Default::default()
            }),
            command: expanded(&container.command),
            args: expanded(&container.args),
            working_dir: container.working_dir.clone(),
            envs,
            mounts: self.mounts(container, node, attempt),
            devices: self.devices(container, node),
            labels: labels.map(|(key, value)| (key.into(), value.clone())).into(),
            annotations: self.container_annotations(container, attempt),
            log_path: format!("{}/{attempt}.log", container.name),
            stdin: container.stdin,
            stdin_once: container.stdin_once,
            tty: container.tty,
            linux: Some(self.container_linux(container, node)),
            ..Default::default()
        }
    }

    /// Returns the labels of pkg/kubelet/kuberuntime/labels.go.
    fn container_annotations(
        &self,
        container: &Container,
        attempt: u32,
    ) -> HashMap<String, String> {
        let mut annotations = HashMap::from(
            [
                ("io.kubernetes.container.hash", short_hash(&format!("{container:?}"))),
                ("io.kubernetes.container.restartCount", attempt.to_string()),
                (
                    "io.kubernetes.container.terminationMessagePath",
                    container.termination_message_path.clone(),
                ),
                (
                    "io.kubernetes.container.terminationMessagePolicy",
                    container.termination_message_policy.clone(),
                ),
                ("io.kubernetes.pod.terminationGracePeriod", self.grace_secs.to_string()),
            ]
            .map(|(key, value)| (key.to_owned(), value)),
        );
        if !container.ports.is_empty() {
            let ports = container.ports.iter().map(|port| {
                json!({
                    "name": port.name.as_deref().unwrap_or_default(),
                    "containerPort": port.container_port,
                    "protocol": port.protocol.as_deref().unwrap_or("TCP"),
                })
            });
            annotations.insert(
                "io.kubernetes.container.ports".into(),
                ports.collect::<serde_json::Value>().to_string(),
            );
        }
        annotations
    }

    /// Returns the host path of a container's termination message.
    fn termination_message_file(
        &self,
        container: &Container,
        node: &Node,
        attempt: u32,
    ) -> PathBuf {
        let file = short_hash(&format!("{}/{}/{attempt}", self.metadata.uid, container.name));
        node.pod_dir(self).join("containers").join(&container.name).join(file)
    }

    /// Returns the host path of a pod's /etc/hosts.
    fn etc_hosts_file(&self, node: &Node) -> PathBuf {
        node.pod_dir(self).join("etc-hosts")
    }

    /// Returns the path at which the kubelet binds a part of a volume.
    fn sub_path_target(
        &self,
        container: &Container,
        node: &Node,
        volume: &Volume,
        index: usize,
    ) -> PathBuf {
        let dir = node.pod_dir(self).join("volume-subpaths").join(&volume.name);
        dir.join(&container.name).join(index.to_string())
    }

    /// Returns mounts in the kubelet's order: volumes, /etc/hosts, termination message
    /// (pkg/kubelet/kubelet_pods.go, kuberuntime_container.go).
    fn mounts(&self, container: &Container, node: &Node, attempt: u32) -> Vec<cri::Mount> {
        let mount = |container_path: &str, host_path: &Path| cri::Mount {
            container_path: container_path.into(),
            host_path: text(host_path),
            ..Default::default()
        };
        let mut mounts = Vec::new();
        for (index, wanted) in container.mounts.iter().enumerate() {
            // `parse` has checked that the volume exists.
            let Some(volume) = self.volumes.iter().find(|volume| volume.name == wanted.name) else {
                continue;
            };
            let host_path = match wanted.sub_path {
                Some(_) => self.sub_path_target(container, node, volume, index),
                None => volume.host_path(node, self),
            };
            let image = match &volume.kind {
                VolumeKind::Image(reference) => Some(cri::ImageSpec {
                    image: reference.clone(),
                    user_specified_image: reference.clone(),
                    ..Default::default()
                }),
                _ => None,
            };
            mounts.push(cri::Mount {
                readonly: wanted.read_only || volume.is_read_only(),
                recursive_read_only: wanted.recursive_read_only,
                propagation: wanted.propagation.into(),
                image,
                ..mount(&wanted.mount_path, &host_path)
            });
        }
        if !container.mounts.iter().any(|mount| mount.mount_path == ETC_HOSTS) {
            mounts.push(mount(ETC_HOSTS, &self.etc_hosts_file(node)));
        }
        if !container.termination_message_path.is_empty() {
            mounts.push(mount(
                &container.termination_message_path,
                &self.termination_message_file(container, node, attempt),
            ));
        }
        mounts
    }

    /// Returns the block volumes. The kubelet resolves the links to their devices.
    fn devices(&self, container: &Container, node: &Node) -> Vec<cri::Device> {
        let directory = node.pod_dir(self).join("volumeDevices");
        let device = |device: &api::VolumeDevice| cri::Device {
            container_path: device.device_path.clone(),
            host_path: text(&directory.join(&device.name)),
            permissions: "mrw".into(),
        };
        container.devices.iter().map(device).collect()
    }

    fn container_linux(&self, container: &Container, node: &Node) -> cri::LinuxContainerConfig {
        let value = |id: Option<i64>| id.map(|value| cri::Int64Value { value });
        let own = &container.security;
        let unconfined = || cri::SecurityProfile {
            profile_type: cri::security_profile::ProfileType::Unconfined.into(),
            ..Default::default()
        };
        let capabilities = own.capabilities.clone().unwrap_or_default();
        let capabilities = cri::Capability {
            add_capabilities: capabilities.add.unwrap_or_default(),
            drop_capabilities: capabilities.drop.unwrap_or_default(),
            ..Default::default()
        };
        let is_masked = own.proc_mount.as_deref() != Some(security::UNMASKED);
        let paths = |paths: &[&str]| {
            let masked = paths.iter().filter(|_| is_masked);
            masked.map(|path| (*path).to_owned()).collect()
        };
        let security = cri::LinuxContainerSecurityContext {
            capabilities: Some(capabilities),
            privileged: own.privileged.unwrap_or_default(),
            namespace_options: Some(self.namespaces()),
            run_as_user: value(own.run_as_user.or(self.security.run_as_user)),
            run_as_group: value(own.run_as_group.or(self.security.run_as_group)),
            readonly_rootfs: own.read_only_root_filesystem.unwrap_or_default(),
            supplemental_groups: security::groups(&self.security),
            no_new_privs: own.allow_privilege_escalation == Some(false),
            masked_paths: paths(&kernel_paths::MASKED),
            readonly_paths: paths(&kernel_paths::READ_ONLY),
            seccomp: Some(
                own.seccomp_profile
                    .as_ref()
                    .or(self.security.seccomp_profile.as_ref())
                    .map_or_else(unconfined, |profile| {
                        security::seccomp(profile, &node.kubelet_dir)
                    }),
            ),
            ..Default::default()
        };
        let resources = cri::LinuxContainerResources {
            oom_score_adj: container.resources.oom_score(self.qos_class(), node.memory_bytes),
            ..container.resources.to_cri()
        };
        cri::LinuxContainerConfig { resources: Some(resources), security_context: Some(security) }
    }
}

/// Returns the first 8 hexadecimal digits of a text's hash.
fn short_hash(text: &str) -> String {
    hex::encode(&digest(&SHA256, text.as_bytes()).as_ref()[..4])
}
