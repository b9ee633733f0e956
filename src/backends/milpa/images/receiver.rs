//! Images of a cell, over its link.

use std::time::Duration;

use async_trait::async_trait;
use futures::{
    StreamExt as _, TryStreamExt as _,
    stream::{self, BoxStream},
};
use kiyot_link::channel::Channel;
use kiyot_proto::{
    cell::{
        BlobPart, MissingBlobsRequest, PullNews, PutImageRequest, WatchPullsRequest,
        agent_client::AgentClient,
    },
    cri,
};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;

use crate::backends::milpa::{
    cell_client::{
        self, MAX_IMAGE_RESPONSE_BYTES, PUT_BLOB_TIMEOUT, PUT_IMAGE_TIMEOUT, QUERY_TIMEOUT,
        with_timeout,
    },
    failure::{Class, Failure},
    gateway::CellLink,
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
    /// Names an image.
    async fn put_image(&self, request: PutImageRequest) -> Result<(), Failure>;
}

/// Images of a cell over its link.
#[derive(Debug)]
pub(super) struct CellReceiver(pub(super) CellLink);

impl CellReceiver {
    fn agent(&self) -> AgentClient<Channel> {
        cell_client::agent(&self.0.bulk, MAX_IMAGE_RESPONSE_BYTES)
    }
}

#[async_trait]
impl Receiver for CellReceiver {
    async fn status(
        &self,
        request: cri::ImageStatusRequest,
        deadline: Option<Duration>,
    ) -> Result<cri::ImageStatusResponse, Failure> {
        Ok(cell_client::image_service(&self.0.bulk)
            .image_status(with_timeout(
                deadline.map_or(QUERY_TIMEOUT, |deadline| deadline.min(QUERY_TIMEOUT)),
                request,
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
        Ok(cell_client::image_service(&self.0.bulk)
            .pull_image(with_timeout(deadline, request))
            .await
            .map_err(Failure::of_cell)?
            .into_inner()
            .image_ref)
    }

    async fn watch_pulls(
        &self,
        request: WatchPullsRequest,
    ) -> Result<BoxStream<'static, Result<PullNews, Failure>>, Failure> {
        let mut agent = self.agent();
        let begun = async {
            let mut reports =
                agent.watch_pulls(request).await.map_err(Failure::of_cell)?.into_inner();
            let first = reports.message().await.map_err(Failure::of_cell)?;
            Ok(stream::iter(first.map(Ok)).chain(reports.map_err(Failure::of_cell)).boxed())
        };
        timeout(QUERY_TIMEOUT, begun).await.map_err(|_| {
            Failure::cell(Class::DeadlineExceeded, "the cell says nothing of its pulls")
        })?
    }

    async fn missing(&self, digests: Vec<String>) -> Result<Vec<String>, Failure> {
        Ok(self
            .agent()
            .missing_blobs(with_timeout(QUERY_TIMEOUT, MissingBlobsRequest { digests }))
            .await
            .map_err(Failure::of_cell)?
            .into_inner()
            .digests)
    }

    async fn put_blob(&self, parts: mpsc::Receiver<BlobPart>) -> Result<(), Failure> {
        self.agent()
            .put_blob(with_timeout(PUT_BLOB_TIMEOUT, ReceiverStream::new(parts)))
            .await
            .map(drop)
            .map_err(Failure::of_cell)
    }

    async fn put_image(&self, request: PutImageRequest) -> Result<(), Failure> {
        self.agent()
            .put_image(with_timeout(PUT_IMAGE_TIMEOUT, request))
            .await
            .map(drop)
            .map_err(Failure::of_cell)
    }
}
