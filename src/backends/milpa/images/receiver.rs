//! Images of a cell, over its link.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use futures::stream::BoxStream;
use kiyot_engine::provider::Capabilities;
use kiyot_link::architecture::{self, of_this_machine};
use kiyot_proto::{
    cell::{BlobPart, HelloReply, PullNews, PutImageRequest, UnpackedLayer, WatchPullsRequest},
    cri,
};
use tokio::sync::mpsc;

use super::copy_limits::CopyLimits;
use crate::{
    backends::milpa::{
        cell_client::{self, CONNECT_TIMEOUT, CellClient},
        failure::Failure,
        gateway::ControlChannel,
    },
    metrics::ByteCounter,
};

/// Calls to a cell. Tests have their own implementation.
#[async_trait]
pub(super) trait Receiver: Send + Sync {
    /// Returns the architecture of the cell's machine, as images name it.
    async fn architecture(&self) -> Result<&'static str, Failure>;
    /// Returns the pause image in the configuration of the cell's containerd, as reported by the
    /// cell; empty with an earlier agent.
    async fn pause_image(&self) -> Result<String, Failure>;
    /// Returns CRI's status of an image in the cell.
    async fn status(
        &self,
        request: cri::ImageStatusRequest,
        within: Option<Duration>,
    ) -> Result<cri::ImageStatusResponse, Failure>;
    /// Pulls an image with the cell's CRI.
    async fn pull(
        &self,
        request: cri::PullImageRequest,
        within: Duration,
    ) -> Result<String, Failure>;
    /// Returns reports on the pull of an image, by its full name, after the first has arrived.
    async fn watch_pulls(
        &self,
        request: WatchPullsRequest,
    ) -> Result<BoxStream<'static, Result<PullNews, Failure>>, Failure>;
    /// Returns the blobs that the cell lacks.
    async fn missing(&self, digests: Vec<String>) -> Result<Vec<String>, Failure>;
    async fn put_blob(&self, parts: mpsc::Receiver<BlobPart>) -> Result<(), Failure>;
    /// Waits until bytes of a blob may be sent.
    async fn ready(&self, bytes: usize) {
        let _ = bytes;
    }
    /// Counts sent bytes of a blob.
    fn count(&self, bytes: usize) {
        let _ = bytes;
    }
    /// Returns whether the cell is on another machine.
    fn is_remote(&self) -> bool;
    /// Returns whether the cell sees the files of the node.
    fn sees_node_files(&self) -> bool;
    /// Mounts layers of the node.
    async fn mount_layers(&self, layers: Vec<UnpackedLayer>) -> Result<(), Failure>;
    /// Names an image.
    async fn put_image(&self, request: PutImageRequest) -> Result<(), Failure>;
}

/// Images of a cell over its link.
#[derive(Debug)]
pub(super) struct CellReceiver {
    pub(super) client: CellClient,
    /// The control connection of the cell.
    pub(super) control: ControlChannel,
    /// Bytes sent to cells.
    pub(super) bytes: ByteCounter,
    /// Limits of copies; `None` for a cell on the node.
    pub(super) limits: Option<Arc<CopyLimits>>,
    pub(super) capabilities: Capabilities,
}

impl CellReceiver {
    async fn hello(&self) -> Result<HelloReply, Failure> {
        let cell = || "the cell that receives an image".to_owned();
        cell_client::hello(&self.control, CONNECT_TIMEOUT, cell).await
    }
}

#[async_trait]
impl Receiver for CellReceiver {
    async fn architecture(&self) -> Result<&'static str, Failure> {
        let hello = self.hello().await?;
        Ok(architecture::named(&hello.architecture).unwrap_or_else(of_this_machine))
    }

    fn is_remote(&self) -> bool {
        self.capabilities.remote
    }

    fn sees_node_files(&self) -> bool {
        self.capabilities.sees_node_files
    }

    async fn pause_image(&self) -> Result<String, Failure> {
        Ok(self.hello().await?.pause_image)
    }

    async fn status(
        &self,
        request: cri::ImageStatusRequest,
        within: Option<Duration>,
    ) -> Result<cri::ImageStatusResponse, Failure> {
        self.client.image_status(within, request).await
    }

    async fn pull(
        &self,
        request: cri::PullImageRequest,
        within: Duration,
    ) -> Result<String, Failure> {
        Ok(self.client.pull_image(within, request).await?.image_ref)
    }

    async fn watch_pulls(
        &self,
        request: WatchPullsRequest,
    ) -> Result<BoxStream<'static, Result<PullNews, Failure>>, Failure> {
        self.client.watch_pulls(request).await
    }

    async fn missing(&self, digests: Vec<String>) -> Result<Vec<String>, Failure> {
        self.client.missing_blobs(digests).await
    }

    async fn mount_layers(&self, layers: Vec<UnpackedLayer>) -> Result<(), Failure> {
        self.client.mount_layers(layers).await
    }

    async fn put_blob(&self, parts: mpsc::Receiver<BlobPart>) -> Result<(), Failure> {
        self.client.put_blob(parts).await
    }

    async fn ready(&self, bytes: usize) {
        if let Some(limits) = &self.limits {
            limits.ready(bytes).await;
        }
    }

    fn count(&self, bytes: usize) {
        self.bytes.add(bytes);
    }

    async fn put_image(&self, request: PutImageRequest) -> Result<(), Failure> {
        self.client.put_image(request).await
    }
}
