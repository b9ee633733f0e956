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

use self::progress::{Known, Labelled, Progress, Store};
use super::{
    blobs,
    runtime::{ASK, MESSAGE_LIMIT, Runtime, namespaced, within},
};

mod progress;

/// The pause between two looks until a manifest has come: its layers follow at once.
const SOON: Duration = Duration::from_millis(10);
/// The pause after that, when none has come for [`PATIENCE`], and when a look has failed.
const LATER: Duration = Duration::from_millis(250);
/// How long a manifest is looked for often.
const PATIENCE: Duration = Duration::from_secs(30);
/// Nobody waits longer for news than this.
const HEARTBEAT: Duration = Duration::from_secs(4);
/// How long looks may fail, one after another, until a watch ends.
const TROUBLE: Duration = Duration::from_secs(60);
/// The longest manifest that is told: one of the most layers that a snapshotter takes has a tenth
/// of it.
const MAX_MANIFEST: usize = 1 << 20;
/// Manifests with this label lead to an image's configuration; with it, all that they lead to is
/// known (containerd, images.SetChildrenMappedLabels).
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
        untold: Vec::new(),
        often_until: Instant::now() + PATIENCE,
        told: None,
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

fn of_message(known: KnownManifests) -> Known {
    known
        .manifests
        .into_iter()
        .map(|manifest| (manifest.digest, (manifest.changed_seconds, manifest.changed_nanos)))
        .collect()
}

fn message_of(known: Known) -> KnownManifests {
    let message = |(digest, (changed_seconds, changed_nanos))| KnownManifest {
        digest,
        changed_seconds,
        changed_nanos,
    };
    KnownManifests { manifests: known.into_iter().map(message).collect() }
}

/// One watcher.
struct Watch {
    runtime: Runtime,
    progress: Progress,
    /// Manifests that have come and were not told yet.
    untold: Vec<String>,
    often_until: Instant,
    /// When it was told last, and what.
    told: Option<(Instant, (u64, bool))>,
    _permit: OwnedSemaphorePermit,
}

impl Watch {
    /// What is to be told next. A look that fails is looked again: containerd fails to list what is
    /// just being fetched when it is put away meanwhile, and who begins a watch anew because of it
    /// learns less.
    async fn next(&mut self) -> Result<PullNews, Status> {
        let mut fails_until = None;
        loop {
            match self.look().await {
                Ok(Some(news)) => return Ok(news),
                Ok(None) => fails_until = None,
                Err(status) => {
                    if Instant::now()
                        >= *fails_until.get_or_insert_with(|| Instant::now() + TROUBLE)
                    {
                        return Err(status);
                    }
                    tracing::info!(
                        status = status.message(),
                        "the content store can't be looked at, and is looked at again"
                    );
                    tokio::time::sleep(LATER).await;
                }
            }
        }
    }

    /// Looks once, and tells what is due.
    async fn look(&mut self) -> Result<Option<PullNews>, Status> {
        if self.told.is_some() && self.untold.is_empty() {
            tokio::time::sleep(if Instant::now() < self.often_until { SOON } else { LATER }).await;
        }
        let store = list(&self.runtime, &self.progress).await?;
        let (new, fetching) = self.progress.look(&store);
        self.untold.extend(new);
        let state = (self.progress.moves, fetching);
        let now = Instant::now();
        let is_due = self.told.is_none_or(|(at, told)| told != state || now >= at + HEARTBEAT);
        if !is_due && self.untold.is_empty() {
            return Ok(None);
        }
        let mut manifest = None;
        if let Some(digest) = self.untold.last() {
            manifest = read(&self.runtime, digest.clone()).await?;
            self.untold.pop();
            self.often_until = now;
        }
        let known = self.told.is_none().then(|| message_of(self.progress.known()));
        self.told = Some((now, state));
        Ok(Some(PullNews { moves: state.0, fetching, manifest, known }))
    }
}

async fn list(runtime: &Runtime, progress: &Progress) -> Result<Store, Status> {
    let mut store = Store::default();
    let filters = vec![format!("labels.\"{CONFIG_LABEL}\"")];
    let mut list = content(runtime)
        .list(namespaced(within(ASK, ListContentRequest { filters })))
        .await?
        .into_inner();
    while let Some(part) = list.message().await? {
        for info in part.info {
            store.manifests.insert(info.digest, Labelled::new(info.labels));
        }
    }
    // A list has no times of changes (containerd, contentserver.List). What is asked about are the
    // few manifests of one repository.
    for digest in progress.own(&store) {
        match content(runtime)
            .info(namespaced(within(ASK, InfoRequest { digest: digest.clone() })))
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
        .list_statuses(namespaced(within(ASK, ListStatusesRequest { filters: Vec::new() })))
        .await?
        .into_inner();
    let fetched = statuses.statuses.into_iter().filter(|status| !blobs::is_ours(&status.r#ref));
    store.ingests = fetched.map(|status| (status.r#ref, status.offset)).collect();
    Ok(store)
}

fn content(runtime: &Runtime) -> ContentClient<Channel> {
    ContentClient::new(runtime.channel()).max_decoding_message_size(MESSAGE_LIMIT)
}

/// A manifest; `None` if it is gone again, or too long.
async fn read(runtime: &Runtime, digest: String) -> Result<Option<PulledManifest>, Status> {
    let request = ReadContentRequest { digest: digest.clone(), offset: 0, size: 0 };
    let read = async {
        let mut parts = content(runtime).read(namespaced(within(ASK, request))).await?.into_inner();
        let mut json = Vec::new();
        while let Some(part) = parts.next().await {
            json.extend_from_slice(&part?.data);
            if json.len() > MAX_MANIFEST {
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
