//! Record of the API's calls.

use std::{collections::BTreeMap, time::Instant};

use crate::{proxy::Caller, query::Query};

/// Most recorded calls. Beyond it, the oldest call is dropped.
pub(crate) const MAX_CALLS: usize = 100_000;

/// Outcome of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// In progress, or cancelled by its caller.
    Pending,
    /// Waits until its [`Hold`](crate::Hold) ends.
    Held,
    /// Success.
    Ok,
    /// Error with its code.
    Error(String),
    /// The call had its effect, and its reply was lost.
    Lost,
    /// The connection was closed, and the call had no effect.
    Reset,
}

/// A call that the API received.
#[derive(Debug, Clone)]
pub struct Call {
    /// Action.
    pub action: String,
    /// Parameters without `Version`.
    pub parameters: BTreeMap<String, String>,
    /// The id of the key that signed the call; "" for an unsigned call.
    pub key_id: String,
    /// Time of arrival.
    pub time: Instant,
    /// Outcome.
    pub outcome: Outcome,
}

impl Call {
    pub(crate) fn new(query: &Query, caller: &Caller) -> Self {
        Self {
            action: query.action.clone(),
            parameters: query.parameters.clone(),
            key_id: caller.key_id().to_owned(),
            time: Instant::now(),
            outcome: Outcome::Pending,
        }
    }
}
