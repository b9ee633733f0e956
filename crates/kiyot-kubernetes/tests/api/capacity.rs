//! The policies of `deploy/capacity.yaml`, evaluated like the API server does.

use serde_json::{Value, json};

use crate::policy::{
    Review, Row, assert_each_part_denies, denying, kubelet, mutated_by, mutating, named, token,
    wrong,
};

const POLICIES: &str = include_str!("../../../../deploy/capacity.yaml");
const KEY: &str = "kiyot.elotl.co/capacity";

/// Returns a Node object with the figures of its kubelet.
fn node(name: &str, label: Option<&str>, annotation: Option<&str>) -> Value {
    let mut node = json!({
        "metadata": { "name": name, "labels": {}, "annotations": { "example.org/a": "b" } },
        "status": {
            "capacity": { "cpu": "2", "memory": "8000000Ki", "ephemeral-storage": "50Gi" },
            "allocatable": { "cpu": "1930m", "memory": "7000000Ki", "ephemeral-storage": "45Gi" },
            "conditions": [{ "type": "Ready", "status": "True" }],
        },
    });
    node["metadata"]["labels"] = label.map_or(json!({}), |label| json!({ KEY: label }));
    if let Some(annotation) = annotation {
        node["metadata"]["annotations"][KEY] = json!(annotation);
    }
    node
}

fn declared(annotation: &str) -> Value {
    node("worker-1", Some("declared"), Some(annotation))
}

/// Returns the review of an update of a node's status.
fn update(user: Value, old: Value, new: Value) -> Review {
    Review { user, group: "", operation: "UPDATE", resource: "nodes/status", old, new }
}

/// Returns the review of an update by the kubelet.
fn by_kubelet(new: &Value) -> Review {
    update(kubelet("worker-1"), new.clone(), new.clone())
}

fn policy() -> Value {
    let policy = named(&mutating(POLICIES), "kiyot-capacity");
    assert_eq!(policy["spec"]["failurePolicy"], "Fail", "an error denies");
    policy
}

/// Texts of the annotation, with the resulting changes of capacity and of allocatable.
///
/// The API server refuses each update of the status if a policy sets other changes.
fn texts() -> Vec<(String, Value, Value)> {
    let same = |text: &str, figures: Value| (text.to_owned(), figures.clone(), figures);
    let mut texts = vec![
        same(
            "cpu=1000,memory=4000Gi,ephemeral-storage=20Ti,pods=250",
            json!({
                "cpu": "1000", "memory": "4000Gi", "ephemeral-storage": "20Ti", "pods": "250",
            }),
        ),
        same("nvidia.com/gpu=8,pod.elotl.co/cell=5", {
            json!({ "nvidia.com/gpu": "8", "pod.elotl.co/cell": "5" })
        }),
        same(
            "pod.elotl.co/memory=4000Gi,pod.elotl.co/ephemeral-storage=20Ti,pod.elotl.co/cpu=7",
            {
                json!({
                    "pod.elotl.co/memory": "4000Gi",
                    "pod.elotl.co/ephemeral-storage": "20Ti",
                    "pod.elotl.co/cpu": "7",
                })
            },
        ),
        // Other figures are ignored.
        same("cpu=-5,memory=64Gi,x,a.b/c=1.5", json!({ "memory": "64Gi" })),
        // The last figure counts.
        same("cpu=7,cpu=3,cpu=1", json!({ "cpu": "3" })),
        // Between the kubelet's two figures.
        ("cpu=2".to_owned(), json!({}), json!({ "cpu": "2" })),
        ("ephemeral-storage=47Gi".to_owned(), json!({}), json!({ "ephemeral-storage": "47Gi" })),
    ];
    let long_name = format!("{}b/c=5", "a.".repeat(64));
    let long_text = format!("cpu=5,{}", "x".repeat(1024));
    let kept = [
        "",
        ",,,",
        "cpu",
        "cpu=",
        "=5",
        "cpu=x",
        "cpu= 5",
        "cpu=5=6",
        "cpu=5;memory=64Gi",
        // Negative, 0, or less than the kubelet's figure.
        "cpu=-5",
        "memory=-64Gi",
        "a.b/c=-5",
        "cpu=0",
        "a.b/c=0",
        "cpu=1",
        "memory=5Gi",
        "ephemeral-storage=45Gi",
        // Fractions, and other forms of a quantity.
        "a.b/c=1.5",
        "a.b/c=500m",
        "pods=0.5",
        "cpu=5000m",
        "cpu=05",
        "cpu=1e3",
        "cpu=2Gi",
        "cpu=1000000",
        "memory=64000000000",
        "memory=64G",
        "pod.elotl.co/memory=64",
        "pod.elotl.co/ephemeral-storage=64",
        "memory=0x64Gi",
        // Names that an extended resource can't have.
        "storage=5Gi",
        "hugepages-2Mi=5Gi",
        "kubernetes.io/c=5",
        "example.kubernetes.io/c=5",
        "requests.a/c=5",
        "a..b/c=5",
        "a.-b/c=5",
        "A.b/c=5",
        "/c=5",
        "a.b/=5",
        "a.b/-c=5",
        "a.b/c/d=5",
        &long_name,
        &long_text,
    ];
    texts.extend(kept.map(|text| same(text, json!({}))));
    texts
}

/// Returns the texts with an unexpected outcome.
fn unexpected(policy: &Value) -> impl Iterator<Item = String> {
    texts().into_iter().filter_map(move |(text, capacity, allocatable)| {
        let given = declared(&text);
        let mut expected = given.clone();
        for (field, changes) in [("capacity", capacity), ("allocatable", allocatable)] {
            let figures = expected["status"][field].as_object_mut().unwrap();
            figures.extend(changes.as_object().unwrap().clone());
        }
        let found = mutated_by(policy, &by_kubelet(&given));
        (found.as_ref() != Ok(&expected)).then(|| format!("{text:?}: {found:?}"))
    })
}

/// Verifies K12.
#[test]
fn valid_figures_are_declared_and_other_texts_keep_the_kubelets() {
    let policy = policy();
    let unexpected: Vec<String> = unexpected(&policy).collect();
    assert!(unexpected.is_empty(), "{}", unexpected.join("\n"));
}

/// Verifies K12.
#[test]
fn each_check_of_the_figures_is_needed() {
    let text = policy().to_string();
    for (check, without) in [
        ("<= 1024", "<= 2048"),
        ("size(figure) == 2", "size(figure) > 1"),
        ("'ephemeral-storage', 'pod", "'storage', 'pod"),
        ("'pod.elotl.co/memory'", "''"),
        ("'pod.elotl.co/ephemeral-storage'] ?", "'memory'] ?"),
        ("^[1-9][0-9]{0,5}(Mi|Gi|Ti)$", "^[1-9][0-9]{0,5}.*$"),
        ("^[1-9][0-9]{0,5}(Mi|Gi|Ti)$", "[1-9][0-9]{0,5}(Mi|Gi|Ti)$"),
        ("^[1-9][0-9]{0,5}$", "[1-9][0-9]{0,5}$"),
        ("^[1-9][0-9]{0,5}$", "^[1-9][0-9]{0,5}"),
        ("^[1-9][0-9]{0,5}$", "^[1-9][0-9]*$"),
        ("['cpu', 'pods'] ||", "['cpu', 'pods', 'storage', ''] ||"),
        ("size(figure[0]) <= 128", "true"),
        ("'^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.]", "'^[A-Za-z0-9]([-a-z0-9]*[a-z0-9])?([.]"),
        ("([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/", "([.][-a-z0-9]+)*/"),
        ("([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/", "[.a-z0-9]*/"),
        ("[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$", "[-A-Za-z0-9_.]+$"),
        ("[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$", "[A-Za-z0-9].*$"),
        ("!figure[0].contains('kubernetes.io/')", "true"),
        ("!figure[0].startsWith('requests.')", "true"),
        ("quantity(object.status.capacity[", "quantity(object.status.allocatable["),
        ("quantity(object.status.allocatable[", "quantity(object.status.capacity["),
        ("/status/capacity/", "/status/allocatable/"),
        ("jsonpatch.escapeKey", "string"),
        (".orValue('0'))) > 0", ".orValue('0'))) > -2"),
    ] {
        assert!(text.contains(check), "{check} is absent");
        let policy = serde_json::from_str(&text.replace(check, without)).unwrap();
        assert!(unexpected(&policy).next().is_some(), "{check} is not needed");
    }
}

/// Returns the names of requests that give the node wrong figures.
fn unequal(policy: &Value) -> Vec<&'static str> {
    let given = declared("cpu=1000");
    let other = |label| node("worker-1", label, Some("cpu=1000"));
    let create = |new| Review { operation: "CREATE", resource: "nodes", ..by_kubelet(new) };
    let mut without_figures = given.clone();
    without_figures["status"] = json!({});
    let rows = [
        ("status", by_kubelet(&given), true),
        ("status by a daemon", update(token("worker-1"), other(None), given.clone()), true),
        ("registered", create(&given), true),
        ("node alone", Review { resource: "nodes", ..by_kubelet(&given) }, false),
        ("opted out", update(kubelet("worker-1"), given.clone(), other(None)), false),
        ("another value", update(kubelet("worker-1"), given.clone(), other(Some("no"))), false),
        ("never opted in", by_kubelet(&other(None)), false),
        ("without an annotation", by_kubelet(&node("worker-1", Some("declared"), None)), false),
        ("without figures", create(&without_figures), false),
    ];
    let unequal = rows.into_iter().filter(|(_, review, is_declared)| {
        let mut expected = review.new.clone();
        if *is_declared {
            for field in ["capacity", "allocatable"] {
                expected["status"][field]["cpu"] = json!("1000");
            }
        }
        mutated_by(policy, review) != Ok(expected)
    });
    unequal.map(|(name, ..)| name).collect()
}

/// Verifies K12.
#[test]
fn nodes_without_the_label_keep_their_figures() {
    assert_eq!(unequal(&policy()), <[&str; 0]>::default());
}

/// Verifies K12.
#[test]
fn each_condition_of_the_policy_is_needed() {
    for part in ["/spec/matchConditions", "/spec/matchConstraints/resourceRules"] {
        for number in 0..2 {
            let mut without = policy();
            without.pointer_mut(part).unwrap().as_array_mut().unwrap().remove(number);
            assert!(!unequal(&without).is_empty(), "{part}, {number}");
        }
    }
}

/// Returns a Node object with this value at a path; null removes the field.
fn changed(path: &str, value: Value) -> Value {
    let mut node = declared("cpu=5");
    let (parent, key) = path.rsplit_once('/').unwrap();
    let parent = node.pointer_mut(parent).unwrap().as_object_mut().unwrap();
    match value {
        Value::Null => parent.remove(&key.replace("~1", "/")),
        value => parent.insert(key.replace("~1", "/"), value),
    };
    node
}

fn rows() -> Vec<Row> {
    let own = || declared("cpu=5");
    let other = || node("worker-2", Some("declared"), Some("cpu=5"));
    let me = || token("worker-1");
    let to = |path: &str, value: Value| update(me(), own(), changed(path, value));
    let unbound = json!({ "username": "system:serviceaccount:kiyot:kiyot" });
    let with = |review: Review, resource| Review { resource, ..review };
    let (annotations, owners) = ("annotations of a node are", "owners and finalizers");
    let (labels, status) = ("labels of a node are not", "status of a node is not changed");
    let owner = json!([{ "apiVersion": "v1", "kind": "Pod", "name": "a", "uid": "b" }]);
    let mut rows = vec![
        ("declared", update(me(), node("worker-1", None, None), node("worker-1", None, None)), ""),
        ("annotation", to("/metadata/annotations/kiyot.elotl.co~1capacity", json!("cpu=6")), ""),
        ("withdrawn", to("/metadata/annotations/kiyot.elotl.co~1capacity", Value::Null), ""),
        ("capacity", to("/status/capacity/a.b~1c", json!("5")), ""),
        ("allocatable", to("/status/allocatable/cpu", json!("5")), ""),
        ("other node", update(me(), other(), other()), "status of node worker-2 is not written"),
        ("no node", update(unbound, own(), own()), "credentials name no node"),
        ("empty node", update(token(""), node("", None, None), node("", None, None)), "no node"),
        ("node alone", with(update(me(), own(), own()), "nodes"), "allowed is its status"),
        ("other annotation", to("/metadata/annotations/a", json!("b")), annotations),
        ("changed", to("/metadata/annotations/example.org~1a", json!("c")), annotations),
        ("removed", to("/metadata/annotations/example.org~1a", Value::Null), annotations),
        ("label", to("/metadata/labels/a", json!("b")), labels),
        ("label removed", to("/metadata/labels/kiyot.elotl.co~1capacity", Value::Null), labels),
        ("owner", to("/metadata/ownerReferences", owner), owners),
        ("finalizer", to("/metadata/finalizers", json!(["a.b/c"])), owners),
        ("condition removed", to("/status/conditions", Value::Null), status),
        ("kubelet", update(kubelet("worker-1"), own(), changed("/status/phase", json!("a"))), ""),
        (
            "administrator",
            update(
                json!({ "username": "admin" }),
                own(),
                changed("/metadata/labels/a", json!("b")),
            ),
            "",
        ),
    ];
    // The fields of a NodeStatus of Kubernetes 1.36, without capacity and allocatable.
    rows.extend(
        [
            ("addresses", "/status/addresses"),
            ("conditions", "/status/conditions"),
            ("config", "/status/config"),
            ("daemonEndpoints", "/status/daemonEndpoints"),
            ("declaredFeatures", "/status/declaredFeatures"),
            ("features", "/status/features"),
            ("images", "/status/images"),
            ("nodeInfo", "/status/nodeInfo"),
            ("phase", "/status/phase"),
            ("runtimeHandlers", "/status/runtimeHandlers"),
            ("volumesAttached", "/status/volumesAttached"),
            ("volumesInUse", "/status/volumesInUse"),
        ]
        .map(|(name, path)| (name, to(path, json!("a")), status)),
    );
    rows
}

/// Verifies K13.
#[test]
fn daemon_changes_only_the_capacity_of_its_own_node() {
    let wrong = wrong(&denying(POLICIES), &rows());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Verifies K13.
#[test]
fn each_part_of_the_policy_of_the_own_node_denies_what_no_other_part_denies() {
    let policies = denying(POLICIES);
    let [policy] = &policies[..] else { panic!("{policies:?}") };
    let parts = ["/spec/validations", "/spec/matchConstraints/resourceRules/0/resources"];
    assert_each_part_denies(policy, &parts, &rows());
}
