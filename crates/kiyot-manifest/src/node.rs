//! Node of a kubelet.

use std::path::{Path, PathBuf};

use super::{Dns, Pod, QosClass};

/// Node of a kubelet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// The kubelet's `--root-dir`.
    pub kubelet_dir: PathBuf,
    /// The kubelet's `podLogsDir`.
    pub pod_logs_dir: PathBuf,
    /// Cgroup driver.
    pub cgroup_driver: CgroupDriver,
    /// Memory in bytes, from which OOM scores are computed.
    pub memory_bytes: u64,
    /// The cluster's DNS servers.
    pub cluster_dns: Vec<String>,
    /// The cluster's domain.
    pub cluster_domain: String,
    /// The node's resolv.conf.
    pub dns: Dns,
    /// Time when the kubelet first saw the pods, in RFC 3339: the annotation
    /// `kubernetes.io/config.seen`.
    pub seen: String,
}

/// Cgroup driver of a kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupDriver {
    /// `/kubepods/burstable/pod<uid>`
    Cgroupfs,
    /// `/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice`
    Systemd,
}

impl Default for Node {
    /// Returns a kubelet with default settings.
    fn default() -> Self {
        Self {
            kubelet_dir: "/var/lib/kubelet".into(),
            pod_logs_dir: "/var/log/pods".into(),
            cgroup_driver: CgroupDriver::Cgroupfs,
            memory_bytes: 8 << 30,
            cluster_dns: vec!["10.96.0.10".into()],
            cluster_domain: "cluster.local".into(),
            dns: Dns::default(),
            seen: "2026-01-01T00:00:00.000000000Z".into(),
        }
    }
}

impl Node {
    /// Returns a pod's directory.
    pub fn pod_dir(&self, pod: &Pod) -> PathBuf {
        self.kubelet_dir.join("pods").join(&pod.metadata.uid)
    }

    /// Returns a pod's `log_directory`.
    pub fn log_dir(&self, pod: &Pod) -> PathBuf {
        self.pod_logs_dir
            .join(format!("{}_{}_{}", pod.metadata.namespace, pod.metadata.name, pod.metadata.uid))
    }

    /// Returns a pod's `cgroup_parent` (pkg/kubelet/cm/pod_container_manager_linux.go).
    pub fn cgroup_parent(&self, pod: &Pod) -> String {
        let uid = &pod.metadata.uid;
        let class = match pod.qos_class() {
            QosClass::Guaranteed => None,
            QosClass::Burstable => Some("burstable"),
            QosClass::BestEffort => Some("besteffort"),
        };
        match (self.cgroup_driver, class) {
            (CgroupDriver::Cgroupfs, None) => format!("/kubepods/pod{uid}"),
            (CgroupDriver::Cgroupfs, Some(class)) => format!("/kubepods/{class}/pod{uid}"),
            (CgroupDriver::Systemd, None) => {
                format!("/kubepods.slice/kubepods-pod{}.slice", uid.replace('-', "_"))
            }
            (CgroupDriver::Systemd, Some(class)) => {
                format!(
                    "/kubepods.slice/kubepods-{class}.slice/kubepods-{class}-pod{}.slice",
                    uid.replace('-', "_")
                )
            }
        }
    }
}

/// Returns a path as text. The conversion is lossless, because a node's paths are built from texts.
pub(super) fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
