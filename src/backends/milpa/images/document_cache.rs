//! Small blobs of the node's images, in memory: each copy of an image reads its index, manifest and
//! configuration, and blobs never change.

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::{
    StreamExt as _,
    stream::{self, BoxStream},
};
use kiyot_proto::cri;
use tokio::time::timeout;

use super::{
    manifest::Descriptor,
    memory::BoundedMap,
    node::{Node, RESPONSE_TIMEOUT},
    reference::digest_of,
};
use crate::backends::milpa::failure::{Code, Failure};

/// Largest blob in memory, in bytes. Manifests and configurations have some KiB.
const MAX_BLOB_BYTES: u64 = 64 << 10;
/// Most blobs in memory: together 4 MiB.
const MAX_BLOBS: usize = 64;

/// The node's containerd, with a cache of small blobs.
#[derive(Debug)]
pub(super) struct DocumentCache {
    node: Box<dyn Node>,
    blobs: BoundedMap<String, Bytes>,
}

impl DocumentCache {
    /// Creates an empty cache in front of a node.
    pub(super) fn new(node: Box<dyn Node>) -> Self {
        Self { node, blobs: BoundedMap::new(MAX_BLOBS) }
    }

    /// Reads a small blob, and caches it if it matches its digest.
    async fn read_whole(&self, blob: &Descriptor) -> Result<Bytes, Failure> {
        let mut parts = self.node.read(blob).await?;
        let mut whole = BytesMut::new();
        let stalled = |_| {
            let message = format!("blob {}: the node's containerd sends no part", blob.digest);
            Failure::node(Code::DeadlineExceeded, message)
        };
        while let Some(part) = timeout(RESPONSE_TIMEOUT, parts.next()).await.map_err(stalled)? {
            whole.extend_from_slice(&part?);
            // The reader also compares the length.
            if whole.len() as u64 > blob.size {
                break;
            }
        }
        let whole = whole.freeze();
        if digest_of(&whole) == blob.digest {
            self.blobs.put(blob.digest.clone(), whole.clone());
        }
        Ok(whole)
    }
}

#[async_trait]
impl Node for DocumentCache {
    async fn status(
        &self,
        request: cri::ImageStatusRequest,
    ) -> Result<cri::ImageStatusResponse, Failure> {
        self.node.status(request).await
    }

    async fn pull(&self, image: &str) -> Result<(), Failure> {
        self.node.pull(image).await
    }

    async fn target(&self, name: &str) -> Result<Option<Descriptor>, Failure> {
        self.node.target(name).await
    }

    async fn targets(&self, repository: &str) -> Result<Vec<Descriptor>, Failure> {
        self.node.targets(repository).await
    }

    async fn has(&self, digest: &str) -> Result<bool, Failure> {
        if self.has_in_memory(digest) { Ok(true) } else { self.node.has(digest).await }
    }

    fn has_in_memory(&self, digest: &str) -> bool {
        self.blobs.contains(digest)
    }

    async fn read(
        &self,
        blob: &Descriptor,
    ) -> Result<BoxStream<'static, Result<Bytes, Failure>>, Failure> {
        if blob.size > MAX_BLOB_BYTES {
            return self.node.read(blob).await;
        }
        let whole = match self.blobs.get(&blob.digest) {
            Some(whole) => whole,
            None => self.read_whole(blob).await?,
        };
        Ok(stream::iter([Ok(whole)]).boxed())
    }

    async fn acquire_lease(&self, digest: &str) -> Result<String, Failure> {
        self.node.acquire_lease(digest).await
    }

    async fn release_lease(&self, lease: &str) {
        self.node.release_lease(lease).await;
    }
}
