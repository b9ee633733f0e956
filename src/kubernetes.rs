//! Gives the daemon's cells and events to `kiyot-kubernetes`, for the Kubernetes API.
//!
//! The tasks have a thread of their own, and read the same state as the admin API. A failure is
//! logged: pods need no API server.

use std::{
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    fmt, io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use futures::stream::BoxStream;
use kiyot_config::{self as config, Capacity};
use kiyot_engine::{
    id::CellId,
    placement::{ApiRequests, Most, NodeFigure, NodeResource, PodRequests, REQUESTS_TIMEOUT},
};
use kiyot_kubernetes::{
    Access, BudgetKeeper, BudgetOptions, CapacityDeclarer, Counter, DeclarerOptions, Options,
    Periods, PodInformer, Publisher, Room, RoomSource, ShownCell, Source,
    counter::{FAILED, REMOVED, SWEPT},
    requests,
};
use kiyot_proto::admin;
use kiyot_values::error_chain::error_chain;
use tokio::{runtime::Builder, sync::oneshot};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    backends::milpa::{Milpa, inventory::Inventory},
    metrics::{
        self, ApiCalls, BUDGET_READ_AGE, BUDGET_SWEEPS, KUBERNETES_CELLS_EXHAUSTED,
        KUBERNETES_DROPPED_EVENTS, KUBERNETES_UNAPPLIED_CAPACITY, Page,
    },
};

mod budgets;
mod node_pods;

use budgets::Shares;

/// Cells that are read before other tasks run.
const PART_CELLS: usize = 128;
/// Limit of cells whose pods' labels are cached.
const MAX_REMEMBERED: usize = 4096;

/// Pods on the node itself, in addition to pods in cells: the kubelet's default limit.
const NODE_PODS: u64 = 110;

/// Name of the thread.
const THREAD: &str = "kiyot-kube-api";

/// Metrics of the tasks.
#[derive(Debug)]
pub(crate) struct Counters {
    calls: ApiCalls,
    dropped_events: AtomicU64,
    unapplied_capacity: AtomicU32,
    are_cells_exhausted: AtomicBool,
    budgets_read: Mutex<Option<Instant>>,
    swept: [(&'static str, AtomicU64); 3],
}

impl Counters {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            calls: ApiCalls::of_kubernetes(),
            dropped_events: AtomicU64::new(0),
            unapplied_capacity: AtomicU32::new(0),
            are_cells_exhausted: AtomicBool::new(false),
            budgets_read: Mutex::default(),
            swept: [SWEPT, REMOVED, FAILED].map(|outcome| (outcome, AtomicU64::new(0))),
        })
    }
}

impl Counter for Counters {
    fn called(&self, operation: &'static str, outcome: &'static str, duration: Duration) {
        self.calls.count(operation, outcome, duration);
    }

    fn event_dropped(&self) {
        self.dropped_events.fetch_add(1, Ordering::Relaxed);
    }

    fn capacity_unapplied(&self, figures: usize) {
        let figures = u32::try_from(figures).unwrap_or(u32::MAX);
        self.unapplied_capacity.store(figures, Ordering::Relaxed);
    }

    fn budgets_read(&self) {
        *self.budgets_read.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    fn swept(&self, outcome: &'static str) {
        if let Some((_, count)) = self.swept.iter().find(|(own, _)| *own == outcome) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn cells_exhausted(&self, is_exhausted: bool) {
        self.are_cells_exhausted.store(is_exhausted, Ordering::Relaxed);
    }
}

impl metrics::Source for Counters {
    fn write(&self, page: &mut Page<'_>) -> fmt::Result {
        self.calls.write(page)?;
        let dropped = self.dropped_events.load(Ordering::Relaxed);
        page.family(&KUBERNETES_DROPPED_EVENTS)?.counter(&[], dropped)?;
        let unapplied = self.unapplied_capacity.load(Ordering::Relaxed);
        page.family(&KUBERNETES_UNAPPLIED_CAPACITY)?.gauge(&[], f64::from(unapplied))?;
        let exhausted = u8::from(self.are_cells_exhausted.load(Ordering::Relaxed));
        page.family(&KUBERNETES_CELLS_EXHAUSTED)?.gauge(&[], f64::from(exhausted))?;
        let read = *self.budgets_read.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(read) = read {
            page.family(&BUDGET_READ_AGE)?.gauge(&[], read.elapsed().as_secs_f64())?;
        }
        let mut family = page.family(&BUDGET_SWEEPS)?;
        for (outcome, count) in &self.swept {
            family.counter(&[outcome], count.load(Ordering::Relaxed))?;
        }
        Ok(())
    }
}

/// The running thread. Dropping it ends its tasks.
#[derive(Debug)]
pub(crate) struct Kubernetes {
    _running: oneshot::Sender<Infallible>,
}

/// The requests of the node's pods.
#[derive(Debug)]
struct Requests(PodInformer);

#[async_trait]
impl PodRequests for Requests {
    async fn of_pod(&self, uid: &str) -> Option<ApiRequests> {
        self.0.requests(uid, REQUESTS_TIMEOUT).await.map(of_api)
    }

    fn known(&self, uid: &str) -> Option<ApiRequests> {
        self.0.known(uid).map(of_api)
    }
}

fn of_api(requests: requests::Requests) -> ApiRequests {
    ApiRequests {
        milli_cpu_request: requests.milli_cpus.request,
        milli_cpu_limit: requests.milli_cpus.limit,
        memory_request: requests.memory.request,
        memory_limit: requests.memory.limit,
        storage_request: requests.storage_request,
        has_env_in_files: requests.has_env_in_files,
        gpus: requests.gpus,
        node_variables: requests.node_variables.into_iter().map(of_figure).collect(),
        node_files: requests.node_files.into_iter().map(of_figure).collect(),
    }
}

fn of_figure(figure: requests::NodeFigure) -> NodeFigure {
    let requests::NodeFigure { holder, name, is_memory, divisor } = figure;
    let resource = if is_memory { NodeResource::Memory } else { NodeResource::Cpu };
    NodeFigure { holder, name, resource, divisor }
}

impl Kubernetes {
    /// Starts the tasks; `None` without access to the API, or without a backend of cells.
    ///
    /// The tasks have a thread of their own: a kubeconfig may name a program for credentials, and
    /// kube's client blocks its thread while the program runs.
    pub(crate) fn start(
        config: &config::Kubernetes,
        milpas: &[Arc<Milpa>],
        counters: Arc<Counters>,
    ) -> Option<Self> {
        let access = match config.kubeconfig.as_ref()? {
            config::KubernetesAccess::Kubeconfig(path) => Access::Kubeconfig(path.clone()),
            config::KubernetesAccess::InCluster => Access::InCluster,
        };
        // The configuration's checks allow a single backend of cells.
        let milpa = Arc::clone(milpas.first()?);
        let (running, stopped) = oneshot::channel();
        let config = config.clone();
        let spawned = thread::Builder::new().name(THREAD.to_owned()).spawn(move || {
            let runtime = match Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => return not_started(&error),
            };
            runtime.block_on(serve(access, &config, milpa, counters, stopped));
            runtime.shutdown_background();
        });
        if let Err(error) = spawned {
            not_started(&error);
        }
        Some(Self { _running: running })
    }
}

fn not_started(error: &io::Error) {
    tracing::error!(%error, "tasks of the Kubernetes API not started, pods are not affected");
}

/// Runs the tasks until the sender is dropped.
async fn serve(
    access: Access,
    config: &config::Kubernetes,
    milpa: Arc<Milpa>,
    counters: Arc<Counters>,
    stopped: oneshot::Receiver<Infallible>,
) {
    let node = milpa.inventory().node().to_owned();
    let (mut declarer, mut counting) = (None, None);
    if config.reads_requests() {
        let informer =
            PodInformer::start(access.clone(), node.clone(), None, Arc::clone(&counters) as _);
        declarer = config.capacity.clone().map(|Capacity { figures, is_derived }| {
            let options =
                DeclarerOptions::new(access.clone(), node.clone(), figures, config.events);
            let room = Arc::new(CellRoom { milpa: Arc::clone(&milpa), is_derived });
            let counter = Arc::clone(&counters) as _;
            CapacityDeclarer::start(options, informer.counted(), room, counter)
        });
        let count = node_pods::count(Arc::clone(&milpa), informer.counted());
        counting = Some(AbortOnDropHandle::new(tokio::spawn(count)));
        milpa.set_pod_requests(Arc::new(Requests(informer)));
    }
    let _keeper = config.budgets.then(|| {
        let options = BudgetOptions::new(access.clone(), node.clone());
        let shares = Arc::new(Shares(Arc::clone(&milpa)));
        BudgetKeeper::start(options, shares, Arc::clone(&counters) as _)
    });
    let options = Options {
        access,
        node,
        cells: config.cells,
        events: config.events,
        periods: Periods::default(),
    };
    let source = Arc::new(Cells { milpa, labels: Mutex::default() });
    let _publisher =
        (config.cells || config.events).then(|| Publisher::start(options, source, counters));
    // Completes with an error when the sender is dropped: nothing is ever sent.
    let _closed = stopped.await;
    drop((declarer, counting));
}

/// The room of a backend's cells.
struct CellRoom {
    milpa: Arc<Milpa>,
    /// Derives figures from the most that the cells can have.
    is_derived: bool,
}

impl fmt::Debug for CellRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CellRoom").finish_non_exhaustive()
    }
}

#[async_trait]
impl RoomSource for CellRoom {
    async fn room(&self) -> Option<Room> {
        let inventory = self.milpa.inventory();
        let room = inventory.room().await?;
        let max_cells = u64::try_from(room.limits.max_cells).unwrap_or(u64::MAX);
        let figures = if self.is_derived {
            let Most { cpus, memory_mib } = inventory.most(room.limits).await?;
            let pods = max_cells.saturating_add(NODE_PODS);
            let figures = [("cpu", cpus), ("memory", memory_mib), ("pods", pods)].into_iter();
            figures.map(|(name, amount)| (name.to_owned(), amount.max(1))).collect()
        } else {
            BTreeMap::new()
        };
        Some(Room {
            max_cells,
            idle: u64::try_from(room.idle).unwrap_or(u64::MAX),
            refusal: room.refusal.map(|error| error_chain(&error)),
            figures,
        })
    }
}

/// The cells of a backend.
struct Cells {
    milpa: Arc<Milpa>,
    /// Labels of pods, by cell. Each pod's record is read once.
    labels: Mutex<HashMap<String, BTreeMap<String, String>>>,
}

impl Cells {
    fn shown(&self, inventory: &Inventory, ids: &[CellId]) -> Vec<ShownCell> {
        let mut remembered = self.labels.lock().unwrap_or_else(PoisonError::into_inner);
        let shown = |cell: admin::Cell| {
            let labels = remembered.get(&cell.id).cloned().or_else(|| {
                let labels = inventory.labels(&CellId::parse(&cell.id).ok()?)?;
                if remembered.len() >= MAX_REMEMBERED {
                    remembered.clear();
                }
                remembered.insert(cell.id.clone(), labels.clone());
                Some(labels)
            });
            ShownCell { cell, labels: labels.unwrap_or_default() }
        };
        inventory.cells(ids).into_iter().map(shown).collect()
    }
}

#[async_trait]
impl Source for Cells {
    async fn cells(&self) -> Vec<ShownCell> {
        let inventory = self.milpa.inventory();
        let ids = inventory.cell_ids();
        let mut cells = Vec::with_capacity(ids.len());
        for part in ids.chunks(PART_CELLS) {
            cells.extend(self.shown(inventory, part));
            tokio::task::yield_now().await;
        }
        let mut labels = self.labels.lock().unwrap_or_else(PoisonError::into_inner);
        if labels.len() > cells.len() {
            let listed: HashMap<&str, ()> =
                cells.iter().map(|shown| (shown.cell.id.as_str(), ())).collect();
            labels.retain(|cell, _| listed.contains_key(cell.as_str()));
        }
        cells
    }

    async fn cell(&self, id: &str) -> Option<ShownCell> {
        let (id, inventory) = (CellId::parse(id).ok()?, self.milpa.inventory());
        self.shown(inventory, std::slice::from_ref(&id)).pop()
    }

    fn events(&self) -> BoxStream<'static, admin::Event> {
        self.milpa.inventory().later_events()
    }
}
