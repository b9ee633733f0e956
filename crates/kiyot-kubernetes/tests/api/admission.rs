//! `deploy/admission-policy.yaml`, evaluated like the API server does.

use kiyot_kubernetes::{
    ShownCell,
    call::Call,
    object::{GROUP, OwnerReference, render},
};
use kiyot_proto::admin;
use serde_json::{Value, json};

use crate::policy::{Review, Row, assert_each_part_denies, denying, kubelet, token, wrong};

const POLICY: &str = include_str!("../../../../deploy/admission-policy.yaml");

/// Returns the object of a cell that its node's daemon applies.
fn cell(node: &str) -> Value {
    let cell = admin::Cell {
        id: "cell-000000000001".to_owned(),
        node: node.to_owned(),
        backend: "milpa".to_owned(),
        ..admin::Cell::default()
    };
    let owner = OwnerReference::node(node, format!("uid of {node}"));
    Call::apply_cell(&render(&ShownCell { cell, ..ShownCell::default() }, &owner)).body.unwrap()
}

/// Returns a cell of worker-1 with this value in a field of its metadata; null removes the field.
fn changed(field: &str, value: Value) -> Value {
    let mut cell = cell("worker-1");
    let metadata = cell["metadata"].as_object_mut().unwrap();
    match value {
        Value::Null => metadata.remove(field),
        value => metadata.insert(field.to_owned(), value),
    };
    cell
}

/// Returns a cell of worker-1 whose owner has this value in a field.
fn owned(field: &str, value: Value) -> Value {
    let mut cell = cell("worker-1");
    cell["metadata"]["ownerReferences"][0][field] = value;
    cell
}

fn create(user: Value, new: Value) -> Review {
    Review { operation: "CREATE", ..update(user, Value::Null, new) }
}

fn update(user: Value, old: Value, new: Value) -> Review {
    Review { user, group: GROUP, operation: "UPDATE", resource: "cells", old, new }
}

fn status(user: Value, cell: &Value) -> Review {
    Review { resource: "cells/status", ..update(user, cell.clone(), cell.clone()) }
}

fn delete(user: Value, old: Value) -> Review {
    Review { operation: "DELETE", ..update(user, old, Value::Null) }
}

fn rows() -> Vec<Row> {
    let own = || cell("worker-1");
    let other = || cell("worker-2");
    let me = || token("worker-1");
    let long = format!("{}.example", "x".repeat(63));
    let of_another = "cell of another node is neither written nor deleted";
    let of_no_node = "credentials name no node";
    let (name, label, owner) = ("name of a cell is", "label kiyot", "owner of a cell is");
    // A cell of worker-2 that belongs to worker-1 by its name, label and owner.
    let disguised = || {
        let mut cell = own();
        cell["spec"]["nodeName"] = json!("worker-2");
        cell
    };
    let named = |name: &str| changed("name", json!(name));
    let other_labels = other()["metadata"]["labels"].clone();
    let owners = [own(), other()].map(|cell| cell["metadata"]["ownerReferences"][0].clone());
    let finished = changed("finalizers", json!(["example.org/a"]));
    let two = json!(["example.org/a", "example.org/b"]);
    // Earlier daemons set no owner.
    let former = || changed("ownerReferences", Value::Null);
    let unbound = json!({ "username": "system:serviceaccount:kiyot:kiyot" });
    let mut of_pod = unbound.clone();
    of_pod["extra"] = json!({ "authentication.kubernetes.io/pod-name": ["kiyot"] });
    let administrator = || json!({ "username": "kubernetes-admin", "groups": ["system:masters"] });
    let collector =
        json!({ "username": "system:serviceaccount:kube-system:generic-garbage-collector" });
    vec![
        ("own, token", create(me(), own()), ""),
        ("own, kubelet", create(kubelet("worker-1"), own()), ""),
        ("own again", update(me(), own(), own()), ""),
        ("own status", status(me(), &own()), ""),
        ("own deleted", delete(me(), own()), ""),
        ("own deleted, kubelet", delete(kubelet("worker-1"), own()), ""),
        ("own with a long name", create(token(&long), cell(&long)), ""),
        ("own of a former daemon deleted", delete(me(), former()), ""),
        ("own gets its owner", update(me(), former(), own()), ""),
        ("own gets another owner", update(me(), owned("uid", json!("former")), own()), ""),
        ("other made", create(me(), other()), "is not written by node worker-1"),
        ("other made, kubelet", create(kubelet("worker-1"), other()), "is not written by node"),
        ("other made with own name", create(me(), disguised()), "is not written by node worker-1"),
        ("other changed", update(me(), other(), other()), of_another),
        ("other taken over", update(me(), other(), own()), of_another),
        ("own given away", update(me(), own(), disguised()), "is not written by node worker-1"),
        ("other's status", status(me(), &other()), of_another),
        ("other deleted", delete(me(), other()), of_another),
        ("other deleted, kubelet", delete(kubelet("worker-1"), other()), of_another),
        ("name of another", create(me(), named("cell-1.worker-2")), name),
        ("name of a subdomain", create(me(), named("cell-1.a.worker-1")), name),
        ("name without a node", create(me(), named("cell-1")), name),
        ("no labels", create(me(), changed("labels", Value::Null)), label),
        ("no label", create(me(), changed("labels", json!({ "app": "web" }))), label),
        ("label removed", update(me(), own(), changed("labels", Value::Null)), label),
        ("label of another", create(me(), changed("labels", other_labels)), label),
        ("no owner", create(me(), former()), owner),
        ("owner removed", update(me(), own(), former()), owner),
        ("status without an owner", status(me(), &former()), owner),
        ("two owners", update(me(), own(), changed("ownerReferences", json!(owners))), owner),
        ("owner of another version", create(me(), owned("apiVersion", json!("v2"))), owner),
        ("owner of another kind", create(me(), owned("kind", json!("Pod"))), owner),
        ("owner is another node", create(me(), owned("name", json!("worker-2"))), owner),
        ("blocking owner", create(me(), owned("blockOwnerDeletion", json!(true))), owner),
        ("not blocking owner", create(me(), owned("blockOwnerDeletion", json!(false))), ""),
        ("finalizer", create(me(), finished.clone()), "finalizer"),
        ("finalizer added", update(me(), own(), finished.clone()), "finalizer"),
        ("finalizer of others kept", update(me(), finished.clone(), finished.clone()), ""),
        ("another finalizer", update(me(), finished, changed("finalizers", two)), "finalizer"),
        ("no node", create(unbound.clone(), own()), of_no_node),
        ("no node, deleted", delete(unbound, own()), of_no_node),
        ("pod of no node", status(of_pod, &own()), of_no_node),
        ("no name", create(kubelet(""), cell("")), of_no_node),
        ("administrator", delete(administrator(), other()), ""),
        ("administrator's object", create(administrator(), former()), ""),
        ("garbage collector", delete(collector, other()), ""),
    ]
}

/// Verifies K9.
#[test]
fn policy_admits_only_writes_and_deletions_of_the_own_nodes_cells() {
    let wrong = wrong(&denying(POLICY), &rows());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Verifies K9.
#[test]
fn each_part_of_the_policy_denies_what_no_other_part_denies() {
    let policies = denying(POLICY);
    let [policy] = &policies[..] else { panic!("{policies:?}") };
    let parts = [
        "/spec/validations",
        "/spec/matchConstraints/resourceRules/0/operations",
        "/spec/matchConstraints/resourceRules/0/resources",
    ];
    assert_each_part_denies(policy, &parts, &rows());
}
