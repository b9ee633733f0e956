//! The end of a cell, and the failure that led to it.

use std::sync::Arc;

use crate::{engine::CellError, provider::ProviderError};

/// The end of a cell, once it has begun.
#[derive(Debug, Clone, Default)]
pub struct End {
    pub(in crate::engine) reason: Arc<str>,
    /// True if it is proven that no container of the pod runs.
    pub(in crate::engine) stopped: bool,
    /// True while the provider is asked to release the shared parts of the node.
    pub(in crate::engine) is_detaching: bool,
    /// The error of the last termination, until its callers are answered.
    pub(in crate::engine) refusal: Option<ProviderError>,
    /// The number of failed attempts to end the cell.
    pub(in crate::engine) failed_attempts: u32,
    /// The end of the console, if it was read.
    pub(in crate::engine) console: Option<String>,
}

/// The causes of a cell's end. They may be known before the end begins.
#[derive(Debug, Default)]
pub(in crate::engine) struct CellEnd {
    /// The cause of its failed launch.
    pub(in crate::engine) failure: Option<CellError>,
    /// The time at which the cell was given up because its agent was silent for too long, in
    /// nanoseconds since 1970.
    pub(in crate::engine) lost_unix_nanos: Option<i64>,
    pub(in crate::engine) callers: EndCallers,
}

/// The callers that have ended a cell.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum EndCallers {
    /// No caller has ended it.
    #[default]
    None,
    /// Callers wait for the end of its pod.
    Waiting,
    /// The callers were answered.
    Answered,
}

impl End {
    pub(in crate::engine) fn new(reason: Arc<str>, stopped: bool) -> Self {
        Self { reason, stopped, ..Self::default() }
    }

    /// Returns the end with the proof that no container of the pod runs.
    pub(in crate::engine) fn stopped(self) -> Self {
        Self { stopped: true, ..self }
    }
}

impl CellEnd {
    /// Returns whether a caller has ended the cell. Then its order gets no other cell.
    pub(in crate::engine) fn is_by_caller(&self) -> bool {
        self.callers != EndCallers::None
    }
}
