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
mod text;
mod volume;
mod workload;

pub use container::{Container, Port};
pub use dns::{Dns, DnsPolicy};
pub use document::Skipped;
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

use document::{Documents, Kind};

/// Largest file, in bytes.
pub const MAX_BYTES: usize = kiyot_manifest_files::MAX_FILE_BYTES;

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
        [only] => only.name.clone(),
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
