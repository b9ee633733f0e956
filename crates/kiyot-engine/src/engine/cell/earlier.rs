//! Failed launches for the pod of a cell, before the cell's own launch.

use kiyot_proto::store;

/// Bounds the errors that are kept.
const MAX_LAST: usize = 4;

/// The failed launches of a pod before its cell's launch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EarlierLaunches {
    /// The number of failed launches.
    pub failures: u32,
    /// True if a failed launch was for spot.
    pub spot_failed: bool,
    /// The last errors, in order.
    pub last: Vec<String>,
}

impl EarlierLaunches {
    /// Returns the launches that failed with these errors.
    pub(in crate::engine) fn new(causes: &[String], spot_failed: bool) -> Self {
        Self {
            failures: u32::try_from(causes.len()).unwrap_or(u32::MAX),
            spot_failed,
            last: causes[causes.len().saturating_sub(MAX_LAST)..].to_vec(),
        }
    }

    pub(in crate::engine) fn from_stored(record: &store::Cell) -> Self {
        Self {
            failures: record.start_failures,
            spot_failed: record.spot_failed,
            last: record.last_failures.clone(),
        }
    }
}
