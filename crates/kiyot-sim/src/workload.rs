//! Pods of a workload.

use std::time::Duration;

use kiyot_engine::request::CellRequest;

/// A pod of a workload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkloadPod {
    /// The time of the pod's creation.
    pub arrival: Duration,
    /// The time for which the pod runs.
    pub duration: Duration,
    /// The request for the pod's cell.
    pub request: CellRequest,
    /// The pod's namespace.
    pub namespace: String,
}
