//! Images, blob by blob, into the cell's containerd.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use containerd_client::{
    services::v1::{
        AbortRequest, CreateImageRequest, CreateRequest, Image, InfoRequest, UpdateImageRequest,
        WriteAction, WriteContentRequest, WriteContentResponse, content_client::ContentClient,
        images_client::ImagesClient, leases_client::LeasesClient,
    },
    types::Descriptor,
};
use futures::{Stream, StreamExt};
use jiff::{SignedDuration, Timestamp};
use kiyot_proto::{
    cell::{BlobPart, PutImageRequest},
    cri::{ImageSpec, ImageStatusRequest},
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Status, Streaming, metadata::MetadataValue, transport::Channel};

use super::runtime::{ASK, MESSAGE_LIMIT, Runtime, namespaced, within};

/// The most digests of one question, and names of one image.
const DIGESTS: usize = 1024;
/// The most names of one image.
const NAMES: usize = 64;
/// How long a part of a blob may take to come. The daemon reads it from its own disk.
const PART: Duration = Duration::from_secs(60);
/// How long CRI may take to learn of an image.
const KNOWN_WITHIN: Duration = Duration::from_secs(30);
/// The first and the longest wait between two questions to CRI.
const KNOWN_PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(250));
/// A lease keeps blobs until their image is named: so long at least.
const LEASE_HOURS: i64 = 2;

/// A blob's name: `sha256:` and 64 hexadecimal digits, as containerd has them (sha512 with 128 is
/// taken too).
pub fn is_digest(digest: &str) -> bool {
    let of = |name, length| {
        digest.strip_prefix(name).is_some_and(|hex: &str| {
            hex.len() == length
                && hex.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
        })
    };
    of("sha256:", 64) || of("sha512:", 128)
}

/// What a blob is called while it is written begins so: a pull's are called otherwise.
const OURS: &str = "kiyot-";

/// Whether an ingest is one of a blob that the daemon sends.
pub fn is_ours(reference: &str) -> bool {
    reference.starts_with(OURS)
}

fn check(digest: &str) -> Result<(), Status> {
    if is_digest(digest) {
        Ok(())
    } else {
        Err(Status::invalid_argument(format!(
            "the digest {digest:?}: allowed are sha256:<64 hex digits> and sha512:<128>"
        )))
    }
}

fn content(runtime: &Runtime) -> ContentClient<Channel> {
    ContentClient::new(runtime.channel())
        .max_decoding_message_size(MESSAGE_LIMIT)
        .max_encoding_message_size(MESSAGE_LIMIT)
}

/// Which of these blobs containerd lacks.
pub async fn missing(runtime: &Runtime, digests: Vec<String>) -> Result<Vec<String>, Status> {
    if digests.len() > DIGESTS {
        return Err(Status::invalid_argument(format!(
            "{} digests: at most {DIGESTS} are allowed",
            digests.len()
        )));
    }
    let mut missing = Vec::new();
    for digest in digests {
        check(&digest)?;
        match content(runtime)
            .info(namespaced(within(ASK, InfoRequest { digest: digest.clone() })))
            .await
        {
            Ok(_) => {}
            Err(status) if status.code() == Code::NotFound => missing.push(digest),
            Err(status) => return Err(status),
        }
    }
    Ok(missing)
}

/// One blob, checked by containerd against its digest. One that is there already is not written
/// again.
pub async fn put(
    runtime: &Runtime,
    mut parts: impl Stream<Item = Result<BlobPart, Status>> + Unpin,
) -> Result<(), Status> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let first = next(&mut parts)
        .await?
        .ok_or_else(|| Status::invalid_argument("a blob begins with a part that names it"))?;
    check(&first.digest)?;
    let size = i64::try_from(first.size).map_err(|_| {
        Status::invalid_argument(format!("the blob {} has {} bytes", first.digest, first.size))
    })?;
    if missing(runtime, vec![first.digest.clone()]).await?.is_empty() {
        return Ok(());
    }
    let lease = lease(runtime).await?;
    let reference = format!(
        "{OURS}{}-{}-{}",
        std::process::id(),
        Timestamp::now().as_nanosecond(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    );
    let written = write(runtime, first, size, &reference, &lease, parts).await;
    match written {
        Err(status) if status.code() == Code::AlreadyExists => Ok(()),
        Err(status) => {
            // What is left of it would go in a day by itself.
            let _ = content(runtime)
                .abort(namespaced(within(ASK, AbortRequest { r#ref: reference })))
                .await;
            Err(status)
        }
        Ok(()) => Ok(()),
    }
}

async fn next(
    parts: &mut (impl Stream<Item = Result<BlobPart, Status>> + Unpin),
) -> Result<Option<BlobPart>, Status> {
    let part = tokio::time::timeout(PART, parts.next()).await;
    part.map_err(|_| {
        Status::deadline_exceeded(format!("no part of the blob came within {} s", PART.as_secs()))
    })?
    .transpose()
}

async fn write(
    runtime: &Runtime,
    first: BlobPart,
    size: i64,
    reference: &str,
    lease: &str,
    mut parts: impl Stream<Item = Result<BlobPart, Status>> + Unpin,
) -> Result<(), Status> {
    let request = |action: WriteAction, offset, data| WriteContentRequest {
        action: action as i32,
        r#ref: reference.to_owned(),
        total: size,
        expected: first.digest.clone(),
        offset,
        data,
        labels: first.labels.clone(),
    };
    // One message at a time is under way.
    let (sender, receiver) = mpsc::channel(1);
    send(&sender, request(WriteAction::Stat, 0, Vec::new())).await?;
    let mut call = namespaced(Request::new(ReceiverStream::new(receiver)));
    let lease = MetadataValue::try_from(lease).map_err(|_| Status::internal("the lease's name"))?;
    call.metadata_mut().insert("containerd-lease", lease);
    let mut answers = content(runtime).write(call).await?.into_inner();
    answer(&mut answers).await?;
    let mut offset = 0_i64;
    let mut part = Some(first.content.clone());
    while let Some(data) = part {
        let length = i64::try_from(data.len()).unwrap_or(i64::MAX);
        if offset.saturating_add(length) > size {
            return Err(Status::invalid_argument(format!(
                "the blob {} has more than the {size} bytes that were announced",
                first.digest
            )));
        }
        if length > 0 {
            send(&sender, request(WriteAction::Write, offset, data.to_vec())).await?;
            offset = answer(&mut answers).await?.offset;
        }
        part = next(&mut parts).await?.map(|part| part.content);
    }
    if offset != size {
        return Err(Status::invalid_argument(format!(
            "the blob {} has {offset} bytes, and {size} were announced",
            first.digest
        )));
    }
    send(&sender, request(WriteAction::Commit, offset, Vec::new())).await?;
    answer(&mut answers).await.map(drop)
}

async fn send(
    sender: &mpsc::Sender<WriteContentRequest>,
    request: WriteContentRequest,
) -> Result<(), Status> {
    sender
        .send(request)
        .await
        .map_err(|_| Status::unavailable("containerd ended the blob's stream"))
}

async fn answer(
    answers: &mut Streaming<WriteContentResponse>,
) -> Result<WriteContentResponse, Status> {
    let answer = tokio::time::timeout(PART, answers.message()).await;
    let answer =
        answer.map_err(|_| Status::deadline_exceeded("containerd does not take the blob"))??;
    answer.ok_or_else(|| Status::unavailable("containerd ended the blob's stream"))
}

/// A lease that holds what is written now until its image is named; another one for each hour, so
/// that blobs of images that never came go away.
async fn lease(runtime: &Runtime) -> Result<String, Status> {
    let now = Timestamp::now();
    let id = format!("kiyot-{}", now.as_second() / 3600);
    let expires = now
        .checked_add(SignedDuration::from_hours(LEASE_HOURS))
        .map_err(|error| Status::internal(error.to_string()))?;
    let labels = [("containerd.io/gc.expire".to_owned(), expires.to_string())].into();
    match LeasesClient::new(runtime.channel())
        .create(namespaced(within(ASK, CreateRequest { id: id.clone(), labels })))
        .await
    {
        Err(status) if status.code() != Code::AlreadyExists => Err(status),
        _ => Ok(id),
    }
}

/// Names an image, and waits until CRI has it under all its names.
pub async fn name(runtime: &Runtime, request: PutImageRequest) -> Result<(), Status> {
    check(&request.target_digest)?;
    if request.names.is_empty() || request.names.len() > NAMES {
        return Err(Status::invalid_argument(format!(
            "an image of {} names: allowed are 1 to {NAMES}",
            request.names.len()
        )));
    }
    let target = Descriptor {
        media_type: request.target_media_type,
        digest: request.target_digest,
        size: i64::try_from(request.target_size)
            .map_err(|_| Status::invalid_argument("the size of the image's manifest"))?,
        annotations: std::collections::HashMap::new(),
    };
    for name in &request.names {
        let image = Image {
            name: name.clone(),
            labels: request.labels.clone(),
            target: Some(target.clone()),
            ..Default::default()
        };
        let create = CreateImageRequest { image: Some(image.clone()), source_date_epoch: None };
        let created =
            ImagesClient::new(runtime.channel()).create(namespaced(within(ASK, create))).await;
        match created {
            Ok(_) => {}
            Err(status) if status.code() == Code::AlreadyExists => {
                let update = UpdateImageRequest {
                    image: Some(image),
                    update_mask: None,
                    source_date_epoch: None,
                };
                ImagesClient::new(runtime.channel())
                    .update(namespaced(within(ASK, update)))
                    .await?;
            }
            Err(status) => return Err(status),
        }
    }
    let until = Instant::now() + KNOWN_WITHIN;
    for name in request.names {
        wait_known(runtime, &name, &request.image_id, until).await?;
    }
    Ok(())
}

async fn wait_known(runtime: &Runtime, name: &str, id: &str, until: Instant) -> Result<(), Status> {
    let mut pause = KNOWN_PAUSES.0;
    loop {
        let request = ImageStatusRequest {
            image: Some(ImageSpec { image: name.to_owned(), ..Default::default() }),
            verbose: false,
        };
        let known = runtime
            .images()
            .image_status(within(ASK, request))
            .await?
            .into_inner()
            .image
            .map(|image| image.id);
        if known.as_deref() == Some(id) {
            return Ok(());
        }
        if Instant::now() >= until {
            let known = known.unwrap_or_else(|| "nothing".to_owned());
            return Err(Status::deadline_exceeded(format!(
                "CRI takes the image {name} for {known}, and not for {id}"
            )));
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(KNOWN_PAUSES.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_told_from_other_words() {
        assert!(is_digest(&format!("sha256:{}", "0a".repeat(32))));
        assert!(is_digest(&format!("sha512:{}", "0a".repeat(64))));
        for wrong in [
            "",
            "sha256:",
            "sha256:00",
            &format!("sha256:{}", "0A".repeat(32)),
            &format!("md5:{}", "0a".repeat(16)),
        ] {
            assert!(!is_digest(wrong), "{wrong}");
        }
    }
}
