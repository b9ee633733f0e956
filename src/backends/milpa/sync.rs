//! Sync of pods with their cells: reports of cells change the records and the read model, and ended
//! pods are torn down.
//!
//! Calls go one way: `cell_events` -> `cell_watch`, `teardown` -> `container_status` ->
//! `container_exit` -> `container_logs` -> `records`.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use kiyot_engine::{
    StoreError,
    id::{CellId, ContainerId, SandboxId},
};

use super::{
    cells::Cells, images::Images, logs::Logs, pods::Pods, resolver::Resolver, store::Store,
    tasks::Tasks, volumes::Volumes,
};

mod cell_events;
mod cell_watch;
mod container_exit;
mod container_logs;
mod container_status;
mod in_progress;
mod metrics_subscription;
mod orphan_gc;
mod records;
mod recovery;
mod rehearsal;
mod runtime_features;
mod stale_attempts;
mod teardown;

use cell_watch::Watch;
pub(crate) use container_exit::EXIT_RECORD_TIMEOUT;
use container_logs::ContainerLogs;
pub(crate) use container_logs::ReopenError;
use in_progress::InProgress;
use metrics_subscription::MetricsSubscription;
use orphan_gc::Orphans;
use records::Records;
use rehearsal::Rehearsals;
use runtime_features::RuntimeFeatures;
pub(crate) use stale_attempts::AttemptError;
pub(crate) use teardown::TeardownError;

/// A container's sandbox and name. Attempts of a container are created one at a time.
pub(crate) type ContainerKey = (SandboxId, String);

/// Parts of the daemon that the sync uses.
#[derive(Debug)]
pub(crate) struct SyncParts {
    pub(crate) store: Store,
    pub(crate) cells: Arc<Cells>,
    pub(crate) images: Arc<Images>,
    pub(crate) volumes: Arc<Volumes>,
    pub(crate) logs: Arc<Logs>,
    /// The read model.
    pub(crate) pods: Arc<Pods>,
    pub(crate) tasks: Tasks,
    /// Time until an orphaned sandbox is removed.
    pub(crate) owner_timeout: Duration,
}

/// Keeps records and read model in sync with the cells.
#[derive(Debug)]
pub(crate) struct CellSync {
    cells: Arc<Cells>,
    images: Arc<Images>,
    volumes: Arc<Volumes>,
    logs: Arc<Logs>,
    pods: Arc<Pods>,
    tasks: Tasks,
    owner_timeout: Duration,
    pub(crate) records: Arc<Records>,
    pub(crate) container_logs: ContainerLogs,
    /// Features of the cells' runtime.
    pub(crate) features: RuntimeFeatures,
    /// Containers that are being created: the cell may have them before they are recorded.
    pub(crate) creations: InProgress<ContainerKey>,
    /// Containers that are being removed for their next attempt.
    replacements: InProgress<ContainerId>,
    metrics: MetricsSubscription,
    orphans: Orphans,
    rehearsals: Rehearsals,
    watches: Mutex<HashMap<CellId, Watch>>,
    resolver: Resolver,
}

impl CellSync {
    /// Recovers the read model from the records, and follows the events of cells from now on.
    pub(crate) async fn start(parts: SyncParts) -> Result<Arc<Self>, StoreError> {
        let SyncParts { store, cells, images, volumes, logs, pods, tasks, owner_timeout } = parts;
        let records = Arc::new(Records::new(&store, &cells, &images, &pods));
        let keeper: Weak<Records> = Arc::downgrade(&records);
        logs.set_base_store(keeper);
        // Subscribes first, so that no event during the recovery is missed.
        let events = cells.events();
        let cgroup_parents =
            recovery::recover(&store, |cell| cells.get(cell).is_some(), &pods).await?;
        cells.restore_cgroups(&cgroup_parents).await;
        let features = RuntimeFeatures::load(store).await?;
        let container_logs = ContainerLogs::new(&logs, &cells, &records, &pods, &tasks);
        let sync = Arc::new(Self {
            cells,
            images,
            volumes,
            logs,
            pods,
            tasks,
            owner_timeout,
            records,
            container_logs,
            features,
            creations: InProgress::default(),
            replacements: InProgress::default(),
            metrics: MetricsSubscription::default(),
            orphans: Orphans::default(),
            rehearsals: Rehearsals::default(),
            watches: Mutex::default(),
            resolver: Resolver::default(),
        });
        sync.tasks.spawn(Arc::clone(&sync).follow_events(events));
        sync.tasks.spawn(Arc::clone(&sync).collect_orphans());
        Ok(sync)
    }

    /// Returns the reason of a cell's end.
    pub(crate) fn end_reason(&self, cell: &CellId) -> String {
        let reason = self.cells.gone_reason(cell);
        reason.unwrap_or_else(|| "the reason is not recorded".to_owned())
    }
}
