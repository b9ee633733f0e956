//! Launches that failed before a cell's, for the same pod.

use kiyot_proto::store;

/// The errors that are kept.
const MAX_LAST: usize = 4;

/// Launches that failed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EarlierLaunches {
    /// Their number.
    pub failures: u32,
    /// True if one of them was for spot.
    pub spot_failed: bool,
    /// The errors of the last of them, in order.
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

    /// Returns the launches of a cell's record.
    pub(in crate::engine) fn from_stored(record: &store::Cell) -> Self {
        Self {
            failures: record.start_failures,
            spot_failed: record.spot_failed,
            last: record.last_failures.clone(),
        }
    }
}
