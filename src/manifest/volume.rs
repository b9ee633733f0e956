//! Volumes of a pod.

use super::{metadata::dns_name, node::Node, plugin, resources::quantity};
use crate::{
    annotations::Quantity,
    problems::{Field, Problem, Table},
};

/// Highest permissions of a file.
const MAX_MODE: u32 = 0o777;
/// Longest path of the node, in bytes: each mount repeats it. Linux's `PATH_MAX`.
const MAX_PATH_BYTES: usize = 4096;

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
    /// `configMap`
    ConfigMap,
    /// `secret`
    Secret,
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

impl Volume {
    /// Returns the volume's directory on the node, or its host path.
    pub(super) fn host_path(&self, node: &Node, pod: &super::Pod) -> std::path::PathBuf {
        let plugin = match &self.kind {
            VolumeKind::EmptyDir { .. } => "kubernetes.io~empty-dir",
            VolumeKind::ConfigMap => "kubernetes.io~configmap",
            VolumeKind::Secret => "kubernetes.io~secret",
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

    pub(super) fn read(field: Field<'_>) -> Option<Self> {
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
                "emptyDir" => Some(empty_dir(table)),
                "configMap" => keyed(table, "name").map(|()| VolumeKind::ConfigMap),
                "secret" => keyed(table, "secretName").map(|()| VolumeKind::Secret),
                _ => host_path(table),
            });
        }
        kinds.extend(plugin::read(&mut table));
        table.finish();
        if given > 1 {
            report.add(Problem::new(at, "has several sources; allowed: one"));
        }
        let kind = if given == 0 { none } else { kinds.into_iter().next()? };
        Some(Self { name: name?, kind })
    }
}

fn empty_dir(mut table: Table<'_>) -> VolumeKind {
    // Huge pages are memory.
    let media = [
        ("", false),
        ("Memory", true),
        ("HugePages", true),
        ("HugePages-2Mi", true),
        ("HugePages-1Gi", true),
    ];
    let memory = table.take("medium").and_then(|field| field.choice(&media)).unwrap_or_default();
    let size_limit = table
        .take("sizeLimit")
        .and_then(|field| quantity(field, "a quantity of bytes such as 1Gi"))
        .map(Quantity::units);
    table.finish();
    VolumeKind::EmptyDir { memory, size_limit }
}

/// Checks a volume of an object's keys. The object may be anywhere.
fn keyed(mut table: Table<'_>, name_key: &'static str) -> Option<()> {
    let name = table.need(name_key, "the name of an object").and_then(dns_name);
    let _is_optional = table.take("optional").and_then(Field::flag);
    let _mode = table.take("defaultMode").and_then(mode);
    for item in table.take("items").map(Field::items).unwrap_or_default() {
        let Some(mut item) = item.table() else { continue };
        let _key = item.need("key", "a key of it").and_then(Field::text);
        let path = item.need("path", "a relative path");
        let _path = path
            .and_then(|path| path.read("a relative path that does not start with \"..\"", plain));
        let _mode = item.take("mode").and_then(mode);
        item.finish();
    }
    table.finish();
    name.map(drop)
}

/// Returns a path that stays in its volume.
fn plain(text: &str) -> Option<()> {
    let is_plain = !text.is_empty()
        && !text.starts_with("..")
        && text.split('/').all(|part| !part.is_empty() && part != "..");
    is_plain.then_some(())
}

/// Reads permissions; YAML reads `0o644`, and by YAML 1.1 `0644`, as octal.
fn mode(field: Field<'_>) -> Option<u32> {
    field.number(0..=MAX_MODE)
}

fn host_path(mut table: Table<'_>) -> Option<VolumeKind> {
    let path = table.need("path", "an absolute path").and_then(|field| {
        let is_path = |text: &str| text.starts_with('/') && text.len() <= MAX_PATH_BYTES;
        let allowed = "an absolute path of at most 4096 bytes";
        field.read(allowed, |text| is_path(text).then(|| text.to_owned()))
    });
    let kind = table.take("type").and_then(Field::text).unwrap_or_default();
    table.finish();
    Some(VolumeKind::HostPath(HostPathVolume { path: path?, kind }))
}
