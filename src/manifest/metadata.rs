//! `metadata` of a document.

use std::collections::BTreeMap;

use ring::digest::{SHA256, digest};

use crate::{
    names::{DEFAULT_NAMESPACE, uid},
    problems::{Field, Table},
};

/// Part of a name that the API server chooses.
pub(super) const GENERATED: &str = "<generated>";

/// Fields that the API server and controllers set.
const OF_THE_SERVER: [&str; 9] = [
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "finalizers",
    "generation",
    "managedFields",
    "ownerReferences",
    "resourceVersion",
    "selfLink",
];

/// `metadata` of a document.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Metadata {
    /// Name.
    pub name: String,
    /// Namespace.
    pub namespace: String,
    /// UID. By default derived from namespace and name.
    pub uid: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
}

impl Metadata {
    /// Reads the metadata of a document. The API server may choose the name.
    pub(super) fn read(document: &mut Table<'_>) -> Self {
        let Some(mut table) =
            document.need("metadata", "a table with a name").and_then(|field| field.table())
        else {
            return Self::default();
        };
        let prefix = table.take("generateName");
        let name = if let Some(prefix) = prefix.filter(|_| !table.has("name")) {
            prefix.text().map(|prefix| prefix + GENERATED)
        } else {
            table.need("name", "a DNS name").and_then(dns_name)
        };
        let namespace = table
            .take("namespace")
            .and_then(dns_name)
            .unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned());
        let metadata = Self::new(name.unwrap_or_default(), namespace);
        let uid = table.take("uid").and_then(dns_name);
        let metadata = Self { uid: uid.unwrap_or(metadata.uid), ..metadata };
        metadata.with_labels(table)
    }

    /// Reads the metadata of a template, for a pod with a name in a namespace.
    pub(super) fn read_template(document: &mut Table<'_>, name: String, namespace: String) -> Self {
        let metadata = Self::new(name, namespace);
        let Some(mut table) = document.take("metadata").and_then(Field::table) else {
            return metadata;
        };
        table.ignore(&["generateName", "name", "namespace", "uid"]);
        metadata.with_labels(table)
    }

    fn new(name: String, namespace: String) -> Self {
        let uid = uid_of(&namespace, &name);
        Self { name, namespace, uid, ..Self::default() }
    }

    /// Reads labels and annotations, the rest of the metadata.
    fn with_labels(self, mut table: Table<'_>) -> Self {
        let [labels, annotations] = ["labels", "annotations"]
            .map(|key| table.take(key).map(Field::text_entries).unwrap_or_default());
        table.ignore(&OF_THE_SERVER);
        table.finish();
        Self { labels, annotations, ..self }
    }
}

/// Reads a name that can be a path's component: a DNS subdomain, as Kubernetes requires.
pub(super) fn dns_name(field: Field<'_>) -> Option<String> {
    field.read(
        "a DNS name: 1 to 253 of a-z, 0-9, - and ., the first and the last of them a \
                letter or a digit",
        |text| {
            let fits = |byte: u8| {
                byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-' || byte == b'.'
            };
            let ends = [text.bytes().next(), text.bytes().last()]
                .into_iter()
                .flatten()
                .all(|byte| byte != b'-' && byte != b'.');
            ((1..=253).contains(&text.len()) && text.bytes().all(fits) && ends)
                .then(|| text.to_owned())
        },
    )
}

/// Returns a UID in the API server's form, the same for the same pod.
fn uid_of(namespace: &str, name: &str) -> String {
    let digest = digest(&SHA256, format!("{namespace}/{name}").as_bytes());
    digest.as_ref().first_chunk().map(uid).unwrap_or_default()
}
