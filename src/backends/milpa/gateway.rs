//! The gateway: cells dial home over mutual TLS, and calls to them run back over the connection that they made.

use async_trait::async_trait;
use kiyot_link::channel::Channel;
use kiyot_proto::cell::HelloReply;
use tokio::sync::watch;

use super::id::CellId;

/// Why a cell is not let in.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// No such cell is to be.
    #[error("cell {0} is not known, or has ended")]
    Unknown(String),
    /// Not the token that the cell was given.
    #[error("the token of cell {0} is another")]
    WrongToken(CellId),
    /// The token's time is over.
    #[error("the token of cell {0} has expired")]
    Expired(CellId),
    /// Another key has spent the token: an alarm, and the cell is destroyed if it is unbound.
    #[error("the token of cell {0} was spent by another key")]
    OtherKey(CellId),
    /// The store could not keep what must be kept first.
    #[error("what cell {0} did could not be recorded")]
    Store(CellId, #[source] super::store::StoreError),
}

/// What the gateway asks about cells. Implemented by [`super::cells::Cells`].
#[async_trait]
pub trait Ledger: Send + Sync + 'static {
    /// Spends a cell's token for a key, durably, before a certificate is made. Again with the same key it is fine until the token's end.
    async fn claim(&self, cell: &str, token_sha256: &str, key_sha256: &str) -> Result<CellId, Refusal>;
    /// Whether a cell with a certificate for this key may connect now.
    fn admits(&self, cell: &str, key_sha256: &str) -> Result<CellId, Refusal>;
    /// A cell's control connection is there, or is gone. Called in order for each cell.
    fn linked(&self, cell: &CellId, hello: Option<HelloReply>);
}

/// The link to one cell. Cheap to clone; outlives connections.
#[derive(Debug, Clone)]
pub struct CellLink {
    /// Lifecycle, CRI, events.
    pub control: Channel,
    /// Logs, streams, blobs: the connection is asked for when a call needs it, and closed when nothing has used it for a while.
    pub bulk: Channel,
    /// What the agent said of itself on the current control connection; `None` without one.
    pub hello: watch::Receiver<Option<HelloReply>>,
}
