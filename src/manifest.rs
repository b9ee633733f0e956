//! Kubernetes YAML and JSON as the CRI messages that a kubelet would send.
//!
//! The part of the Pod API that shapes those messages is read, and every unknown field is reported.
//! Fields for the scheduler, the API server or the kubelet alone are accepted without an effect.
//! Workloads are read as the pods of their templates. Variables, files and credentials from
//! ConfigMaps and Secrets are left out.

use crate::problems::{Field, Problem, Problems, Report};

mod container;
mod create;
mod dns;
mod document;
mod env;
mod expand;
mod metadata;
mod mount;
mod node;
mod plugin;
mod pod;
mod resources;
mod run;
mod security;
mod volume;
mod workload;

pub use container::{Container, Port};
pub use dns::{Dns, DnsPolicy};
pub use document::Skipped;
pub use env::EnvSource;
pub use expand::expand;
pub use kiyot_manifest_files::File;
pub use metadata::Metadata;
pub use mount::{VolumeDevice, VolumeMount};
pub use node::{CgroupDriver, Node};
pub use pod::Pod;
pub use resources::{QosClass, Resources};
pub use security::{Capabilities, ContainerSecurity, PodSecurity, Seccomp, SeccompType};
pub use volume::{HostPathVolume, PluginVolume, Volume, VolumeKind};
pub use workload::{Workload, WorkloadKind};

use document::{Documents, Kind, MAX_DOCUMENTS};

/// Largest file, in bytes.
pub const MAX_BYTES: usize = kiyot_manifest_files::MAX_FILE_BYTES;
/// Characters of a file's name that problems show.
const SHOWN_NAME_CHARS: usize = 120;

/// Contents of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Pods, in order.
    pub pods: Vec<Pod>,
    /// Documents of kinds without pods, in order.
    pub skipped: Vec<Skipped>,
}

/// Parses files that belong together.
pub fn parse_files(files: &[File]) -> Result<Manifest, Problems> {
    let name = match files {
        [only] => shown_name(&only.name),
        _ => format!("{} files", files.len()),
    };
    let report = Report::default();
    let Documents { known, skipped, .. } = documents(files, &report);
    let mut pods = Vec::new();
    for (kind, table) in known {
        pods.extend(match kind {
            Kind::Workload(kind) => workload::read(kind, table),
            Kind::Pod => Pod::read(table),
        });
    }
    if pods.is_empty() && report.is_empty() {
        report.add(Problem::new("the text", "has no Pod; allowed: one or more"));
    }
    report.finish(name, Manifest { pods, skipped })
}

/// Parses the texts of files. Of several files, each problem names its own.
fn documents<'r>(files: &[File], report: &'r Report) -> Documents<'r> {
    let mut documents = Documents::default();
    if let Err(rule) = kiyot_manifest_files::check(files) {
        report.add(Problem::new("-f", rule));
        return documents;
    }
    for file in files {
        if documents.are_too_many() {
            break;
        }
        let of = if let [_] = files { String::new() } else { shown_name(&file.name) + ": " };
        let whole = |rule| report.add(Problem::new(format!("{of}the text"), rule));
        if file.text.len() > MAX_BYTES {
            whole(format!("has {} bytes; allowed: {MAX_BYTES}", file.text.len()));
            continue;
        }
        let values = kiyot_manifest_files::documents(&file.text, MAX_DOCUMENTS + 1).map_err(whole);
        for (index, value) in values.unwrap_or_default().into_iter().enumerate() {
            let at = format!("{of}document {}", index + 1);
            documents.read(Field::new(at, value, report));
        }
    }
    documents
}

/// Returns a file's name, without the beginning of a long one.
fn shown_name(name: &str) -> String {
    match name.char_indices().nth_back(SHOWN_NAME_CHARS) {
        Some((at, cut)) => format!("…{}", &name[at + cut.len_utf8()..]),
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests;
