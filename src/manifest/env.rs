//! Environment variables of a container, as pkg/kubelet/kubelet_pods.go makes them.

use std::collections::{BTreeMap, HashMap};

use super::{
    Content, Metadata, Purpose,
    expand::{expand, expanded_bytes},
    metadata::dns_name,
    sources::{Sources, absent_key, absent_object},
};
use crate::problems::{Field, Problem, Report, Table};

/// Sources of a variable's value.
const VALUE_SOURCES: [&str; 5] =
    ["configMapKeyRef", "fieldRef", "fileKeyRef", "resourceFieldRef", "secretKeyRef"];
/// Sources that need a kubelet.
const SOURCES_OF_THE_KUBELET: [&str; 2] = ["fileKeyRef", "resourceFieldRef"];
/// Sources in objects: the field of `valueFrom`, that of `envFrom`, and the object's kind.
const OBJECTS: [(&str, &str, &str); 2] =
    [("configMapKeyRef", "configMapRef", "ConfigMap"), ("secretKeyRef", "secretRef", "Secret")];

/// Fields of an item of `envFrom`.
const ENV_FROM: [&str; 3] = ["configMapRef", "prefix", "secretRef"];

const FIELD_PATHS: &str = "metadata.name, metadata.namespace, metadata.uid, \
                           metadata.labels['KEY'], metadata.annotations['KEY']";

/// Bytes of a uid in hexadecimal digits and hyphens.
const UID_BYTES: usize = 36;

/// Value of a variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EnvValue {
    /// Text with `$(NAME)` of earlier variables.
    Template(String),
    /// Value of a key, in which nothing is replaced.
    Key(Content),
    /// Field of the pod.
    Field(PodField),
}

/// Field of a pod that a variable can have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodField {
    /// `metadata.name`
    Name,
    /// `metadata.namespace`
    Namespace,
    /// `metadata.uid`
    Uid,
    /// `metadata.labels['KEY']`
    Label(String),
    /// `metadata.annotations['KEY']`
    Annotation(String),
}

impl EnvValue {
    /// Returns the value in a pod, after earlier variables.
    pub(super) fn resolve(&self, pod: &Metadata, earlier: &HashMap<String, String>) -> String {
        match self {
            Self::Template(text) => expand(text, earlier),
            Self::Key(content) => String::from_utf8_lossy(&content.0).into_owned(),
            Self::Field(field) => field.value(pod).to_owned(),
        }
    }
}

impl EnvValue {
    /// Returns the bytes of the value in a pod, after earlier variables with these bytes. The uid
    /// may be another, of the usual length.
    pub(super) fn bytes(&self, pod: &Metadata, earlier: &HashMap<&str, u64>) -> u64 {
        match self {
            Self::Template(text) => expanded_bytes(text, earlier),
            Self::Key(content) => content.0.len() as u64,
            Self::Field(PodField::Uid) => pod.uid.len().max(UID_BYTES) as u64,
            Self::Field(field) => field.value(pod).len() as u64,
        }
    }
}

impl PodField {
    /// Reads the path of a `fieldRef`.
    fn of_path(path: &str) -> Option<Self> {
        let in_brackets = |start| path.strip_prefix(start)?.strip_suffix("']").map(str::to_owned);
        let label = in_brackets("metadata.labels['").map(Self::Label);
        let annotation = || in_brackets("metadata.annotations['").map(Self::Annotation);
        label.or_else(annotation).or(match path {
            "metadata.name" => Some(Self::Name),
            "metadata.namespace" => Some(Self::Namespace),
            "metadata.uid" => Some(Self::Uid),
            _ => None,
        })
    }

    /// Returns the field of a pod; an absent label or annotation is empty, as for the kubelet.
    fn value<'a>(&self, pod: &'a Metadata) -> &'a str {
        match self {
            Self::Name => &pod.name,
            Self::Namespace => &pod.namespace,
            Self::Uid => &pod.uid,
            Self::Label(key) => pod.labels.get(key).map_or("", String::as_str),
            Self::Annotation(key) => pod.annotations.get(key).map_or("", String::as_str),
        }
    }
}

/// Objects and fields that variables can refer to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Origins<'a> {
    /// Namespace of the pod.
    pub(super) namespace: &'a str,
    /// Objects of the manifest.
    pub(super) sources: &'a Sources,
    /// Explaining takes variables from objects of the cluster for absent.
    pub(super) purpose: Purpose,
}

impl Origins<'_> {
    /// Reads `env` and `envFrom`, in order: variables of `env` follow, and win.
    pub(super) fn read(self, table: &mut Table<'_>) -> Vec<(String, EnvValue)> {
        let mut variables = Vec::new();
        for item in table.take("envFrom").map(Field::items).unwrap_or_default() {
            if let Some(item) = item.table() {
                self.read_object(item, &mut variables);
            }
        }
        let own = table.take("env").map(Field::items).unwrap_or_default();
        variables.extend(own.into_iter().filter_map(|field| self.read_variable(field)));
        variables
    }

    /// Reads an item of `envFrom`: all keys of an object.
    fn read_object(self, mut item: Table<'_>, variables: &mut Vec<(String, EnvValue)>) {
        if self.purpose == Purpose::Explain {
            item.ignore(&ENV_FROM);
            return item.finish();
        }
        let prefix = item.take("prefix").and_then(Field::text).unwrap_or_default();
        for (_, key, kind) in OBJECTS {
            let Some(mut object) = item.take(key).and_then(Field::table) else { continue };
            let at = object.path_of("name");
            let name = object.need("name", "the name of an object in this file").and_then(dns_name);
            let is_optional = object.take("optional").and_then(Field::flag).unwrap_or_default();
            let report = object.report();
            object.finish();
            let Some(name) = name else { continue };
            let Some(keys) = self.keys(kind, &name, at, is_optional, report) else { continue };
            for (key, content) in keys {
                let variable = format!("{prefix}{key}");
                match value(content).filter(|_| is_name(&variable)) {
                    Some(value) => variables.push((variable, EnvValue::Key(value))),
                    None => report.add(Problem::new(
                        format!("{kind} {name}.{key}"),
                        "can't be a variable; allowed: a key of printable ASCII without \"=\", \
                         and a value in UTF-8",
                    )),
                }
            }
        }
        item.finish();
    }

    /// Reads a variable, whose value may be a secret.
    fn read_variable(self, field: Field<'_>) -> Option<(String, EnvValue)> {
        let mut table = field.table()?;
        let name = table.need("name", "a variable's name").and_then(Field::text);
        let source = table.take("valueFrom").and_then(Field::table);
        let value = table.take("value").map_or(Some(String::new()), |field| field.secret().text());
        table.finish();
        let value = match source {
            Some(source) => self.read_source(source),
            None => value.map(EnvValue::Template),
        };
        Some((name?, value?))
    }

    /// Reads `valueFrom`. `None` stands for an absent optional object or key, and for a problem.
    fn read_source(self, mut source: Table<'_>) -> Option<EnvValue> {
        if self.purpose == Purpose::Explain {
            source.ignore(&VALUE_SOURCES);
            source.finish();
            return None;
        }
        self.purpose.take_all(&mut source, &SOURCES_OF_THE_KUBELET);
        let mut value = None;
        for (key, _, kind) in OBJECTS {
            if let Some(table) = source.take(key).and_then(Field::table) {
                value = self.read_key(table, kind);
            }
        }
        if let Some(mut table) = source.take("fieldRef").and_then(Field::table) {
            // The version of the fields' names: v1 is the only version.
            table.take("apiVersion");
            let path = table.need("fieldPath", FIELD_PATHS);
            let field = path.and_then(|path| path.read(FIELD_PATHS, PodField::of_path));
            value = field.map(EnvValue::Field);
            table.finish();
        }
        source.finish();
        value
    }

    /// Reads `configMapKeyRef` or `secretKeyRef`.
    fn read_key(self, mut table: Table<'_>, kind: &str) -> Option<EnvValue> {
        let (name_at, key_at) = (table.path_of("name"), table.path_of("key"));
        let name = table.need("name", "the name of an object in this file").and_then(dns_name);
        let key = table.need("key", "a key of it").and_then(Field::text);
        let is_optional = table.take("optional").and_then(Field::flag).unwrap_or_default();
        let report = table.report();
        table.finish();
        let (name, key) = (name?, key?);
        let keys = self.keys(kind, &name, name_at, is_optional, report)?;
        let Some(content) = keys.get(&key) else {
            if !is_optional {
                report.add(absent_key(key_at, kind, &name, key));
            }
            return None;
        };
        let value = value(content);
        if value.is_none() {
            let rule = "can't be a variable; allowed: a key with a value in UTF-8";
            report.add(Problem::with_value(key_at, key, rule));
        }
        value.map(EnvValue::Key)
    }

    /// Returns the content of an object by key. Reports an absent object, unless it is optional.
    fn keys(
        &self,
        kind: &str,
        name: &str,
        at: String,
        is_optional: bool,
        report: &Report,
    ) -> Option<&BTreeMap<String, Content>> {
        let keys = self.sources.keys(kind, self.namespace, name);
        if keys.is_none() && !is_optional {
            report.add(absent_object(at, kind, self.namespace, name.to_owned()));
        }
        keys
    }
}

/// Returns a content that can be a value: text without NUL.
fn value(content: &Content) -> Option<Content> {
    let text = str::from_utf8(&content.0).ok()?;
    (!text.contains('\0')).then(|| content.clone())
}

/// Says if a key can name a variable (`RelaxedEnvironmentVariableValidation` of Kubernetes).
fn is_name(key: &str) -> bool {
    !key.is_empty() && key.bytes().all(|byte| (b' '..=b'~').contains(&byte) && byte != b'=')
}

#[cfg(test)]
mod tests;
