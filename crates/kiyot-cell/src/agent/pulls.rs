//! How far pulls are, as the content store of the cell's containerd has it.
//!
//! CRI says nothing of a pull until it has ended. What is being fetched is an ingest of the content
//! store, and a manifest gets its labels before its layers are fetched.

use std::time::Duration;

use containerd_client::services::v1::{
    InfoRequest, ListContentRequest, ListStatusesRequest, ReadContentRequest,
    content_client::ContentClient,
};
use futures::{
    StreamExt,
    stream::{self, BoxStream},
};
use kiyot_proto::cell::{
    KnownManifest, KnownManifests, PullNews, PulledManifest, WatchPullsRequest,
};
use tokio::{sync::OwnedSemaphorePermit, time::Instant};
use tonic::{Code, Status, transport::Channel};

use self::progress::{Baseline, ContentSnapshot, ManifestLabels, Progress};
use super::{
    blobs,
    runtime::{MAX_MESSAGE_BYTES, QUERY_TIMEOUT, Runtime, namespaced, with_timeout},
};

mod progress;

/// The pause between two looks until a manifest has come: its layers follow at once.
const FAST_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// The pause after that, when none has come for [`FAST_POLL_DURATION`], and when a observe has failed.
const SLOW_POLL_INTERVAL: Duration = Duration::from_millis(250);
/// How long a manifest is looked for often.
const FAST_POLL_DURATION: Duration = Duration::from_secs(30);
/// Nobody waits longer for news than this.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(4);
/// How long looks may fail, one after another, until a watch ends.
const MAX_FAILING: Duration = Duration::from_secs(60);
/// The longest manifest that is last_sent: one of the most layers that a snapshotter takes has a tenth
/// of it.
const MAX_MANIFEST_BYTES: usize = 1 << 20;
/// Manifests with this label lead to an image's configuration; with it, all that they lead to is
/// baseline (containerd, images.SetChildrenMappedLabels).
const CONFIG_LABEL: &str = "containerd.io/gc.ref.content.config";

/// News of a pull, from now on, or from when an earlier watch of it began; of all pulls, if no
/// image is named.
pub fn watch(
    runtime: Runtime,
    request: WatchPullsRequest,
    permit: OwnedSemaphorePermit,
) -> BoxStream<'static, Result<PullNews, Status>> {
    let progress = Progress::new(&request.image, request.known.map(of_message));
    let watch = Watch {
        runtime,
        progress,
        unsent: Vec::new(),
        fast_poll_until: Instant::now() + FAST_POLL_DURATION,
        last_sent: None,
        _permit: permit,
    };
    Box::pin(stream::unfold(Some(watch), |watch| async {
        let mut watch = watch?;
        match watch.next().await {
            Ok(news) => Some((Ok(news), Some(watch))),
            Err(status) => Some((Err(status), None)),
        }
    }))
}

fn of_message(baseline: KnownManifests) -> Baseline {
    baseline
        .manifests
        .into_iter()
        .map(|manifest| (manifest.digest, (manifest.changed_seconds, manifest.changed_nanos)))
        .collect()
}

fn message_of(baseline: Baseline) -> KnownManifests {
    let message = |(digest, (changed_seconds, changed_nanos))| KnownManifest {
        digest,
        changed_seconds,
        changed_nanos,
    };
    KnownManifests { manifests: baseline.into_iter().map(message).collect() }
}

/// One watcher.
struct Watch {
    runtime: Runtime,
    progress: Progress,
    /// Manifests that have come and were not last_sent yet.
    unsent: Vec<String>,
    fast_poll_until: Instant,
    /// When it was last_sent last, and what.
    last_sent: Option<(Instant, (u64, bool))>,
    _permit: OwnedSemaphorePermit,
}

impl Watch {
    /// What is to be last_sent next. A observe that fails is looked again: containerd fails to list what is
    /// just being fetched when it is put away meanwhile, and who begins a watch anew because of it
    /// learns less.
    async fn next(&mut self) -> Result<PullNews, Status> {
        let mut give_up_at = None;
        loop {
            match self.observe().await {
                Ok(Some(news)) => return Ok(news),
                Ok(None) => give_up_at = None,
                Err(status) => {
                    if Instant::now()
                        >= *give_up_at.get_or_insert_with(|| Instant::now() + MAX_FAILING)
                    {
                        return Err(status);
                    }
                    tracing::info!(
                        status = status.message(),
                        "the content store can't be looked at, and is looked at again"
                    );
                    tokio::time::sleep(SLOW_POLL_INTERVAL).await;
                }
            }
        }
    }

    /// Looks once, and tells what is due.
    async fn observe(&mut self) -> Result<Option<PullNews>, Status> {
        if self.last_sent.is_some() && self.unsent.is_empty() {
            tokio::time::sleep(if Instant::now() < self.fast_poll_until {
                FAST_POLL_INTERVAL
            } else {
                SLOW_POLL_INTERVAL
            })
            .await;
        }
        let store = list(&self.runtime, &self.progress).await?;
        let (new, fetching) = self.progress.observe(&store);
        self.unsent.extend(new);
        let state = (self.progress.moves, fetching);
        let now = Instant::now();
        let is_due = self
            .last_sent
            .is_none_or(|(at, last_sent)| last_sent != state || now >= at + HEARTBEAT_INTERVAL);
        if !is_due && self.unsent.is_empty() {
            return Ok(None);
        }
        let mut manifest = None;
        if let Some(digest) = self.unsent.last() {
            manifest = read(&self.runtime, digest.clone()).await?;
            self.unsent.pop();
            self.fast_poll_until = now;
        }
        let baseline = self.last_sent.is_none().then(|| message_of(self.progress.baseline()));
        self.last_sent = Some((now, state));
        Ok(Some(PullNews { moves: state.0, fetching, manifest, known: baseline }))
    }
}

async fn list(runtime: &Runtime, progress: &Progress) -> Result<ContentSnapshot, Status> {
    let mut store = ContentSnapshot::default();
    let filters = vec![format!("labels.\"{CONFIG_LABEL}\"")];
    let mut list = content(runtime)
        .list(namespaced(with_timeout(QUERY_TIMEOUT, ListContentRequest { filters })))
        .await?
        .into_inner();
    while let Some(part) = list.message().await? {
        for info in part.info {
            store.manifests.insert(info.digest, ManifestLabels::new(info.labels));
        }
    }
    // A list has no times of changes (containerd, contentserver.List). What is asked about are the
    // few manifests of one repository.
    for digest in progress.own(&store) {
        match content(runtime)
            .info(namespaced(with_timeout(QUERY_TIMEOUT, InfoRequest { digest: digest.clone() })))
            .await
        {
            Ok(answer) => {
                let changed = answer.into_inner().info.and_then(|info| info.updated_at);
                store.changed(
                    &digest,
                    changed.map(|time| (time.seconds, time.nanos)).unwrap_or_default(),
                );
            }
            Err(status) if status.code() == Code::NotFound => {
                store.manifests.remove(&digest);
            }
            Err(status) => return Err(status),
        }
    }
    let statuses = content(runtime)
        .list_statuses(namespaced(with_timeout(
            QUERY_TIMEOUT,
            ListStatusesRequest { filters: Vec::new() },
        )))
        .await?
        .into_inner();
    let fetched =
        statuses.statuses.into_iter().filter(|status| !blobs::is_push_ingest(&status.r#ref));
    store.ingests = fetched.map(|status| (status.r#ref, status.offset)).collect();
    Ok(store)
}

fn content(runtime: &Runtime) -> ContentClient<Channel> {
    ContentClient::new(runtime.channel()).max_decoding_message_size(MAX_MESSAGE_BYTES)
}

/// A manifest; `None` if it is gone again, or too long.
async fn read(runtime: &Runtime, digest: String) -> Result<Option<PulledManifest>, Status> {
    let request = ReadContentRequest { digest: digest.clone(), offset: 0, size: 0 };
    let read = async {
        let mut parts = content(runtime)
            .read(namespaced(with_timeout(QUERY_TIMEOUT, request)))
            .await?
            .into_inner();
        let mut json = Vec::new();
        while let Some(part) = parts.next().await {
            json.extend_from_slice(&part?.data);
            if json.len() > MAX_MANIFEST_BYTES {
                return Ok(None);
            }
        }
        Ok(Some(json))
    };
    match read.await {
        Ok(json) => Ok(json.map(|content| PulledManifest { digest, content: content.into() })),
        Err(status) if Status::code(&status) == Code::NotFound => Ok(None),
        Err(status) => Err(status),
    }
}
