//! Cells: their lifecycle, and what is kept of it.

use std::{net::IpAddr, sync::Arc, time::Instant};

use super::{
    gateway::CellLink,
    id::{CellId, SandboxId},
    providers::{Attachment, ProviderError},
};

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
    /// Its agent refused.
    #[error("the agent of cell {0}: {1}")]
    Agent(CellId, String),
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

/// All cells. The only way to make and end one.
#[derive(Debug)]
pub struct Cells {}

impl Cells {
    /// Makes a cell for a sandbox and gives it the pod's network: recorded before the provider is asked, enrolled, bound. Returns its addresses, the pod's first.
    /// On an error nothing of it is left, or a record says what is left to be undone.
    pub async fn launch(self: &Arc<Self>, _order: LaunchOrder) -> Result<(Cell, Vec<IpAddr>), CellError> {
        unimplemented!()
    }

    /// The cell of this id, unless it is gone.
    pub fn get(&self, _id: &CellId) -> Option<Cell> {
        unimplemented!()
    }

    /// All that are not gone.
    pub fn all(&self) -> Vec<CellId> {
        unimplemented!()
    }

    /// Ends a cell. When it returns `Ok`, the end is confirmed and nothing of it is left. One that is gone is fine.
    pub async fn terminate(self: &Arc<Self>, _id: &CellId, _reason: &str) -> Result<(), CellError> {
        unimplemented!()
    }

    /// News from now on. A receiver that lags must look at everything anew.
    pub fn events(&self) -> tokio::sync::broadcast::Receiver<CellEvent> {
        unimplemented!()
    }
}
