//! Calls of the API, as data. All calls of this crate are in this file, and `deploy/rbac.yaml`
//! permits them.

use http::Method;
use serde_json::{Value, json};

use crate::{
    label::{NODE_LABEL, node_value},
    object::{Cell, GROUP, VERSION},
};

/// Field manager under which the API server records kiyot's fields.
pub const FIELD_MANAGER: &str = "kiyot";
/// Bounds the objects in a part of a list.
const LIST_LIMIT: usize = 250;
/// Bounds the budgets in a part of a list. Each may have the shares of a thousand nodes.
const BUDGET_LIST_LIMIT: usize = 50;
/// Time after which the API server ends a watch, in seconds.
pub(crate) const WATCH_SECONDS: u64 = 300;
/// Content type of server-side apply. JSON is YAML.
const APPLY: &str = "application/apply-patch+yaml";
const JSON: &str = "application/json";
const MERGE_PATCH: &str = "application/merge-patch+json";

/// A call of the API.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// Verb and resource, in RBAC's terms.
    pub operation: &'static str,
    /// HTTP method.
    pub method: Method,
    /// Path and query.
    pub path: String,
    /// Type of the body.
    pub content_type: &'static str,
    /// Body, if any.
    pub body: Option<Value>,
}

impl Call {
    fn get(operation: &'static str, path: String) -> Self {
        Self { operation, method: Method::GET, path, content_type: JSON, body: None }
    }

    /// Lists a part of the objects at a path with a query, from a position, or the first part.
    fn list(operation: &'static str, path: String, position: Option<&str>) -> Self {
        Self::list_by(LIST_LIMIT, operation, format!("{path}&"), position)
    }

    fn list_by(
        limit: usize,
        operation: &'static str,
        path: String,
        position: Option<&str>,
    ) -> Self {
        let mut path = format!("{path}limit={limit}");
        if let Some(position) = position {
            path.push_str(&format!("&continue={}", encoded(position)));
        }
        Self::get(operation, path)
    }

    /// Reads a Node object.
    pub fn get_node(name: &str) -> Self {
        Self::get("get nodes", format!("/api/v1/nodes/{}", encoded(name)))
    }

    /// Lists the resources of admission policies that the API server serves. Every client has this
    /// right.
    pub fn get_admission_resources() -> Self {
        Self::get("get apis", "/apis/admissionregistration.k8s.io/v1".to_owned())
    }

    /// Applies name, labels, owner and spec of a cell. Creates the object if absent.
    pub fn apply_cell(cell: &Cell) -> Self {
        let metadata = &cell.metadata;
        let body = json!({
            "apiVersion": cell.api_version,
            "kind": cell.kind,
            "metadata": {
                "name": metadata.name,
                "labels": metadata.labels,
                "ownerReferences": metadata.owner_references,
            },
            "spec": cell.spec,
        });
        Self::apply("patch cells", cells_path(&metadata.name), body)
    }

    /// Applies the status of a cell with an object.
    pub fn apply_cell_status(cell: &Cell) -> Self {
        let body = json!({
            "apiVersion": cell.api_version,
            "kind": cell.kind,
            "metadata": { "name": cell.metadata.name },
            "status": cell.status,
        });
        let path = format!("{}/status", cells_path(&cell.metadata.name));
        Self::apply("patch cells/status", path, body)
    }

    /// Forces conflicts: only kiyot owns the fields, so that changes of other clients are reverted.
    fn apply(operation: &'static str, path: String, body: Value) -> Self {
        let path = format!("{path}?fieldManager={FIELD_MANAGER}&force=true");
        Self { operation, method: Method::PATCH, path, content_type: APPLY, body: Some(body) }
    }

    /// Lists a part of the cells of a node, from a position, or the first part.
    pub fn list_cells(node: &str, position: Option<&str>) -> Self {
        let selector = format!("{NODE_LABEL}={}", node_value(node));
        let path = format!("{}?labelSelector={}", cells_path(""), encoded(&selector));
        Self::list("list cells", path, position)
    }

    /// Deletes a cell's object, unless a later object has its name.
    pub fn delete_cell(name: &str, uid: &str) -> Self {
        let body = json!({
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": { "uid": uid },
        });
        Self {
            operation: "delete cells",
            method: Method::DELETE,
            path: cells_path(name),
            content_type: JSON,
            body: Some(body),
        }
    }

    /// Creates an event.
    pub fn create_event(namespace: &str, event: Value) -> Self {
        let path = events_path(namespace, "");
        let operation = "create events";
        Self { operation, method: Method::POST, path, content_type: JSON, body: Some(event) }
    }

    /// Changes the count of an event.
    pub fn patch_event(namespace: &str, name: &str, patch: Value) -> Self {
        let path = events_path(namespace, name);
        let operation = "patch events";
        Self {
            operation,
            method: Method::PATCH,
            path,
            content_type: MERGE_PATCH,
            body: Some(patch),
        }
    }

    /// Changes metadata and status of a Node object.
    pub fn patch_node_status(name: &str, patch: Value) -> Self {
        Self {
            operation: "patch nodes/status",
            method: Method::PATCH,
            path: format!("/api/v1/nodes/{}/status?fieldManager={FIELD_MANAGER}", encoded(name)),
            content_type: MERGE_PATCH,
            body: Some(patch),
        }
    }

    /// Lists a part of the pods of a node, from a position, or the first part.
    pub fn list_pods(node: &str, position: Option<&str>) -> Self {
        Self::list("list pods", pods_path(node), position)
    }

    /// Streams the changes of the pods of a node since a position.
    pub fn watch_pods(node: &str, position: &str) -> Self {
        Self::get("watch pods", format!("{}&{}", pods_path(node), watched_from(position)))
    }

    /// Lists a part of the budgets of all namespaces, from a position, or the first part.
    pub fn list_budgets(position: Option<&str>) -> Self {
        let path = format!("/apis/{GROUP}/{VERSION}/cellbudgets?");
        Self::list_by(BUDGET_LIST_LIMIT, "list cellbudgets", path, position)
    }

    /// Streams the changes of all budgets since a position.
    pub fn watch_budgets(position: &str) -> Self {
        let path = format!("/apis/{GROUP}/{VERSION}/cellbudgets?{}", watched_from(position));
        Self::get("watch cellbudgets", path)
    }

    /// Reads the newest version of a budget.
    pub fn get_budget(namespace: &str, name: &str) -> Self {
        Self::get("get cellbudgets", budget_path(namespace, name))
    }

    /// Changes the status of a budget, if the budget still has the version in the patch.
    pub fn patch_budget_status(namespace: &str, name: &str, patch: Value) -> Self {
        let path = budget_path(namespace, name);
        Self {
            operation: "patch cellbudgets/status",
            method: Method::PATCH,
            path: format!("{path}/status?fieldManager={FIELD_MANAGER}"),
            content_type: MERGE_PATCH,
            body: Some(patch),
        }
    }
}

/// Returns the parameters of a watch from a position.
fn watched_from(position: &str) -> String {
    format!(
        "watch=true&allowWatchBookmarks=true&timeoutSeconds={WATCH_SECONDS}&resourceVersion={}",
        encoded(position)
    )
}

fn budget_path(namespace: &str, name: &str) -> String {
    let (namespace, name) = (encoded(namespace), encoded(name));
    format!("/apis/{GROUP}/{VERSION}/namespaces/{namespace}/cellbudgets/{name}")
}

fn cells_path(name: &str) -> String {
    let separator = if name.is_empty() { "" } else { "/" };
    format!("/apis/{GROUP}/{VERSION}/cells{separator}{}", encoded(name))
}

fn events_path(namespace: &str, name: &str) -> String {
    let separator = if name.is_empty() { "" } else { "/" };
    format!("/api/v1/namespaces/{}/events{separator}{}", encoded(namespace), encoded(name))
}

fn pods_path(node: &str) -> String {
    format!("/api/v1/pods?fieldSelector={}", encoded(&format!("spec.nodeName={node}")))
}

/// Percent-encodes a text for a part of a path or of a query.
fn encoded(text: &str) -> String {
    let byte = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
            char::from(byte).to_string()
        }
        other => format!("%{other:02X}"),
    };
    text.bytes().map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_positions_are_encoded_in_paths() {
        let call = Call::list_cells("worker 1", Some("a&b=c/../d"));
        assert_eq!(
            call.path,
            format!(
                "/apis/kiyot.elotl.co/v1/cells?labelSelector=kiyot.elotl.co%2Fnode%3D{}&limit=250\
                 &continue=a%26b%3Dc%2F..%2Fd",
                node_value("worker 1")
            )
        );
        assert_eq!(Call::delete_cell("a/b?c", "u").path, "/apis/kiyot.elotl.co/v1/cells/a%2Fb%3Fc");
    }
}
