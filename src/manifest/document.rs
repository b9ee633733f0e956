//! Documents of a manifest, and the items of its lists.

use std::fmt;

use super::WorkloadKind;
use crate::problems::{Field, Problem, Table, shown};

/// Most documents and items of lists of a manifest, empty ones included.
pub(super) const MAX_DOCUMENTS: usize = 10_000;

/// Characters of kind, namespace and name of a document that is skipped: those of a DNS name.
const SHOWN_CHARS: usize = 253;
/// Kind of lists; those of one kind end with it.
const LIST: &str = "List";
/// Version of the kinds without a group.
const CORE: &str = "v1";
/// Groups of workloads, today and in versions that are no longer served.
const WORKLOAD_GROUPS: [&str; 4] = ["", "apps", "batch", "extensions"];
/// Ending of the groups of Kubernetes itself.
const KUBERNETES_GROUP: &str = ".k8s.io";
/// Groups of Kubernetes itself without this ending.
const KUBERNETES_GROUPS: [&str; 6] = ["", "apps", "autoscaling", "batch", "extensions", "policy"];

/// Kind of a document that is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Pod,
    Workload(WorkloadKind),
}

impl Kind {
    /// Returns a kind with its version.
    fn of(name: &str) -> Option<(Self, &'static str)> {
        if name == "Pod" {
            return Some((Self::Pod, CORE));
        }
        let workload = WorkloadKind::ALL.iter().find(|(_, workload, _)| *workload == name);
        workload.map(|(kind, _, version)| (Self::Workload(*kind), *version))
    }
}

/// Document of a kind without pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped {
    /// Kind.
    pub kind: String,
    /// Namespace; empty if absent.
    pub namespace: String,
    /// Name; empty if absent.
    pub name: String,
    /// Set for a kind that Kubernetes defines itself.
    pub is_of_kubernetes: bool,
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, namespace, name, is_of_kubernetes } = self;
        f.write_str(kind)?;
        if !name.is_empty() {
            let slash = if namespace.is_empty() { "" } else { "/" };
            write!(f, " {namespace}{slash}{name}")?;
        }
        f.write_str(if *is_of_kubernetes {
            " skipped: it has no pod"
        } else {
            " skipped: its kind is no workload of Kubernetes"
        })
    }
}

/// Documents of a manifest.
#[derive(Debug, Default)]
pub(super) struct Documents<'r> {
    /// Documents and items of lists so far.
    count: usize,
    /// Documents with pods, in order.
    pub(super) known: Vec<(Kind, Table<'r>)>,
    /// Documents of other kinds, in order.
    pub(super) skipped: Vec<Skipped>,
}

/// List that a document is an item of.
struct List {
    /// Kind and version of items without their own.
    item: Option<(String, String)>,
}

impl<'r> Documents<'r> {
    /// Says if there are more than [`MAX_DOCUMENTS`], which is reported.
    pub(super) fn are_too_many(&self) -> bool {
        self.count > MAX_DOCUMENTS
    }

    /// Adds a document of a file.
    pub(super) fn read(&mut self, field: Field<'r>) {
        self.read_item(field, None);
    }

    /// Adds a document, or the items of a list. Lists don't nest.
    fn read_item(&mut self, field: Field<'r>, list: Option<&List>) {
        if self.are_too_many() {
            return;
        }
        self.count += 1;
        if self.are_too_many() {
            let rule = format!("is one document too many; allowed: {MAX_DOCUMENTS}");
            return field.report().add(Problem::new(field.at(), rule));
        }
        if list.is_none() && field.is_null() {
            return;
        }
        let Some(mut table) = field.table() else { return };
        let inherited = list.and_then(|list| list.item.as_ref()).filter(|_| !table.has("kind"));
        let (kind, version) = if let Some((kind, version)) = inherited {
            table.ignore(&["kind", "apiVersion"]);
            (kind.clone(), version.clone())
        } else {
            let Some(kind) = read_kind(&mut table, list.is_some()) else { return };
            let Some(version) = read_version(&mut table, &kind) else { return };
            (kind, version)
        };
        if kind == LIST || (kind.ends_with(LIST) && table.has("items")) {
            return self.read_list(table, &kind, &version);
        }
        match Kind::of(&kind) {
            Some((known, expected)) if version == expected => self.known.push((known, table)),
            _ => self.skipped.push(skipped(kind, &version, table)),
        }
    }

    fn read_list(&mut self, mut table: Table<'r>, kind: &str, version: &str) {
        let item = kind.strip_suffix(LIST).filter(|item| !item.is_empty());
        let list = List { item: item.map(|item| (item.to_owned(), version.to_owned())) };
        let items = table.need("items", "a list of documents");
        let items = items.map(|items| items.items_up_to(MAX_DOCUMENTS));
        // The list's metadata, for paging.
        table.take("metadata");
        table.finish();
        for item in items.unwrap_or_default() {
            self.read_item(item, Some(&list));
        }
    }
}

/// Reads the kind of a document.
fn read_kind(table: &mut Table<'_>, is_item: bool) -> Option<String> {
    let fits = |text: &str| !text.is_empty() && (text != LIST || !is_item);
    table
        .need("kind", "a kind such as Pod, Deployment or List")?
        .read(if is_item { "any kind but List" } else { "a kind" }, |text| {
            fits(text).then(|| text.to_owned())
        })
}

/// Reads the version of a document, which must be the served one for a kind that is read.
fn read_version(table: &mut Table<'_>, kind: &str) -> Option<String> {
    let expected = if kind == LIST { Some(CORE) } else { Kind::of(kind).map(|(_, own)| own) };
    let field = table.need("apiVersion", expected.unwrap_or("a version"))?;
    let Some(expected) = expected else { return field.text() };
    let is_other = |text: &str| !WORKLOAD_GROUPS.contains(&group(text));
    field.read(&format!("{expected:?}"), |text| {
        (text == expected || is_other(text)).then(|| text.to_owned())
    })
}

/// Returns the group of an `apiVersion`.
fn group(version: &str) -> &str {
    version.split_once('/').map_or("", |(group, _)| group)
}

/// Reads the identity of a document without pods, and nothing else.
fn skipped(kind: String, version: &str, mut table: Table<'_>) -> Skipped {
    let mut metadata = table.take("metadata").and_then(Field::table);
    let mut text = |key| {
        metadata
            .as_mut()
            .and_then(|table| table.take(key))
            .and_then(Field::text)
            .map(|text| shown(SHOWN_CHARS, text))
            .unwrap_or_default()
    };
    let (namespace, name) = (text("namespace"), text("name"));
    let kind = shown(SHOWN_CHARS, kind);
    let group = group(version);
    let is_of_kubernetes = KUBERNETES_GROUPS.contains(&group) || group.ends_with(KUBERNETES_GROUP);
    Skipped { kind, namespace, name, is_of_kubernetes }
}

#[cfg(test)]
mod tests;
