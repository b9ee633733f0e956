//! Kubernetes YAML and JSON as the CRI messages that a kubelet would send.
//!
//! Objects are read as the types of the Kubernetes API, and fields that are unknown to these types
//! are noted. The fields that shape the messages are checked further; the others have no effect.
//! Workloads are read as the pods of their templates. Variables, files and credentials from
//! ConfigMaps and Secrets are omitted.

use kiyot_values::problems::{Problem, Problems, Report};
use serde_json::Value;

mod container;
mod create;
mod dns;
mod document;
mod env;
mod expand;
pub mod files;
mod metadata;
mod mount;
mod node;
mod place;
mod plugin;
mod pod;
mod resources;
mod run;
mod security;
mod typed;
mod volume;
mod workload;

pub use container::Container;
pub use dns::{Dns, DnsPolicy};
pub use document::Skipped;
pub use env::{EnvSource, ResourceField, SourceKind};
pub use expand::expand;
pub use files::File;
pub use metadata::Metadata;
pub use mount::VolumeMount;
pub use node::{CgroupDriver, Node};
pub use pod::Pod;
pub use resources::{QosClass, Resources};
pub use volume::{HostPathVolume, PluginVolume, Volume, VolumeKind};
pub use workload::{Workload, WorkloadKind};

use document::Kind;
use files::{MAX_FILE_BYTES, Malformed, Object, Objects};
use place::Place;

/// Most notes on unknown fields of a pod, or of all refused objects; further fields are only
/// counted.
const MAX_NOTES: usize = 20;
/// Limit on the characters of a file's name that problems show.
const SHOWN_NAME_CHARS: usize = 120;

/// Contents of a manifest.
#[derive(Debug, Clone, PartialEq)]
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
    let (report, unknown) = (Report::default(), Report::default());
    let mut manifest = Manifest { pods: Vec::new(), skipped: Vec::new() };
    match files::check(files) {
        Ok(()) => read(files, &report, &unknown, &mut manifest),
        Err(rule) => report.add(Problem::new("-f", rule)),
    }
    if manifest.pods.is_empty() && report.is_empty() {
        report.add(Problem::new("the text", "has no Pod; allowed: one or more"));
    }
    report.finish(name, manifest).map_err(|problems| problems.with_notes(notes(unknown)))
}

/// Reads the texts of files. If there are several files, each problem names its file. Adds the
/// unknown fields of refused objects to `unknown`.
fn read(files: &[File], report: &Report, unknown: &Report, manifest: &mut Manifest) {
    let mut objects = Objects::default();
    for file in files {
        let of = if let [_] = files { String::new() } else { shown_name(&file.name) + ": " };
        if file.text.len() > MAX_FILE_BYTES {
            let rule = format!("has {} bytes; allowed: {MAX_FILE_BYTES}", file.text.len());
            report.add(Problem::new(of + "the text", rule));
            continue;
        }
        objects.read(&file.text, &mut |object| match object {
            Ok(object) => {
                let at = Place::new(format!("{of}{}", object.at), report);
                read_object(&at, object, unknown, manifest);
            }
            Err(Malformed { at, value, rule }) => {
                report.add(Problem { at: format!("{of}{at}"), value, rule });
            }
        });
    }
}

/// Reads an object: a pod, a workload with its pod, or an object to skip.
fn read_object(at: &Place<'_>, mut object: Object, unknown: &Report, manifest: &mut Manifest) {
    let Ok(kind) = document::kind_of(&object, at) else { return };
    let Some(kind) = kind else { return manifest.skipped.push(Skipped::of(&object)) };
    // The API server writes `status`.
    object.fields.remove("status");
    if let Some(Value::Object(metadata)) = object.fields.get_mut("metadata") {
        metadata.remove("managedFields");
    }
    let (notes, problems) = (Report::default(), at.collector().len());
    let pod = match kind {
        Kind::Pod => typed::read(at, object.fields, &notes).and_then(|pod| Pod::read(at, pod)),
        Kind::Workload(kind) => workload::read(kind, at, object.fields, &notes),
    };
    if at.collector().len() > problems {
        unknown.add_report(notes);
    } else if let Some(mut pod) = pod {
        pod.notes = self::notes(notes);
        manifest.pods.push(pod);
    }
}

/// Returns the notes on unknown fields.
fn notes(unknown: Report) -> Vec<String> {
    let Err(Problems { list, more, .. }) = unknown.finish("", ()) else { return Vec::new() };
    let mut notes: Vec<_> = list.iter().take(MAX_NOTES).map(ToString::to_string).collect();
    let more = more + list.len() - notes.len();
    notes.extend((more > 0).then(|| format!("and {more} more unknown fields")));
    notes
}

/// Returns a file's name; a long name loses its beginning.
fn shown_name(name: &str) -> String {
    match name.char_indices().nth_back(SHOWN_NAME_CHARS) {
        Some((at, cut)) => format!("…{}", &name[at + cut.len_utf8()..]),
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests;
