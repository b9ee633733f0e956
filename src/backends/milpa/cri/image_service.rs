//! `PullImage` and `ImageStatus` of pods in cells.

use std::time::Instant;

use bytes::Bytes;
use kiyot_engine::id::{CellId, SandboxId};
use kiyot_proto::cri;
use prost::Message;
use tonic::Status;

use super::{CriService, PullFailure};
use crate::backends::{
    Method,
    milpa::{clock, images::normalized, pods::Sandbox},
};

/// Size in bytes for the status of an image that no cell has reported since the start of the
/// daemon. A kubelet accepts no image without a size (cri-client, ImageStatus).
const UNKNOWN_SIZE_BYTES: u64 = 1;

impl CriService {
    /// Returns whether an image call is for a pod in a cell, by the pod's uid or annotations.
    pub fn owns_image(&self, method: Method, message: &[u8]) -> bool {
        match method {
            Method::PullImage => cri::PullImageRequest::decode(message)
                .is_ok_and(|request| self.sandbox_of_pull(&request).is_some()),
            Method::ImageStatus => cri::ImageStatusRequest::decode(message)
                .is_ok_and(|request| self.sandbox_of_status(&request).is_some()),
            _ => false,
        }
    }

    /// Returns an encoded `ImageStatusResponse` of the image that cells of running pods report for
    /// a reference.
    pub fn reported_image(&self, reference: &str) -> Option<Bytes> {
        let image = Some(self.report_of(reference)?);
        Some(cri::ImageStatusResponse { image, ..Default::default() }.encode_to_vec().into())
    }

    fn report_of(&self, reference: &str) -> Option<cri::Image> {
        let has_pod =
            |cell: &CellId| self.pods.sandbox_of_cell(cell).is_some_and(|sandbox| sandbox.ready);
        self.images.reported(reference, has_pod)
    }

    /// Returns an encoded `ImageStatusResponse` for a request with the annotations of pods in
    /// cells, apart from the kubelet's own annotations, such as after a restart of the kubelet.
    /// Uses only records. Returns `None` unless all these pods ran the same image for this
    /// reference.
    pub fn image_of_pods_like(&self, message: &[u8]) -> Option<Bytes> {
        let image = cri::ImageStatusRequest::decode(message).ok()?.image?;
        let reference = normalized(&image.image);
        let mut ids = self
            .pods
            .sandboxes_like(&image)
            .into_iter()
            .filter_map(|sandbox| self.image_run_by(&sandbox, &reference));
        let id = ids.next()?;
        if ids.any(|other| other != id) {
            return None;
        }
        let size = self.report_of(&id).map_or(UNKNOWN_SIZE_BYTES, |image| image.size);
        let image = Some(cri::Image { id, repo_tags: vec![reference], size, ..Default::default() });
        Some(cri::ImageStatusResponse { image, ..Default::default() }.encode_to_vec().into())
    }

    /// Returns the image id of a pod's newest container with this reference.
    fn image_run_by(&self, sandbox: &Sandbox, reference: &str) -> Option<String> {
        let mut containers = self.pods.containers_of(&sandbox.id);
        containers.sort_by_key(|container| std::cmp::Reverse(container.sequence));
        containers.iter().map(|container| container.meta()).find_map(|meta| {
            let image = meta.config?.image?;
            let is_same = |name: &str| !name.is_empty() && normalized(name) == reference;
            (is_same(&image.user_specified_image) || is_same(&image.image)).then_some(meta.image_id)
        })
    }

    fn sandbox_of_pull(&self, request: &cri::PullImageRequest) -> Option<Sandbox> {
        let uid = &request.sandbox_config.as_ref()?.metadata.as_ref()?.uid;
        self.pods.sandboxes_of_pod(uid).into_iter().rev().find(|sandbox| sandbox.ready)
    }

    fn sandbox_of_status(&self, request: &cri::ImageStatusRequest) -> Option<Sandbox> {
        self.pods.sandbox_of_annotations(request.image.as_ref()?)
    }

    /// Pulls an image into the cell of the pod that the request names. The end of the caller ends
    /// the pull.
    pub(super) async fn pull_image(
        &self,
        request: cri::PullImageRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::PullImageResponse, Status> {
        let sandbox = self
            .sandbox_of_pull(&request)
            .ok_or_else(|| Status::not_found("PullImage names no pod that runs in a cell"))?;
        self.sync.set_owned(&sandbox.id);
        self.sync.records.refresh_annotations(&sandbox, request.sandbox_config.as_ref()).await;
        let cell = self.connected_cell(&sandbox, deadline).await?;
        let image = request.image.as_ref().map(|image| image.image.clone()).unwrap_or_default();
        let pulled = self.images.pull(&cell, request).await;
        let pulled: Result<_, Status> = pulled.map_err(|failure| sandbox.restored(&failure).into());
        match &pulled {
            Ok(_) => self.pull_failures.clear(&sandbox.id, &image),
            Err(status) => {
                let error = status.message().to_owned();
                let failure = PullFailure { error, unix_nanos: clock::now() };
                let is_known = |id: &SandboxId| self.pods.sandbox(id.as_str()).is_ok();
                self.pull_failures.add(&sandbox.id, &image, failure, is_known);
            }
        }
        pulled
    }

    /// Returns the status of an image in the pod's cell. For an absent image that the cell can get
    /// from the node, returns the node's status.
    pub(super) async fn image_status(
        &self,
        request: cri::ImageStatusRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::ImageStatusResponse, Status> {
        let sandbox = self.sandbox_of_status(&request).ok_or_else(|| {
            Status::unavailable("the pod of this ImageStatus has just been stopped")
        })?;
        self.sync.set_owned(&sandbox.id);
        let cell = self.cell_of(&sandbox)?;
        Ok(self.images.status(&cell, request, deadline).await?)
    }
}
