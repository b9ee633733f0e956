//! Kubernetes Pod YAML as the CRI messages that a kubelet would send. Pure.
//!
//! It reads the part of the Pod API that shapes those messages, and reports every field that it
//! does not know. What is only for the scheduler, the API server or the kubelet itself is accepted
//! and has no effect. ConfigMaps and Secrets that the pods mount stand in the same file.

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

/// Bytes of the largest manifest that is read.
pub const MAX_BYTES: usize = 4 * 1024 * 1024;

/// The kinds of documents that are read.
const KINDS: [&str; 3] = ["Pod", "ConfigMap", "Secret"];
/// What holds them where there are many.
const LIST: &str = "List";
const KINDS_AND_LIST: &[&str] = &[KINDS[0], KINDS[1], KINDS[2], LIST];

/// What a file describes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Its pods, in their order.
    pub pods: Vec<Pod>,
}

/// Reads the documents of a file (called `name` in problems).
pub fn parse(name: &str, yaml: &str) -> Result<Manifest, Problems> {
    let whole = |rule: String| Problems::one(name, Problem::new("the text", rule));
    if yaml.len() > MAX_BYTES {
        return Err(whole(format!("has {} bytes; allowed are {MAX_BYTES}", yaml.len())));
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
        report.add(Problem::new("the text", "has no Pod; allowed is one or more"));
    }
    report.finish(name, Manifest { pods })
}

/// Adds a document's kind and its other fields; those of its items if it is a list, as `kubectl get
/// -o yaml` writes it. A list has none within.
fn read_document<'r>(
    field: Field<'r>,
    kinds: &[&'static str],
    tables: &mut Vec<(&'static str, Table<'r>)>,
) {
    let Some(mut table) = field.table() else { return };
    let allowed = format!("one of {}", kinds.join(", "));
    let Some(kind) = table.need("kind", &allowed) else { return };
    let advice = format!(
        "{allowed}; what another kind makes is told of a Pod with the metadata and the spec of its template"
    );
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
    // Of the list, for who reads on.
    table.take("metadata");
    table.finish();
    for item in items {
        read_document(item, &KINDS, tables);
    }
}

#[cfg(test)]
mod tests;
