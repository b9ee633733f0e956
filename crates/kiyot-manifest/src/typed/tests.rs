use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ConfigMap, Container, Pod, PodSpec};
use serde_json::json;

use super::*;

/// Reads a pod's `spec`, with problems and notes.
fn spec(value: Value) -> (Option<PodSpec>, Vec<String>, Vec<String>) {
    let (report, notes) = (Report::default(), Report::default());
    let Value::Object(fields) = json!({ "spec": value }) else { unreachable!() };
    let pod: Option<Pod> = read(&Place::new("p", &report), fields, &notes);
    let texts = |report: Report| match report.finish("", ()) {
        Ok(()) => Vec::new(),
        Err(problems) => problems.list.iter().map(ToString::to_string).collect(),
    };
    (pod.and_then(|pod| pod.spec), texts(report), texts(notes))
}

fn container(value: Value) -> Container {
    let (spec, problems, notes) = spec(json!({ "containers": [value] }));
    assert!(problems.is_empty() && notes.is_empty(), "{problems:?} {notes:?}");
    spec.unwrap().containers.remove(0)
}

/// Returns the problem of a container.
fn problem(value: Value) -> String {
    let (spec, mut problems, _) = spec(json!({ "containers": [value] }));
    assert!(spec.is_none() && problems.len() == 1, "{problems:?}");
    problems.remove(0)
}

/// Verifies M13.
#[test]
fn null_is_the_empty_value_of_its_type() {
    let read = container(json!({
        "name": null, "args": [null, "a"], "env": null, "ports": [null], "tty": null,
        "resources": { "limits": { "cpu": null }, "requests": null }, "livenessProbe": null,
    }));
    assert_eq!((read.name.as_str(), read.tty, read.env), ("", None, None));
    assert_eq!(read.args.unwrap(), ["", "a"]);
    assert_eq!(read.ports.unwrap()[0].container_port, 0);
    let resources = read.resources.unwrap();
    assert_eq!((resources.limits.unwrap()["cpu"].0.as_str(), resources.requests), ("0", None));
    let (read, problems, _) = spec(json!({
        "containers": [], "securityContext": { "supplementalGroups": [null, 1] },
    }));
    let groups = read.and_then(|spec| spec.security_context?.supplemental_groups);
    assert_eq!((groups, problems), (Some(vec![0, 1]), Vec::new()));
    let (report, notes) = (Report::default(), Report::default());
    let Value::Object(fields) = json!({ "data": { "a": null, "b": "" } }) else { unreachable!() };
    let map: ConfigMap = super::read(&Place::new("m", &report), fields, &notes).unwrap();
    let empty = |key: &str| (key.to_owned(), String::new());
    assert_eq!(map.data, Some(BTreeMap::from([empty("a"), empty("b")])));
}

/// Verifies M13.
#[test]
fn number_is_a_quantity_and_a_port() {
    let read = container(json!({
        "name": "c", "resources": { "limits": { "cpu": 0.1, "memory": 1e9, "a.b/c": "1" } },
        "livenessProbe": { "httpGet": { "port": 80 } }, "readinessProbe": { "grpc": { "port": 1 } },
    }));
    let limits = read.resources.unwrap().limits.unwrap();
    assert_eq!(
        ["cpu", "memory", "a.b/c"].map(|name| limits[name].0.as_str()),
        ["0.1", "1000000000", "1"]
    );
}

/// Verifies M13.
#[test]
fn value_of_another_type_is_named_by_its_place_and_what_is_allowed() {
    let at = "p.spec.containers[0]";
    for (value, expected) in [
        (json!({ "name": 1.1 }), ".name = 1.1: is invalid; allowed: a text in quotes"),
        (json!({ "tty": "yes" }), ".tty = \"yes\": is invalid; allowed: true or false"),
        (json!({ "args": "a" }), ".args = \"a\": is invalid; allowed: a list"),
        (json!({ "args": [1] }), ".args[0] = 1: is invalid; allowed: a text in quotes"),
        (json!({ "resources": 1 }), ".resources = 1: is invalid; allowed: a table"),
        (json!([]), " = []: is invalid; allowed: a table"),
        (
            json!({ "ports": [{ "containerPort": "80" }] }),
            ".ports[0].containerPort = \"80\": is invalid; allowed: a whole number from \
             -2147483648 to 2147483647",
        ),
        (
            json!({ "livenessProbe": { "httpGet": { "port": 1.5 } } }),
            ".livenessProbe.httpGet.port: is invalid; allowed: a value of its type in Kubernetes",
        ),
        (
            json!({ "env": [{ "name": "A", "value": 1 }] }),
            ".env[0].value: is invalid; allowed: a text in quotes",
        ),
    ] {
        assert_eq!(problem(value), format!("{at}{expected}"));
    }
}

/// Verifies M12.
#[test]
fn items_and_keys_are_limited() {
    let list = |items: usize| json!({ "args": vec!["a"; items] });
    assert_eq!(container(list(MAX_ITEMS)).args.unwrap().len(), MAX_ITEMS);
    assert_eq!(
        problem(list(MAX_ITEMS + 1)),
        "p.spec.containers[0].args: has 1025 items; allowed: 1024"
    );
    let all = |lists: usize| spec(json!({ "containers": vec![list(MAX_ITEMS); lists] }));
    let fitting = MAX_ALL_ITEMS / (MAX_ITEMS + 1);
    assert!(all(fitting).0.is_some());
    let (_, problems, _) = all(fitting + 1);
    let rule = "is too long beside other lists; allowed: 40000 items in all";
    assert_eq!(problems, [format!("p.spec.containers[{fitting}].args: {rule}")]);
    let keys: Map<String, Value> =
        (0..=MAX_ENTRIES).map(|key| (key.to_string(), "".into())).collect();
    let (_, problems, _) = spec(json!({ "nodeSelector": keys }));
    assert_eq!(problems, ["p.spec.nodeSelector: has 10001 keys; allowed: 10000"]);
}
