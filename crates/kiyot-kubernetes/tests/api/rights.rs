//! The rights of `deploy/rbac.yaml` and the definition of `deploy/crds`, compared with the calls.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use kiyot_kubernetes::{
    PodInformer, Publisher, ShownCell,
    object::{self, Cell, OwnerReference},
};
use kiyot_proto::admin::{self, CellPhase::CellBound};
use kiyot_testkit::{
    ApiFault, ApiServer, LIMIT, Recorded, Verb, log::CapturedLog, wait_for, wait_until,
};
use serde_json::{Value, json};

use crate::{
    budgets::{Holder, keep, put_budget},
    declarer::{declare, put_declared_node},
    world::{Calls, Daemon, NODE, api, definition, options, wait_for_cells},
};

const RBAC: &str = include_str!("../../../../deploy/rbac.yaml");
const CAPACITY: &str = include_str!("../../../../deploy/capacity.yaml");

/// A right: group, resource with its subresource, and verb.
type Right = (String, String, String);

/// Returns the rights of the daemons' roles.
fn granted() -> BTreeSet<Right> {
    let read = |file| serde_saphyr::from_multiple::<Value>(file).unwrap();
    let documents = [read(RBAC), read(CAPACITY)].concat();
    let mut rights = BTreeSet::new();
    for role in documents.iter().filter(|document| {
        let (kind, name) = (document["kind"].as_str().unwrap(), &document["metadata"]["name"]);
        kind.ends_with("Role") && ["kiyot", "kiyot-capacity"].iter().any(|own| name == own)
    }) {
        assert!(role["metadata"]["namespace"].is_null(), "no call needs a right in a namespace");
        for rule in role["rules"].as_array().unwrap() {
            let texts = |name: &str| -> Vec<String> {
                let texts = rule[name].as_array().unwrap().iter();
                texts.map(|text| text.as_str().unwrap().to_owned()).collect()
            };
            for group in texts("apiGroups") {
                for resource in texts("resources") {
                    for verb in texts("verbs") {
                        rights.insert((group.clone(), resource.clone(), verb));
                    }
                }
            }
        }
    }
    rights
}

/// Returns the rights that the recorded requests need.
fn needed(api: &ApiServer) -> BTreeSet<Right> {
    let mut rights = BTreeSet::new();
    for recorded in api.recorded() {
        let request = recorded.request;
        let resource = match request.subresource.as_str() {
            "" => request.resource.clone(),
            subresource => format!("{}/{subresource}", request.resource),
        };
        let mut need = |verb: &str| {
            let (group, resource) = (request.group.clone(), resource.clone());
            rights.insert((group, resource, verb.to_owned()));
        };
        need(request.verb.word());
        // A patch that creates an object needs both rights.
        if request.verb == Verb::Patch && recorded.status == 201 {
            need(Verb::Create.word());
        }
    }
    rights
}

/// Verifies K9, K10.
#[tokio::test]
async fn daemons_have_exactly_the_rights_that_their_calls_need() {
    let api = api().await;
    api.put("pods", pod("web", "uid-web", "2Gi"));
    let access = options(&api).access;
    let calls = Calls::new();
    let counter = Arc::clone(&calls) as _;
    let informer = PodInformer::start(access, "worker-1".to_owned(), None, counter);
    put_declared_node(&api, json!({}));
    let _declarer = declare(&api, &informer, &calls);
    let holder = Holder::with_order(1, 1);
    put_budget(&api, "web", "2", "u");
    let _keeper = keep(&api, NODE, &holder, &calls);
    let daemon = Daemon::new();
    let counter = Arc::clone(&calls) as _;
    let _publisher = Publisher::start(options(&api), Arc::clone(&daemon) as _, counter);
    daemon.set(0, CellBound);
    daemon.set(1, CellBound);
    wait_for_cells(&api, &[(0, "Bound"), (1, "Bound")]).await;
    daemon.end(1);
    daemon.tell(0, "LaunchFailed", "no capacity");
    wait_until("the event is reported", LIMIT, async || {
        api.objects("events").keys().any(|event| event.starts_with("default/web-0.")).then_some(())
    })
    .await;
    daemon.tell(0, "LaunchFailed", "no capacity");
    wait_until("each right is used", LIMIT, async || (needed(&api) == granted()).then_some(()))
        .await;
    let requests = wait_until("requests of the pod are known", LIMIT, async || {
        informer.requests("uid-web", Duration::from_millis(100)).await
    })
    .await;
    assert_eq!(requests.memory.request, 2 << 30);
    for operation in [
        "get nodes",
        "patch cells",
        "patch cells/status",
        "list cells",
        "delete cells",
        "create events",
        "patch events",
        "patch nodes/status",
        "list cellbudgets",
        "watch cellbudgets",
        "get cellbudgets",
        "patch cellbudgets/status",
        "list pods",
        "watch pods",
    ] {
        // The API server records a call before its response is counted.
        wait_for(operation, || calls.of(operation, "ok") > 0).await;
    }
}

pub(crate) fn pod(name: &str, uid: &str, memory: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "namespace": "default", "uid": uid },
        "spec": {
            "nodeName": "worker-1",
            "containers": [{ "name": "main", "resources": { "requests": { "memory": memory } } }],
        },
    })
}

/// Verifies K10.
#[tokio::test]
async fn requests_follow_changes_expired_watches_and_restarts() {
    let mut api = ApiServer::start(&[]).await;
    let limit = Duration::from_millis(100);
    let pause = Some(Duration::from_millis(20));
    let access = options(&api).access;
    let informer = PodInformer::start(access, "worker-1".to_owned(), pause, Calls::new());
    let memory_is = async |uid: &str, expected: Option<u64>| {
        wait_until(format!("memory of {uid} is {expected:?}"), LIMIT, async || {
            let known = informer.requests(uid, limit).await;
            (known.map(|known| known.memory.request >> 20) == expected).then_some(())
        })
        .await;
    };
    api.put("pods", pod("a", "uid-a", "64Mi"));
    memory_is("uid-a", Some(64)).await;
    let mut of_another_node = pod("b", "uid-b", "64Mi");
    of_another_node["spec"]["nodeName"] = json!("worker-2");
    api.put("pods", of_another_node);
    api.put("pods", pod("a", "uid-a", "128Mi"));
    memory_is("uid-a", Some(128)).await;
    memory_is("uid-b", None).await;
    // The watch expires, and changes are lost.
    api.delete("pods", "default/a");
    api.compact();
    memory_is("uid-a", None).await;
    api.put("pods", pod("c", "uid-c", "32Mi"));
    memory_is("uid-c", Some(32)).await;
    api.stop().await;
    api.put("pods", pod("d", "uid-d", "16Mi"));
    // Known requests stay known.
    memory_is("uid-c", Some(32)).await;
    api.restart().await;
    memory_is("uid-d", Some(16)).await;
}

/// Verifies K10.
#[tokio::test]
async fn watches_that_end_at_once_are_not_renewed_at_once() {
    const WATCHES: u32 = 6;
    let api = ApiServer::start(&[]).await;
    api.fail(Some(Verb::Watch), "pods", usize::MAX, ApiFault::Ended);
    let (begun, pause) = (Instant::now(), Duration::from_millis(100));
    let (calls, access) = (Calls::new(), options(&api).access);
    let counter = Arc::clone(&calls) as _;
    let _informer = PodInformer::start(access, "worker-1".to_owned(), Some(pause), counter);
    let last = wait_until("watches were renewed", LIMIT, async || {
        let is_watch = |recorded: &Recorded| recorded.request.verb == Verb::Watch;
        let mut watches = api.recorded().into_iter().filter(is_watch);
        watches.nth(WATCHES as usize - 1).map(|watch| watch.at)
    })
    .await;
    assert!(last.duration_since(begun) >= pause * (WATCHES - 1), "{calls:?}");
}

/// Verifies K6, K10.
#[tokio::test]
async fn watches_that_break_without_a_change_are_logged_once_and_repeated_after_growing_pauses() {
    let log = CapturedLog::start();
    let api = ApiServer::start(&[]).await;
    api.fail(Some(Verb::Watch), "pods", usize::MAX, ApiFault::Cut);
    let (calls, access) = (Calls::new(), options(&api).access);
    let (pause, counter) = (Duration::from_millis(50), Arc::clone(&calls) as _);
    let informer = PodInformer::start(access, "worker-1".to_owned(), Some(pause), counter);
    let watches = wait_until("watches were repeated", LIMIT, async || {
        let is_watch = |recorded: &Recorded| recorded.request.verb == Verb::Watch;
        let watches: Vec<_> = api.recorded().into_iter().filter(is_watch).collect();
        (watches.len() > 4).then_some(watches)
    })
    .await;
    for (number, two) in watches.windows(2).take(4).enumerate() {
        let between = two[1].at.duration_since(two[0].at);
        assert!(between >= pause * (1 << number), "{number}: {between:?}");
    }
    assert!(calls.of("watch pods", "ok") > 3, "response headers were received: {calls:?}");
    let logged = |text: &str| log.lines().iter().filter(|line| line.contains(text)).count();
    assert_eq!((logged("are not read"), logged("again")), (1, 0), "{:?}", log.lines());

    // Received changes end the series of failures.
    api.heal();
    wait_until("the watch has a change", LIMIT, async || {
        api.put("pods", pod("a", "uid-a", "64Mi"));
        (logged("again") == 1).then_some(())
    })
    .await;
    assert!(informer.requests("uid-a", LIMIT).await.is_some());
    assert_eq!(logged("are not read"), 1, "{:?}", log.lines());
}

/// Verifies K6, K10.
#[tokio::test]
async fn refused_watch_waits_as_long_as_the_api_server_asks_and_logs_the_reason() {
    let log = CapturedLog::start();
    let api = ApiServer::start(&[]).await;
    api.fail(Some(Verb::Watch), "pods", 1, ApiFault::Status(429, Some(2)));
    let (access, pause) = (options(&api).access, Duration::from_millis(20));
    let _informer = PodInformer::start(access, "worker-1".to_owned(), Some(pause), Calls::new());
    let watches = wait_until("the watch is repeated", LIMIT, async || {
        let is_watch = |recorded: &Recorded| recorded.request.verb == Verb::Watch;
        let watches: Vec<_> = api.recorded().into_iter().filter(is_watch).collect();
        (watches.len() > 1).then_some(watches)
    })
    .await;
    assert_eq!(watches[0].status, 429);
    assert!(watches[1].at.duration_since(watches[0].at) >= Duration::from_secs(2), "{watches:?}");
    let reasons = ["too many calls: played failure"].map(|text| {
        log.lines()
            .iter()
            .filter(|line| line.contains("are not read") && line.contains(text))
            .count()
    });
    assert_eq!(reasons, [1], "{:?}", log.lines());
}

/// Verifies K6, K10.
#[tokio::test]
async fn lists_and_watches_whose_position_always_expires_are_repeated_after_growing_pauses() {
    for verb in [Verb::List, Verb::Watch] {
        let log = CapturedLog::start();
        let api = ApiServer::start(&[]).await;
        api.fail(Some(verb), "pods", usize::MAX, ApiFault::Status(410, None));
        let (access, pause) = (options(&api).access, Duration::from_millis(50));
        let _informer =
            PodInformer::start(access, "worker-1".to_owned(), Some(pause), Calls::new());
        let failed = wait_until(format!("{verb:?} is repeated"), LIMIT, async || {
            let is_failed = |recorded: &Recorded| recorded.request.verb == verb;
            let failed: Vec<_> = api.recorded().into_iter().filter(is_failed).collect();
            (failed.len() > 5).then_some(failed)
        })
        .await;
        // After the first expiry of a watch, a list begins again.
        for (number, two) in failed[1..].windows(2).take(4).enumerate() {
            let between = two[1].at.duration_since(two[0].at);
            assert!(between >= pause * (1 << number), "{verb:?}, {number}: {between:?}");
        }
        let logged = |text: &str| log.lines().iter().filter(|line| line.contains(text)).count();
        assert_eq!((logged("are not read"), logged("again")), (1, 0), "{:?}", log.lines());
    }
}

/// Verifies K10.
#[tokio::test]
async fn lookup_without_access_does_not_wait() {
    let api = ApiServer::start(&[]).await;
    let begun = std::time::Instant::now();
    std::fs::remove_file(api.kubeconfig()).unwrap();
    let informer =
        PodInformer::start(options(&api).access, "worker-1".to_owned(), None, Calls::new());
    assert_eq!(informer.requests("uid", LIMIT).await, None);
    assert!(begun.elapsed() < LIMIT);
}

/// Asserts that the version of a definition has a status and a structural schema. The schema's
/// fields must be the fields of `object` and `unwritten`. Returns the fields of `object`.
pub(crate) fn assert_schema_has_every_field_of(
    version: &Value,
    object: &Value,
    unwritten: &[&str],
) -> BTreeSet<String> {
    assert_eq!((&version["name"], &version["subresources"]["status"]), (&json!("v1"), &json!({})));
    let schema = &version["schema"]["openAPIV3Schema"];
    let mut faults = Vec::new();
    structural(schema, "", &mut faults);
    assert!(faults.is_empty(), "{faults:?}");
    let mut paths = Vec::new();
    fields(object, "", &mut paths);
    let unknown: Vec<_> = paths.iter().filter(|path| at(schema, path).is_none()).collect();
    assert!(unknown.is_empty(), "fields that the schema lacks: {unknown:?}");
    let written: BTreeSet<_> = paths.into_iter().collect();
    let mut known = Vec::new();
    schema_fields(schema, "", &mut known);
    let never: Vec<_> = known
        .iter()
        .filter(|path| !written.contains(*path) && !unwritten.contains(&path.as_str()))
        .collect();
    assert!(never.is_empty(), "fields of the schema that are never written: {never:?}");
    written
}

/// Verifies K4.
#[test]
fn definition_is_structural_and_has_every_field_of_the_object() {
    let definition = definition();
    assert_eq!(definition["metadata"]["name"], "cells.kiyot.elotl.co");
    assert_eq!(definition["spec"]["scope"], "Cluster");
    assert_eq!(definition["spec"]["names"]["shortNames"], json!(["cl"]));
    let version = &definition["spec"]["versions"][0];
    let written = assert_schema_has_every_field_of(version, &whole_object(), &[]);
    for column in version["additionalPrinterColumns"].as_array().unwrap() {
        let path = column["jsonPath"].as_str().unwrap();
        assert!(
            path == ".metadata.creationTimestamp" || written.contains(path),
            "{path} is not written"
        );
    }
}

/// Returns an object with every field.
fn whole_object() -> Value {
    let cell = admin::Cell {
        id: "cell-abcdefghijkl".to_owned(),
        node: "worker-1".to_owned(),
        backend: "milpa".to_owned(),
        provider: "ec2".to_owned(),
        phase: CellBound.into(),
        instance: "i-1".to_owned(),
        pool: "default".to_owned(),
        offering: Some(admin::Offering {
            instance_type: "c5.large".to_owned(),
            zone: "us-east-1a".to_owned(),
            ..admin::Offering::default()
        }),
        addresses: vec!["10.0.0.1".to_owned()],
        offering_reason: "the only candidate".to_owned(),
        error: "error".to_owned(),
        pod_namespace: "default".to_owned(),
        pod_name: "web".to_owned(),
        pod_uid: "uid".to_owned(),
        timeline: Some(admin::Timeline {
            launched: 1,
            booted: 1,
            enrolled: 2,
            bound: 3,
            image_ready: 4,
            first_container: 5,
        }),
        ..admin::Cell::default()
    };
    let owner = OwnerReference::node(NODE, "uid".to_owned());
    let cell: Cell = object::render(&ShownCell { cell, ..ShownCell::default() }, &owner);
    let mut object = serde_json::to_value(cell).unwrap();
    object.as_object_mut().unwrap().remove("metadata");
    object
}

/// Collects the fields of an object. The fields of a list's items count as the list's.
fn fields(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            for (name, value) in members {
                let path = format!("{at}.{name}");
                found.push(path.clone());
                fields(value, &path, found);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| fields(item, at, found)),
        _ => {}
    }
}

fn schema_fields(schema: &Value, at: &str, found: &mut Vec<String>) {
    let schema = if schema["items"].is_null() { schema } else { &schema["items"] };
    for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{at}.{name}");
        if path != ".metadata" {
            found.push(path.clone());
        }
        schema_fields(schema, &path, found);
    }
}

fn at<'s>(schema: &'s Value, path: &str) -> Option<&'s Value> {
    path.split('.').skip(1).try_fold(schema, |schema, name| {
        let schema = if schema["items"].is_null() { schema } else { &schema["items"] };
        schema["properties"].get(name)
    })
}

/// Collects the rules of structural schemas that a schema violates.
fn structural(schema: &Value, at: &str, faults: &mut Vec<String>) {
    const KNOWN: [&str; 18] = [
        "type",
        "description",
        "properties",
        "items",
        "required",
        "enum",
        "format",
        "minLength",
        "maxLength",
        "pattern",
        "minItems",
        "maxItems",
        "minimum",
        "maximum",
        "x-kubernetes-validations",
        "x-kubernetes-list-type",
        "x-kubernetes-list-map-keys",
        "additionalProperties",
    ];
    let Some(members) = schema.as_object() else {
        return faults.push(format!("{at}: is not a schema"));
    };
    for name in members.keys().filter(|name| !KNOWN.contains(&name.as_str())) {
        faults.push(format!("{at}: {name} is not allowed"));
    }
    let kind = schema["type"].as_str().unwrap_or_default();
    if !["object", "array", "string", "integer", "number", "boolean"].contains(&kind) {
        faults.push(format!("{at}: type {kind:?}"));
    }
    if !schema["properties"].is_null() && !schema["additionalProperties"].is_null() {
        faults.push(format!("{at}: properties and additionalProperties exclude each other"));
    }
    for name in schema["required"].as_array().into_iter().flatten() {
        if schema["properties"][name.as_str().unwrap()].is_null() {
            faults.push(format!("{at}: required {name} is not a property"));
        }
    }
    match kind {
        "object" => {
            for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
                structural(schema, &format!("{at}.{name}"), faults);
            }
        }
        "array" => {
            let keys = schema["x-kubernetes-list-map-keys"].as_array();
            for key in keys.into_iter().flatten() {
                let required = schema["items"]["required"].as_array();
                if !required.is_some_and(|required| required.contains(key)) {
                    faults.push(format!("{at}: key {key} of the list is not required"));
                }
            }
            structural(&schema["items"], &format!("{at}[]"), faults);
        }
        // Bounded texts bound the cost of rules on them.
        "string" if schema["maxLength"].is_null() => {
            let is_bounded = !schema["enum"].is_null() || schema["format"] == "date-time";
            if !is_bounded && ![".apiVersion", ".kind"].contains(&at) {
                faults.push(format!("{at}: has no maxLength"));
            }
        }
        _ => {}
    }
}
