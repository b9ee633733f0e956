//! The names of the pods of manifests.

use kiyot_proto::admin::ManifestFile;
use serde_json::Value;

use crate::error::Error;

/// The namespace of a pod without one.
const DEFAULT_NAMESPACE: &str = "default";

/// Returns namespace and name of each pod of files. Other documents are skipped: ConfigMaps and
/// Secrets are parts of the pods.
pub(super) fn of(files: &[ManifestFile]) -> Result<Vec<(String, String)>, Error> {
    let mut names = Vec::new();
    for ManifestFile { name, text } in files {
        let documents: Vec<Value> = serde_saphyr::from_multiple(text).map_err(|error| {
            Error::Usage(format!("{name}: is no YAML: {}", error.without_snippet()))
        })?;
        documents.iter().for_each(|document| collect(document, &mut names));
    }
    if !files.is_empty() && names.is_empty() {
        return Err(Error::Usage("the files have no Pod; allowed: one or more".to_owned()));
    }
    Ok(names)
}

fn collect(document: &Value, names: &mut Vec<(String, String)>) {
    let kind = document["kind"].as_str().unwrap_or_default();
    if kind.ends_with("List") {
        let items = document["items"].as_array().into_iter().flatten();
        return items.for_each(|item| collect(item, names));
    }
    let metadata = &document["metadata"];
    if let ("Pod", Some(name)) = (kind, metadata["name"].as_str()) {
        let namespace = metadata["namespace"].as_str().unwrap_or(DEFAULT_NAMESPACE);
        names.push((namespace.to_owned(), name.to_owned()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Result<Vec<(String, String)>, Error> {
        of(&[ManifestFile { name: "pods.yaml".to_owned(), text: text.to_owned() }])
    }

    #[test]
    fn pods_of_documents_and_lists_are_named() {
        let text = "kind: Secret\nmetadata: {name: key}\n---\n\
                    kind: Pod\nmetadata: {name: web}\n---\n\
                    {\"kind\": \"List\", \"items\": [{\"kind\": \"Pod\", \"metadata\": \
                    {\"name\": \"cart\", \"namespace\": \"shop\"}}]}\n---\n";
        let pair = |namespace: &str, name: &str| (namespace.to_owned(), name.to_owned());
        assert_eq!(names(text).unwrap(), [pair("default", "web"), pair("shop", "cart")]);
        assert!(names("kind: Secret").unwrap_err().text().contains("no Pod"));
        let broken = names("kind: [Pod").unwrap_err();
        assert!(broken.text().contains("pods.yaml"), "{}", broken.text());
        assert_eq!(of(&[]).unwrap(), Vec::new());
    }
}
