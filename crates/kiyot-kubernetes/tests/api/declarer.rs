//! The declarer with a played API server. The tests play its policies.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use kiyot_kubernetes::{
    CapacityDeclarer, DeclarerOptions, PodInformer, Room, RoomSource,
    capacity::{Figures, KEY},
};
use kiyot_testkit::{ApiFault, ApiServer, LIMIT, Verb, log::CapturedLog, wait_for, wait_until};
use serde_json::{Value, json};

use crate::{
    rights::pod,
    world::{Calls, NODE, options, writes},
};

/// Makes the Node object with the label of declared capacity and these figures.
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

/// A room that the test sets.
#[derive(Debug)]
pub(crate) struct Played {
    room: Mutex<Option<Room>>,
    asked: AtomicUsize,
}

impl Played {
    /// Returns a room for this number of cells.
    pub(crate) fn of(max_cells: u64) -> Arc<Self> {
        let room = Mutex::new(Some(Room { max_cells, ..Room::default() }));
        Arc::new(Self { room, asked: AtomicUsize::new(0) })
    }

    fn set(&self, room: Option<Room>) {
        *self.room.lock().unwrap() = room;
    }
}

#[async_trait]
impl RoomSource for Played {
    async fn room(&self) -> Option<Room> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.room.lock().unwrap().clone()
    }
}

/// Starts a declarer with short periods: 8 CPUs, 1 GiB, 2 of an extended resource, and 9 cells.
pub(crate) fn declare(
    api: &ApiServer,
    informer: &PodInformer,
    calls: &Arc<Calls>,
) -> CapacityDeclarer {
    declare_with(api, informer, Played::of(9), calls)
}

fn declare_with(
    api: &ApiServer,
    informer: &PodInformer,
    room: Arc<Played>,
    calls: &Arc<Calls>,
) -> CapacityDeclarer {
    let figures = [("cpu", 8), ("memory", 1024), ("a.b/c", 2)];
    let figures: Figures =
        figures.into_iter().map(|(name, amount)| (name.to_owned(), amount)).collect();
    let options = DeclarerOptions {
        check: Duration::from_millis(50),
        step: Duration::from_millis(20),
        first_pause: Duration::from_millis(20),
        ..DeclarerOptions::new(options(api).access, NODE.to_owned(), figures, true)
    };
    CapacityDeclarer::start(options, informer.counted(), room, Arc::clone(calls) as _)
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
    wait_for_annotation(&api, "a.b/c=2,cpu=8,memory=1024Mi,pod.elotl.co/cell=9").await;
    let node = api.objects("nodes")[NODE].clone();
    let figures = json!({ "cpu": "2", "memory": "900Mi", "a.b/c": "2", "pod.elotl.co/cell": "9" });
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

    // The policy is applied, and the kubelet's memory is above the declared figure.
    let mut node = api.objects("nodes")[NODE].clone();
    let figures = json!({ "cpu": "8", "memory": "2Gi", "a.b/c": "2", "pod.elotl.co/cell": "9" });
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
    wait_for_annotation(&api, "a.b/c=2,cpu=8,memory=5120Mi,pod.elotl.co/cell=9").await;
    let first = |resource: &str| {
        let mut recorded = api.recorded().into_iter();
        recorded.position(|recorded| recorded.request.resource == resource)
    };
    assert!(first("pods") < first("nodes"), "nothing is declared before the pods are known");
    let mut ended = pod("a", "uid-a", "3Gi");
    ended["status"] = json!({ "phase": "Succeeded" });
    api.put("pods", ended);
    wait_for_annotation(&api, "a.b/c=2,cpu=8,memory=2048Mi,pod.elotl.co/cell=9").await;
    api.delete("pods", "default/b");
    wait_for_annotation(&api, "a.b/c=2,cpu=8,memory=1024Mi,pod.elotl.co/cell=9").await;
    // The Node object is made again.
    api.delete("nodes", NODE);
    put_declared_node(&api, json!({}));
    wait_for_annotation(&api, "a.b/c=2,cpu=8,memory=1024Mi,pod.elotl.co/cell=9").await;
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
    assert_eq!((writes(&api.recorded()).len(), calls.unapplied()), (1, 4));
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
    wait_for_annotation(&api, "a.b/c=2,cpu=8,memory=1024Mi,pod.elotl.co/cell=9").await;
    wait_for("the end is logged", || logged(&log, "is declared again") == 1).await;
    assert_eq!(calls.of("patch nodes/status", "denied"), 2);
    assert_eq!(logged(&log, "is not declared"), 1, "{:?}", log.lines());
}

/// Returns a pod for a cell.
fn pod_for_cell(name: &str) -> Value {
    let mut pod = pod(name, name, "1Gi");
    pod["spec"]["containers"][0]["resources"]["requests"]["pod.elotl.co/cell"] = json!("1");
    pod
}

/// Verifies K15.
#[tokio::test]
async fn node_takes_no_further_pods_while_no_cell_can_be_launched() {
    let log = CapturedLog::start();
    let api = ApiServer::start(&[]).await;
    put_declared_node(&api, json!({ "cpu": "8", "memory": "2Gi" }));
    api.put("pods", pod_for_cell("a"));
    api.put("pods", pod_for_cell("b"));
    let (informer, calls, room) = (inform(&api), Calls::new(), Played::of(20));
    let _declarer = declare_with(&api, &informer, Arc::clone(&room), &calls);
    let cells = || api.objects("nodes")[NODE]["status"]["allocatable"]["pod.elotl.co/cell"].clone();
    wait_for("all are declared", || cells() == "20").await;
    assert!(!calls.is_exhausted());

    let refusal = Some("the quota of vCPUs is used".to_owned());
    room.set(Some(Room { max_cells: 20, idle: 1, refusal, ..Room::default() }));
    wait_for("the cells of pods and the idle cell are declared", || cells() == "3").await;
    wait_for("it is reported", || calls.is_exhausted() && api.objects("events").len() == 1).await;
    let event = api.objects("events").into_values().next().unwrap();
    let message = "no cell can be launched: the quota of vCPUs is used";
    assert_eq!((&event["reason"], &event["message"]), (&json!("CellsExhausted"), &json!(message)));
    // The end of a pod leaves no place for another pod.
    api.delete("pods", "default/b");
    wait_for("its cell is not declared", || cells() == "2").await;

    let patches = calls.of("patch nodes/status", "ok");
    room.set(Some(Room { max_cells: 20, ..Room::default() }));
    wait_for("all are declared", || cells() == "20").await;
    wait_for("the end is noted", || !calls.is_exhausted()).await;
    // 3, 5, 9, 17 and 20: the pods' own cells and a first further cell were declared.
    assert_eq!(calls.of("patch nodes/status", "ok"), patches + 5);
    let lines = ["node takes no further pods", "node takes as many pods as cells are allowed"];
    assert_eq!(lines.map(|line| logged(&log, line)), [1, 1], "{:?}", log.lines());
}

/// Verifies K15.
#[tokio::test]
async fn nothing_is_declared_before_the_room_is_known() {
    let api = ApiServer::start(&[]).await;
    put_declared_node(&api, json!({}));
    let (informer, calls, room) = (inform(&api), Calls::new(), Played::of(9));
    room.set(None);
    let _declarer = declare_with(&api, &informer, Arc::clone(&room), &calls);
    wait_for("the pods are known", || informer.counted().sum().is_some()).await;
    let asked = || room.asked.load(Ordering::Relaxed);
    let before = asked();
    wait_for("the room is asked for again", || asked() > before + 2).await;
    assert_eq!(calls.of("get nodes", "ok"), 0);
    let figures: Figures =
        [("cpu", 5), ("x.y/z", 7)].map(|(name, of)| (name.to_owned(), of)).into();
    room.set(Some(Room { max_cells: 9, figures, ..Room::default() }));
    // Configured figures override the room's.
    wait_for_annotation(&api, "a.b/c=2,cpu=8,memory=1024Mi,pod.elotl.co/cell=9,x.y/z=7").await;
}
