//! Kubernetes Pod YAML as the CRI messages that a kubelet would send.
//!
//! The part of the Pod API that shapes those messages is read, and every unknown field is reported.
//! Fields for the scheduler, the API server or the kubelet alone are accepted without an effect.
//! ConfigMaps and Secrets that the pods mount are in the same file.

use serde_json::Value;

use crate::problems::{Field, Problem, Problems, Report, Table};

mod container;
mod create;
mod expand;
mod files;
mod metadata;
mod node;
mod pod;
mod resources;
mod run;
mod security;
mod volume;

pub use container::{Container, Port, VolumeMount};
pub use expand::expand;
pub use files::Entry;
pub use metadata::Metadata;
pub use node::{CgroupDriver, Dns, Node};
pub use pod::{DnsPolicy, Pod, RestartPolicy};
pub use resources::{QosClass, Resources};
pub use security::{Capabilities, ContainerSecurity, PodSecurity, Seccomp, SeccompType};
pub use volume::{Content, HostPathVolume, KeyedFile, Volume, VolumeKind};

/// Largest manifest, in bytes.
pub const MAX_BYTES: usize = 4 * 1024 * 1024;

/// Accepted kinds of documents.
const KINDS: [&str; 3] = ["Pod", "ConfigMap", "Secret"];
/// Kinds of lists.
const LIST: &str = "List";
const KINDS_AND_LIST: &[&str] = &[KINDS[0], KINDS[1], KINDS[2], LIST];

/// Contents of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Pods, in order.
    pub pods: Vec<Pod>,
}

/// Parses the documents of a file, which problems call `name`.
pub fn parse(name: &str, yaml: &str) -> Result<Manifest, Problems> {
    let whole = |rule: String| Problems::one(name, Problem::new("the text", rule));
    if yaml.len() > MAX_BYTES {
        return Err(whole(format!("has {} bytes; allowed: {MAX_BYTES}", yaml.len())));
    }
    let documents: Vec<Value> = serde_saphyr::from_multiple(yaml)
        .map_err(|error| whole(format!("is no YAML: {}", error.without_snippet())))?;
    let report = Report::default();
    let mut tables = Vec::new();
    for (index, value) in documents.into_iter().enumerate().filter(|(_, value)| !value.is_null()) {
        read_document(
            Field::new(format!("document {}", index + 1), value, &report),
            KINDS_AND_LIST,
            &mut tables,
        );
    }
    let mut sources = volume::Sources::default();
    let mut pods = Vec::new();
    for (kind, table) in tables.extract_if(.., |(kind, _)| *kind != "Pod") {
        sources.read(kind, table);
    }
    for (_, table) in tables {
        pods.extend(Pod::read(table, &sources));
    }
    if pods.is_empty() && report.is_empty() {
        report.add(Problem::new("the text", "has no Pod; allowed: one or more"));
    }
    report.finish(name, Manifest { pods })
}

/// Adds a document's kind and other fields, or those of its items for a list as `kubectl get -o
/// yaml` writes it. Lists don't nest.
fn read_document<'r>(
    field: Field<'r>,
    kinds: &[&'static str],
    tables: &mut Vec<(&'static str, Table<'r>)>,
) {
    let Some(mut table) = field.table() else { return };
    let allowed = kinds.join(", ");
    let Some(kind) = table.need("kind", &allowed) else { return };
    let advice =
        format!("{allowed}; for any other kind, a Pod with the metadata and spec of its template");
    let Some(kind) = kind.read(&advice, |text| kinds.iter().copied().find(|kind| *kind == text))
    else {
        return;
    };
    if let Some(version) = table.need("apiVersion", "v1") {
        version.choice(&[("v1", ())]);
    }
    if kind != LIST {
        return tables.push((kind, table));
    }
    let items = table.need("items", "a list of documents").map(Field::items).unwrap_or_default();
    // The list's metadata, for paging.
    table.take("metadata");
    table.finish();
    for item in items {
        read_document(item, &KINDS, tables);
    }
}

#[cfg(test)]
mod tests;
