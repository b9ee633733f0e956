//! The node's images, as its containerd has them.

use std::{path::PathBuf, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use containerd_client::services::v1::{
    AddResourceRequest, CreateRequest, DeleteRequest, GetImageRequest, InfoRequest,
    ReadContentRequest, Resource, content_client::ContentClient, images_client::ImagesClient,
    leases_client::LeasesClient,
};
use futures::{StreamExt as _, stream::BoxStream};
use jiff::{SignedDuration, Timestamp};
use kiyot_proto::cri::{self, image_service_client::ImageServiceClient};
use ring::rand::{SecureRandom, SystemRandom};
use tokio::sync::OnceCell;
use tonic::{
    Code, Request, Status,
    metadata::{Ascii, MetadataValue},
    transport::{Channel, Endpoint},
};

use super::manifest::Descriptor;

/// How long the node's containerd has for an answer.
pub(super) const ASK: Duration = Duration::from_secs(20);

/// Largest message that is taken from it: parts of blobs have 1 MiB.
const MAX_MESSAGE: usize = 16 << 20;

/// A lease that is not deleted, because kiyot was killed, ends by itself.
const LEASE_HOURS: i64 = 1;

/// Where the node's images are.
#[derive(Debug, Clone)]
pub struct NodeImages {
    /// The socket of the node's containerd.
    pub socket: PathBuf,
    /// The namespace that its CRI uses: `k8s.io`.
    pub namespace: String,
}

/// What is asked of the node. A test plays it.
#[async_trait]
pub(super) trait Node: std::fmt::Debug + Send + Sync + 'static {
    /// What CRI says of an image.
    async fn status(
        &self,
        request: cri::ImageStatusRequest,
    ) -> Result<cri::ImageStatusResponse, Status>;
    /// What an image of this very name leads to.
    async fn target(&self, name: &str) -> Result<Option<Descriptor>, Status>;
    /// Whether a blob is there.
    async fn has(&self, digest: &str) -> Result<bool, Status>;
    /// A blob's bytes.
    async fn read(
        &self,
        blob: &Descriptor,
    ) -> Result<BoxStream<'static, Result<Bytes, Status>>, Status>;
    /// Holds a blob, and all that it leads to, until it is released or an hour has passed.
    async fn hold(&self, digest: &str) -> Result<String, Status>;
    /// Ends what [`Self::hold`] began. A failure is of no interest.
    async fn release(&self, lease: &str);
}

/// The node's containerd.
#[derive(Debug)]
pub(super) struct Containerd {
    node: NodeImages,
    /// Made at the first call; it connects by itself, again and again.
    channel: OnceCell<Channel>,
}

impl Containerd {
    /// Connects when it is first asked.
    pub(super) fn new(node: NodeImages) -> Self {
        Self { node, channel: OnceCell::new() }
    }

    pub(super) async fn channel(&self) -> Result<Channel, Status> {
        let connect = || async {
            let endpoint = Endpoint::from_shared(format!("unix://{}", self.node.socket.display()));
            endpoint.map(|endpoint| endpoint.connect_lazy()).map_err(|error| {
                Status::internal(format!("socket {}: {error}", self.node.socket.display()))
            })
        };
        self.channel.get_or_try_init(connect).await.cloned()
    }

    async fn content(&self) -> Result<ContentClient<Channel>, Status> {
        Ok(ContentClient::new(self.channel().await?).max_decoding_message_size(MAX_MESSAGE))
    }

    /// A request with namespace and deadline.
    pub(super) fn request<T>(
        &self,
        message: T,
        deadline: Option<Duration>,
    ) -> Result<Request<T>, Status> {
        let namespace: MetadataValue<Ascii> = self
            .node
            .namespace
            .parse()
            .map_err(|_| Status::internal("the namespace of the node's containerd"))?;
        let mut request = Request::new(message);
        request.metadata_mut().insert("containerd-namespace", namespace);
        if let Some(deadline) = deadline {
            request.set_timeout(deadline);
        }
        Ok(request)
    }
}

#[async_trait]
impl Node for Containerd {
    async fn status(
        &self,
        request: cri::ImageStatusRequest,
    ) -> Result<cri::ImageStatusResponse, Status> {
        let mut client =
            ImageServiceClient::new(self.channel().await?).max_decoding_message_size(MAX_MESSAGE);
        Ok(client.image_status(self.request(request, Some(ASK))?).await?.into_inner())
    }

    async fn target(&self, name: &str) -> Result<Option<Descriptor>, Status> {
        let request = self.request(GetImageRequest { name: name.to_owned() }, Some(ASK))?;
        let image = match ImagesClient::new(self.channel().await?).get(request).await {
            Ok(answer) => answer.into_inner().image,
            Err(status) if status.code() == Code::NotFound => None,
            Err(status) => return Err(status),
        };
        let target = image.and_then(|image| image.target);
        Ok(target.and_then(|target| {
            Some(Descriptor::new(
                &target.media_type,
                &target.digest,
                u64::try_from(target.size).ok()?,
            ))
        }))
    }

    async fn has(&self, digest: &str) -> Result<bool, Status> {
        let request = self.request(InfoRequest { digest: digest.to_owned() }, Some(ASK))?;
        match self.content().await?.info(request).await {
            Ok(_) => Ok(true),
            Err(status) if status.code() == Code::NotFound => Ok(false),
            Err(status) => Err(status),
        }
    }

    async fn read(
        &self,
        blob: &Descriptor,
    ) -> Result<BoxStream<'static, Result<Bytes, Status>>, Status> {
        // No deadline for all of it: a layer may be large. The reader bounds the wait for each
        // part.
        let request = self.request(
            ReadContentRequest { digest: blob.digest.clone(), offset: 0, size: 0 },
            None,
        )?;
        let mut content = self.content().await?;
        let opened = tokio::time::timeout(ASK, content.read(request)).await;
        let parts = opened
            .map_err(|_| Status::deadline_exceeded("the node's containerd does not answer"))??
            .into_inner();
        Ok(parts.map(|part| part.map(|part| part.data.into())).boxed())
    }

    async fn hold(&self, digest: &str) -> Result<String, Status> {
        let mut random = [0_u8; 16];
        SystemRandom::new()
            .fill(&mut random)
            .map_err(|_| Status::internal("no random bytes from the kernel"))?;
        let id = format!("kiyot-{}", hex::encode(random));
        let expires = Timestamp::now()
            .checked_add(SignedDuration::from_hours(LEASE_HOURS))
            .map_err(|error| Status::internal(error.to_string()))?;
        let labels = [("containerd.io/gc.expire".to_owned(), expires.to_string())].into();
        let mut leases = LeasesClient::new(self.channel().await?);
        leases.create(self.request(CreateRequest { id: id.clone(), labels }, Some(ASK))?).await?;
        let resource = Resource { id: digest.to_owned(), r#type: "content".to_owned() };
        leases
            .add_resource(self.request(
                AddResourceRequest { id: id.clone(), resource: Some(resource) },
                Some(ASK),
            )?)
            .await?;
        Ok(id)
    }

    async fn release(&self, lease: &str) {
        let deleted = async {
            let request =
                self.request(DeleteRequest { id: lease.to_owned(), sync: false }, Some(ASK))?;
            LeasesClient::new(self.channel().await?).delete(request).await
        };
        if let Err(error) = deleted.await {
            tracing::debug!(%error, "a lease on the node's images was not deleted; it ends by itself");
        }
    }
}
