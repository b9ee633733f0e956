//! Static pods: files in the kubelet's `staticPodPath`, from which it runs pods without the API
//! server.

use std::collections::HashSet;

use kiyot_manifest::files::{Object, Objects};
use kiyot_proto::admin::ManifestFile;
use serde_json::{Map, Value};

use crate::error::Error;

mod directory;
mod names;
mod references;

pub(crate) use directory::StaticPodDirectory;
pub(crate) use names::PodName;

/// The annotation that sends a pod to a cell, and its value.
const TARGET_RUNTIME: &str = "kubernetes.io/target-runtime";
const KIYOT: &str = "kiyot";
/// The alternative for objects that can't be static pods.
const INSTEAD: &str = "`kubectl apply -f` creates it through the API server";

/// A pod of a manifest, as the kubelet reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StaticPod {
    /// Its namespace and name. The kubelet appends the name of the node.
    pub(crate) name: PodName,
    /// The file of the manifest, in errors.
    pub(crate) file: String,
    /// Its manifest with the annotation, in JSON.
    pub(crate) json: String,
}

/// Returns all pods of files, or the first problem.
pub(crate) fn read(files: &[ManifestFile]) -> Result<Vec<StaticPod>, Error> {
    let mut pods = Vec::new();
    let mut objects = Objects::default();
    for ManifestFile { name: file, text } in files {
        let mut read = Ok(());
        objects.read(text, &mut |object| {
            if read.is_ok() {
                read = object.map_err(|problem| problem.to_string()).and_then(|object| {
                    let (name, json) = read_pod(object)?;
                    pods.push(StaticPod { name, file: file.clone(), json });
                    Ok(())
                });
            }
        });
        read.map_err(|problem| Error::Usage(format!("{file}: {problem}")))?;
    }
    let mut known = HashSet::new();
    if let Some(twice) = pods.iter().find(|pod| !known.insert(&pod.name)) {
        let error = format!("two pods {}; allowed: a pod of each name", twice.name);
        return Err(Error::Usage(error));
    }
    if pods.is_empty() {
        return Err(Error::Usage("the files have no Pod; allowed: one or more".to_owned()));
    }
    Ok(pods)
}

/// Reads a pod, with its annotated manifest.
fn read_pod(object: Object) -> Result<(PodName, String), String> {
    let Object { at, kind, version, mut fields } = object;
    if (kind.as_str(), version.as_str()) != ("Pod", "v1") {
        return Err(format!(
            "{at} is of the kind {kind:?} of {version:?}; allowed: Pod of \"v1\", which a kubelet \
             runs from a file; {INSTEAD}"
        ));
    }
    let metadata = fields.get("metadata");
    let of_metadata = |key: &str| metadata.and_then(|metadata| metadata.get(key)?.as_str());
    let (namespace, name) = (of_metadata("namespace"), of_metadata("name").unwrap_or_default());
    let name = PodName::new(namespace, name).map_err(|rule| format!("{at}.metadata: {rule}"))?;
    if let Some(path) = fields.get("spec").and_then(references::find) {
        return Err(format!(
            "{at}.spec.{path}: a kubelet runs no static pod that refers to objects of the API \
             server; allowed: absent; {INSTEAD}"
        ));
    }
    annotate(&mut fields).map_err(|rule| at + &rule)?;
    fields.insert("kind".to_owned(), kind.into());
    fields.insert("apiVersion".to_owned(), version.into());
    Ok((name, Value::Object(fields).to_string()))
}

/// Adds the annotation that sends a pod to a cell.
fn annotate(pod: &mut Map<String, Value>) -> Result<(), String> {
    let at = ".metadata.annotations";
    let metadata = pod.get_mut("metadata").and_then(Value::as_object_mut);
    let annotations = metadata.map(|metadata| metadata.entry("annotations").or_insert(Value::Null));
    let Some(annotations) = annotations else { return Err(".metadata is no object".to_owned()) };
    if annotations.is_null() {
        *annotations = Value::Object(Map::new());
    }
    let Some(annotations) = annotations.as_object_mut() else {
        return Err(format!("{at} is no object"));
    };
    match annotations.entry(TARGET_RUNTIME).or_insert_with(|| KIYOT.into()) {
        Value::String(target) if target == KIYOT => Ok(()),
        other => Err(format!("{at}[{TARGET_RUNTIME:?}] = {other}; allowed: {KIYOT:?}, or absent")),
    }
}

#[cfg(test)]
mod tests;
