//! What the tasks of cells share, and what of a cell is seen from outside its task.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use kiyot_proto::store::CellPhase;
use tokio::sync::{Notify, broadcast};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    super::{
        gateway::CellLink,
        id::CellId,
        latest::Latest,
        mailbox,
        providers::{InstanceId, Provider},
        store::Store,
    },
    CellError, CellEvent, CellsConfig, Links,
    driver::{Driver, Message},
    gone::Gone,
    record::Record,
    state::State,
};

/// News that a slow receiver may be behind; beyond that it lags and looks at everything anew.
const EVENTS_KEPT: usize = 1024;

/// What the tasks share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: CellsConfig,
    pub(super) max_cells: AtomicUsize,
    pub(super) store: Store,
    pub(super) provider: Arc<dyn Provider>,
    pub(super) links: OnceLock<Arc<dyn Links>>,
    pub(super) entries: RwLock<BTreeMap<CellId, Arc<Entry>>>,
    pub(super) gone: Gone,
    pub(super) events: broadcast::Sender<CellEvent>,
    /// Rings for a look at the provider's list before its time.
    pub(super) look: Notify,
    pub(super) tasks: TaskTracker,
    pub(super) stop: CancellationToken,
}

/// A cell, as seen from outside its task.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) inbox: mailbox::Sender<Message>,
    /// Whether it has a control connection.
    pub(super) linked: Latest<bool>,
    pub(super) link: OnceLock<CellLink>,
    /// `metadata.uid` of its pod.
    pub(super) pod_uid: String,
    pub(super) view: Mutex<View>,
}

/// What of a cell's state must be known without asking its task.
#[derive(Debug, Clone)]
pub(super) struct View {
    pub(super) phase: CellPhase,
    pub(super) instance: Option<InstanceId>,
    pub(super) key_sha256: String,
}

impl Shared {
    /// Without any cell yet.
    pub(super) fn new(config: CellsConfig, store: Store, provider: Arc<dyn Provider>) -> Self {
        Self {
            max_cells: AtomicUsize::new(config.max_cells),
            config,
            store,
            provider,
            links: OnceLock::new(),
            entries: RwLock::default(),
            gone: Gone::default(),
            events: broadcast::channel(EVENTS_KEPT).0,
            look: Notify::new(),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
        }
    }

    pub(super) fn entry(&self, id: &CellId) -> Option<Arc<Entry>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }

    pub(super) fn enter(
        &self,
        record: &Record,
        state: &State,
        inbox: mailbox::Sender<Message>,
    ) -> Arc<Entry> {
        let entry = Arc::new(Entry::new(record, state, inbox));
        self.entries
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(record.id.clone(), Arc::clone(&entry));
        entry
    }

    /// Enters a cell, if there may be one more.
    pub(super) fn enter_new(
        &self,
        record: &Record,
        inbox: mailbox::Sender<Message>,
    ) -> Result<Arc<Entry>, CellError> {
        let entry = Arc::new(Entry::new(record, &State::Requested, inbox));
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if entries.len() >= self.max_cells.load(Ordering::Relaxed) {
            return Err(CellError::Full(entries.len()));
        }
        entries.insert(record.id.clone(), Arc::clone(&entry));
        Ok(entry)
    }

    pub(super) fn run(self: &Arc<Self>, driver: Driver) {
        // Before its task begins: a cell without a link would be taken for one that is gone.
        driver.has_link();
        let stop = self.stop.clone();
        // Boxed, or the task would have room for several copies of it.
        let run = Box::pin(Box::new(driver).run());
        self.tasks.spawn(async move {
            stop.run_until_cancelled_owned(run).await;
        });
    }
}

impl Entry {
    pub(super) fn new(record: &Record, state: &State, inbox: mailbox::Sender<Message>) -> Self {
        let view = View {
            phase: state.phase(),
            instance: state.instance().cloned(),
            key_sha256: record.key_sha256.clone(),
        };
        Self {
            inbox,
            linked: Latest::new(false),
            link: OnceLock::new(),
            pod_uid: record.pod_uid.clone(),
            view: Mutex::new(view),
        }
    }

    pub(super) fn view(&self) -> View {
        locked(&self.view).clone()
    }
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
