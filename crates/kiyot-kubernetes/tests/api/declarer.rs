//! The declarer before a played API server, whose policies the tests play.

use std::{sync::Arc, time::Duration};

use kiyot_kubernetes::{
    CapacityDeclarer, DeclarerOptions, PodInformer,
    capacity::{Figures, KEY},
};
use kiyot_testkit::{ApiFault, ApiServer, LIMIT, Verb, log::CapturedLog, wait_for, wait_until};
use serde_json::{Value, json};

use crate::{
    rights::pod,
    world::{Calls, NODE, options, writes},
};

/// Makes the Node object, with a label of declared capacity and these figures.
pub(crate) fn put_declared_node(api: &ApiServer, figures: Value) {
    put_node(api, json!({ KEY: "declared" }), figures);
}

fn put_node(api: &ApiServer, labels: Value, figures: Value) {
    let node = json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": { "name": NODE, "labels": labels, "annotations": { "a": "b" } },
        "status": { "capacity": figures, "allocatable": figures },
    });
    api.put("nodes", node);
}

/// Starts a declarer of 8 CPUs, 1 GiB and 2 of an extended resource, with short periods.
pub(crate) fn declare(
    api: &ApiServer,
    informer: &PodInformer,
    calls: &Arc<Calls>,
) -> CapacityDeclarer {
    let figures = [("cpu", 8), ("memory", 1024), ("a.b/c", 2)];
    let figures: Figures =
        figures.into_iter().map(|(name, amount)| (name.to_owned(), amount)).collect();
    let options = DeclarerOptions {
        check: Duration::from_millis(50),
        first_pause: Duration::from_millis(20),
        ..DeclarerOptions::new(options(api).access, NODE.to_owned(), figures, true)
    };
    CapacityDeclarer::start(options, informer.counted(), Arc::clone(calls) as _)
}

fn inform(api: &ApiServer) -> PodInformer {
    let pause = Some(Duration::from_millis(20));
    PodInformer::start(options(api).access, NODE.to_owned(), pause, Calls::new())
}

fn annotation(api: &ApiServer) -> Value {
    api.objects("nodes")[NODE]["metadata"]["annotations"][KEY].clone()
}

async fn wait_for_annotation(api: &ApiServer, expected: &str) {
    let is_expected = async || (annotation(api) == expected).then_some(());
    wait_until(format!("the node declares {expected}"), LIMIT, is_expected).await;
}

fn logged(log: &CapturedLog, text: &str) -> usize {
    log.lines().iter().filter(|line| line.contains(text)).count()
}

/// Verifies K14.
#[tokio::test]
async fn figures_are_declared_and_reported_once_until_the_policy_applies_them() {
    let log = CapturedLog::start();
    let api = ApiServer::start(&[]).await;
    put_declared_node(&api, json!({ "cpu": "2", "memory": "900Mi" }));
    let (informer, calls) = (inform(&api), Calls::new());
    let _declarer = declare(&api, &informer, &calls);
    wait_for_annotation(&api, "a.b/c=2,cpu=8,memory=1024Mi").await;
    let node = api.objects("nodes")[NODE].clone();
    let figures = json!({ "cpu": "2", "memory": "900Mi", "a.b/c": "2" });
    assert_eq!(node["status"], json!({ "capacity": figures, "allocatable": figures }));
    assert_eq!(node["metadata"]["annotations"]["a"], "b");
    wait_for("the event", || api.objects("events").len() == 1).await;
    let event = api.objects("events").into_values().next().unwrap();
    assert_eq!(event["involvedObject"]["kind"], "Node");
    let message = "the policy kiyot-capacity is not applied, and the node has less than \
                   cpu=8,memory=1024Mi";
    assert_eq!(
        (&event["reason"], &event["message"]),
        (&json!("CapacityNotApplied"), &json!(message))
    );
    assert_eq!(calls.unapplied(), 2);
    let patches = calls.of("patch nodes/status", "ok");
    wait_for("checks are repeated", || calls.of("patch nodes/status", "ok") > patches + 3).await;

    // The policy is applied, and the kubelet's figure is higher than a declared one.
    let mut node = api.objects("nodes")[NODE].clone();
    let figures = json!({ "cpu": "8", "memory": "2Gi", "a.b/c": "2" });
    node["status"] = json!({ "capacity": figures, "allocatable": figures });
    api.put("nodes", node);
    wait_for("it is applied", || calls.unapplied() == 0 && logged(&log, "applied again") == 1)
        .await;
    let (reads, patches) = (calls.of("get nodes", "ok"), calls.of("patch nodes/status", "ok"));
    wait_for("checks are repeated", || calls.of("get nodes", "ok") > reads + 3).await;
    assert_eq!(calls.of("patch nodes/status", "ok"), patches, "nothing is due");
    let counts = (logged(&log, "capacity of the node is not applied"), api.objects("events").len());
    assert_eq!(counts, (1, 1), "{:?}", log.lines());
}

/// Verifies K14.
#[tokio::test]
async fn node_declares_no_less_than_its_pods_request_while_they_run() {
    let api = ApiServer::start(&[]).await;
    put_declared_node(&api, json!({}));
    api.put("pods", pod("a", "uid-a", "3Gi"));
    api.put("pods", pod("b", "uid-b", "2Gi"));
    let informer = inform(&api);
    let _declarer = declare(&api, &informer, &Calls::new());
    wait_for_annotation(&api, "a.b/c=2,cpu=8,memory=5120Mi").await;
    let first = |resource: &str| {
        let mut recorded = api.recorded().into_iter();
        recorded.position(|recorded| recorded.request.resource == resource)
    };
    assert!(first("pods") < first("nodes"), "nothing is declared before the pods are known");
    let mut ended = pod("a", "uid-a", "3Gi");
    ended["status"] = json!({ "phase": "Succeeded" });
    api.put("pods", ended);
    wait_for_annotation(&api, "a.b/c=2,cpu=8,memory=2048Mi").await;
    api.delete("pods", "default/b");
    wait_for_annotation(&api, "a.b/c=2,cpu=8,memory=1024Mi").await;
    // The Node object is made again.
    api.delete("nodes", NODE);
    put_declared_node(&api, json!({}));
    wait_for_annotation(&api, "a.b/c=2,cpu=8,memory=1024Mi").await;
}

/// Verifies K14.
#[tokio::test]
async fn node_without_the_label_is_not_changed_and_has_an_event() {
    let api = ApiServer::start(&[]).await;
    put_node(&api, json!({}), json!({ "cpu": "2" }));
    let (informer, calls) = (inform(&api), Calls::new());
    let _declarer = declare(&api, &informer, &calls);
    wait_for("the event", || api.objects("events").len() == 1).await;
    wait_for("checks are repeated", || calls.of("get nodes", "ok") > 4).await;
    let event = api.objects("events").into_values().next().unwrap();
    let message = event["message"].as_str().unwrap();
    assert!(message.contains("no label kiyot.elotl.co/capacity=declared"), "{message}");
    assert_eq!((writes(&api.recorded()).len(), calls.unapplied()), (1, 3));
}

/// Verifies K6, K14.
#[tokio::test]
async fn denied_patch_is_logged_once_and_repeated() {
    let log = CapturedLog::start();
    let api = ApiServer::start(&[]).await;
    put_declared_node(&api, json!({}));
    api.fail(Some(Verb::Patch), "nodes", 2, ApiFault::Status(403, None));
    let (informer, calls) = (inform(&api), Calls::new());
    let _declarer = declare(&api, &informer, &calls);
    wait_for_annotation(&api, "a.b/c=2,cpu=8,memory=1024Mi").await;
    wait_for("the end is logged", || logged(&log, "is declared again") == 1).await;
    assert_eq!(calls.of("patch nodes/status", "denied"), 2);
    assert_eq!(logged(&log, "is not declared"), 1, "{:?}", log.lines());
}
