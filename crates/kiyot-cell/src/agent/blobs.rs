//! `PutBlob` and `PutImage`: writes an image that the daemon pushes into the cell's containerd.

use std::{
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use containerd_client::{
    services::v1::{
        AbortRequest, CreateImageRequest, Image, InfoRequest, UpdateImageRequest, WriteAction,
        WriteContentRequest, WriteContentResponse, content_client::ContentClient,
        images_client::ImagesClient,
    },
    types::Descriptor,
};
use futures::{Stream, StreamExt, TryStreamExt, future::try_join_all, stream};
use jiff::Timestamp;
use kiyot_proto::{
    cell::{BlobPart, PutImageRequest},
    cri::{ImageSpec, ImageStatusRequest},
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Status, Streaming, transport::Channel};

use super::{
    digest::check_digest,
    layers,
    lease::create_lease,
    runtime::{MAX_MESSAGE_BYTES, QUERY_TIMEOUT, Runtime, leased, namespaced, with_timeout},
};

mod small;

/// Upper bound on the digests in a `MissingBlobs` request.
const MAX_DIGESTS: usize = 1024;
/// Upper bound on the queries for blobs that containerd answers at the same time.
const MAX_CONCURRENT_QUERIES: usize = 8;
/// Upper bound on the names of an image.
const MAX_IMAGE_NAMES: usize = 64;
/// Longest wait for the next part of a blob. The daemon reads it from the node's disk.
const PART_TIMEOUT: Duration = Duration::from_secs(60);
/// Time within which CRI must list a created image.
const CRI_VISIBLE_TIMEOUT: Duration = Duration::from_secs(30);
/// First and longest interval between two `ImageStatus` calls.
const CRI_POLL_INTERVALS: (Duration, Duration) =
    (Duration::from_millis(5), Duration::from_millis(250));

/// Prefix of the ingests that pushed blobs are written to. Pulls use other names.
const PUSH_INGEST_PREFIX: &str = "kiyot-";

/// Returns whether an ingest belongs to a blob that the daemon pushes.
pub fn is_push_ingest(reference: &str) -> bool {
    reference.starts_with(PUSH_INGEST_PREFIX)
}

fn content(runtime: &Runtime) -> ContentClient<Channel> {
    ContentClient::new(runtime.channel())
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

/// Returns the digests that are absent from containerd's content store.
pub async fn missing_blobs(runtime: &Runtime, digests: Vec<String>) -> Result<Vec<String>, Status> {
    if digests.len() > MAX_DIGESTS {
        return Err(Status::invalid_argument(format!(
            "{} digests: too many; allowed: at most {MAX_DIGESTS}",
            digests.len()
        )));
    }
    for digest in &digests {
        check_digest(digest)?;
    }
    let queries: Vec<_> = digests
        .into_iter()
        .map(|digest| async move {
            is_missing(runtime, &digest).await.map(|is_missing| is_missing.then_some(digest))
        })
        .collect();
    let missing: Vec<Option<String>> =
        stream::iter(queries).buffered(MAX_CONCURRENT_QUERIES).try_collect().await?;
    Ok(missing.into_iter().flatten().collect())
}

async fn is_missing(runtime: &Runtime, digest: &str) -> Result<bool, Status> {
    let request = InfoRequest { digest: digest.to_owned() };
    match content(runtime).info(namespaced(with_timeout(QUERY_TIMEOUT, request))).await {
        Ok(_) => Ok(false),
        Err(status) if status.code() == Code::NotFound => Ok(true),
        Err(status) => Err(status),
    }
}

/// Writes a blob and checks its digest. A blob that is in the store is not written again. `store`
/// is the directory of containerd's content store.
pub async fn put_blob(
    runtime: &Runtime,
    store: &Path,
    mut parts: impl Stream<Item = Result<BlobPart, Status>> + Unpin,
) -> Result<(), Status> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mut first = next_part(&mut parts)
        .await?
        .ok_or_else(|| Status::invalid_argument("blob stream ended before its first part"))?;
    check_digest(&first.digest)?;
    let size = i64::try_from(first.size).map_err(|_| {
        Status::invalid_argument(format!(
            "blob {}: size of {} bytes is out of range",
            first.digest, first.size
        ))
    })?;
    let lease = create_lease(runtime).await?;
    let reference = format!(
        "{PUSH_INGEST_PREFIX}{}-{}-{}",
        std::process::id(),
        Timestamp::now().as_nanosecond(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    );
    let write = BlobWrite { runtime, reference: &reference, lease: &lease, size };
    if first.size <= small::MAX_BYTES {
        first.content = write.gather(&first, &mut parts).await?;
        match small::place(store, &first.digest, first.content.clone()).await {
            Ok(()) => match write.commit_placed(&first).await {
                Err(status) if status.code() != Code::AlreadyExists => {
                    tracing::debug!(blob = first.digest, error = %status, "blob not shared");
                }
                _ => return Ok(()),
            },
            Err(error) => tracing::debug!(blob = first.digest, %error, "blob not placed"),
        }
    }
    match write.stream(first, parts).await {
        Err(status) if status.code() == Code::AlreadyExists => Ok(()),
        Err(status) => {
            // Best effort: containerd removes an abandoned ingest after a day.
            let _ = content(runtime)
                .abort(namespaced(with_timeout(QUERY_TIMEOUT, AbortRequest { r#ref: reference })))
                .await;
            Err(status)
        }
        Ok(()) => Ok(()),
    }
}

async fn next_part(
    parts: &mut (impl Stream<Item = Result<BlobPart, Status>> + Unpin),
) -> Result<Option<BlobPart>, Status> {
    let part = tokio::time::timeout(PART_TIMEOUT, parts.next()).await;
    part.map_err(|_| {
        Status::deadline_exceeded(format!(
            "no part of the blob received within {} s",
            PART_TIMEOUT.as_secs()
        ))
    })?
    .transpose()
}

/// Blob that is being written.
struct BlobWrite<'a> {
    runtime: &'a Runtime,
    /// Name of containerd's ingest.
    reference: &'a str,
    lease: &'a str,
    /// Announced size in bytes.
    size: i64,
}

impl BlobWrite<'_> {
    /// Returns the content of a small blob.
    async fn gather(
        &self,
        first: &BlobPart,
        mut parts: impl Stream<Item = Result<BlobPart, Status>> + Unpin,
    ) -> Result<Bytes, Status> {
        let mut content = BytesMut::from(&first.content[..]);
        let mut length = self.add(first, 0, first.content.len())?;
        while let Some(part) = next_part(&mut parts).await? {
            length = self.add(first, length, part.content.len())?;
            content.extend_from_slice(&part.content);
        }
        Ok(content.freeze())
    }

    /// Registers with containerd a blob whose file is already in the content store.
    async fn commit_placed(&self, first: &BlobPart) -> Result<(), Status> {
        let commit = self.request(first, WriteAction::Commit, self.size, Vec::new());
        let mut call = leased(Request::new(stream::iter([commit])), self.lease)?;
        call.set_timeout(PART_TIMEOUT);
        let mut responses = content(self.runtime).write(call).await?.into_inner();
        response(&mut responses).await.map(drop)
    }

    /// Writes a blob part by part. containerd checks its digest.
    async fn stream(
        &self,
        first: BlobPart,
        mut parts: impl Stream<Item = Result<BlobPart, Status>> + Unpin,
    ) -> Result<(), Status> {
        // At most one message is in flight.
        let (sender, receiver) = mpsc::channel(1);
        send(&sender, self.request(&first, WriteAction::Stat, 0, Vec::new())).await?;
        let call = leased(Request::new(ReceiverStream::new(receiver)), self.lease)?;
        let mut responses = content(self.runtime).write(call).await?.into_inner();
        response(&mut responses).await?;
        let mut offset = 0_i64;
        let mut part = Some(first.content.clone());
        while let Some(data) = part {
            self.add(&first, offset, data.len())?;
            if !data.is_empty() {
                let write = self.request(&first, WriteAction::Write, offset, data.to_vec());
                send(&sender, write).await?;
                offset = response(&mut responses).await?.offset;
            }
            part = next_part(&mut parts).await?.map(|part| part.content);
        }
        if offset != self.size {
            return Err(Status::invalid_argument(format!(
                "blob {}: {offset} bytes received, {} announced",
                first.digest, self.size
            )));
        }
        send(&sender, self.request(&first, WriteAction::Commit, offset, Vec::new())).await?;
        response(&mut responses).await.map(drop)
    }

    /// Returns the length plus a part's length; fails beyond the announced size.
    fn add(&self, first: &BlobPart, length: i64, part: usize) -> Result<i64, Status> {
        let length = length.saturating_add(i64::try_from(part).unwrap_or(i64::MAX));
        if length > self.size {
            return Err(Status::invalid_argument(format!(
                "blob {}: more than the announced {} bytes",
                first.digest, self.size
            )));
        }
        Ok(length)
    }

    fn request(
        &self,
        first: &BlobPart,
        action: WriteAction,
        offset: i64,
        data: Vec<u8>,
    ) -> WriteContentRequest {
        WriteContentRequest {
            action: action as i32,
            r#ref: self.reference.to_owned(),
            total: self.size,
            expected: first.digest.clone(),
            offset,
            data,
            labels: first.labels.clone(),
        }
    }
}

async fn send(
    sender: &mpsc::Sender<WriteContentRequest>,
    request: WriteContentRequest,
) -> Result<(), Status> {
    sender
        .send(request)
        .await
        .map_err(|_| Status::unavailable("containerd closed the blob's stream"))
}

async fn response(
    responses: &mut Streaming<WriteContentResponse>,
) -> Result<WriteContentResponse, Status> {
    let answer = tokio::time::timeout(PART_TIMEOUT, responses.message()).await;
    let answer = answer.map_err(|_| {
        Status::deadline_exceeded("containerd's content store: no response in time")
    })??;
    answer.ok_or_else(|| Status::unavailable("containerd closed the blob's stream"))
}

/// Creates or updates an image, and waits until CRI lists it under all its names.
pub async fn put_image(runtime: &Runtime, request: PutImageRequest) -> Result<(), Status> {
    check_digest(&request.target_digest)?;
    if request.names.is_empty() || request.names.len() > MAX_IMAGE_NAMES {
        return Err(Status::invalid_argument(format!(
            "image with {} names; allowed: 1 to {MAX_IMAGE_NAMES}",
            request.names.len()
        )));
    }
    let target = Descriptor {
        media_type: request.target_media_type,
        digest: request.target_digest,
        size: i64::try_from(request.target_size).map_err(|_| {
            Status::invalid_argument("size of the image's manifest is out of range")
        })?,
        annotations: std::collections::HashMap::new(),
    };
    if !request.snapshot.is_empty() {
        layers::keep(runtime, &request.snapshot, &request.image_id).await?;
    }
    let images = request.names.iter().map(|name| Image {
        name: name.clone(),
        labels: request.labels.clone(),
        target: Some(target.clone()),
        ..Default::default()
    });
    try_join_all(images.map(|image| create_or_update(runtime, image))).await?;
    let deadline = Instant::now() + CRI_VISIBLE_TIMEOUT;
    // One after the other: once the first name is listed, the others nearly always are.
    for name in &request.names {
        wait_visible_to_cri(runtime, name, &request.image_id, deadline).await?;
    }
    Ok(())
}

async fn create_or_update(runtime: &Runtime, image: Image) -> Result<(), Status> {
    let create = CreateImageRequest { image: Some(image.clone()), source_date_epoch: None };
    let created = ImagesClient::new(runtime.channel())
        .create(namespaced(with_timeout(QUERY_TIMEOUT, create)))
        .await;
    match created {
        Err(status) if status.code() == Code::AlreadyExists => {
            let update = UpdateImageRequest {
                image: Some(image),
                update_mask: None,
                source_date_epoch: None,
            };
            ImagesClient::new(runtime.channel())
                .update(namespaced(with_timeout(QUERY_TIMEOUT, update)))
                .await
                .map(drop)
        }
        created => created.map(drop),
    }
}

async fn wait_visible_to_cri(
    runtime: &Runtime,
    name: &str,
    id: &str,
    deadline: Instant,
) -> Result<(), Status> {
    let mut interval = CRI_POLL_INTERVALS.0;
    loop {
        let request = ImageStatusRequest {
            image: Some(ImageSpec { image: name.to_owned(), ..Default::default() }),
            verbose: false,
        };
        let listed = runtime
            .images()
            .image_status(with_timeout(QUERY_TIMEOUT, request))
            .await?
            .into_inner()
            .image
            .map(|image| image.id);
        if listed.as_deref() == Some(id) {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let listed = listed.unwrap_or_else(|| "nothing".to_owned());
            return Err(Status::deadline_exceeded(format!(
                "image {name}: CRI lists {listed}, expected {id}"
            )));
        }
        tokio::time::sleep(interval).await;
        interval = (interval * 2).min(CRI_POLL_INTERVALS.1);
    }
}
