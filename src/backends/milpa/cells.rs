//! Cells: their lifecycle, and what is kept of it.
//!
//! Each cell has a task of its own (`driver`) that carries out what a pure state machine (`state`)
//! says. What is about to be done at the provider is on disk before it is done (`record`), so that
//! a daemon that is killed at any moment finds what it had begun. `reconcile` compares the cells
//! with what the provider lists, at the start and ever after.

use std::{
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

use kiyot_link::bootstrap::Bootstrap;
use kiyot_proto::store::{CellPhase, SandboxMeta};
use ring::rand::{SecureRandom, SystemRandom};
use tokio::sync::{broadcast, oneshot};

use super::{
    gateway::{CellLink, Gateway},
    id::{CellId, NoRandomness, SandboxId},
    mailbox::mailbox,
    providers::{Attachment, Provider, ProviderError},
    store::{Batch, Store, StoreError, Table},
};

mod driver;
mod gone;
mod job;
mod ledger;
mod reconcile;
mod record;
mod shared;
mod state;

#[cfg(test)]
mod tests;

use driver::{Driver, Launch, Message};
use record::Record;
use shared::{Shared, locked};

/// Messages that may wait for a cell's task.
const INBOX: usize = 32;

/// A cell that runs, or ran when it was asked for. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Cell {
    /// Its id.
    pub id: CellId,
    /// The link to its agent.
    pub link: CellLink,
}

/// A cell that a pod needs.
#[derive(Debug, Clone)]
pub struct LaunchOrder {
    /// The sandbox that it is for.
    pub sandbox: SandboxId,
    /// The pod, as network plugins are told it.
    pub attachment: Attachment,
    /// When the caller stops waiting.
    pub deadline: Option<Instant>,
}

/// Why there is no cell, or why it does not end.
#[derive(Debug, thiserror::Error)]
pub enum CellError {
    /// The provider did not do it.
    #[error("the provider of cells")]
    Provider(#[source] ProviderError),
    /// The store did not keep what must be kept first.
    #[error("the record of cell {0}")]
    Store(CellId, #[source] super::store::StoreError),
    /// It did not call home in time.
    #[error("cell {cell} did not call home within {seconds} s; its console ends: {console}")]
    Silent {
        /// The cell.
        cell: CellId,
        /// How long it had.
        seconds: u64,
        /// What it printed last.
        console: String,
    },
    /// It ended while it was being made or bound.
    #[error("cell {0} ended: {1}")]
    Ended(CellId, String),
    /// As many cells as `max_cells` allows are there.
    #[error("{0} cells are running, and max_cells allows no more")]
    Full(usize),
    /// No random bytes.
    #[error(transparent)]
    Randomness(#[from] super::id::NoRandomness),
}

/// News of a cell.
#[derive(Debug, Clone)]
pub enum CellEvent {
    /// Its control connection is (again) there: watch it anew.
    Connected(CellId),
    /// It is gone, which has been confirmed.
    Gone {
        /// The cell.
        cell: CellId,
        /// Why, in words for a pod's status.
        reason: String,
    },
}

/// What holds for all cells.
#[derive(Debug, Clone)]
pub struct CellsConfig {
    /// As many cells may be there at once, those that are ending among them.
    pub max_cells: usize,
    /// How long a cell may take from the order until it is the pod's.
    pub launch_timeout: Duration,
    /// How long a cell's token may be traded for a certificate.
    pub token_ttl: Duration,
    /// The boot id of the node, for a provider whose instances end with the node; `None` for
    /// instances that don't.
    pub boot_id: Option<String>,
    /// How often the provider's instances are listed.
    pub list_interval: Duration,
    /// How long after a failed termination the next one is tried.
    pub retry_pause: Duration,
}

impl Default for CellsConfig {
    fn default() -> Self {
        Self {
            max_cells: 250,
            launch_timeout: Duration::from_secs(120),
            token_ttl: Duration::from_secs(600),
            boot_id: None,
            list_interval: Duration::from_secs(2),
            retry_pause: Duration::from_secs(3),
        }
    }
}

/// What cells need of the gateway.
pub trait Links: std::fmt::Debug + Send + Sync + 'static {
    /// The link to a cell, made if there is none yet.
    fn link(&self, cell: &CellId) -> CellLink;
    /// What a cell is told so that it can call home.
    fn bootstrap(&self, cell: &CellId, token: &str) -> Bootstrap;
    /// Cuts the link to a cell, and forgets it.
    fn forget(&self, cell: &CellId);
}

impl Links for Gateway {
    fn link(&self, cell: &CellId) -> CellLink {
        Self::link(self, cell)
    }

    fn bootstrap(&self, cell: &CellId, token: &str) -> Bootstrap {
        Self::bootstrap(self, cell, token)
    }

    fn forget(&self, cell: &CellId) {
        Self::forget(self, cell);
    }
}

/// All cells. The only way to make and end one.
#[derive(Debug)]
pub struct Cells {
    shared: Arc<Shared>,
    /// Cells of the store whose tasks begin with [`Cells::serve`].
    resumed: Mutex<Vec<Driver>>,
}

impl Cells {
    /// Reads what the store has of cells. They are admitted to the gateway from now on, but nothing
    /// is done about them before [`Cells::serve`].
    pub async fn start(
        config: CellsConfig,
        store: Store,
        provider: Arc<dyn Provider>,
    ) -> Result<Arc<Self>, StoreError> {
        let shared = Arc::new(Shared::new(config, store, provider));
        let sandboxes = shared.store.load::<SandboxMeta>(Table::Sandboxes).await?;
        let records = shared.store.load(Table::Cells).await?;
        let mut resumed = Vec::new();
        for (record, state) in reconcile::read(&shared, records, &sandboxes).await? {
            let (inbox, messages) = mailbox(INBOX);
            let entry = shared.enter(&record, &state, inbox);
            resumed.push(Driver::resume(Arc::clone(&shared), entry, record, state, messages));
        }
        Ok(Arc::new(Self { shared, resumed: Mutex::new(resumed) }))
    }

    /// How many cells there may be at once, from now on.
    pub fn set_max_cells(&self, most: usize) {
        self.shared.max_cells.store(most, Ordering::Relaxed);
    }

    /// Begins to work with a gateway. The second and any further time it does nothing.
    pub fn serve(&self, links: Arc<dyn Links>) {
        if self.shared.links.set(links).is_err() {
            return;
        }
        for driver in locked(&self.resumed).drain(..) {
            self.shared.run(driver);
        }
        let watch = reconcile::watch(Arc::clone(&self.shared));
        self.shared.tasks.spawn(watch);
    }

    /// Ends all tasks, and returns when they have ended. Cells go on; a launch that runs is undone
    /// at the next start.
    pub async fn shutdown(&self) {
        self.shared.stop.cancel();
        locked(&self.resumed).clear();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
    }

    /// Makes a cell for a sandbox and gives it the pod's network: recorded before the provider is
    /// asked, enrolled, bound. Returns its addresses, the pod's first. On an error nothing of it is
    /// left, or a record says what is left to be undone.
    ///
    /// It goes on when the caller goes away: then the cell is there, bound to the sandbox, until it
    /// is terminated.
    pub async fn launch(
        self: &Arc<Self>,
        order: LaunchOrder,
    ) -> Result<(Cell, Vec<IpAddr>), CellError> {
        self.await_endings(&order.attachment.pod_uid).await?;
        let id = CellId::mint()?;
        let token = token()?;
        let shared = &self.shared;
        if shared.links.get().is_none() || shared.stop.is_cancelled() {
            return Err(CellError::Ended(
                id,
                "no cells are made now: the daemon is starting or stopping".to_owned(),
            ));
        }
        let record = Record::new(id.clone(), &token, &order, &shared.config);
        let (inbox, messages) = mailbox(INBOX);
        let entry = shared.enter_new(&record, inbox)?;
        let deadline = Instant::now() + shared.config.launch_timeout;
        let deadline = order.deadline.map_or(deadline, |wanted| wanted.min(deadline));
        let (answer, answered) = oneshot::channel();
        tracing::info!(cell = %id, sandbox = %order.sandbox, pod = order.attachment.pod_name, namespace = order.attachment.pod_namespace, "A cell is launched");
        let launch = Launch { attachment: order.attachment, token, deadline, answer };
        shared.run(Driver::launch(Arc::clone(shared), entry, record, messages, launch));
        answered.await.unwrap_or_else(|_| Err(CellError::Ended(id, STOPPING.to_owned())))
    }

    /// Waits until the cells of a pod that are ending are gone: what a daemon before this one left
    /// half-made must not run beside what is made now.
    async fn await_endings(self: &Arc<Self>, pod_uid: &str) -> Result<(), CellError> {
        let ending: Vec<CellId> = {
            let entries = self.shared.entries.read().unwrap_or_else(PoisonError::into_inner);
            let of_pod =
                entries.iter().filter(|(_, entry)| !pod_uid.is_empty() && entry.pod_uid == pod_uid);
            of_pod
                .filter(|(_, entry)| entry.view().phase == CellPhase::Terminating)
                .map(|(id, _)| id.clone())
                .collect()
        };
        for id in ending {
            tracing::info!(cell = %id, pod_uid, "A pod's new cell waits for the end of its last one");
            self.terminate(&id, "its pod gets another cell").await?;
        }
        Ok(())
    }

    /// The cell of this id, unless it is gone.
    pub fn get(&self, id: &CellId) -> Option<Cell> {
        let link = self.shared.entry(id)?.link.get()?.clone();
        Some(Cell { id: id.clone(), link })
    }

    /// All that are not gone.
    pub fn all(&self) -> Vec<CellId> {
        self.shared.entries.read().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }

    /// Why a cell of a pod is gone, as long as that is remembered: for whoever was not there when
    /// it was told.
    pub fn gone_reason(&self, id: &CellId) -> Option<String> {
        self.shared.gone.reason(id)
    }

    /// Forgets the cells that are gone, but for those to keep: their records go with this batch.
    pub fn forget_gone(&self, keep: impl Fn(&CellId) -> bool, batch: &mut Batch) {
        for forgotten in self.shared.gone.forget_unless(keep) {
            batch.remove(Table::Cells, forgotten.as_str());
        }
    }

    /// Ends a cell. When it returns `Ok`, the end is confirmed and nothing of it is left. One that
    /// is gone is fine.
    ///
    /// After an error it is tried again every few seconds, and at once when this is called again.
    pub async fn terminate(self: &Arc<Self>, id: &CellId, reason: &str) -> Result<(), CellError> {
        let Some(entry) = self.shared.entry(id) else { return Ok(()) };
        let (answer, answered) = oneshot::channel();
        if entry.inbox.send(Message::Terminate { reason: reason.into(), answer }).await.is_ok()
            && let Ok(outcome) = answered.await
        {
            return outcome;
        }
        // Its task has ended: the cell is gone, or the daemon is stopping.
        if self.shared.entry(id).is_none() {
            Ok(())
        } else {
            Err(CellError::Ended(id.clone(), STOPPING.to_owned()))
        }
    }

    /// News from now on. A receiver that lags must look at everything anew.
    pub fn events(&self) -> broadcast::Receiver<CellEvent> {
        self.shared.events.subscribe()
    }
}

impl Drop for Cells {
    fn drop(&mut self) {
        self.shared.stop.cancel();
    }
}

/// What callers are told whose cell's task ends with the daemon.
const STOPPING: &str = "the daemon is stopping";

/// A new token: 256 random bits in hexadecimal.
fn token() -> Result<String, NoRandomness> {
    let mut bytes = [0_u8; 32];
    SystemRandom::new().fill(&mut bytes).map_err(|_| NoRandomness)?;
    Ok(hex::encode(bytes))
}
