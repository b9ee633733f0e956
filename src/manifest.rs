//! Kubernetes Pod YAML as the CRI messages that a kubelet would send. Pure.
//!
//! It reads the part of the Pod API that shapes those messages, and reports every field that it does not know. What is only for the scheduler, the API server or
//! the kubelet itself is accepted and has no effect. ConfigMaps and Secrets that the pods mount stand in the same file.

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
    let documents: Vec<Value> = serde_saphyr::from_multiple(yaml).map_err(|error| whole(format!("is no YAML: {}", error.without_snippet())))?;
    let report = Report::default();
    let documents = documents.into_iter().enumerate().filter(|(_, value)| !value.is_null());
    let mut tables: Vec<(String, Table<'_>)> =
        documents.filter_map(|(index, value)| document(Field::new(format!("document {}", index + 1), value, &report))).collect();
    let mut sources = volume::Sources::default();
    let mut pods = Vec::new();
    for (kind, table) in tables.extract_if(.., |(kind, _)| kind != "Pod") {
        sources.read(&kind, table);
    }
    for (_, table) in tables {
        pods.extend(Pod::read(table, &sources));
    }
    if pods.is_empty() {
        report.add(Problem::new("the text", "has no Pod; allowed is one or more"));
    }
    report.finish(name, Manifest { pods })
}

/// A document's kind, and its other fields.
fn document(field: Field<'_>) -> Option<(String, Table<'_>)> {
    let mut table = field.table()?;
    if let Some(version) = table.need("apiVersion", "v1") {
        version.choice(&[("v1", ())]);
    }
    let kind = table.need("kind", "Pod, ConfigMap or Secret")?.choice(&[("Pod", "Pod"), ("ConfigMap", "ConfigMap"), ("Secret", "Secret")])?;
    Some((kind.to_owned(), table))
}

#[cfg(test)]
mod tests;
