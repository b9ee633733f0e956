//! Calls about a cell's images: CRI to its containerd, and copies by its agent.

use std::time::Duration;

use futures::{
    StreamExt as _, TryStreamExt as _,
    future::BoxFuture,
    stream::{self, BoxStream},
};
use kiyot_link::channel::Channel;
use kiyot_proto::{
    cell::{
        BlobPart, MissingBlobsRequest, MountLayersRequest, PullNews, PutImageRequest,
        UnpackedLayer, WatchPullsRequest,
    },
    cri::{self, image_service_client::ImageServiceClient},
};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;

use super::{CellClient, QUERY_TIMEOUT, call, with_timeout};
use crate::backends::milpa::failure::{Code, Failure};

/// Time limit for a cell to make an image from its blobs, and for its CRI to notice the image.
const PUT_IMAGE_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit of a whole blob. A stalled transfer ends much earlier.
const PUT_BLOB_TIMEOUT: Duration = Duration::from_secs(4 * 60 * 60);
/// Largest response about images that is accepted from a cell, in bytes.
const MAX_IMAGE_RESPONSE_BYTES: usize = 4 << 20;

impl CellClient {
    fn image_service(&self) -> ImageServiceClient<Channel> {
        ImageServiceClient::new(self.bulk.clone())
            .max_decoding_message_size(MAX_IMAGE_RESPONSE_BYTES)
    }

    /// Calls `ImageStatus` of the cell's containerd.
    pub(crate) fn image_status(
        &self,
        timeout: Option<Duration>,
        request: cri::ImageStatusRequest,
    ) -> BoxFuture<'static, Result<cri::ImageStatusResponse, Failure>> {
        let mut images = self.image_service();
        let timeout = timeout.map_or(QUERY_TIMEOUT, |timeout| timeout.min(QUERY_TIMEOUT));
        let request = with_timeout(timeout, request);
        call(timeout, "ImageStatus", async move { images.image_status(request).await })
    }

    /// Calls `PullImage` of the cell's containerd.
    pub(crate) fn pull_image(
        &self,
        timeout: Duration,
        request: cri::PullImageRequest,
    ) -> BoxFuture<'static, Result<cri::PullImageResponse, Failure>> {
        let mut images = self.image_service();
        let request = with_timeout(timeout, request);
        call(timeout, "PullImage", async move { images.pull_image(request).await })
    }

    /// Returns reports on the pull of an image, once the first has arrived.
    pub(crate) async fn watch_pulls(
        &self,
        request: WatchPullsRequest,
    ) -> Result<BoxStream<'static, Result<PullNews, Failure>>, Failure> {
        let mut agent = self.agent(MAX_IMAGE_RESPONSE_BYTES);
        let begun = async {
            let mut reports =
                agent.watch_pulls(request).await.map_err(Failure::of_cell)?.into_inner();
            let first = reports.message().await.map_err(Failure::of_cell)?;
            Ok(stream::iter(first.map(Ok)).chain(reports.map_err(Failure::of_cell)).boxed())
        };
        timeout(QUERY_TIMEOUT, begun).await.map_err(|_| {
            Failure::cell(Code::DeadlineExceeded, "the cell did not report its pulls in time")
        })?
    }

    /// Returns the digests of the blobs that the cell lacks.
    pub(crate) async fn missing_blobs(&self, digests: Vec<String>) -> Result<Vec<String>, Failure> {
        let mut agent = self.agent(MAX_IMAGE_RESPONSE_BYTES);
        let request = with_timeout(QUERY_TIMEOUT, MissingBlobsRequest { digests });
        let missing =
            call(QUERY_TIMEOUT, "MissingBlobs", async move { agent.missing_blobs(request).await });
        Ok(missing.await?.digests)
    }

    pub(crate) async fn put_blob(&self, parts: mpsc::Receiver<BlobPart>) -> Result<(), Failure> {
        let mut agent = self.agent(MAX_IMAGE_RESPONSE_BYTES);
        let request = with_timeout(PUT_BLOB_TIMEOUT, ReceiverStream::new(parts));
        call(PUT_BLOB_TIMEOUT, "PutBlob", async move { agent.put_blob(request).await }).await?;
        Ok(())
    }

    /// Mounts layers of the node in the cell.
    pub(crate) async fn mount_layers(&self, layers: Vec<UnpackedLayer>) -> Result<(), Failure> {
        let mut agent = self.agent(MAX_IMAGE_RESPONSE_BYTES);
        let request = with_timeout(QUERY_TIMEOUT, MountLayersRequest { layers });
        call(QUERY_TIMEOUT, "MountLayers", async move { agent.mount_layers(request).await })
            .await?;
        Ok(())
    }

    /// Creates an image from blobs in the cell.
    pub(crate) async fn put_image(&self, request: PutImageRequest) -> Result<(), Failure> {
        let mut agent = self.agent(MAX_IMAGE_RESPONSE_BYTES);
        let request = with_timeout(PUT_IMAGE_TIMEOUT, request);
        call(PUT_IMAGE_TIMEOUT, "PutImage", async move { agent.put_image(request).await }).await?;
        Ok(())
    }
}
