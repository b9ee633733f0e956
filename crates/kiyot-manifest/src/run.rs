//! `RunPodSandboxRequest`, as in pkg/kubelet/kuberuntime/kuberuntime_sandbox.go.

use std::collections::HashMap;

use kiyot_proto::cri::{self, NamespaceMode};

use super::{Dns, DnsPolicy, Node, Pod, node::text, security};

/// Annotations that the kubelet adds.
const CONFIG_SEEN: &str = "kubernetes.io/config.seen";
const CONFIG_SOURCE: &str = "kubernetes.io/config.source";
/// Source of a pod, unless its annotations name another source.
const SOURCE: &str = "api";

/// Labels of sandboxes and containers.
pub(super) const POD_NAME: &str = "io.kubernetes.pod.name";
pub(super) const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
pub(super) const POD_UID: &str = "io.kubernetes.pod.uid";

/// Longest host name, in characters: Linux's `HOST_NAME_MAX` less one.
const HOSTNAME_CHARS: usize = 63;

impl Pod {
    /// Returns the request for attempt `attempt` of the pod's sandbox.
    pub fn run_pod_sandbox(&self, node: &Node, attempt: u32) -> cri::RunPodSandboxRequest {
        cri::RunPodSandboxRequest {
            config: Some(self.sandbox_config(node, attempt)),
            runtime_handler: self.runtime_class.clone().unwrap_or_default(),
        }
    }

    /// Returns the configuration of the pod's sandbox.
    pub fn sandbox_config(&self, node: &Node, attempt: u32) -> cri::PodSandboxConfig {
        let meta = &self.metadata;
        let mut labels: HashMap<String, String> = meta.labels.clone().into_iter().collect();
        labels.extend(
            [(POD_NAME, &meta.name), (POD_NAMESPACE, &meta.namespace), (POD_UID, &meta.uid)]
                .map(|(key, value)| (key.into(), value.clone())),
        );
        let mut annotations: HashMap<String, String> =
            meta.annotations.clone().into_iter().collect();
        annotations.insert(CONFIG_SEEN.into(), node.seen.clone());
        // A mirror pod has this annotation already: its kubelet read the pod from a file.
        annotations.entry(CONFIG_SOURCE.into()).or_insert_with(|| SOURCE.into());
        cri::PodSandboxConfig {
            metadata: Some(cri::PodSandboxMetadata {
                name: meta.name.clone(),
                uid: meta.uid.clone(),
                namespace: meta.namespace.clone(),
                attempt,
            }),
            hostname: if self.host_network { String::new() } else { self.host_name() },
            log_directory: text(&node.log_dir(self)),
            dns_config: Some(self.dns_config(node)),
            port_mappings: self.port_mappings(),
            labels,
            annotations,
            linux: Some(self.linux(node)),
            windows: None,
        }
    }

    /// Returns the pod's host name: `spec.hostname` or the pod's name, truncated to the allowed
    /// length.
    pub fn host_name(&self) -> String {
        let name: String = self
            .hostname
            .as_ref()
            .unwrap_or(&self.metadata.name)
            .chars()
            .take(HOSTNAME_CHARS)
            .collect();
        name.trim_end_matches(['-', '.']).to_owned()
    }

    /// Returns the pod's DNS configuration as pkg/kubelet/network/dns does: the policy's, then
    /// additions of `dnsConfig`.
    fn dns_config(&self, node: &Node) -> cri::DnsConfig {
        let cluster = Dns {
            servers: node.cluster_dns.clone(),
            searches: [
                format!("{}.svc.{}", self.metadata.namespace, node.cluster_domain),
                format!("svc.{}", node.cluster_domain),
                node.cluster_domain.clone(),
            ]
            .into_iter()
            .chain(node.dns.searches.clone())
            .collect(),
            options: vec!["ndots:5".into()],
        };
        let mut dns = match self.dns_policy {
            DnsPolicy::None => Dns::default(),
            DnsPolicy::Default => node.dns.clone(),
            DnsPolicy::ClusterFirst if self.host_network => node.dns.clone(),
            DnsPolicy::ClusterFirst | DnsPolicy::ClusterFirstWithHostNet => cluster,
        };
        // An option of the pod replaces an option of the same name.
        let name = |option: &str| option.split(':').next().unwrap_or_default().to_owned();
        dns.options.retain(|option| !self.dns.options.iter().any(|own| name(own) == name(option)));
        dns.options.extend(self.dns.options.clone());
        for (all, own) in
            [(&mut dns.servers, &self.dns.servers), (&mut dns.searches, &self.dns.searches)]
        {
            for item in own {
                if !all.contains(item) {
                    all.push(item.clone());
                }
            }
        }
        cri::DnsConfig { servers: dns.servers, searches: dns.searches, options: dns.options }
    }

    fn port_mappings(&self) -> Vec<cri::PortMapping> {
        let protocol =
            |name: Option<&str>| name.and_then(cri::Protocol::from_str_name).unwrap_or_default();
        let ports = self.containers.iter().flat_map(|container| &container.ports);
        ports
            .map(|port| cri::PortMapping {
                protocol: protocol(port.protocol.as_deref()).into(),
                container_port: port.container_port,
                // On the node's network, the container's port is the node's.
                host_port: port.host_port.unwrap_or_default(),
                host_ip: port.host_ip.clone().unwrap_or_default(),
            })
            .collect()
    }

    /// Returns the namespaces that the pod's containers share.
    pub(super) fn namespaces(&self) -> cri::NamespaceOption {
        let host_or = |host: bool, other: NamespaceMode| {
            i32::from(if host { NamespaceMode::Node } else { other })
        };
        let own = if self.share_process_namespace {
            NamespaceMode::Pod
        } else {
            NamespaceMode::Container
        };
        // The kubelet would choose the mappings; only the namespace itself matters for decisions.
        let users = (!self.host_users)
            .then(|| cri::UserNamespace { mode: NamespaceMode::Pod.into(), ..Default::default() });
        cri::NamespaceOption {
            network: host_or(self.host_network, NamespaceMode::Pod),
            pid: host_or(self.host_pid, own),
            ipc: host_or(self.host_ipc, NamespaceMode::Pod),
            target_id: String::new(),
            userns_options: users,
        }
    }

    fn linux(&self, node: &Node) -> cri::LinuxPodSandboxConfig {
        let value = |id: Option<i64>| id.map(|value| cri::Int64Value { value });
        let security = cri::LinuxSandboxSecurityContext {
            namespace_options: Some(self.namespaces()),
            run_as_user: value(self.security.run_as_user),
            run_as_group: value(self.security.run_as_group),
            supplemental_groups: security::groups(&self.security),
            privileged: self
                .init_containers
                .iter()
                .chain(&self.containers)
                .any(|container| container.security.privileged == Some(true)),
            seccomp: Some(cri::SecurityProfile {
                profile_type: cri::security_profile::ProfileType::RuntimeDefault.into(),
                ..Default::default()
            }),
            ..Default::default()
        };
        let sysctls = self.security.sysctls.iter().flatten();
        cri::LinuxPodSandboxConfig {
            cgroup_parent: node.cgroup_parent(self),
            security_context: Some(security),
            sysctls: sysctls.map(|sysctl| (sysctl.name.clone(), sysctl.value.clone())).collect(),
            overhead: Some(if self.overhead.is_empty() {
                cri::LinuxContainerResources::default()
            } else {
                self.overhead.to_cri()
            }),
            resources: Some(self.resources().to_cri()),
        }
    }
}
