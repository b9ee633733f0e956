//! Volumes of pods in cells: copied from the kubelet's pod directory, and kept in step.

use std::sync::Arc;

use kiyot_proto::cri;
use tonic::Status;

use super::{cells::Cell, id::ContainerId};

/// Volumes of pods in cells.
#[derive(Debug)]
pub struct Volumes {}

impl Volumes {
    /// Brings everything that a container mounts into the cell, and returns its mounts as the cell's containerd must be told them (same order, host paths in the cell).
    pub async fn prepare(
        self: &Arc<Self>,
        _cell: &Cell,
        _sandbox: &cri::PodSandboxConfig,
        _container: &cri::ContainerConfig,
    ) -> Result<Vec<cri::Mount>, Status> {
        unimplemented!()
    }

    /// Copies the termination message of a container that has exited to the node (bounded). A failure is logged: the kubelet then falls back to the log.
    pub async fn fetch_termination_message(&self, _cell: &Cell, _id: &ContainerId, _container: &cri::ContainerConfig) {
        unimplemented!()
    }

    /// Keeps a pod's volumes in step until [`Self::release`]; called when the pod's first container is made and, after a restart, when its cell is back.
    pub fn keep(self: &Arc<Self>, _cell: &Cell, _sandbox: &cri::PodSandboxConfig, _container: &cri::ContainerConfig) {
        unimplemented!()
    }

    /// Ends what [`Self::keep`] began for a cell.
    pub fn release(&self, _cell: &super::id::CellId) {
        unimplemented!()
    }
}
