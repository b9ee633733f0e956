//! Volumes of a pod, and the ConfigMaps and Secrets in them.

use std::{collections::BTreeMap, fmt};

use base64::{Engine, prelude::BASE64_STANDARD};

use super::{Metadata, metadata::dns_name, node::Node, resources::quantity};
use crate::{
    annotations::Quantity,
    problems::{Field, Problem, Table},
};

/// Default mode of files.
const DEFAULT_MODE: u32 = 0o644;
const MAX_MODE: u32 = 0o777;

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
            VolumeKind::HostPath(host) => return host.path.clone().into(),
        };
        node.pod_dir(pod).join("volumes").join(plugin).join(&self.name)
    }

    /// Says if containers can't write to it.
    pub(super) fn is_read_only(&self) -> bool {
        matches!(self.kind, VolumeKind::ConfigMap(_) | VolumeKind::Secret(_))
    }

    pub(super) fn read(field: Field<'_>, namespace: &str, sources: &Sources) -> Option<Self> {
        let mut table = field.table()?;
        let name = table.need("name", "a DNS name").and_then(dns_name);
        let at = table.at().to_owned();
        let report = table.report();
        let given = ["emptyDir", "configMap", "secret", "hostPath"]
            .iter()
            .filter(|key| table.has(key))
            .count();
        let kinds = [
            table.take("emptyDir").and_then(Field::table).map(empty_dir),
            table
                .take("configMap")
                .and_then(Field::table)
                .and_then(|table| sources.files("ConfigMap", "name", namespace, table))
                .map(VolumeKind::ConfigMap),
            table
                .take("secret")
                .and_then(Field::table)
                .and_then(|table| sources.files("Secret", "secretName", namespace, table))
                .map(VolumeKind::Secret),
            table.take("hostPath").and_then(Field::table).and_then(host_path),
        ];
        table.finish();
        if given != 1 {
            report.add(Problem::new(
                at,
                "is invalid; allowed: emptyDir, configMap, secret, hostPath",
            ));
        }
        let kind = kinds.into_iter().flatten().next()?;
        Some(Self { name: name?, kind })
    }
}

fn empty_dir(mut table: Table<'_>) -> VolumeKind {
    let memory = table
        .take("medium")
        .and_then(|field| field.choice(&[("", false), ("Memory", true)]))
        .unwrap_or_default();
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

/// ConfigMaps and Secrets of a file.
#[derive(Debug, Default)]
pub(super) struct Sources(BTreeMap<Name, BTreeMap<String, Content>>);

/// Kind, namespace and name.
type Name = (String, String, String);

impl Sources {
    /// Adds an object.
    pub(super) fn read(&mut self, kind: &str, mut table: Table<'_>) {
        let metadata = Metadata::read(&mut table);
        let secret = kind == "Secret";
        let (plain, encoded) = if secret { ("stringData", "data") } else { ("data", "binaryData") };
        let mut keys = BTreeMap::new();
        for (key, field) in table
            .take(encoded)
            .map(|field| if secret { field.secret() } else { field }.entries())
            .unwrap_or_default()
        {
            let content =
                field.read("a text in base64", |text| BASE64_STANDARD.decode(text.trim()).ok());
            keys.extend(content.map(|content| (key, Content(content))));
        }
        for (key, field) in table
            .take(plain)
            .map(|field| if secret { field.secret() } else { field }.entries())
            .unwrap_or_default()
        {
            keys.extend(field.text().map(|text| (key, Content(text.into_bytes()))));
        }
        // For the API server.
        table.take("immutable");
        if secret {
            table.take("type");
        }
        let (at, report) = (table.at().to_owned(), table.report());
        table.finish();
        let name = (kind.to_owned(), metadata.namespace, metadata.name);
        if self.0.contains_key(&name) {
            report.add(Problem::new(
                at,
                format!("is another {kind} {}/{}; allowed: one", name.1, name.2),
            ));
        }
        self.0.insert(name, keys);
    }

    /// Returns the files of a volume.
    fn files(
        &self,
        kind: &str,
        name_key: &'static str,
        namespace: &str,
        mut table: Table<'_>,
    ) -> Option<Vec<KeyedFile>> {
        let name = table.need(name_key, "the name of one in this file").and_then(dns_name);
        let optional = table.take("optional").and_then(Field::flag).unwrap_or_default();
        let default_mode = table.take("defaultMode").and_then(mode).unwrap_or(DEFAULT_MODE);
        let items = table.take("items").map(|field| {
            field
                .items()
                .into_iter()
                .filter_map(|item| item.table().and_then(read_item))
                .collect::<Vec<_>>()
        });
        let (at, report) = (table.at().to_owned(), table.report());
        table.finish();
        let name = name?;
        let Some(keys) = self.0.get(&(kind.to_owned(), namespace.to_owned(), name.clone())) else {
            if optional {
                return Some(Vec::new());
            }
            report.add(Problem::with_value(
                format!("{at}.{name_key}"),
                name,
                format!(
                    "is invalid; allowed: the name of a {kind} in this file, in namespace \
                         {namespace}"
                ),
            ));
            return None;
        };
        let Some(items) = items else {
            return Some(
                keys.iter()
                    .map(|(key, content)| KeyedFile {
                        path: key.clone(),
                        mode: default_mode,
                        content: content.clone(),
                    })
                    .collect(),
            );
        };
        let mut files = Vec::new();
        for item in items {
            match keys.get(&item.key) {
                Some(content) => files.push(KeyedFile {
                    path: item.path,
                    mode: item.mode.unwrap_or(default_mode),
                    content: content.clone(),
                }),
                None if optional => {}
                None => report.add(Problem::with_value(
                    format!("{at}.items"),
                    item.key,
                    format!("is invalid; allowed: a key of {kind} {name}"),
                )),
            }
        }
        Some(files)
    }
}

struct Item {
    key: String,
    path: String,
    mode: Option<u32>,
}

fn read_item(mut table: Table<'_>) -> Option<Item> {
    let key = table.need("key", "a key of it").and_then(Field::text);
    let plain = |text: &str| {
        let fits = !text.is_empty()
            && !text.starts_with("..")
            && text.split('/').all(|part| !part.is_empty() && part != "..");
        fits.then(|| text.to_owned())
    };
    let path = table
        .need("path", "a relative path")
        .and_then(|field| field.read("a relative path that does not start with \"..\"", plain));
    let mode = table.take("mode").and_then(mode);
    table.finish();
    Some(Item { key: key?, path: path?, mode })
}

/// Reads permissions; YAML reads `0o644`, and by YAML 1.1 `0644`, as octal.
fn mode(field: Field<'_>) -> Option<u32> {
    field.number(0..=MAX_MODE)
}
