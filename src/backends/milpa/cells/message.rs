//! Messages to a cell's task.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::{super::gateway::Refusal, CellError};

/// A message to a cell's task.
#[derive(Debug)]
pub(super) enum Message {
    /// Spends the enrolment token for a key.
    Claim { token_sha256: String, key_sha256: String, answer: oneshot::Sender<Result<(), Refusal>> },
    /// Terminates the cell.
    Terminate { reason: Arc<str>, answer: oneshot::Sender<Result<(), CellError>> },
    /// Reports that the provider lists the instance as ended or not at all.
    InstanceEnded,
}
