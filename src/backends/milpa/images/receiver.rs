//! The images of one cell, over its link.

use std::time::Duration;

use async_trait::async_trait;
use futures::{
    StreamExt as _,
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
use tonic::{Request, Status};

use crate::backends::milpa::gateway::CellLink;

/// How long a cell has for an answer.
const ASK: Duration = Duration::from_secs(20);

/// How long a cell has to make an image of its blobs, and CRI in it to notice.
const PUT_IMAGE: Duration = Duration::from_secs(60);

/// How long one blob may take in all; one that does not go on is given up much earlier.
const PUT_BLOB: Duration = Duration::from_secs(4 * 60 * 60);

/// Largest answer that is taken from a cell.
const MAX_ANSWER: usize = 4 << 20;

/// What is asked of a cell. A test plays one.
#[async_trait]
pub(super) trait Receiver: Send + Sync {
    /// What CRI in the cell says of an image.
    async fn status(
        &self,
        request: cri::ImageStatusRequest,
        within: Option<Duration>,
    ) -> Result<cri::ImageStatusResponse, Status>;
    /// CRI in the cell pulls an image.
    async fn pull(
        &self,
        request: cri::PullImageRequest,
        within: Duration,
    ) -> Result<String, Status>;
    /// How far the pull of an image is, by its whole name; the first news has come.
    async fn watch_pulls(
        &self,
        request: WatchPullsRequest,
    ) -> Result<BoxStream<'static, Result<PullNews, Status>>, Status>;
    /// Which of these blobs the cell lacks.
    async fn missing(&self, digests: Vec<String>) -> Result<Vec<String>, Status>;
    /// Takes one blob.
    async fn put_blob(&self, parts: mpsc::Receiver<BlobPart>) -> Result<(), Status>;
    /// Names an image.
    async fn put_image(&self, request: PutImageRequest) -> Result<(), Status>;
}

/// Over a link.
#[derive(Debug)]
pub(super) struct CellReceiver(pub(super) CellLink);

impl CellReceiver {
    fn agent(&self) -> AgentClient<kiyot_link::channel::Channel> {
        AgentClient::new(self.0.bulk.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    fn images(&self) -> ImageServiceClient<kiyot_link::channel::Channel> {
        ImageServiceClient::new(self.0.bulk.clone()).max_decoding_message_size(MAX_ANSWER)
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
    ) -> Result<cri::ImageStatusResponse, Status> {
        Ok(self
            .images()
            .image_status(within(request, deadline.map_or(ASK, |deadline| deadline.min(ASK))))
            .await?
            .into_inner())
    }

    async fn pull(
        &self,
        request: cri::PullImageRequest,
        deadline: Duration,
    ) -> Result<String, Status> {
        Ok(self.images().pull_image(within(request, deadline)).await?.into_inner().image_ref)
    }

    async fn watch_pulls(
        &self,
        request: WatchPullsRequest,
    ) -> Result<BoxStream<'static, Result<PullNews, Status>>, Status> {
        let mut agent = AgentClient::new(self.0.bulk.clone()).max_decoding_message_size(MAX_ANSWER);
        let begun = async {
            let mut news = agent.watch_pulls(request).await?.into_inner();
            let first = news.message().await?;
            Ok(stream::iter(first.map(Ok)).chain(news).boxed())
        };
        timeout(ASK, begun)
            .await
            .map_err(|_| Status::deadline_exceeded("the cell says nothing of its pulls"))?
    }

    async fn missing(&self, digests: Vec<String>) -> Result<Vec<String>, Status> {
        Ok(self
            .agent()
            .missing_blobs(within(MissingBlobsRequest { digests }, ASK))
            .await?
            .into_inner()
            .digests)
    }

    async fn put_blob(&self, parts: mpsc::Receiver<BlobPart>) -> Result<(), Status> {
        self.agent().put_blob(within(ReceiverStream::new(parts), PUT_BLOB)).await.map(drop)
    }

    async fn put_image(&self, request: PutImageRequest) -> Result<(), Status> {
        self.agent().put_image(within(request, PUT_IMAGE)).await.map(drop)
    }
}
