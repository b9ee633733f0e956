//! Counts this crate's calls and events, for metrics.

use std::{fmt, time::Duration};

/// The share of a deleted node was given back.
pub const SWEPT: &str = "swept";
/// The entry of a deleted node was removed.
pub const REMOVED: &str = "removed";
/// A sweep failed, for example because a list of instances failed.
pub const FAILED: &str = "failed";

/// Counts calls and events.
pub trait Counter: fmt::Debug + Send + Sync {
    /// Counts a call by its operation, such as `list pods`, and its outcome: `ok`, or the class of
    /// its failure.
    fn called(&self, operation: &'static str, outcome: &'static str, duration: Duration);
    /// Counts an event that was dropped because it exceeds its pod's share.
    fn event_dropped(&self);
    /// Sets the number of declared figures of the node that the API server does not apply.
    fn capacity_unapplied(&self, figures: usize);
    /// Notes that the known budgets are current.
    fn budgets_read(&self);
    /// Counts a sweep of another node's entry by its outcome: [`SWEPT`], [`REMOVED`] or [`FAILED`].
    fn swept(&self, outcome: &'static str);
    /// Sets whether the node takes fewer pods than allowed because no cell can be launched.
    fn cells_exhausted(&self, is_exhausted: bool);
}
