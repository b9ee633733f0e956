//! State that the tasks of all cells share, and the view of a cell from outside its task.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use kiyot_link::watch::Watch;
use kiyot_proto::store::CellPhase;
use tokio::sync::{Notify, broadcast};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    super::{
        gateway::CellLink,
        id::CellId,
        mailbox,
        providers::{InstanceId, Provider},
        store::Store,
    },
    CellError, CellEvent, CellsConfig, Links,
    message::Message,
    record::Record,
    state::State,
    tombstones::Tombstones,
};

/// The capacity of the event channel, in events; a slower receiver lags and reads all again.
const EVENT_CAPACITY: usize = 1024;

/// State that the tasks of all cells share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: CellsConfig,
    pub(super) max_cells: AtomicUsize,
    pub(super) store: Store,
    pub(super) provider: Arc<dyn Provider>,
    pub(super) links: OnceLock<Arc<dyn Links>>,
    pub(super) entries: RwLock<BTreeMap<CellId, Arc<Entry>>>,
    pub(super) tombstones: Tombstones,
    pub(super) events: broadcast::Sender<CellEvent>,
    /// Requests a listing of the provider's instances before its period is over.
    pub(super) list_now: Notify,
    pub(super) tasks: TaskTracker,
    pub(super) stop: CancellationToken,
}

/// A cell, as seen from outside its task.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) inbox: mailbox::Sender<Message>,
    /// True while the cell has a control connection.
    pub(super) linked: Watch<bool>,
    pub(super) link: OnceLock<CellLink>,
    /// `metadata.uid` of its pod.
    pub(super) pod_uid: String,
    pub(super) view: Mutex<View>,
}

/// The part of a cell's state that is read without its task.
#[derive(Debug, Clone)]
pub(super) struct View {
    pub(super) phase: CellPhase,
    pub(super) instance: Option<InstanceId>,
    pub(super) key_sha256: String,
}

impl Shared {
    /// Returns the state without any cell.
    pub(super) fn new(config: CellsConfig, store: Store, provider: Arc<dyn Provider>) -> Self {
        Self {
            max_cells: AtomicUsize::new(config.max_cells),
            config,
            store,
            provider,
            links: OnceLock::new(),
            entries: RwLock::default(),
            tombstones: Tombstones::default(),
            events: broadcast::channel(EVENT_CAPACITY).0,
            list_now: Notify::new(),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
        }
    }

    pub(super) fn entry(&self, id: &CellId) -> Option<Arc<Entry>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }

    pub(super) fn insert(
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

    /// Adds a cell, unless `max_cells` is reached.
    pub(super) fn try_insert(
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
            linked: Watch::new(false),
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
