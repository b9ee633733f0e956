//! Kinds of the objects of a manifest.

use std::fmt;

use kiyot_values::problems::shown;

use super::{WorkloadKind, place::Place};
use crate::files::Object;

/// Limit on the shown characters of a skipped document's kind, namespace and name: the length of a
/// DNS name.
const SHOWN_CHARS: usize = 253;
/// Version of the kinds without a group.
const CORE: &str = "v1";
/// Groups of workloads, in served and in removed versions.
const WORKLOAD_GROUPS: [&str; 4] = ["", "apps", "batch", "extensions"];
/// Ending of the groups of Kubernetes itself.
const KUBERNETES_GROUP: &str = ".k8s.io";
/// Groups of Kubernetes itself without the ending [`KUBERNETES_GROUP`].
const KUBERNETES_GROUPS: [&str; 6] = ["", "apps", "autoscaling", "batch", "extensions", "policy"];

/// Kind of an object that is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Pod,
    Workload(WorkloadKind),
}

impl Kind {
    /// Returns the kind with this name, and its version.
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
    /// Namespace.
    pub namespace: Option<String>,
    /// Name.
    pub name: Option<String>,
    /// True for a kind that Kubernetes itself defines.
    pub is_of_kubernetes: bool,
}

/// Object whose problem is reported.
#[derive(Debug)]
pub(super) struct Reported;

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, namespace, name, is_of_kubernetes } = self;
        f.write_str(kind)?;
        if let Some(name) = name {
            f.write_str(" ")?;
            namespace.iter().try_for_each(|namespace| write!(f, "{namespace}/"))?;
            f.write_str(name)?;
        }
        f.write_str(if *is_of_kubernetes {
            " skipped: it has no pod"
        } else {
            " skipped: its kind is no workload of Kubernetes"
        })
    }
}

/// Returns the kind of an object with pods. Reports a version that is no longer served.
pub(super) fn kind_of(object: &Object, at: &Place<'_>) -> Result<Option<Kind>, Reported> {
    let Some((kind, expected)) = Kind::of(&object.kind) else { return Ok(None) };
    if object.version == expected {
        return Ok(Some(kind));
    }
    if !WORKLOAD_GROUPS.contains(&group(&object.version)) {
        return Ok(None);
    }
    at.of("apiVersion")
        .field(object.version.as_str())
        .refuse(format!("is invalid; allowed: {expected:?}"));
    Err(Reported)
}

/// Returns the group of an `apiVersion`.
fn group(version: &str) -> &str {
    version.split_once('/').map_or("", |(group, _)| group)
}

impl Skipped {
    /// Reads only the identity of an object without pods.
    pub(super) fn of(object: &Object) -> Self {
        let text = |key| {
            let text = object.fields.get("metadata")?.get(key)?.as_str()?;
            Some(shown(SHOWN_CHARS, text)).filter(|text| !text.is_empty())
        };
        let group = group(&object.version);
        Self {
            kind: shown(SHOWN_CHARS, &object.kind),
            namespace: text("namespace"),
            name: text("name"),
            is_of_kubernetes: KUBERNETES_GROUPS.contains(&group)
                || group.ends_with(KUBERNETES_GROUP),
        }
    }
}

#[cfg(test)]
mod tests;
