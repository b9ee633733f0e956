//! Static pods: files in the kubelet's `staticPodPath`, from which it runs pods without the API
//! server.

use std::collections::HashSet;

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
/// Most documents of a file, as of a manifest that the daemon reads.
const MAX_DOCUMENTS: usize = 10_000;
/// The alternative for everything that is no static pod.
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

/// Returns the pods of files, all of them or the first problem.
pub(crate) fn read(files: &[ManifestFile]) -> Result<Vec<StaticPod>, Error> {
    let mut pods = Vec::new();
    for ManifestFile { name, text } in files {
        let documents = kiyot_manifest_files::documents(text, MAX_DOCUMENTS + 1)
            .map_err(|error| Error::Usage(format!("{name}: {error}")))?;
        if documents.len() > MAX_DOCUMENTS {
            let rule = format!("more than {MAX_DOCUMENTS} documents; allowed: as many");
            return Err(Error::Usage(format!("{name}: {rule}")));
        }
        for (index, document) in documents.into_iter().enumerate() {
            read_document(name, &format!("document {}", index + 1), document, &mut pods)?;
        }
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

/// Reads a document: a pod, or a list of pods.
fn read_document(
    file: &str,
    at: &str,
    document: Value,
    pods: &mut Vec<StaticPod>,
) -> Result<(), Error> {
    let refused = |rule: String| Err(Error::Usage(format!("{file}: {at}{rule}")));
    let mut document = match document {
        Value::Null => return Ok(()),
        Value::Object(document) => document,
        _ => return refused(" is no object; allowed: a Pod".to_owned()),
    };
    let text = |key: &str| document.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let (kind, version) = (text("kind"), text("apiVersion"));
    match (kind.as_str(), version.as_str()) {
        ("Pod", "v1") => {}
        ("List" | "PodList", "v1") => {
            let Some(Value::Array(items)) = document.remove("items") else { return Ok(()) };
            for (index, mut item) in items.into_iter().enumerate() {
                // Items of a PodList may leave both out.
                if let (Value::Object(item), "PodList") = (&mut item, kind.as_str()) {
                    item.entry("kind").or_insert_with(|| "Pod".into());
                    item.entry("apiVersion").or_insert_with(|| "v1".into());
                }
                if item["kind"].as_str().is_some_and(|kind| kind.ends_with("List")) {
                    return refused(format!(".items[{index}] is a list; allowed: a Pod"));
                }
                read_document(file, &format!("{at}.items[{index}]"), item, pods)?;
            }
            return Ok(());
        }
        _ => {
            return refused(format!(
                " is of the kind {kind:?} of {version:?}; allowed: Pod of \"v1\", which a kubelet \
                 runs from a file; {INSTEAD}"
            ));
        }
    }
    let metadata = document.get("metadata");
    let of_metadata = |key: &str| metadata.and_then(|metadata| metadata.get(key)?.as_str());
    let (namespace, name) = (of_metadata("namespace"), of_metadata("name").unwrap_or_default());
    let name = match PodName::new(namespace, name) {
        Ok(name) => name,
        Err(rule) => return refused(format!(".metadata: {rule}")),
    };
    if let Some(path) = document.get("spec").and_then(references::find) {
        return refused(format!(
            ".spec.{path}: a kubelet runs no static pod that refers to objects of the API server; \
             allowed: absent; {INSTEAD}"
        ));
    }
    if let Err(rule) = annotate(&mut document) {
        return refused(rule);
    }
    let json = Value::Object(document).to_string();
    pods.push(StaticPod { name, file: file.to_owned(), json });
    Ok(())
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
