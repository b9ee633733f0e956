//! The end of a cell, and the failure that led to it.

use crate::{engine::CellError, provider::ProviderError};

/// The end of a cell, as far as it goes.
#[derive(Debug, Default)]
pub(in crate::engine) struct CellEnd {
    /// The cause of its failed launch.
    pub(in crate::engine) failure: Option<CellError>,
    /// The error of its last termination, until its callers have it.
    pub(in crate::engine) refusal: Option<ProviderError>,
    /// The number of failed attempts to end it.
    pub(in crate::engine) failed_attempts: u32,
    /// The end of its console, if it was read.
    pub(in crate::engine) console: Option<String>,
    /// The time at which it was given up, because its agent was silent for too long, in nanoseconds
    /// since 1970.
    pub(in crate::engine) lost_unix_nanos: Option<i64>,
    pub(in crate::engine) callers: EndCallers,
}

/// The callers that have ended a cell.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum EndCallers {
    /// No caller has ended it.
    #[default]
    None,
    /// They wait for the end of its pod.
    Waiting,
    /// They were answered.
    Answered,
}

impl CellEnd {
    /// Returns whether a caller has ended the cell: its order gets no other cell.
    pub(in crate::engine) fn is_by_caller(&self) -> bool {
        self.callers != EndCallers::None
    }
}
