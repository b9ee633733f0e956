//! `deploy/admission-policy.yaml`, evaluated as the API server evaluates it.

use std::{collections::HashMap, sync::Arc};

use cel::{Context, Env, extensions, objects::Value as CelValue};
use kiyot_kubernetes::{
    ShownCell,
    call::Call,
    object::{OwnerReference, render},
};
use kiyot_proto::admin;
use serde_json::{Value, json};

const POLICY: &str = include_str!("../../../../deploy/admission-policy.yaml");
/// Key of the node that a service account's token is bound to.
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";

/// A request for a cell, as admission sees it.
#[derive(Debug, Clone)]
struct Review {
    user: Value,
    operation: &'static str,
    resource: &'static str,
    old: Value,
    new: Value,
}

/// A review with the words of its denial; without words it is admitted.
type Row = (&'static str, Review, &'static str);

/// Evaluates an expression of CEL, with the extension of strings that the API server has.
fn evaluate(expression: &Value, variables: &HashMap<String, CelValue>) -> Result<CelValue, String> {
    let mut env = Env::stdlib();
    env.add_extension(extensions::strings).unwrap();
    let program = env.compile(expression.as_str().unwrap()).expect("the expression has no errors");
    let mut context = Context::with_env(Arc::new(env));
    for (name, value) in variables {
        context.add_variable_from_value(name.clone(), value.clone());
    }
    program.execute(&context).map_err(|error| error.to_string())
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// Returns the reason for which a policy denies a review; `None` if it admits it.
fn denied_by(policy: &Value, review: &Review) -> Option<String> {
    let spec = &policy["spec"];
    assert_eq!(spec["failurePolicy"], "Fail", "an error denies");
    let constraints = spec["matchConstraints"].as_object().unwrap();
    assert_eq!(constraints.keys().collect::<Vec<_>>(), ["resourceRules"], "others are not played");
    let is_matched = list(&constraints["resourceRules"]).iter().any(|rule| {
        [
            ("apiGroups", "kiyot.elotl.co"),
            ("apiVersions", "v1"),
            ("operations", review.operation),
            ("resources", review.resource),
        ]
        .iter()
        .all(|(key, value)| list(&rule[*key]).contains(&json!(value)))
    });
    if !is_matched {
        return None;
    }
    let value = |value: &Value| cel::to_value(value).unwrap();
    let request = json!({ "userInfo": review.user, "operation": review.operation });
    let mut known = HashMap::from([
        ("request".to_owned(), value(&request)),
        ("object".to_owned(), value(&review.new)),
        ("oldObject".to_owned(), value(&review.old)),
    ]);
    for condition in list(&spec["matchConditions"]) {
        match evaluate(&condition["expression"], &known) {
            Ok(CelValue::Bool(true)) => {}
            Ok(CelValue::Bool(false)) => return None,
            other => return Some(format!("{other:?}")),
        }
    }
    let mut variables = HashMap::<String, CelValue>::new();
    for variable in list(&spec["variables"]) {
        // An error is that of the validation that uses the variable.
        if let Ok(value) = evaluate(&variable["expression"], &known) {
            variables.insert(variable["name"].as_str().unwrap().to_owned(), value);
            known.insert("variables".to_owned(), CelValue::Map(variables.clone().into()));
        }
    }
    list(&spec["validations"]).iter().find_map(|validation| {
        match evaluate(&validation["expression"], &known) {
            Ok(CelValue::Bool(true)) => return None,
            Ok(CelValue::Bool(false)) => {}
            other => return Some(format!("{other:?}")),
        }
        let message = &validation["messageExpression"];
        let made = (!message.is_null()).then(|| evaluate(message, &known));
        Some(match made {
            Some(Ok(CelValue::String(text))) => text.to_string(),
            Some(other) => panic!("{message}: {other:?}"),
            None => validation["message"].as_str().unwrap().to_owned(),
        })
    })
}

/// Returns the policies of documents that a binding has deny.
fn bound(documents: &[Value]) -> Vec<Value> {
    let of_kind = |kind: &'static str| documents.iter().filter(move |own| own["kind"] == kind);
    let denies = |policy: &&Value| {
        of_kind("ValidatingAdmissionPolicyBinding").any(|binding| {
            let spec = binding["spec"].as_object().unwrap();
            // Without a selector, which would bind it to some objects alone.
            spec.keys().eq(["policyName", "validationActions"])
                && spec["policyName"] == policy["metadata"]["name"]
                && spec["validationActions"] == json!(["Deny"])
        })
    };
    of_kind("ValidatingAdmissionPolicy").filter(denies).cloned().collect()
}

fn policies() -> Vec<Value> {
    bound(&serde_saphyr::from_multiple::<Value>(POLICY).unwrap())
}

/// Returns the reviews whose outcome is not that of their row.
fn wrong(policies: &[Value], rows: &[Row]) -> Vec<String> {
    let outcome = |review| policies.iter().find_map(|policy| denied_by(policy, review));
    let wrong = rows.iter().filter_map(|(name, review, words)| {
        let denial = outcome(review);
        let is_right = match &denial {
            Some(denial) => !words.is_empty() && denial.contains(words),
            None => words.is_empty(),
        };
        (!is_right).then(|| format!("{name}: {denial:?}, expected {words:?}"))
    });
    wrong.collect()
}

/// Returns the object of a cell, as the daemon of its node applies it.
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

/// Returns a cell of worker-1 with another value in a field of its metadata; null removes it.
fn changed(field: &str, value: Value) -> Value {
    let mut cell = cell("worker-1");
    let metadata = cell["metadata"].as_object_mut().unwrap();
    match value {
        Value::Null => metadata.remove(field),
        value => metadata.insert(field.to_owned(), value),
    };
    cell
}

/// Returns a cell of worker-1 whose owner has another value in a field.
fn owned(field: &str, value: Value) -> Value {
    let mut cell = cell("worker-1");
    cell["metadata"]["ownerReferences"][0][field] = value;
    cell
}

fn token(node: &str) -> Value {
    json!({ "username": "system:serviceaccount:kiyot:kiyot", "extra": { NODE_NAME: [node] } })
}

fn kubelet(node: &str) -> Value {
    json!({ "username": format!("system:node:{node}"), "groups": ["system:nodes"] })
}

fn create(user: Value, new: Value) -> Review {
    Review { user, operation: "CREATE", resource: "cells", old: Value::Null, new }
}

fn update(user: Value, old: Value, new: Value) -> Review {
    Review { user, operation: "UPDATE", resource: "cells", old, new }
}

fn status(user: Value, cell: &Value) -> Review {
    Review { resource: "cells/status", ..update(user, cell.clone(), cell.clone()) }
}

fn delete(user: Value, old: Value) -> Review {
    Review { user, operation: "DELETE", resource: "cells", old, new: Value::Null }
}

fn rows() -> Vec<Row> {
    let own = || cell("worker-1");
    let other = || cell("worker-2");
    let me = || token("worker-1");
    let long = format!("{}.example", "x".repeat(63));
    let of_another = "cell of another node is neither written nor deleted";
    let of_no_node = "credentials name no node";
    let (name, label, owner) = ("name of a cell is", "label kiyot", "owner of a cell is");
    // A cell of worker-2 that is worker-1's by what its name, label and owner say.
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
    // Earlier daemons wrote no owner.
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
fn policy_admits_writes_and_deletions_of_the_own_nodes_cells_alone() {
    let wrong = wrong(&policies(), &rows());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Verifies K9.
#[test]
fn each_part_of_the_policy_denies_what_no_other_part_denies() {
    let (policies, rows) = (policies(), rows());
    let [policy] = &policies[..] else { panic!("{policies:?}") };
    for part in [
        "/spec/validations",
        "/spec/matchConstraints/resourceRules/0/operations",
        "/spec/matchConstraints/resourceRules/0/resources",
    ] {
        for number in 0..list(policy.pointer(part).unwrap()).len() {
            let mut without = policy.clone();
            without.pointer_mut(part).unwrap().as_array_mut().unwrap().remove(number);
            let wrong = wrong(&[without], &rows);
            let admitted = wrong.iter().filter(|wrong| wrong.contains(": None, ")).count();
            assert!(admitted > 0, "{part}, {number}: nothing more is admitted");
        }
    }
}
