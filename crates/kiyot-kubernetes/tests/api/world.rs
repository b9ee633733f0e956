//! A publisher with a played daemon and a played API server.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use futures::{StreamExt, stream::BoxStream};
use kiyot_kubernetes::{Access, Counter, Options, Periods, Publisher, ShownCell, Source};
use kiyot_proto::admin;
use kiyot_testkit::{ApiServer, LIMIT, Recorded, Verb, wait_until};
use serde_json::{Value, json};
use tokio::sync::broadcast;

pub(crate) const NODE: &str = "worker-1";
const DEFINITION: &str = include_str!("../../../../deploy/crds/cells.kiyot.elotl.co.yaml");

const BUDGET_DEFINITION: &str =
    include_str!("../../../../deploy/crds/cellbudgets.kiyot.elotl.co.yaml");

/// Returns the definition of budgets.
pub(crate) fn budget_definition() -> Value {
    serde_saphyr::from_str(BUDGET_DEFINITION).unwrap()
}

/// Returns the definition of cells.
pub(crate) fn definition() -> Value {
    serde_saphyr::from_str(DEFINITION).unwrap()
}

/// Starts an API server with the definitions and the Node object of the node.
pub(crate) async fn api() -> ApiServer {
    with_node(ApiServer::start(&[definition(), budget_definition()]).await)
}

/// Adds the Node object of the node.
pub(crate) fn with_node(api: ApiServer) -> ApiServer {
    put_node(&api, NODE);
    api
}

/// Makes a Node object.
pub(crate) fn put_node(api: &ApiServer, name: &str) {
    let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name } });
    api.put("nodes", node);
}

/// The counted calls, by operation and outcome.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    by_outcome: Mutex<BTreeMap<(&'static str, &'static str), usize>>,
    unapplied: AtomicUsize,
    is_exhausted: AtomicBool,
}

impl Calls {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Returns the number of calls of an operation with an outcome.
    pub(crate) fn of(&self, operation: &'static str, outcome: &'static str) -> usize {
        self.by_outcome.lock().unwrap().get(&(operation, outcome)).copied().unwrap_or_default()
    }

    /// Returns the number of declared figures that the API server does not apply.
    pub(crate) fn unapplied(&self) -> usize {
        self.unapplied.load(Ordering::Relaxed)
    }

    /// Returns whether the node takes no further pods.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.is_exhausted.load(Ordering::Relaxed)
    }
}

impl Counter for Calls {
    fn called(&self, operation: &'static str, outcome: &'static str, _duration: Duration) {
        *self.by_outcome.lock().unwrap().entry((operation, outcome)).or_default() += 1;
    }

    fn event_dropped(&self) {
        self.called("create events", "dropped", Duration::ZERO);
    }

    fn budgets_read(&self) {
        self.called("watch cellbudgets", "read", Duration::ZERO);
    }

    fn swept(&self, outcome: &'static str) {
        self.called("sweep", outcome, Duration::ZERO);
    }

    fn capacity_unapplied(&self, figures: usize) {
        self.unapplied.store(figures, Ordering::Relaxed);
    }

    fn cells_exhausted(&self, is_exhausted: bool) {
        self.is_exhausted.store(is_exhausted, Ordering::Relaxed);
    }
}

/// A played daemon.
pub(crate) struct Daemon {
    cells: Mutex<BTreeMap<String, ShownCell>>,
    events: broadcast::Sender<admin::Event>,
}

impl Daemon {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { cells: Mutex::default(), events: broadcast::channel(64).0 })
    }

    /// Adds or replaces the cell with this number, in a phase.
    pub(crate) fn set(&self, number: usize, phase: admin::CellPhase) {
        let id = id(number);
        let cell = admin::Cell {
            id: id.clone(),
            node: NODE.to_owned(),
            backend: "milpa".to_owned(),
            phase: phase.into(),
            pod_namespace: "default".to_owned(),
            pod_name: format!("web-{number}"),
            pod_uid: format!("uid-{number}"),
            offering: Some(admin::Offering {
                instance_type: "c5.large".to_owned(),
                price_micros: 85_000,
                ..admin::Offering::default()
            }),
            ..admin::Cell::default()
        };
        let labels = BTreeMap::from([("app".to_owned(), "web".to_owned())]);
        let shown = ShownCell { cell, labels };
        self.cells.lock().unwrap_or_else(PoisonError::into_inner).insert(id, shown);
        self.tell(number, "Changed", "");
    }

    pub(crate) fn change(&self, number: usize, change: impl FnOnce(&mut ShownCell)) {
        change(self.cells.lock().unwrap().get_mut(&id(number)).unwrap());
        self.tell(number, "Changed", "");
    }

    pub(crate) fn end(&self, number: usize) {
        self.cells.lock().unwrap().remove(&id(number));
        self.tell(number, "Ended", "");
    }

    /// Sends an event of a cell.
    pub(crate) fn tell(&self, number: usize, status: &str, message: &str) {
        let _no_reader = self.events.send(admin::Event {
            kind: "Cell".to_owned(),
            name: id(number),
            status: status.to_owned(),
            message: message.to_owned(),
            ..admin::Event::default()
        });
    }
}

#[async_trait]
impl Source for Daemon {
    async fn cells(&self) -> Vec<ShownCell> {
        self.cells.lock().unwrap().values().cloned().collect()
    }

    async fn cell(&self, id: &str) -> Option<ShownCell> {
        self.cells.lock().unwrap().get(id).cloned()
    }

    fn events(&self) -> BoxStream<'static, admin::Event> {
        let events = tokio_stream::wrappers::BroadcastStream::new(self.events.subscribe());
        events.filter_map(async |event| event.ok()).boxed()
    }
}

pub(crate) fn id(number: usize) -> String {
    format!("cell-{number:012}")
}

/// Returns the name of the object of the cell with this number.
pub(crate) fn name(number: usize) -> String {
    format!("{}.{NODE}", id(number))
}

/// Returns the options of a node, with short periods.
pub(crate) fn options(api: &ApiServer) -> Options {
    Options {
        access: Access::Kubeconfig(api.kubeconfig()),
        node: NODE.to_owned(),
        cells: true,
        events: true,
        periods: Periods {
            list: Duration::from_millis(400),
            first_pause: Duration::from_millis(20),
            ..Periods::default()
        },
    }
}

/// Starts the publisher of a daemon.
pub(crate) fn publish(api: &ApiServer, daemon: &Arc<Daemon>) -> Publisher {
    Publisher::start(options(api), Arc::clone(daemon) as _, Calls::new())
}

/// Waits until exactly these cells are shown, with these phases.
pub(crate) async fn wait_for_cells(api: &ApiServer, expected: &[(usize, &str)]) {
    let expected: Vec<(String, String)> =
        expected.iter().map(|(number, phase)| (id(*number), (*phase).to_owned())).collect();
    wait_until(format!("{expected:?} are shown"), LIMIT, async || {
        let cells = api.objects("cells").into_iter();
        let phase = |cell: &Value| cell["status"]["phase"].as_str().unwrap_or_default().to_owned();
        let id = |name: &str| name.split_once('.').map_or(name, |(id, _)| id).to_owned();
        let shown: Vec<_> = cells.map(|(name, cell)| (id(&name), phase(&cell))).collect();
        (shown == expected).then_some(())
    })
    .await;
}

/// Returns the writes among requests.
pub(crate) fn writes(recorded: &[Recorded]) -> Vec<&Recorded> {
    let is_write = |recorded: &&Recorded| {
        !matches!(recorded.request.verb, Verb::Get | Verb::List | Verb::Watch)
    };
    recorded.iter().filter(is_write).collect()
}
