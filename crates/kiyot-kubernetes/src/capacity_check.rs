//! Checks the parts of the Kubernetes API that declared capacity needs, with the daemons' rights.

use std::{sync::Arc, time::Duration};

use serde::Deserialize;
use tokio::time::timeout;

use crate::{
    call::Call,
    capacity::{Figures, KEY, Node},
    client::{Access, Client, LOAD_TIMEOUT},
    counter::Counter,
    failure::Failure,
};

/// Resource of policies that can raise figures.
const POLICIES: &str = "mutatingadmissionpolicies";
/// Annotations that prevent autoscalers from removing the node.
const KEEPING: [&str; 2] =
    ["cluster-autoscaler.kubernetes.io/scale-down-disabled", "karpenter.sh/do-not-disrupt"];

/// The resources of a version of an API group.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Resources {
    /// The resources.
    pub resources: Vec<Resource>,
}

/// A resource of an API group.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Resource {
    /// Plural name.
    pub name: String,
}

/// The configured capacity.
#[derive(Debug, Clone, Copy)]
pub struct Declared<'a> {
    /// Figures.
    pub figures: &'a Figures,
    /// True if the figures exceed the machine's. The node then needs the policy and a taint.
    pub exceeds_machine: bool,
}

/// Returns the parts that a node's declared capacity lacks. Each finding says what was found, why
/// it matters, and what is allowed.
pub fn findings(
    name: &str,
    node: &Node,
    served: &Resources,
    declared: Option<Declared<'_>>,
) -> Vec<String> {
    let is_declared = node.is_declared();
    let mut found = Vec::new();
    if !is_declared {
        if declared.is_some() {
            found.push(format!(
                "node {name}: has no label {KEY}=declared, so that kubernetes.capacity has no \
                 effect; allowed: this label"
            ));
        }
        return found;
    }
    let exceeds_machine = declared.is_none_or(|declared| declared.exceeds_machine);
    if exceeds_machine && !node.spec.taints.iter().any(|taint| taint.is_of_cells()) {
        found.push(format!(
            "node {name}: has no taint cri=kiyot:NoSchedule, so that pods that share its machine \
             come to it; allowed with declared capacity: this taint"
        ));
    }
    if exceeds_machine && !served.resources.iter().any(|resource| resource.name == POLICIES) {
        found.push(format!(
            "API server: does not serve {POLICIES} of admissionregistration.k8s.io/v1, so that no \
             capacity is declared; allowed: Kubernetes 1.36 and later"
        ));
    } else if let Some(declared) = declared {
        let lacking = node.lacks(declared.figures);
        if !lacking.is_empty() {
            found.push(format!(
                "node {name}: has less than {}, so that the policy kiyot-capacity is absent, or no \
                 daemon has declared it yet; allowed: deploy/capacity.yaml applied",
                lacking.join(",")
            ));
        }
    }
    for key in KEEPING {
        if node.metadata.annotations.get(key).is_none_or(|value| value != "true") {
            found.push(format!(
                "node {name}: has no annotation {key}: \"true\", so that an autoscaler may remove \
                 it as idle; allowed with declared capacity: this annotation"
            ));
        }
    }
    found
}

/// Reads a node and the served policies, and returns the parts that its declared capacity lacks.
pub async fn check(
    access: &Access,
    name: &str,
    declared: Option<Declared<'_>>,
) -> Result<Vec<String>, String> {
    let client = timeout(LOAD_TIMEOUT, Client::new(access, Arc::new(Uncounted))).await;
    let client = client.map_err(|_| "credentials were not read in time".to_owned())?;
    let client = client.map_err(|error| error.to_string())?;
    let node = client.object(&Call::get_node(name)).await;
    let node: Node = node.map_err(|failure| format!("node {name}: {failure}"))?;
    let served = match client.object(&Call::get_admission_resources()).await {
        Err(Failure::NotFound(_)) => Ok(Resources::default()),
        served => served,
    };
    let served = served.map_err(|failure| format!("resources of admission: {failure}"))?;
    Ok(findings(name, &node, &served, declared))
}

/// A counter for commands, which have no metrics.
#[derive(Debug)]
struct Uncounted;

impl Counter for Uncounted {
    fn called(&self, _: &'static str, _: &'static str, _: Duration) {}
    fn event_dropped(&self) {}
    fn budgets_read(&self) {}

    fn swept(&self, _outcome: &'static str) {}

    fn capacity_unapplied(&self, _: usize) {}
    fn cells_exhausted(&self, _: bool) {}
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Returns the findings for a complete node after a change.
    fn after(change: impl FnOnce(&mut Value, &mut Resources)) -> Vec<String> {
        declaring(true, change)
    }

    fn declaring(
        exceeds_machine: bool,
        change: impl FnOnce(&mut Value, &mut Resources),
    ) -> Vec<String> {
        let mut node = json!({
            "metadata": {
                "labels": { KEY: "declared" },
                "annotations": { KEEPING[0]: "true", KEEPING[1]: "true" },
            },
            "spec": { "taints": [{ "key": "cri", "value": "kiyot", "effect": "NoSchedule" }] },
            "status": { "allocatable": { "cpu": "1k" } },
        });
        let resources = vec![Resource { name: POLICIES.to_owned() }];
        let mut served = Resources { resources };
        change(&mut node, &mut served);
        let node = serde_json::from_value(node).unwrap();
        let figures = Figures::from([("cpu".to_owned(), 1000)]);
        findings("n", &node, &served, Some(Declared { figures: &figures, exceeds_machine }))
    }

    /// Verifies K32.
    #[test]
    fn each_part_that_a_node_lacks_is_named() {
        assert_eq!(after(|_, _| {}), Vec::<String>::new());
        type Change = fn(&mut Value, &mut Resources);
        let changes: [(Change, &str); 7] = [
            (|node, _| node["metadata"]["labels"] = json!({}), "has no label kiyot.elotl.co/"),
            (|node, _| node["spec"] = json!({}), "has no taint cri=kiyot:NoSchedule"),
            (
                |node, _| node["spec"]["taints"][0]["effect"] = json!("PreferNoSchedule"),
                "has no taint cri=kiyot:NoSchedule",
            ),
            (|_, served| served.resources.clear(), "does not serve mutatingadmissionpolicies"),
            (
                |node, _| node["status"]["allocatable"]["cpu"] = json!("999"),
                "has less than cpu=1000, so that the policy kiyot-capacity is absent",
            ),
            (
                |node, _| node["metadata"]["annotations"][KEEPING[0]] = json!("false"),
                "has no annotation cluster-autoscaler.kubernetes.io/scale-down-disabled: \"true\"",
            ),
            (
                |node, _| node["metadata"]["annotations"] = json!({ KEEPING[0]: "true" }),
                "has no annotation karpenter.sh/do-not-disrupt: \"true\"",
            ),
        ];
        for (change, expected) in changes {
            let lines = after(change);
            let [line] = lines.as_slice() else { panic!("{expected}: {lines:?}") };
            assert!(line.contains(expected) && line.contains("allowed"), "{line}");
        }
    }

    /// Verifies K32.
    #[test]
    fn capacity_within_the_machine_needs_neither_taint_nor_policy() {
        let lines = declaring(false, |node, served| {
            node["spec"] = json!({});
            served.resources.clear();
        });
        assert_eq!(lines, [""; 0]);
    }

    /// Verifies K32.
    #[test]
    fn node_without_declared_capacity_lacks_nothing() {
        assert_eq!(findings("n", &Node::default(), &Resources::default(), None), [""; 0]);
    }
}
