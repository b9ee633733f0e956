//! Images of pods in cells: copied from the node's containerd, or pulled in the cell.

use std::time::Instant;

use kiyot_proto::cri;
use tonic::Status;

use super::cells::Cell;

/// Images of pods in cells.
#[derive(Debug)]
pub struct Images {}

impl Images {
    /// `PullImage` for a pod in this cell. A pull's failure is the pull's own words.
    pub async fn pull(&self, _cell: &Cell, _request: cri::PullImageRequest) -> Result<cri::PullImageResponse, Status> {
        unimplemented!()
    }

    /// `ImageStatus` for a pod in this cell: in the cell, else on the node (which can give it).
    pub async fn status(
        &self,
        _cell: &Cell,
        _request: cri::ImageStatusRequest,
        _deadline: Option<Instant>,
    ) -> Result<cri::ImageStatusResponse, Status> {
        unimplemented!()
    }

    /// What cells reported for a reference, for an `ImageStatus` that names no pod; `None` if nothing.
    pub fn reported(&self, _reference: &str) -> Option<cri::Image> {
        unimplemented!()
    }

    /// Sees to it that an image is in a cell: it is, or is copied from the node, or is pulled with the credentials that came for this pod. Returns the id by which the cell's
    /// containerd knows it.
    pub async fn ensure(&self, _cell: &Cell, _image: &cri::ImageSpec, _sandbox: &cri::PodSandboxConfig) -> Result<String, Status> {
        unimplemented!()
    }

    /// Sees to it that the pause image is in a cell, under the name that the cell's containerd is configured with.
    pub async fn ensure_pause(&self, _cell: &Cell) -> Result<(), Status> {
        unimplemented!()
    }
}
