//! Images of a cell, over its link.

use std::time::Duration;

use async_trait::async_trait;
use futures::{
    StreamExt as _, TryStreamExt as _,
    stream::{self, BoxStream},
};
use kiyot_proto::{
    cell::{
        BlobPart, MissingBlobsRequest, PullNews, PutImageRequest, WatchPullsRequest,
        agent_client::AgentClient,
    },
    cri::{self, image_service_client::ImageServiceClient},
};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Request;

use crate::backends::milpa::{
    failure::{Class, Failure},
    gateway::CellLink,
};

/// Deadline for a response of a cell.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(20);

/// Deadline for a cell to make an image of its blobs, and for its CRI to notice.
const PUT_IMAGE_TIMEOUT: Duration = Duration::from_secs(60);

/// Deadline for a whole blob; a stalled one ends much earlier.
const PUT_BLOB_TIMEOUT: Duration = Duration::from_secs(4 * 60 * 60);

/// Largest response that is accepted from a cell, in bytes.
const MAX_RESPONSE_BYTES: usize = 4 << 20;

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
    /// Names an image.
    async fn put_image(&self, request: PutImageRequest) -> Result<(), Failure>;
}

/// Images of a cell over its link.
#[derive(Debug)]
pub(super) struct CellReceiver(pub(super) CellLink);

impl CellReceiver {
    fn agent(&self) -> AgentClient<kiyot_link::channel::Channel> {
        AgentClient::new(self.0.bulk.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    fn images(&self) -> ImageServiceClient<kiyot_link::channel::Channel> {
        ImageServiceClient::new(self.0.bulk.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }
}

fn within<T>(message: T, deadline: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(deadline);
    request
}

#[async_trait]
impl Receiver for CellReceiver {
    async fn status(
        &self,
        request: cri::ImageStatusRequest,
        deadline: Option<Duration>,
    ) -> Result<cri::ImageStatusResponse, Failure> {
        Ok(self
            .images()
            .image_status(within(
                request,
                deadline.map_or(RESPONSE_TIMEOUT, |deadline| deadline.min(RESPONSE_TIMEOUT)),
            ))
            .await
            .map_err(Failure::of_cell)?
            .into_inner())
    }

    async fn pull(
        &self,
        request: cri::PullImageRequest,
        deadline: Duration,
    ) -> Result<String, Failure> {
        Ok(self
            .images()
            .pull_image(within(request, deadline))
            .await
            .map_err(Failure::of_cell)?
            .into_inner()
            .image_ref)
    }

    async fn watch_pulls(
        &self,
        request: WatchPullsRequest,
    ) -> Result<BoxStream<'static, Result<PullNews, Failure>>, Failure> {
        let mut agent =
            AgentClient::new(self.0.bulk.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES);
        let begun = async {
            let mut reports =
                agent.watch_pulls(request).await.map_err(Failure::of_cell)?.into_inner();
            let first = reports.message().await.map_err(Failure::of_cell)?;
            Ok(stream::iter(first.map(Ok)).chain(reports.map_err(Failure::of_cell)).boxed())
        };
        timeout(RESPONSE_TIMEOUT, begun).await.map_err(|_| {
            Failure::cell(Class::DeadlineExceeded, "the cell says nothing of its pulls")
        })?
    }

    async fn missing(&self, digests: Vec<String>) -> Result<Vec<String>, Failure> {
        Ok(self
            .agent()
            .missing_blobs(within(MissingBlobsRequest { digests }, RESPONSE_TIMEOUT))
            .await
            .map_err(Failure::of_cell)?
            .into_inner()
            .digests)
    }

    async fn put_blob(&self, parts: mpsc::Receiver<BlobPart>) -> Result<(), Failure> {
        self.agent()
            .put_blob(within(ReceiverStream::new(parts), PUT_BLOB_TIMEOUT))
            .await
            .map(drop)
            .map_err(Failure::of_cell)
    }

    async fn put_image(&self, request: PutImageRequest) -> Result<(), Failure> {
        self.agent()
            .put_image(within(request, PUT_IMAGE_TIMEOUT))
            .await
            .map(drop)
            .map_err(Failure::of_cell)
    }
}
