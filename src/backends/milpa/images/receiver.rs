//! Images of a cell, over its link.

use std::time::Duration;

use async_trait::async_trait;
use futures::stream::BoxStream;
use kiyot_proto::{
    cell::{BlobPart, PullNews, PutImageRequest, WatchPullsRequest},
    cri,
};
use tokio::sync::mpsc;

use crate::{
    backends::milpa::{cell_client::CellClient, failure::Failure},
    metrics::ByteCounter,
};

/// Calls to a cell. Tests have their own implementation.
#[async_trait]
pub(super) trait Receiver: Send + Sync {
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
    /// Returns reports on the pull of an image, by its full name, once the first has come.
    async fn watch_pulls(
        &self,
        request: WatchPullsRequest,
    ) -> Result<BoxStream<'static, Result<PullNews, Failure>>, Failure>;
    /// Returns the blobs that the cell lacks.
    async fn missing(&self, digests: Vec<String>) -> Result<Vec<String>, Failure>;
    /// Sends a blob.
    async fn put_blob(&self, parts: mpsc::Receiver<BlobPart>) -> Result<(), Failure>;
    /// Counts bytes of a blob that were sent.
    fn count(&self, bytes: usize) {
        let _ = bytes;
    }
    /// Names an image.
    async fn put_image(&self, request: PutImageRequest) -> Result<(), Failure>;
}

/// Images of a cell over its link.
#[derive(Debug)]
pub(super) struct CellReceiver(pub(super) CellClient, pub(super) ByteCounter);

#[async_trait]
impl Receiver for CellReceiver {
    async fn status(
        &self,
        request: cri::ImageStatusRequest,
        within: Option<Duration>,
    ) -> Result<cri::ImageStatusResponse, Failure> {
        self.0.image_status(within, request).await
    }

    async fn pull(
        &self,
        request: cri::PullImageRequest,
        within: Duration,
    ) -> Result<String, Failure> {
        Ok(self.0.pull_image(within, request).await?.image_ref)
    }

    async fn watch_pulls(
        &self,
        request: WatchPullsRequest,
    ) -> Result<BoxStream<'static, Result<PullNews, Failure>>, Failure> {
        self.0.watch_pulls(request).await
    }

    async fn missing(&self, digests: Vec<String>) -> Result<Vec<String>, Failure> {
        self.0.missing_blobs(digests).await
    }

    async fn put_blob(&self, parts: mpsc::Receiver<BlobPart>) -> Result<(), Failure> {
        self.0.put_blob(parts).await
    }

    fn count(&self, bytes: usize) {
        self.1.add(bytes);
    }

    async fn put_image(&self, request: PutImageRequest) -> Result<(), Failure> {
        self.0.put_image(request).await
    }
}
