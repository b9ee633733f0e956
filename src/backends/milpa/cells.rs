//! The lifecycle of cells.
//!
//! A task per cell (`driver`) carries out the effects of a pure state machine (`state`). Each step
//! at the provider is on disk before it is taken (`record`), so that a daemon that is killed at any
//! moment finds what it had begun. `reconcile` compares the cells with the provider's list.

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

mod admission;
mod driver;
mod message;
mod provider_calls;
mod reconcile;
mod record;
mod shared;
mod state;
mod tombstones;

#[cfg(test)]
mod tests;

use driver::{Driver, Launch};
use message::Message;
use record::Record;
use shared::{Shared, locked};

/// The capacity of a cell task's inbox, in messages.
const INBOX_CAPACITY: usize = 32;

/// A running cell. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Cell {
    /// The cell's id.
    pub id: CellId,
    /// The link to its agent.
    pub link: CellLink,
}

/// The order of a cell for a pod.
#[derive(Debug, Clone)]
pub struct LaunchOrder {
    /// The pod's sandbox.
    pub sandbox: SandboxId,
    /// The pod, as CNI plugins get it.
    pub attachment: Attachment,
    /// The caller's deadline.
    pub deadline: Option<Instant>,
}

/// An error of the launch or the termination of a cell.
#[derive(Debug, thiserror::Error)]
pub enum CellError {
    /// The provider refused or failed.
    #[error("the provider of cells")]
    Provider(#[source] ProviderError),
    /// The record could not be written.
    #[error("the record of cell {0}")]
    Store(CellId, #[source] super::store::StoreError),
    /// The agent did not connect in time.
    #[error("cell {cell} did not connect within {seconds} s; its console ends: {console}")]
    Silent {
        /// The cell.
        cell: CellId,
        /// The time limit, in seconds.
        seconds: u64,
        /// The end of its console output.
        console: String,
    },
    /// The cell ended during its launch.
    #[error("cell {0} ended: {1}")]
    Ended(CellId, String),
    /// The limit `max_cells` is reached.
    #[error("{0} cells are running, and max_cells allows no more")]
    Full(usize),
    /// The system returned no random bytes.
    #[error(transparent)]
    Randomness(#[from] super::id::NoRandomness),
}

/// An event of a cell.
#[derive(Debug, Clone)]
pub enum CellEvent {
    /// Its control connection is (again) established: start another watch.
    Connected(CellId),
    /// Its end is confirmed.
    Gone {
        /// The cell.
        cell: CellId,
        /// The reason, for the pod's status.
        reason: String,
    },
}

/// The configuration of all cells.
#[derive(Debug, Clone)]
pub struct CellsConfig {
    /// Bounds the number of cells, terminating cells included.
    pub max_cells: usize,
    /// Bounds the time from the order until the cell is bound to its pod.
    pub launch_timeout: Duration,
    /// The validity of a cell's enrolment token.
    pub token_ttl: Duration,
    /// The boot id of the node, for a provider whose instances end with the node, otherwise `None`.
    pub boot_id: Option<String>,
    /// The period at which the provider's instances are listed.
    pub list_interval: Duration,
    /// The pause after a failed termination.
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

/// The part of the gateway that cells use.
pub trait Links: std::fmt::Debug + Send + Sync + 'static {
    /// Returns the link to a cell, creating it if needed.
    fn link(&self, cell: &CellId) -> CellLink;
    /// Returns the data with which a cell's agent connects to the gateway.
    fn bootstrap(&self, cell: &CellId, token: &str) -> Bootstrap;
    /// Closes and removes the link to a cell.
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

/// All cells, and the only way to launch and terminate a cell.
#[derive(Debug)]
pub struct Cells {
    shared: Arc<Shared>,
    /// Stored cells whose tasks start with [`Cells::serve`].
    resumed: Mutex<Vec<Driver>>,
}

impl Cells {
    /// Loads the cells of the store. The gateway admits them from now on; their tasks start with
    /// [`Cells::serve`].
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
            let (inbox, messages) = mailbox(INBOX_CAPACITY);
            let entry = shared.insert(&record, &state, inbox);
            resumed.push(Driver::resume(Arc::clone(&shared), entry, record, state, messages));
        }
        Ok(Arc::new(Self { shared, resumed: Mutex::new(resumed) }))
    }

    /// Sets the limit of cells for further launches.
    pub fn set_max_cells(&self, most: usize) {
        self.shared.max_cells.store(most, Ordering::Relaxed);
    }

    /// Starts all tasks with a gateway. Further calls do nothing.
    pub fn serve(&self, links: Arc<dyn Links>) {
        if self.shared.links.set(links).is_err() {
            return;
        }
        for driver in locked(&self.resumed).drain(..) {
            driver.spawn();
        }
        let watch = reconcile::watch(Arc::clone(&self.shared));
        self.shared.tasks.spawn(watch);
    }

    /// Ends all tasks and waits for them. Cells continue to run; an unfinished launch is undone at
    /// the next start.
    pub async fn shutdown(&self) {
        self.shared.stop.cancel();
        locked(&self.resumed).clear();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
    }

    /// Launches a cell for a sandbox: records it, launches the instance, waits for its agent to
    /// enrol, and attaches the pod's network. Returns its addresses, the pod's first. After an
    /// error nothing of the cell is left, or its record says what remains to be undone.
    ///
    /// The launch continues if the caller is dropped: the cell is then bound to the sandbox until
    /// it is terminated.
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
                "no cell is launched while the daemon is starting or stopping".to_owned(),
            ));
        }
        let record = Record::new(id.clone(), &token, &order, &shared.config);
        let (inbox, messages) = mailbox(INBOX_CAPACITY);
        let entry = shared.try_insert(&record, inbox)?;
        let deadline = Instant::now() + shared.config.launch_timeout;
        let deadline = order.deadline.map_or(deadline, |wanted| wanted.min(deadline));
        let (answer, answered) = oneshot::channel();
        tracing::info!(
            cell = %id,
            sandbox = %order.sandbox,
            pod = order.attachment.pod_name,
            namespace = order.attachment.pod_namespace,
            "cell launch started"
        );
        let launch = Launch { attachment: order.attachment, token, deadline, answer };
        Driver::launch(Arc::clone(shared), entry, record, messages, launch).spawn();
        answered.await.unwrap_or_else(|_| Err(CellError::Ended(id, STOPPING.to_owned())))
    }

    /// Waits for the end of a pod's terminating cells: an unfinished cell of the previous daemon
    /// must not run beside a new cell of the pod.
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
            tracing::info!(
                cell = %id,
                pod_uid,
                "cell launch waits for the end of the pod's previous cell"
            );
            self.terminate(&id, "its pod gets another cell").await?;
        }
        Ok(())
    }

    /// Returns the cell with this id, unless its end is confirmed.
    pub fn get(&self, id: &CellId) -> Option<Cell> {
        let link = self.shared.entry(id)?.link.get()?.clone();
        Some(Cell { id: id.clone(), link })
    }

    /// Returns the ids of all cells whose end is not confirmed.
    pub fn all(&self) -> Vec<CellId> {
        self.shared.entries.read().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }

    /// Returns the reason of a cell's end while its tombstone is kept: for receivers that missed
    /// the event.
    pub fn gone_reason(&self, id: &CellId) -> Option<String> {
        self.shared.tombstones.reason(id)
    }

    /// Drops tombstones, except those to keep, and adds the removal of their records to the batch.
    pub fn forget_gone(&self, keep: impl Fn(&CellId) -> bool, batch: &mut Batch) {
        for forgotten in self.shared.tombstones.retain(keep) {
            batch.remove(Table::Cells, forgotten.as_str());
        }
    }

    /// Terminates a cell. `Ok` means that its end is confirmed and nothing of it is left.
    /// Terminating an unknown cell succeeds.
    ///
    /// After an error the termination is retried every few seconds, and at once by another call.
    pub async fn terminate(self: &Arc<Self>, id: &CellId, reason: &str) -> Result<(), CellError> {
        let Some(entry) = self.shared.entry(id) else { return Ok(()) };
        let (answer, answered) = oneshot::channel();
        if entry.inbox.send(Message::Terminate { reason: reason.into(), answer }).await.is_ok()
            && let Ok(outcome) = answered.await
        {
            return outcome;
        }
        // The cell's task has ended with the cell or with the daemon.
        if self.shared.entry(id).is_none() {
            Ok(())
        } else {
            Err(CellError::Ended(id.clone(), STOPPING.to_owned()))
        }
    }

    /// Subscribes to the events of all cells. A receiver that lags must read everything again.
    pub fn events(&self) -> broadcast::Receiver<CellEvent> {
        self.shared.events.subscribe()
    }
}

impl Drop for Cells {
    fn drop(&mut self) {
        self.shared.stop.cancel();
    }
}

/// The error of calls whose cell task ends with the daemon.
const STOPPING: &str = "the daemon is stopping";

/// Returns a new token: 256 random bits in hexadecimal.
fn token() -> Result<String, NoRandomness> {
    let mut bytes = [0_u8; 32];
    SystemRandom::new().fill(&mut bytes).map_err(|_| NoRandomness)?;
    Ok(hex::encode(bytes))
}
