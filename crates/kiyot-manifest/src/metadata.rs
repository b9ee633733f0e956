//! `metadata` of a document.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kiyot_values::{
    names::{DEFAULT_NAMESPACE, uid},
    problems::Field,
};
use ring::digest::{SHA256, digest};

use super::place::Place;

/// Part of a name that the API server chooses.
pub(super) const GENERATED: &str = "<generated>";

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
    /// Reads the metadata of an object. The API server may choose the name.
    pub(super) fn read(at: &Place<'_>, metadata: ObjectMeta) -> Self {
        let name = match metadata.generate_name {
            Some(prefix) if metadata.name.is_none() => Some(prefix + GENERATED),
            _ => at.need("name", metadata.name, "a DNS name").and_then(dns_name),
        };
        let namespace = at.take("namespace", metadata.namespace).and_then(dns_name);
        let namespace = namespace.unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned());
        let own = Self::new(name.unwrap_or_default(), namespace);
        let uid = at.take("uid", metadata.uid).and_then(dns_name);
        Self {
            uid: uid.unwrap_or(own.uid),
            labels: metadata.labels.unwrap_or_default(),
            annotations: metadata.annotations.unwrap_or_default(),
            ..own
        }
    }

    /// Returns the metadata of a template, for a pod with a name in a namespace.
    pub(super) fn of_template(template: ObjectMeta, name: String, namespace: String) -> Self {
        Self {
            labels: template.labels.unwrap_or_default(),
            annotations: template.annotations.unwrap_or_default(),
            ..Self::new(name, namespace)
        }
    }

    fn new(name: String, namespace: String) -> Self {
        let uid = uid_of(&namespace, &name);
        Self { name, namespace, uid, ..Self::default() }
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
