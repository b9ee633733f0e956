//! The counter of what this crate does, for metrics.

use std::{fmt, time::Duration};

/// The share of a deleted node was given back.
pub const SWEPT: &str = "swept";
/// The entry of a deleted node was removed.
pub const REMOVED: &str = "removed";
/// A sweep failed, as for want of a list of instances.
pub const FAILED: &str = "failed";

/// Counts calls and events.
pub trait Counter: fmt::Debug + Send + Sync {
    /// Counts a call by its operation, such as `list pods`, and its outcome: `ok`, or the class of
    /// its failure.
    fn called(&self, operation: &'static str, outcome: &'static str, duration: Duration);
    /// Counts an event that was dropped, because it is beyond its pod's share.
    fn event_dropped(&self);
    /// Notes the number of declared figures of the node that the API server does not apply.
    fn capacity_unapplied(&self, figures: usize);
    /// Notes that all budgets are known as they are now.
    fn budgets_read(&self);
    /// Counts a sweep of an entry of another node by its outcome, [`SWEPT`], [`REMOVED`] or
    /// [`FAILED`].
    fn swept(&self, outcome: &'static str);
    /// Notes whether the node takes fewer pods for cells than are allowed, for want of cells.
    fn cells_exhausted(&self, is_exhausted: bool);
}
