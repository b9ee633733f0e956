//! `metadata` of a document.

use std::collections::BTreeMap;

use ring::digest::{SHA256, digest};

use crate::problems::{Field, Table};

const DEFAULT_NAMESPACE: &str = "default";

/// Fields that the API server and controllers set.
const OF_THE_SERVER: [&str; 10] = [
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "finalizers",
    "generateName",
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
    pub(super) fn read(document: &mut Table<'_>) -> Self {
        let Some(mut table) =
            document.need("metadata", "a table with a name").and_then(|field| field.table())
        else {
            return Self::default();
        };
        let name = table.need("name", "a DNS name").and_then(dns_name).unwrap_or_default();
        let namespace = table
            .take("namespace")
            .and_then(dns_name)
            .unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned());
        let uid = table.take("uid").and_then(dns_name).unwrap_or_else(|| uid_of(&namespace, &name));
        let labels = table.take("labels").map(|field| field.text_entries()).unwrap_or_default();
        let annotations =
            table.take("annotations").map(|field| field.text_entries()).unwrap_or_default();
        for key in OF_THE_SERVER {
            table.take(key);
        }
        table.finish();
        Self { name, namespace, uid, labels, annotations }
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
    let text =
        hex::encode(&digest(&SHA256, format!("{namespace}/{name}").as_bytes()).as_ref()[..16]);
    format!("{}-{}-{}-{}-{}", &text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..])
}
