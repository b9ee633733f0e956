//! The current connections of all cells.

use std::{
    collections::HashMap,
    net::IpAddr,
    ops::RangeInclusive,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use kiyot_engine::id::CellId;
use kiyot_link::{
    channel::{Offer, OfferError, Slot},
    connection::Connection,
    log_limit::LogLimit,
};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    Admission, CellLink,
    control::{ControlChannel, ControlConnection},
    idle_policy::IdlePolicy,
    message_rate::MessageRate,
};

/// The time for which a request for a bulk connection waits for a control connection, before the
/// gateway checks again whether calls wait.
const OPEN_BULK_TIMEOUT: Duration = Duration::from_secs(5);

/// The interval between requests to the agent while calls wait for a bulk connection. An agent that
/// is dialling ignores the request.
const OPEN_BULK_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The pause between two requests after a connection ended at once or the agent refused to dial.
const OPEN_BULK_BACKOFF: Duration = Duration::from_millis(20);

/// The current connections of a cell.
#[derive(Debug)]
pub(super) struct CellConnections {
    cell: CellId,
    control: ControlChannel,
    bulk: Slot,
    lines: Arc<LogLimit>,
    /// The rate of messages of all control connections of the cell.
    message_rate: MessageRate,
    /// Locked while a bulk connection is opened or closed, so that the policy sees both in order.
    idle_policy: Mutex<IdlePolicy>,
    /// Locked while [`Admission::linked`] is called, so that its calls are in order.
    linked: Mutex<()>,
    /// The address from which the agent connected last over TCP.
    peer: Mutex<Option<IpAddr>>,
    /// Set while a task asks the agent for a bulk connection.
    is_opening_bulk: AtomicBool,
}

impl CellConnections {
    fn new(
        cell: &CellId,
        bulk_idle: RangeInclusive<Duration>,
        shutdown: &CancellationToken,
        tasks: &TaskTracker,
    ) -> Arc<Self> {
        let connections = Arc::new(Self {
            cell: cell.clone(),
            control: ControlChannel::new(format!("control connection of {cell}")),
            bulk: Slot::new(format!("bulk connection of {cell}")),
            lines: Arc::default(),
            message_rate: MessageRate::default(),
            idle_policy: Mutex::new(IdlePolicy::new(bulk_idle)),
            linked: Mutex::new(()),
            peer: Mutex::default(),
            is_opening_bulk: AtomicBool::new(false),
        });
        let (weak, shutdown, tasks) =
            (Arc::downgrade(&connections), shutdown.clone(), tasks.clone());
        connections.bulk.on_demand(move || {
            if let Some(connections) = weak.upgrade()
                && !connections.is_opening_bulk.swap(true, Ordering::SeqCst)
            {
                let shutdown = shutdown.clone();
                tasks.spawn(async move {
                    shutdown.run_until_cancelled_owned(connections.open_bulk()).await
                });
            }
        });
        connections
    }

    fn link(&self) -> CellLink {
        CellLink {
            control: self.control.clone(),
            bulk: self.bulk.channel(),
            lines: self.lines.clone(),
        }
    }

    pub(super) fn message_rate(&self) -> &MessageRate {
        &self.message_rate
    }

    /// Asks the agent for a bulk connection while calls wait for it.
    async fn open_bulk(self: Arc<Self>) {
        loop {
            while self.needs_bulk() {
                match self.control.open_bulk(OPEN_BULK_TIMEOUT).await {
                    Ok(()) => {
                        let _ = timeout(OPEN_BULK_RETRY_INTERVAL, self.bulk.connected()).await;
                    }
                    Err(status) => {
                        tracing::debug!(
                            cell = %self.cell,
                            %status,
                            "agent could not be asked for a bulk connection"
                        );
                    }
                }
                if !self.bulk.is_connected() {
                    sleep(OPEN_BULK_BACKOFF).await;
                }
            }
            self.is_opening_bulk.store(false, Ordering::SeqCst);
            // A call that began to wait before this store did not start another task.
            if !self.needs_bulk() || self.is_opening_bulk.swap(true, Ordering::SeqCst) {
                return;
            }
        }
    }

    fn needs_bulk(&self) -> bool {
        self.bulk.waiting_calls() > 0 && !self.bulk.is_connected() && !self.bulk.is_closed()
    }

    /// Makes a control connection the current one.
    pub(super) fn control_opened(
        &self,
        offer: Offer<ControlConnection>,
        peer: Option<IpAddr>,
        admission: &dyn Admission,
    ) -> Result<(), OfferError> {
        let _linked = self.linked.lock().unwrap_or_else(PoisonError::into_inner);
        let hello = offer.connection.hello().clone();
        self.control.offer(offer)?;
        *self.peer.lock().unwrap_or_else(PoisonError::into_inner) = peer;
        admission.linked(&self.cell, Some(hello));
        Ok(())
    }

    /// Returns the address from which the agent connected last over TCP.
    pub(super) fn peer(&self) -> Option<IpAddr> {
        *self.peer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes a control connection after its end.
    pub(super) fn control_ended(&self, connection: &ControlConnection, admission: &dyn Admission) {
        let _linked = self.linked.lock().unwrap_or_else(PoisonError::into_inner);
        if self.control.withdraw(connection) {
            admission.linked(&self.cell, None);
        }
    }

    /// Makes a bulk connection the current one.
    pub(super) fn bulk_opened(&self, offer: Offer) -> Result<(), OfferError> {
        let mut idle_policy = self.idle_policy();
        self.bulk.offer(offer)?;
        idle_policy.opened(Instant::now());
        Ok(())
    }

    /// Returns the idle timeout of the current bulk connection.
    pub(super) fn bulk_idle_timeout(&self) -> Duration {
        self.idle_policy().timeout()
    }

    /// Removes a bulk connection after its idle timeout.
    pub(super) fn bulk_idle_closed(&self, connection: &Connection) {
        let mut idle_policy = self.idle_policy();
        if self.bulk.withdraw(connection) {
            idle_policy.idle_closed(Instant::now());
        }
    }

    /// Removes a bulk connection after its end.
    pub(super) fn bulk_ended(&self, connection: &Connection) {
        self.bulk.withdraw(connection);
    }

    fn idle_policy(&self) -> MutexGuard<'_, IdlePolicy> {
        self.idle_policy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        self.control.close();
        self.bulk.close();
    }
}

/// The current connections of all cells that have a link.
#[derive(Debug)]
pub(super) struct Connections {
    by_cell: Mutex<HashMap<CellId, Arc<CellConnections>>>,
    bulk_idle: RangeInclusive<Duration>,
    shutdown: CancellationToken,
    tasks: TaskTracker,
}

impl Connections {
    /// Creates an empty set. `bulk_idle` bounds the idle timeout of bulk connections.
    pub(super) fn new(
        bulk_idle: RangeInclusive<Duration>,
        shutdown: CancellationToken,
        tasks: TaskTracker,
    ) -> Self {
        Self { by_cell: Mutex::default(), bulk_idle, shutdown, tasks }
    }

    /// Returns the link to a cell, and creates it at the first call.
    pub(super) fn link(&self, cell: &CellId) -> CellLink {
        self.by_cell()
            .entry(cell.clone())
            .or_insert_with(|| {
                CellConnections::new(cell, self.bulk_idle.clone(), &self.shutdown, &self.tasks)
            })
            .link()
    }

    /// Returns the connections of a cell, if it has a link.
    pub(super) fn get(&self, cell: &CellId) -> Option<Arc<CellConnections>> {
        self.by_cell().get(cell).cloned()
    }

    /// Removes a cell's link: aborts its connections, and fails its calls at once.
    pub(super) fn forget(&self, cell: &CellId) {
        let connections = self.by_cell().remove(cell);
        if let Some(connections) = connections {
            connections.close();
        }
    }

    pub(super) fn forget_all(&self) {
        let all = std::mem::take(&mut *self.by_cell());
        all.values().for_each(|connections| connections.close());
    }

    fn by_cell(&self) -> MutexGuard<'_, HashMap<CellId, Arc<CellConnections>>> {
        self.by_cell.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
