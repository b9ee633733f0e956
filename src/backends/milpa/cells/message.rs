//! Messages to a cell's task.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::{super::gateway::Refusal, CellError};

/// The sender of a message's outcome.
type Answer<E> = oneshot::Sender<Result<(), E>>;

/// A message to a cell's task.
#[derive(Debug)]
pub(super) enum Message {
    /// Spends the enrolment token for a key.
    Claim { token_sha256: String, key_sha256: String, answer: Answer<Refusal> },
    /// Terminates the cell.
    Terminate { reason: Arc<str>, answer: Answer<CellError> },
    /// Reports that the provider lists the instance as ended or not at all.
    InstanceEnded,
}
