//! Volumes of a pod.

use std::mem::take;

use k8s_openapi::api::core::v1 as api;
use kiyot_values::{problems::Field, quantity::Quantity};

use super::{env::ResourceField, metadata::dns_name, node::Node, place::Place, plugin};

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
    /// Files with requests or limits of containers, by their paths.
    pub resource_files: Vec<(String, ResourceField)>,
}

/// Source of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VolumeKind {
    /// `emptyDir`
    EmptyDir {
        /// True for `medium: Memory`.
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
    /// Returns the volume's limit, if the limit has no effect in a cell.
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
    /// True if the volume is read-only in every container.
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

    /// Returns whether containers can't write to the volume.
    pub(super) fn is_read_only(&self) -> bool {
        match &self.kind {
            VolumeKind::EmptyDir { .. } | VolumeKind::HostPath(_) => false,
            VolumeKind::Plugin(volume) => volume.read_only,
            _ => true,
        }
    }

    /// Returns the volume of a StatefulSet's claim.
    pub(super) fn of_claim(name: String) -> Self {
        Self { name, kind: VolumeKind::Plugin(plugin::CLAIM), resource_files: Vec::new() }
    }

    pub(super) fn read(at: Place<'_>, mut volume: api::Volume) -> Option<Self> {
        let name = at.need("name", Some(take(&mut volume.name)), "a DNS name").and_then(dns_name);
        let resource_files = resource_files(&volume);
        let own = [
            volume.empty_dir.take().map(|dir| empty_dir(&at.of("emptyDir"), dir)),
            volume.config_map.take().map(|map| {
                keyed(&at.of("configMap"), ("name", Some(map.name)), map.default_mode, map.items);
                VolumeKind::ConfigMap
            }),
            volume.secret.take().map(|secret| {
                let name = ("secretName", secret.secret_name);
                keyed(&at.of("secret"), name, secret.default_mode, secret.items);
                VolumeKind::Secret
            }),
            volume.host_path.take().map(|host| host_path(&at.of("hostPath"), host)),
            volume.projected.take().map(|_| VolumeKind::Projected),
            volume.downward_api.take().map(|_| VolumeKind::DownwardApi),
            volume.image.take().map(|image| plugin::image(&at.of("image"), image)),
        ];
        let mut kinds = own.into_iter().flatten().chain(plugin::read(volume));
        // The API server treats a volume without a source as an emptyDir.
        let none = VolumeKind::EmptyDir { memory: false, size_limit: None };
        let kind = kinds.next().unwrap_or(none);
        if kinds.next().is_some() {
            at.report("has several sources; allowed: one");
        }
        Some(Self { name: name?, kind, resource_files })
    }
}

/// Returns the files of the downward API with requests or limits of containers.
fn resource_files(volume: &api::Volume) -> Vec<(String, ResourceField)> {
    let own = volume.downward_api.iter().flat_map(|it| &it.items);
    let sources = volume.projected.iter().flat_map(|it| it.sources.iter().flatten());
    let projected = sources.filter_map(|it| it.downward_api.as_ref()?.items.as_ref());
    let files = own.chain(projected).flatten();
    let files = files.filter_map(|file| {
        let selector = file.resource_field_ref.clone()?;
        Some((file.path.clone(), ResourceField::of(selector)))
    });
    files.collect()
}

fn empty_dir(at: &Place<'_>, dir: api::EmptyDirVolumeSource) -> VolumeKind {
    // Huge pages are memory.
    let media =
        [("Memory", true), ("HugePages", true), ("HugePages-2Mi", true), ("HugePages-1Gi", true)];
    let medium = at.take("medium", dir.medium);
    let size_limit = at.take("sizeLimit", dir.size_limit.map(|limit| limit.0));
    VolumeKind::EmptyDir {
        memory: medium.and_then(|field| field.choice(&media)).unwrap_or_default(),
        size_limit: size_limit
            .and_then(|field| field.parsed("a quantity of bytes such as 1Gi"))
            .map(Quantity::units),
    }
}

/// Checks a volume with the keys of an object. The object need not be in the manifest.
fn keyed(
    at: &Place<'_>,
    (key, name): (&str, Option<String>),
    default_mode: Option<i32>,
    items: Option<Vec<api::KeyToPath>>,
) {
    // YAML reads `0o644`, and by YAML 1.1 `0644`, as octal.
    let mode = |field: Field<'_>| field.number(0..=MAX_MODE);
    at.need(key, name, "the name of an object").and_then(dns_name);
    at.take("defaultMode", default_mode).and_then(mode);
    at.items("items", items, |at, item| {
        at.need("key", Some(item.key), "a key of it");
        at.take("mode", item.mode).and_then(mode);
        at.need("path", Some(item.path), "a relative path")?
            .read("a relative path that does not start with \"..\"", plain)
    });
}

/// Accepts a path that stays in its volume.
fn plain(text: &str) -> Option<()> {
    let is_plain = !text.is_empty()
        && !text.starts_with("..")
        && text.split('/').all(|part| !part.is_empty() && part != "..");
    is_plain.then_some(())
}

fn host_path(at: &Place<'_>, host: api::HostPathVolumeSource) -> VolumeKind {
    let is_path = |text: &str| text.starts_with('/') && text.len() <= MAX_PATH_BYTES;
    let allowed = "an absolute path of at most 4096 bytes";
    let path = at.need("path", Some(host.path), allowed);
    let path =
        path.and_then(|field| field.read(allowed, |text| is_path(text).then(|| text.to_owned())));
    VolumeKind::HostPath(HostPathVolume {
        path: path.unwrap_or_default(),
        kind: host.type_.unwrap_or_default(),
    })
}
