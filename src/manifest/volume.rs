//! Volumes of a pod, and the ConfigMaps and Secrets in them.

use std::fmt;

use super::{
    Purpose, metadata::dns_name, node::Node, plugin, resources::quantity, sources::Sources,
};
use crate::{
    annotations::Quantity,
    problems::{Field, Problem, Table},
};

/// Volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// Name in the pod.
    pub name: String,
    /// Source.
    pub kind: VolumeKind,
}

/// Source of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VolumeKind {
    /// `emptyDir`
    EmptyDir {
        /// Set for `medium: Memory`.
        memory: bool,
        /// `sizeLimit`, in bytes.
        size_limit: Option<u64>,
    },
    /// `configMap`: keys as files.
    ConfigMap(Vec<KeyedFile>),
    /// `secret`: keys as files.
    Secret(Vec<KeyedFile>),
    /// `hostPath`
    HostPath(HostPathVolume),
    /// `projected`
    Projected,
    /// `downwardAPI`
    DownwardApi,
    /// `image`, with the image's name.
    Image(String),
    /// Volume that a plugin mounts on the node.
    Plugin(PluginVolume),
}

impl Volume {
    /// Returns the limit of the volume that has no effect in a cell.
    pub fn limit_without_effect(&self) -> Option<String> {
        let VolumeKind::EmptyDir { memory: false, size_limit: Some(_) } = self.kind else {
            return None;
        };
        Some(format!(
            "volume {:?}: sizeLimit has no effect on an emptyDir on the disk of a cell; allowed: \
             medium Memory, or ephemeral_storage_limit of the daemon for all of the pod's disk",
            self.name
        ))
    }
}

/// Volume that a plugin mounts on the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginVolume {
    /// Key of its source, such as `persistentVolumeClaim`.
    pub source: &'static str,
    /// Directory name of the plugin, such as `kubernetes.io~csi`.
    pub plugin: &'static str,
    /// Set if the volume is read-only in every container.
    pub read_only: bool,
}

/// Path of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPathVolume {
    /// Path.
    pub path: String,
    /// `type`
    pub kind: String,
}

/// File made from a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyedFile {
    /// Path in the volume.
    pub path: String,
    /// Permissions.
    pub mode: u32,
    /// Content.
    pub content: Content,
}

/// Content of a file. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Content(pub Vec<u8>);

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl Volume {
    /// Returns the volume's directory on the node, or its host path.
    pub(super) fn host_path(&self, node: &Node, pod: &super::Pod) -> std::path::PathBuf {
        let plugin = match &self.kind {
            VolumeKind::EmptyDir { .. } => "kubernetes.io~empty-dir",
            VolumeKind::ConfigMap(_) => "kubernetes.io~configmap",
            VolumeKind::Secret(_) => "kubernetes.io~secret",
            VolumeKind::Projected => "kubernetes.io~projected",
            VolumeKind::DownwardApi => "kubernetes.io~downward-api",
            VolumeKind::Plugin(volume) => volume.plugin,
            VolumeKind::HostPath(host) => return host.path.clone().into(),
            // The runtime mounts the image.
            VolumeKind::Image(_) => return std::path::PathBuf::new(),
        };
        node.pod_dir(pod).join("volumes").join(plugin).join(&self.name)
    }

    /// Says if containers can't write to it.
    pub(super) fn is_read_only(&self) -> bool {
        match &self.kind {
            VolumeKind::EmptyDir { .. } | VolumeKind::HostPath(_) => false,
            VolumeKind::Plugin(volume) => volume.read_only,
            _ => true,
        }
    }

    /// Returns the volume of a StatefulSet's claim.
    pub(super) fn of_claim(name: String) -> Self {
        Self { name, kind: VolumeKind::Plugin(plugin::CLAIM) }
    }

    pub(super) fn read(
        field: Field<'_>,
        namespace: &str,
        sources: &Sources,
        purpose: Purpose,
    ) -> Option<Self> {
        let mut table = field.table()?;
        let name = table.need("name", "a DNS name").and_then(dns_name);
        let at = table.at().to_owned();
        let report = table.report();
        // The API server takes a volume without a source for an emptyDir.
        let none = VolumeKind::EmptyDir { memory: false, size_limit: None };
        let mut kinds = Vec::new();
        let mut given = plugin::count(&table);
        for key in ["emptyDir", "configMap", "secret", "hostPath"] {
            let Some(table) = table.take(key).and_then(|field| {
                given += 1;
                field.table()
            }) else {
                continue;
            };
            kinds.extend(match key {
                "emptyDir" => Some(empty_dir(table, purpose)),
                "configMap" => sources
                    .files("ConfigMap", "name", namespace, table, purpose)
                    .map(VolumeKind::ConfigMap),
                "secret" => sources
                    .files("Secret", "secretName", namespace, table, purpose)
                    .map(VolumeKind::Secret),
                _ => host_path(table),
            });
        }
        kinds.extend(plugin::read(&mut table, purpose));
        table.finish();
        if given > 1 {
            report.add(Problem::new(at, "has several sources; allowed: one"));
        }
        let kind = if given == 0 { none } else { kinds.into_iter().next()? };
        Some(Self { name: name?, kind })
    }
}

fn empty_dir(mut table: Table<'_>, purpose: Purpose) -> VolumeKind {
    // Huge pages are memory.
    let media: &[_] = match purpose {
        Purpose::Run => &[("", false), ("Memory", true)],
        Purpose::Explain => &[
            ("", false),
            ("Memory", true),
            ("HugePages", true),
            ("HugePages-2Mi", true),
            ("HugePages-1Gi", true),
        ],
    };
    let memory = table.take("medium").and_then(|field| field.choice(media)).unwrap_or_default();
    let size_limit = table
        .take("sizeLimit")
        .and_then(|field| quantity(field, "a quantity of bytes such as 1Gi"))
        .map(Quantity::units);
    table.finish();
    VolumeKind::EmptyDir { memory, size_limit }
}

fn host_path(mut table: Table<'_>) -> Option<VolumeKind> {
    let path = table.need("path", "an absolute path").and_then(|field| {
        field.read("an absolute path", |text| text.starts_with('/').then(|| text.to_owned()))
    });
    let kind = table.take("type").and_then(Field::text).unwrap_or_default();
    table.finish();
    Some(VolumeKind::HostPath(HostPathVolume { path: path?, kind }))
}
