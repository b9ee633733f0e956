//! `WatchPulls`: progress of image pulls, read from containerd's content store.
//!
//! CRI reports nothing before a pull ends. In the content store, a blob that is being fetched is an
//! ingest, and a manifest gets its labels before its layers are fetched.

use std::time::Duration;

use containerd_client::services::v1::{
    InfoRequest, ListContentRequest, ListStatusesRequest, content_client::ContentClient,
};
use futures::stream::{self, BoxStream};
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
pub mod proxies;

/// Poll interval until a manifest arrives: its layers follow at once.
const FAST_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Poll interval after a manifest, after [`FAST_POLL_DURATION`] without one, and after a failure.
const SLOW_POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Longest time of fast polling.
const FAST_POLL_DURATION: Duration = Duration::from_secs(30);
/// Longest pause between two messages.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(4);
/// Time of consecutive failures after which the watch fails.
const MAX_FAILING: Duration = Duration::from_secs(60);
/// Label of a manifest that references an image configuration. containerd sets the labels of all
/// references at once (images.SetChildrenMappedLabels).
const CONFIG_LABEL: &str = "containerd.io/gc.ref.content.config";

/// Streams the progress of pulls of an image, or of all images if the request names no image.
/// `request.known` continues an earlier watch of the same pull.
pub fn watch(
    runtime: Runtime,
    request: WatchPullsRequest,
    permit: OwnedSemaphorePermit,
) -> BoxStream<'static, Result<PullNews, Status>> {
    let progress = Progress::new(&request.image, request.known.map(baseline_from_proto));
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
            Ok(message) => Some((Ok(message), Some(watch))),
            Err(status) => Some((Err(status), None)),
        }
    }))
}

fn baseline_from_proto(baseline: KnownManifests) -> Baseline {
    baseline
        .manifests
        .into_iter()
        .map(|manifest| (manifest.digest, (manifest.changed_seconds, manifest.changed_nanos)))
        .collect()
}

fn baseline_to_proto(baseline: Baseline) -> KnownManifests {
    let message = |(digest, (changed_seconds, changed_nanos))| KnownManifest {
        digest,
        changed_seconds,
        changed_nanos,
    };
    KnownManifests { manifests: baseline.into_iter().map(message).collect() }
}

/// State of a `WatchPulls` stream.
struct Watch {
    runtime: Runtime,
    progress: Progress,
    /// Manifests that have arrived and are not sent yet.
    unsent: Vec<String>,
    fast_poll_until: Instant,
    /// Time and content of the last message.
    last_sent: Option<(Instant, (u64, bool))>,
    _permit: OwnedSemaphorePermit,
}

impl Watch {
    /// Returns the next message. Failed polls are repeated: containerd fails to list an ingest that
    /// completes during the call, and a new watch would lose progress.
    async fn next(&mut self) -> Result<PullNews, Status> {
        let mut give_up_at = None;
        loop {
            match self.poll().await {
                Ok(Some(message)) => return Ok(message),
                Ok(None) => give_up_at = None,
                Err(status) => {
                    if Instant::now()
                        >= *give_up_at.get_or_insert_with(|| Instant::now() + MAX_FAILING)
                    {
                        return Err(status);
                    }
                    tracing::info!(status = status.message(), "content store not read, retrying");
                    tokio::time::sleep(SLOW_POLL_INTERVAL).await;
                }
            }
        }
    }

    /// Polls once. Returns a message if something changed or a heartbeat is due.
    async fn poll(&mut self) -> Result<Option<PullNews>, Status> {
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
        let current = (self.progress.moves, fetching);
        let now = Instant::now();
        let is_due = self
            .last_sent
            .is_none_or(|(at, last_sent)| last_sent != current || now >= at + HEARTBEAT_INTERVAL);
        if !is_due && self.unsent.is_empty() {
            return Ok(None);
        }
        let manifest = self.unsent.pop().map(|digest| PulledManifest { digest });
        if manifest.is_some() {
            self.fast_poll_until = now;
        }
        let baseline =
            self.last_sent.is_none().then(|| baseline_to_proto(self.progress.baseline()));
        self.last_sent = Some((now, current));
        Ok(Some(PullNews { moves: current.0, fetching, manifest, known: baseline }))
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
    // The list has no update times (containerd, contentserver.List), so the few manifests of this
    // repository are read one by one.
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
