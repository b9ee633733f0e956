//! Logs of pods in cells: the node's file is byte for byte a slice of the cell's log.

use std::{path::PathBuf, sync::Arc, time::Duration};

use tonic::Status;

use super::{cells::Cell, id::ContainerId};

/// A container's log: where it is in the cell, and where it goes on the node.
#[derive(Debug, Clone)]
pub struct LogRoute {
    /// The container.
    pub container: ContainerId,
    /// Absolute, on the node.
    pub node_path: PathBuf,
    /// Beneath the cell's `pod_dir`.
    pub cell_path: String,
    /// Position in the cell's log at which the node's file begins.
    pub base: u64,
}

/// Logs of pods in cells.
#[derive(Debug)]
pub struct Logs {}

impl Logs {
    /// Makes the node's file (before StartContainer answers) and follows the cell's log from base + the file's length on. Again for the same container, it goes on with this cell's link.
    pub async fn follow(self: &Arc<Self>, _cell: &Cell, _route: LogRoute) -> Result<(), Status> {
        unimplemented!()
    }

    /// The cell says that a log has grown to `size` bytes.
    pub fn grown(&self, _cell: &super::id::CellId, _cell_path: &str, _size: u64) {
        unimplemented!()
    }

    /// Waits until the node's file has all that the container wrote, `within` at most. Called before an exit is reported.
    pub async fn drain(&self, _container: &ContainerId, _within: Duration) {
        unimplemented!()
    }

    /// `ReopenContainerLog`: flushes, makes the file anew, and returns the position at which it begins, which the caller keeps before it answers.
    pub async fn reopen(&self, _container: &ContainerId) -> Result<u64, Status> {
        unimplemented!()
    }

    /// Ends what [`Self::follow`] began.
    pub fn close(&self, _container: &ContainerId) {
        unimplemented!()
    }
}
