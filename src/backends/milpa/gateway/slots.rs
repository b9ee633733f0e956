//! The places of the connections of cells.

use std::{
    collections::HashMap,
    ops::RangeInclusive,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use kiyot_link::{
    channel::{Offer, Refused, Slot},
    connection::Connection,
    log_limit::LogLimit,
};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    CellLink, Ledger,
    control::{Control, Line},
    patience::Patience,
};
use crate::backends::milpa::id::CellId;

/// How long a wish for a bulk connection waits for a control connection, before it is looked at
/// anew.
const OPEN_BULK_TIMEOUT: Duration = Duration::from_secs(5);

/// After this it is told again, if calls still wait for one. It ignores what comes while it dials.
const OPEN_BULK_AGAIN: Duration = Duration::from_secs(1);

/// The places of one cell's connections.
#[derive(Debug)]
pub(super) struct CellSlots {
    cell: CellId,
    control: Control,
    bulk: Slot,
    lines: Arc<LogLimit>,
    /// Held while a bulk connection comes or is let go, so that it hears in order.
    patience: Mutex<Patience>,
    /// Held while the ledger is told, so that it hears in order.
    news: Mutex<()>,
    /// A task asks for a bulk connection.
    asking: AtomicBool,
}

impl CellSlots {
    fn new(
        cell: &CellId,
        idle: RangeInclusive<Duration>,
        end: &CancellationToken,
        tasks: &TaskTracker,
    ) -> Arc<Self> {
        let slots = Arc::new(Self {
            cell: cell.clone(),
            control: Control::new(format!("control connection of {cell}")),
            bulk: Slot::new(format!("bulk connection of {cell}")),
            lines: Arc::default(),
            patience: Mutex::new(Patience::new(idle)),
            news: Mutex::new(()),
            asking: AtomicBool::new(false),
        });
        let (weak, end, tasks) = (Arc::downgrade(&slots), end.clone(), tasks.clone());
        slots.bulk.on_demand(move || {
            if let Some(slots) = weak.upgrade()
                && !slots.asking.swap(true, Ordering::SeqCst)
            {
                let end = end.clone();
                tasks.spawn(
                    async move { end.run_until_cancelled_owned(slots.ask_for_bulk()).await },
                );
            }
        });
        slots
    }

    fn link(&self) -> CellLink {
        CellLink {
            control: self.control.clone(),
            bulk: self.bulk.channel(),
            lines: self.lines.clone(),
        }
    }

    /// Has the agent dial a bulk connection, for as long as calls wait for one.
    async fn ask_for_bulk(self: Arc<Self>) {
        loop {
            while self.bulk.waiting() > 0 && !self.bulk.is_connected() && !self.bulk.is_closed() {
                match self.control.open_bulk(OPEN_BULK_TIMEOUT).await {
                    Ok(()) => {
                        let _ = timeout(OPEN_BULK_AGAIN, self.bulk.settled()).await;
                    }
                    Err(status) => {
                        tracing::debug!(cell = %self.cell, %status, "The agent could not be asked for a bulk connection.")
                    }
                }
                if !self.bulk.is_connected() {
                    // A place may hold a connection that has just ended, and an agent may refuse at
                    // once.
                    sleep(Duration::from_millis(20)).await;
                }
            }
            self.asking.store(false, Ordering::SeqCst);
            // A call that began to wait before this saw a task that asks.
            let wanted =
                self.bulk.waiting() > 0 && !self.bulk.is_connected() && !self.bulk.is_closed();
            if !wanted || self.asking.swap(true, Ordering::SeqCst) {
                return;
            }
        }
    }

    /// A control connection becomes the current one.
    pub(super) fn control_opened(
        &self,
        offer: Offer<Line>,
        ledger: &dyn Ledger,
    ) -> Result<(), Refused> {
        let _news = self.news.lock().unwrap_or_else(PoisonError::into_inner);
        let hello = offer.connection.hello().clone();
        self.control.offer(offer)?;
        ledger.linked(&self.cell, Some(hello));
        Ok(())
    }

    /// A control connection has ended.
    pub(super) fn control_ended(&self, connection: &Line, ledger: &dyn Ledger) {
        let _news = self.news.lock().unwrap_or_else(PoisonError::into_inner);
        if self.control.withdraw(connection) {
            ledger.linked(&self.cell, None);
        }
    }

    /// A bulk connection becomes the current one.
    pub(super) fn bulk_opened(&self, offer: Offer) -> Result<(), Refused> {
        let mut patience = self.patience();
        self.bulk.offer(offer)?;
        patience.opened(Instant::now());
        Ok(())
    }

    /// How long the current bulk connection is kept after its last call.
    pub(super) fn bulk_idle(&self) -> Duration {
        self.patience().long()
    }

    /// No further call goes over a bulk connection, as none has for so long.
    pub(super) fn bulk_ran_out(&self, connection: &Connection) {
        let mut patience = self.patience();
        if self.bulk.withdraw(connection) {
            patience.ran_out(Instant::now());
        }
    }

    fn patience(&self) -> MutexGuard<'_, Patience> {
        self.patience.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No further call goes over a bulk connection.
    pub(super) fn bulk_ended(&self, connection: &Connection) {
        self.bulk.withdraw(connection);
    }

    fn close(&self) {
        self.control.close();
        self.bulk.close();
    }
}

/// The places of all cells.
#[derive(Debug)]
pub(super) struct Slots {
    by_cell: Mutex<HashMap<CellId, Arc<CellSlots>>>,
    bulk_idle: RangeInclusive<Duration>,
    end: CancellationToken,
    tasks: TaskTracker,
}

impl Slots {
    /// For how long, at first and at most, a bulk connection is kept without a call is `bulk_idle`.
    pub(super) fn new(
        bulk_idle: RangeInclusive<Duration>,
        end: CancellationToken,
        tasks: TaskTracker,
    ) -> Self {
        Self { by_cell: Mutex::default(), bulk_idle, end, tasks }
    }

    /// The link to a cell; the first call makes its places.
    pub(super) fn link(&self, cell: &CellId) -> CellLink {
        let mut by_cell = self.by_cell.lock().unwrap_or_else(PoisonError::into_inner);
        by_cell
            .entry(cell.clone())
            .or_insert_with(|| CellSlots::new(cell, self.bulk_idle.clone(), &self.end, &self.tasks))
            .link()
    }

    /// The places of a cell that has a link.
    pub(super) fn of(&self, cell: &CellId) -> Option<Arc<CellSlots>> {
        self.by_cell.lock().unwrap_or_else(PoisonError::into_inner).get(cell).cloned()
    }

    /// Cuts a cell's connections; calls to it fail at once.
    pub(super) fn forget(&self, cell: &CellId) {
        let slots = self.by_cell.lock().unwrap_or_else(PoisonError::into_inner).remove(cell);
        if let Some(slots) = slots {
            slots.close();
        }
    }

    /// The same for all.
    pub(super) fn forget_all(&self) {
        let all = std::mem::take(&mut *self.by_cell.lock().unwrap_or_else(PoisonError::into_inner));
        all.values().for_each(|slots| slots.close());
    }
}
