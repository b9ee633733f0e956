//! Copies images from the node to a cell.

use std::{collections::HashSet, future::Future, time::Duration};

use bytes::Bytes;
use futures::{FutureExt as _, StreamExt as _, TryStreamExt as _, stream};
use kiyot_link::architecture::of_this_machine;
use kiyot_proto::cell::{BlobPart, PutImageRequest};
use tokio::{sync::mpsc, time::timeout};

use super::{
    manifest::{Descriptor, Manifest, ManifestError, Parsed, check_architecture, parse},
    node::Node,
    receiver::Receiver,
    reference::digest_of,
};
use crate::backends::milpa::failure::{Code, Failure, Side};

/// Most bytes of an image's JSON document.
const MAX_JSON_BYTES: u64 = 4 << 20;

/// Deadline for the node to return a JSON document.
pub(super) const JSON_TIMEOUT: Duration = Duration::from_secs(30);

/// Most indexes on the way from a name to a manifest.
const MAX_INDEXES: usize = 3;

/// Most bytes of a part of a blob that is sent to a cell.
const MAX_PART_BYTES: usize = 1 << 20;

/// Most blobs sent to a cell at the same time, as in containerd's `max_concurrent_downloads`. Small
/// blobs cost round trips, not bandwidth.
const MAX_CONCURRENT_BLOBS: usize = 3;

/// Most concurrent queries to the node for blobs.
const MAX_CONCURRENT_QUERIES: usize = 8;

/// Most parts queued for sending.
const MAX_QUEUED_PARTS: usize = 2;

/// Label of images that CRI manages.
const MANAGED_LABEL: (&str, &str) = ("io.cri-containerd.image", "managed");

#[derive(Debug, thiserror::Error)]
pub(super) enum CopyError {
    /// A side failed.
    #[error("{}: {}", side(.0), .0)]
    Failed(#[from] Failure),
    /// The image is not supported.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The content does not match the digest.
    #[error("blob {0} is damaged on the node, or larger than {MAX_JSON_BYTES} bytes")]
    Damaged(String),
    /// The content of a layer was deleted after it was unpacked.
    #[error("blob {0} is no longer on the node")]
    Deleted(String),
    /// The copy made no progress.
    #[error("blob {0} made no progress for {1} s")]
    Stalled(String, u64),
}

fn side(failure: &Failure) -> &'static str {
    match failure.side() {
        Side::Node => "the node's containerd",
        Side::Cell => "the cell",
        Side::Request => "the image",
    }
}

/// Returns the manifest of an image on the node for a machine with an architecture; `None` for an
/// unknown name.
pub(super) async fn resolve(
    node: &dyn Node,
    name: &str,
    architecture: &'static str,
) -> Result<Option<Manifest>, CopyError> {
    match node.target(name).await? {
        Some(target) => manifest_of(node, target, architecture).await.map(Some),
        None => Ok(None),
    }
}

/// Returns the manifest of an image's target, an index or the manifest itself.
pub(super) async fn manifest_of(
    node: &dyn Node,
    mut target: Descriptor,
    architecture: &'static str,
) -> Result<Manifest, CopyError> {
    for _ in 0..=MAX_INDEXES {
        match parse(&target, &json_in_time(node, &target).await?, architecture)? {
            Parsed::Index(next) => target = next,
            Parsed::Manifest(manifest) => {
                // Without an index, the image is probably for the node's own architecture.
                if architecture != of_this_machine() {
                    let config = json_in_time(node, &manifest.config).await?;
                    check_architecture(&manifest.config, &config, architecture)?;
                }
                return Ok(manifest);
            }
        }
    }
    Err(ManifestError::Type(target.digest, "index of indexes".to_owned()).into())
}

/// Returns whether all blobs of an image are on the node.
pub(super) async fn is_whole(node: &dyn Node, manifest: &Manifest) -> Result<bool, Failure> {
    Ok(first_absent(node, &manifest.blobs()).await?.is_none())
}

/// Returns the first blob that the node lacks.
async fn first_absent<'a>(
    node: &dyn Node,
    blobs: &[&'a Descriptor],
) -> Result<Option<&'a Descriptor>, Failure> {
    let queries: Vec<_> = blobs.iter().map(|blob| node.has(&blob.digest)).collect();
    let mut found = stream::iter(queries).buffered(MAX_CONCURRENT_QUERIES).zip(stream::iter(blobs));
    while let Some((found, blob)) = found.next().await {
        if !found? {
            return Ok(Some(blob));
        }
    }
    Ok(None)
}

/// Copies the blobs that the cell lacks, and names the image in the cell. `mounted` returns the
/// snapshot of the last layer if the cell has mounted the layers; their blobs are then not copied.
/// `stall` bounds the time without progress of a blob. Blobs in memory need no lease. The lease of
/// a cancelled copy expires by itself.
pub(super) async fn copy(
    node: &dyn Node,
    cell: &dyn Receiver,
    manifest: &Manifest,
    names: impl Future<Output = Result<Vec<String>, Failure>> + Send,
    mounted: impl Future<Output = Option<String>> + Send,
    stall: Duration,
) -> Result<(), CopyError> {
    let target = &manifest.target.digest;
    let needed = async {
        let snapshot = mounted.await;
        let mut blobs = manifest.blobs();
        if snapshot.is_some() {
            blobs.retain(|blob| manifest.layers.iter().all(|layer| layer.digest != blob.digest));
        }
        let digests = blobs.iter().map(|blob| blob.digest.clone()).collect();
        let lease = async {
            let is_in_memory = blobs.iter().all(|blob| node.has_in_memory(&blob.digest));
            if is_in_memory { Ok(None) } else { node.acquire_lease(target).await.map(Some) }
        };
        let missing = async {
            // Without layers the blobs are small: sending a blob that the cell has costs less than
            // asking.
            if snapshot.is_some() { Ok(digests) } else { cell.missing(digests).await }
        };
        let (lease, missing) = tokio::join!(lease, missing);
        (snapshot, blobs, lease, missing)
    };
    let ((snapshot, blobs, lease, missing), names) = tokio::join!(needed, names);
    let lease = lease?;
    let sent = async {
        // Only blobs of this image are sent, whatever blobs the cell requests.
        let missing: HashSet<String> = missing?.into_iter().collect();
        let missing: Vec<&Descriptor> =
            blobs.into_iter().filter(|blob| missing.contains(&blob.digest)).collect();
        send(node, cell, manifest, &missing, stall).await?;
        Ok::<_, CopyError>(names?)
    };
    let release = async {
        if let Some(lease) = &lease {
            node.release_lease(lease).await;
        }
    };
    let names = match sent.await {
        Ok(names) => names,
        Err(error) => {
            release.await;
            return Err(error);
        }
    };
    let request = PutImageRequest {
        names,
        target_digest: target.clone(),
        target_media_type: manifest.target.media_type.clone(),
        target_size: manifest.target.size,
        image_id: manifest.config.digest.clone(),
        labels: [(MANAGED_LABEL.0.to_owned(), MANAGED_LABEL.1.to_owned())].into(),
        snapshot: snapshot.unwrap_or_default(),
    };
    // The cell has all blobs: the lease on the node's blobs is no longer needed.
    let (put, ()) = tokio::join!(cell.put_image(request), release);
    Ok(put?)
}

/// Sends blobs, several at a time. The first failure cancels the others.
async fn send(
    node: &dyn Node,
    cell: &dyn Receiver,
    manifest: &Manifest,
    blobs: &[&Descriptor],
    stall: Duration,
) -> Result<(), CopyError> {
    if let Some(absent) = first_absent(node, blobs).await? {
        return Err(CopyError::Deleted(absent.digest.clone()));
    }
    let puts: Vec<_> =
        blobs.iter().map(|blob| put(node, cell, manifest, blob, stall).boxed()).collect();
    stream::iter(puts).buffer_unordered(MAX_CONCURRENT_BLOBS).try_collect().await
}

/// Sends a blob in parts, while reading it.
pub(super) async fn put(
    node: &dyn Node,
    cell: &dyn Receiver,
    manifest: &Manifest,
    blob: &Descriptor,
    stall: Duration,
) -> Result<(), CopyError> {
    let stalled = || CopyError::Stalled(blob.digest.clone(), stall.as_secs());
    let (sender, parts) = mpsc::channel(MAX_QUEUED_PARTS);
    let sending = async move {
        let first = BlobPart {
            digest: blob.digest.clone(),
            size: blob.size,
            labels: manifest.labels(&blob.digest).into_iter().collect(),
            content: Bytes::new(),
        };
        let mut read = node.read(blob).await?;
        // If the cell takes no more parts, its status has the reason.
        let mut open = sender.send(first).await.is_ok();
        while open && let Some(bytes) = timeout(stall, read.next()).await.map_err(|_| stalled())? {
            let mut bytes = bytes?;
            while open && !bytes.is_empty() {
                let content = bytes.split_to(bytes.len().min(MAX_PART_BYTES));
                let length = content.len();
                let part = BlobPart { content, ..BlobPart::default() };
                cell.ready(length).await;
                open = timeout(stall, sender.send(part)).await.map_err(|_| stalled())?.is_ok();
                if open {
                    cell.count(length);
                }
            }
        }
        Ok::<_, CopyError>(())
    };
    let taking = cell.put_blob(parts);
    tokio::pin!(sending, taking);
    tokio::select! {
        taken = &mut taking => taken,
        sent = &mut sending => {
            sent?;
            timeout(stall, taking).await.map_err(|_| stalled())?
        }
    }
    .map_err(CopyError::from)
}

/// Reads a JSON document within [`JSON_TIMEOUT`].
async fn json_in_time(node: &dyn Node, blob: &Descriptor) -> Result<Vec<u8>, CopyError> {
    timeout(JSON_TIMEOUT, json(node, blob))
        .await
        .map_err(|_| CopyError::Stalled(blob.digest.clone(), JSON_TIMEOUT.as_secs()))?
}

/// Reads a JSON document and checks its digest.
pub(super) async fn json(node: &dyn Node, blob: &Descriptor) -> Result<Vec<u8>, CopyError> {
    let damaged = || CopyError::Damaged(blob.digest.clone());
    if blob.size > MAX_JSON_BYTES {
        return Err(damaged());
    }
    let mut parts = match node.read(blob).await {
        Err(failure) if failure.code() == Code::NotFound => {
            return Err(CopyError::Deleted(blob.digest.clone()));
        }
        parts => parts?,
    };
    let mut json = Vec::new();
    while let Some(part) = parts.next().await {
        match part {
            Ok(part) => json.extend_from_slice(&part),
            Err(failure) if failure.code() == Code::NotFound => {
                return Err(CopyError::Deleted(blob.digest.clone()));
            }
            Err(failure) => return Err(failure.into()),
        }
        if json.len() as u64 > MAX_JSON_BYTES {
            return Err(damaged());
        }
    }
    if digest_of(&json) == blob.digest { Ok(json) } else { Err(damaged()) }
}
