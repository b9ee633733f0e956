//! `PullImage` and `ImageStatus` of pods in cells.

use std::time::Instant;

use bytes::Bytes;
use kiyot_proto::cri;
use prost::Message;
use tonic::Status;

use super::{Verbs, view::Sandbox};
use crate::backends::{Method, milpa::id::CellId};

impl Verbs {
    /// Whether an image call is for a pod in a cell: by the pod's uid, or by its annotations.
    pub(super) fn is_for_a_cell(&self, method: Method, message: &[u8]) -> bool {
        match method {
            Method::PullImage => cri::PullImageRequest::decode(message)
                .is_ok_and(|request| self.puller(&request).is_some()),
            Method::ImageStatus => cri::ImageStatusRequest::decode(message)
                .is_ok_and(|request| self.asker(&request).is_some()),
            _ => false,
        }
    }

    /// What cells reported for a reference whose pods run. Of one that is going nothing is said,
    /// whatever it may still have answered meanwhile.
    pub(super) fn image_reported(&self, reference: &str) -> Option<Bytes> {
        let has_pod =
            |cell: &CellId| self.view.sandbox_of_cell(cell).is_some_and(|sandbox| sandbox.ready);
        let image = Some(self.parts.images.reported(reference, has_pod)?);
        Some(cri::ImageStatusResponse { image, ..Default::default() }.encode_to_vec().into())
    }

    fn puller(&self, request: &cri::PullImageRequest) -> Option<Sandbox> {
        let uid = &request.sandbox_config.as_ref()?.metadata.as_ref()?.uid;
        self.view.sandboxes_of_pod(uid).into_iter().rev().find(|sandbox| sandbox.ready)
    }

    fn asker(&self, request: &cri::ImageStatusRequest) -> Option<Sandbox> {
        self.view.sandbox_of_annotations(request.image.as_ref()?)
    }

    /// Into the cell of the pod that the request names. It ends with its caller.
    pub(super) async fn pull_image(
        &self,
        request: cri::PullImageRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::PullImageResponse, Status> {
        let sandbox = self
            .puller(&request)
            .ok_or_else(|| Status::not_found("PullImage names no pod that runs in a cell"))?;
        self.claim(&sandbox.id);
        let cell = self.reachable_cell(&sandbox, deadline).await?;
        self.parts.images.pull(&cell, request).await.map_err(|status| sandbox.restored(&status))
    }

    /// What the cell of the pod has, or could have from the node.
    pub(super) async fn image_status(
        &self,
        request: cri::ImageStatusRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::ImageStatusResponse, Status> {
        let sandbox = self.asker(&request).ok_or_else(|| {
            Status::unavailable("the pod of this ImageStatus has just been stopped")
        })?;
        self.claim(&sandbox.id);
        let cell = self.cell_of(&sandbox)?;
        self.parts.images.status(&cell, request, deadline).await
    }
}
