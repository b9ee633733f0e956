//! Images of the node's containerd.

use std::{path::PathBuf, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use containerd_client::services::v1::{
    AddResourceRequest, CreateRequest, DeleteRequest, GetImageRequest, Image, InfoRequest,
    ListImagesRequest, ReadContentRequest, Resource, content_client::ContentClient,
    images_client::ImagesClient, leases_client::LeasesClient,
};
use futures::{StreamExt as _, stream::BoxStream};
use jiff::{SignedDuration, Timestamp};
use kiyot_proto::cri::{self, image_service_client::ImageServiceClient};
use ring::rand::{SecureRandom, SystemRandom};
use tokio::sync::OnceCell;
use tonic::{
    Request,
    metadata::{Ascii, MetadataValue},
    transport::Channel,
};

use super::{manifest::Descriptor, reference::repository};
use crate::{
    backends::milpa::failure::{Code, Failure},
    unix_channel,
};

/// Deadline for a response of the node's containerd.
pub(super) const RESPONSE_TIMEOUT: Duration = Duration::from_secs(20);

/// Deadline for a pull of the small pause image.
const PULL_TIMEOUT: Duration = Duration::from_secs(60);

/// Largest accepted message, in bytes: parts of blobs have 1 MiB.
pub(super) const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// Lifetime of a lease, which also ends it after kiyot was killed.
const LEASE_HOURS: i64 = 1;

/// Location of the node's images.
#[derive(Debug, Clone)]
pub struct NodeImages {
    /// Socket of the node's containerd.
    pub socket: PathBuf,
    /// Namespace of the CRI plugin: `k8s.io`.
    pub namespace: String,
}

/// Calls to the node's containerd. Tests have their own implementation.
#[async_trait]
pub(super) trait Node: std::fmt::Debug + Send + Sync + 'static {
    /// Returns CRI's status of an image.
    async fn status(
        &self,
        request: cri::ImageStatusRequest,
    ) -> Result<cri::ImageStatusResponse, Failure>;
    /// Pulls an image, as the node's runtime does for its own pods.
    async fn pull(&self, image: &str) -> Result<(), Failure>;
    /// Returns the target of the image with exactly this name.
    async fn target(&self, name: &str) -> Result<Option<Descriptor>, Failure>;
    /// Returns the targets of the images of a repository.
    async fn targets(&self, repository: &str) -> Result<Vec<Descriptor>, Failure>;
    async fn has(&self, digest: &str) -> Result<bool, Failure>;
    /// Returns whether a read of this blob needs no call to the node's containerd now. A blob
    /// evicted meanwhile is read from containerd.
    fn has_in_memory(&self, digest: &str) -> bool {
        let _ = digest;
        false
    }
    async fn read(
        &self,
        blob: &Descriptor,
    ) -> Result<BoxStream<'static, Result<Bytes, Failure>>, Failure>;
    /// Takes a lease on a blob and all blobs that it references. The lease ends when it is
    /// released, or after an hour.
    async fn acquire_lease(&self, digest: &str) -> Result<String, Failure>;
    /// Releases a lease of [`Self::acquire_lease`]. Ignores failures.
    async fn release_lease(&self, lease: &str);
}

fn descriptor(image: Image) -> Option<Descriptor> {
    let target = image.target?;
    let size = u64::try_from(target.size).ok()?;
    Some(Descriptor::new(&target.media_type, &target.digest, size))
}

#[derive(Debug)]
pub(super) struct Containerd {
    node: NodeImages,
    /// Created by the first call; reconnects by itself.
    channel: OnceCell<Channel>,
}

impl Containerd {
    /// Creates a client that connects at the first call.
    pub(super) fn new(node: NodeImages) -> Self {
        Self { node, channel: OnceCell::new() }
    }

    pub(super) async fn channel(&self) -> Result<Channel, Failure> {
        let connect = || async {
            unix_channel::to(&self.node.socket).map_err(|error| {
                Failure::node(
                    Code::Internal,
                    format!("socket {}: {error}", self.node.socket.display()),
                )
            })
        };
        self.channel.get_or_try_init(connect).await.cloned()
    }

    async fn content(&self) -> Result<ContentClient<Channel>, Failure> {
        Ok(ContentClient::new(self.channel().await?).max_decoding_message_size(MAX_MESSAGE_BYTES))
    }

    /// Creates a request with namespace and deadline.
    pub(super) fn request<T>(
        &self,
        message: T,
        deadline: Option<Duration>,
    ) -> Result<Request<T>, Failure> {
        let namespace: MetadataValue<Ascii> =
            self.node.namespace.parse().map_err(|_| {
                Failure::node(Code::Internal, "the namespace of the node's containerd")
            })?;
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
    ) -> Result<cri::ImageStatusResponse, Failure> {
        let mut client = ImageServiceClient::new(self.channel().await?)
            .max_decoding_message_size(MAX_MESSAGE_BYTES);
        Ok(client
            .image_status(self.request(request, Some(RESPONSE_TIMEOUT))?)
            .await
            .map_err(Failure::of_node)?
            .into_inner())
    }

    async fn pull(&self, image: &str) -> Result<(), Failure> {
        let image = Some(cri::ImageSpec { image: image.to_owned(), ..Default::default() });
        let request = cri::PullImageRequest { image, ..Default::default() };
        let mut client = ImageServiceClient::new(self.channel().await?);
        let pulled = client.pull_image(self.request(request, Some(PULL_TIMEOUT))?).await;
        pulled.map(drop).map_err(Failure::of_node)
    }

    async fn target(&self, name: &str) -> Result<Option<Descriptor>, Failure> {
        let request =
            self.request(GetImageRequest { name: name.to_owned() }, Some(RESPONSE_TIMEOUT))?;
        let mut images = ImagesClient::new(self.channel().await?);
        let image = match images.get(request).await.map_err(Failure::of_node) {
            Ok(answer) => answer.into_inner().image,
            Err(failure) if failure.code() == Code::NotFound => None,
            Err(failure) => return Err(failure),
        };
        Ok(image.and_then(descriptor))
    }

    async fn targets(&self, of: &str) -> Result<Vec<Descriptor>, Failure> {
        // The filter is a regular expression of Go. The names are compared again below.
        let filter = format!("name~={:?}", format!("^\\Q{of}\\E[:@]"));
        let request =
            self.request(ListImagesRequest { filters: vec![filter] }, Some(RESPONSE_TIMEOUT))?;
        let listed = ImagesClient::new(self.channel().await?).list(request).await;
        let images = listed.map_err(Failure::of_node)?.into_inner().images;
        Ok(images
            .into_iter()
            .filter(|image| repository(&image.name) == of)
            .filter_map(descriptor)
            .collect())
    }

    async fn has(&self, digest: &str) -> Result<bool, Failure> {
        let request =
            self.request(InfoRequest { digest: digest.to_owned() }, Some(RESPONSE_TIMEOUT))?;
        match self.content().await?.info(request).await.map_err(Failure::of_node) {
            Ok(_) => Ok(true),
            Err(failure) if failure.code() == Code::NotFound => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    async fn read(
        &self,
        blob: &Descriptor,
    ) -> Result<BoxStream<'static, Result<Bytes, Failure>>, Failure> {
        // Without a deadline, because a layer may be large. The reader bounds the wait for each
        // part.
        let request = self.request(
            ReadContentRequest { digest: blob.digest.clone(), offset: 0, size: 0 },
            None,
        )?;
        let mut content = self.content().await?;
        let opened = tokio::time::timeout(RESPONSE_TIMEOUT, content.read(request)).await;
        let parts = opened
            .map_err(|_| {
                Failure::node(Code::DeadlineExceeded, "the node's containerd does not answer")
            })?
            .map_err(Failure::of_node)?
            .into_inner();
        Ok(parts.map(|part| part.map(|part| part.data.into()).map_err(Failure::of_node)).boxed())
    }

    async fn acquire_lease(&self, digest: &str) -> Result<String, Failure> {
        let mut random = [0_u8; 16];
        SystemRandom::new()
            .fill(&mut random)
            .map_err(|_| Failure::node(Code::Internal, "no random bytes from the kernel"))?;
        let id = format!("kiyot-{}", hex::encode(random));
        let expires = Timestamp::now()
            .checked_add(SignedDuration::from_hours(LEASE_HOURS))
            .map_err(|error| Failure::node(Code::Internal, error.to_string()))?;
        let labels = [("containerd.io/gc.expire".to_owned(), expires.to_string())].into();
        let mut leases = LeasesClient::new(self.channel().await?);
        leases
            .create(self.request(CreateRequest { id: id.clone(), labels }, Some(RESPONSE_TIMEOUT))?)
            .await
            .map_err(Failure::of_node)?;
        let resource = Resource { id: digest.to_owned(), r#type: "content".to_owned() };
        leases
            .add_resource(self.request(
                AddResourceRequest { id: id.clone(), resource: Some(resource) },
                Some(RESPONSE_TIMEOUT),
            )?)
            .await
            .map_err(Failure::of_node)?;
        Ok(id)
    }

    async fn release_lease(&self, lease: &str) {
        let deleted = async {
            let request = self.request(
                DeleteRequest { id: lease.to_owned(), sync: false },
                Some(RESPONSE_TIMEOUT),
            )?;
            let mut leases = LeasesClient::new(self.channel().await?);
            leases.delete(request).await.map_err(Failure::of_node)
        };
        if let Err(error) = deleted.await {
            tracing::debug!(%error, "lease not deleted, expires by itself");
        }
    }
}
