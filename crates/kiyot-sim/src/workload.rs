//! Pods of a workload.

use std::time::Duration;

use kiyot_engine::request::CellRequest;

/// A pod of a workload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkloadPod {
    /// The time at which it is created.
    pub arrival: Duration,
    /// The time for which it runs.
    pub duration: Duration,
    /// The request for its cell.
    pub request: CellRequest,
    /// Its namespace.
    pub namespace: String,
}
