//! Kubernetes YAML and JSON as the CRI messages that a kubelet would send.
//!
//! The part of the Pod API that shapes those messages is read, and every unknown field is reported.
//! Fields for the scheduler, the API server or the kubelet alone are accepted without an effect.
//! Fields that shape messages or files otherwise than this module are accepted to explain pods, and
//! refused to run them. Workloads are read as the pods of their templates. ConfigMaps and Secrets
//! that the pods mount are in the same manifest.

use crate::problems::{Field, Problem, Problems, Report};

mod container;
mod create;
mod dns;
mod document;
mod env;
mod expand;
mod files;
mod make_files;
mod metadata;
mod mount;
mod node;
mod plugin;
mod pod;
mod pull_secret;
mod purpose;
mod resources;
mod run;
mod security;
mod sources;
mod text;
mod volume;
mod workload;

pub use container::{Container, Port, PullPolicy};
pub use dns::{Dns, DnsPolicy};
pub use document::Skipped;
pub use env::{EnvValue, PodField};
pub use expand::expand;
pub(crate) use files::DATA;
pub use files::{Entry, SubPath};
pub use kiyot_manifest_files::File;
pub use metadata::Metadata;
pub use mount::{VolumeDevice, VolumeMount};
pub use node::{CgroupDriver, Node};
pub use pod::{Pod, RestartPolicy};
pub use pull_secret::{Login, PullSecrets};
pub use purpose::Purpose;
pub use resources::{QosClass, Resources};
pub use security::{Capabilities, ContainerSecurity, PodSecurity, Seccomp, SeccompType};
pub use volume::{Content, HostPathVolume, KeyedFile, PluginVolume, Volume, VolumeKind};
pub use workload::{Workload, WorkloadKind};

use document::{Documents, Kind};

/// Largest file, in bytes.
pub const MAX_BYTES: usize = kiyot_manifest_files::MAX_FILE_BYTES;

/// Contents of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Pods, in order.
    pub pods: Vec<Pod>,
    /// Documents of kinds without pods, in order. [`Purpose::Run`] reports them instead.
    pub skipped: Vec<Skipped>,
}

/// Parses a file of pods to run, which problems call `name`.
pub fn parse(name: &str, text: &str) -> Result<Manifest, Problems> {
    let file = File { name: name.to_owned(), text: text.to_owned() };
    parse_files(&[file], Purpose::Run)
}

/// Parses files that belong together.
pub fn parse_files(files: &[File], purpose: Purpose) -> Result<Manifest, Problems> {
    let name = match files {
        [only] => only.name.clone(),
        _ => format!("{} files", files.len()),
    };
    let report = Report::default();
    let Documents { mut known, skipped, .. } = documents(files, purpose, &report);
    let mut sources = sources::Sources::default();
    for (kind, table) in
        known.extract_if(.., |(kind, _)| matches!(kind, Kind::ConfigMap | Kind::Secret))
    {
        let kind = if kind == Kind::Secret { "Secret" } else { "ConfigMap" };
        sources.read(kind, table, purpose);
    }
    let mut pods = Vec::new();
    for (kind, table) in known {
        pods.extend(match kind {
            Kind::Workload(kind) => workload::read(kind, table, &sources),
            _ => Pod::read(table, &sources, purpose),
        });
    }
    if pods.is_empty() && report.is_empty() {
        report.add(Problem::new("the text", "has no Pod; allowed: one or more"));
    }
    report.finish(name, Manifest { pods, skipped })
}

/// Parses the texts of files. Of several files, each problem names its own.
fn documents<'r>(files: &[File], purpose: Purpose, report: &'r Report) -> Documents<'r> {
    let mut documents = Documents::new(purpose);
    for file in files {
        let of = if let [_] = files { String::new() } else { format!("{}: ", file.name) };
        let whole = |rule| report.add(Problem::new(format!("{of}the text"), rule));
        if file.text.len() > MAX_BYTES {
            whole(format!("has {} bytes; allowed: {MAX_BYTES}", file.text.len()));
            continue;
        }
        let values = text::documents(&file.text).map_err(whole).unwrap_or_default();
        for (index, value) in values.into_iter().enumerate().filter(|(_, value)| !value.is_null()) {
            let at = format!("{of}document {}", index + 1);
            documents.read(Field::new(at, value, report));
        }
    }
    documents
}

#[cfg(test)]
mod tests;
