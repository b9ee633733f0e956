//! A pull in a cell: watched, so that one that stands still ends, and helped with layers that the
//! node has.

use std::{collections::HashSet, time::Duration};

use futures::{
    Stream, StreamExt as _,
    stream::{self, BoxStream},
};
use kiyot_link::log_limit::LogLimit;
use kiyot_proto::{
    cell::{KnownManifests, PullNews, PulledManifest, WatchPullsRequest},
    cri,
};
use ring::digest::{SHA256, digest};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tonic::{Code, Status};

use super::{
    copy::{self, CopyError},
    manifest::{Descriptor, Manifest, Parsed, architecture, parse},
    node::Node,
    receiver::Receiver,
    reference::normalized,
};

/// How long a pull that goes on may take in all: against one that comes by single bytes for ever.
const AT_MOST: Duration = Duration::from_secs(24 * 60 * 60);

/// What the node has at least, in bytes, for a pull to be interrupted for it: to begin it again
/// takes some questions to the registry.
const WORTH: u64 = 1 << 20;

/// Manifests for which a pull is interrupted. It has one; those of other pulls from its repository
/// can't be told from it.
const MANIFESTS: usize = 4;

/// Manifests that are looked for on the node while a pull goes on, so that a cell which tells of
/// ever more keeps nobody busy.
const LOOKS: usize = 16;

/// Manifests that a cell knows when a pull begins: so many are told back to it when its watch is
/// begun again. More than that, and it would tell some of them as new.
const KNOWN: usize = 1024;

/// How long a cell may say nothing of a pull. An agent tells every few seconds how it is, and looks
/// for a minute at a containerd that does not let it. While it unpacks, nothing else bounds a pull
/// but the day, and a kubelet may be pulling one image after another.
const SILENCE: Duration = Duration::from_secs(120);
/// The pause before a cell that watches as many pulls as it may, or whose watch has failed, is
/// asked again.
const TURN: Duration = Duration::from_millis(500);

/// What manifests are if they don't say. Only those come here that lead to a configuration.
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// What became of a pull.
enum Outcome {
    /// The image's id.
    Pulled(String),
    /// It was interrupted: the node has these layers of this image.
    Helped(Box<Manifest>, Vec<Descriptor>),
}

/// What came of a pull.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Pulled {
    /// The image's id.
    pub(super) id: String,
    /// Layers that were taken from the node, and their bytes.
    pub(super) from_node: (usize, u64),
}

/// Pulls in a cell. `stall`: how long nothing may come.
///
/// When the manifest has come, and so the registry has given it to this pod, the layers of it that
/// the node has are sent to the cell, and the pull begins again: it takes up what it has, and
/// fetches only what misses. No other blob of the node is sent. A failure to send is no failure of
/// the pull.
pub(super) async fn pull(
    node: &dyn Node,
    cell: &dyn Receiver,
    request: &cri::PullImageRequest,
    stall: Duration,
) -> Result<Pulled, Status> {
    let mut from_node = (0, 0);
    let mut helped = Vec::new();
    loop {
        // Another pull's manifest may have been taken for this one's: so there may be more than
        // one.
        let asked = (helped.len() < MANIFESTS).then_some(node);
        let (manifest, layers) = match watched(asked, &helped, cell, request, stall).await? {
            Outcome::Pulled(id) => return Ok(Pulled { id, from_node }),
            Outcome::Helped(manifest, layers) => (manifest, layers),
        };
        helped.push(manifest.target.digest.clone());
        for layer in layers {
            match give(node, cell, &manifest, &layer, stall).await {
                Ok(()) => from_node = (from_node.0 + 1, from_node.1 + layer.size),
                Err(error) => {
                    tracing::info!(
                        layer = layer.digest,
                        error = &error as &dyn std::error::Error,
                        "a layer is not taken from the node; the cell pulls it"
                    );
                }
            }
        }
    }
}

async fn give(
    node: &dyn Node,
    cell: &dyn Receiver,
    manifest: &Manifest,
    layer: &Descriptor,
    stall: Duration,
) -> Result<(), CopyError> {
    let lease = node.hold(&layer.digest).await.map_err(CopyError::Node)?;
    let given = copy::put(node, cell, manifest, layer, stall).await;
    node.release(&lease).await;
    given
}

/// Pulls until it has ended, stands still, or `node` has something of it.
async fn watched(
    node: Option<&dyn Node>,
    helped: &[String],
    cell: &dyn Receiver,
    request: &cri::PullImageRequest,
    stall: Duration,
) -> Result<Outcome, Status> {
    // What is there before is no part of it: so the watch begins first.
    let mut news = std::pin::pin!(watch(cell, request, stall).await);
    let pulling = cell.pull(request.clone(), AT_MOST);
    tokio::pin!(pulling);
    let (mut moves, mut since, mut counts, mut looks) = (0, Instant::now(), true, 0);
    loop {
        tokio::select! {
            biased;
            pulled = &mut pulling => return pulled.map(Outcome::Pulled),
            Some(next) = news.next() => match next {
                Some(next) => {
                    if next.moves != moves {
                        (moves, since) = (next.moves, Instant::now());
                    }
                    // Between the first byte and the last, what is not being fetched is being
                    // unpacked.
                    counts = next.fetching || moves == 0;
                    if let (Some(node), Some(manifest)) = (node, next.manifest.filter(|manifest| looks < LOOKS && !helped.contains(&manifest.digest))) {
                        looks += 1;
                        match on_node(node, cell, &manifest).await {
                            Ok(Some((manifest, layers))) => return Ok(Outcome::Helped(manifest, layers)),
                            Ok(None) => {}
                            Err(error) => tracing::debug!(manifest = manifest.digest, %error, "no layer of a pull is taken from the node"),
                        }
                    }
                }
                // From now on it is bounded in all.
                None => counts = true,
            },
            () = sleep_until(since + stall), if counts => {
                let image = request.image.as_ref().map_or("", |image| &image.image);
                return Err(Status::deadline_exceeded(format!(
                    "failed to pull image {image:?}: nothing of it has come for {} s (image_pull_progress_timeout)",
                    stall.as_secs_f32()
                )));
            }
        }
    }
}

/// A watch of a pull.
struct Watched<'a> {
    cell: &'a dyn Receiver,
    image: String,
    stall: Duration,
    /// What was there when the pull began, as its first watch has told: one that is begun again
    /// would take what has come since for something older.
    known: Option<KnownManifests>,
    lines: LogLimit,
}

impl Watched<'_> {
    /// News of the pull, the first of which has come. `None` if the cell has none to give.
    async fn begin(&self) -> Option<BoxStream<'static, Result<PullNews, Status>>> {
        let until = Instant::now() + self.stall;
        loop {
            match self
                .cell
                .watch_pulls(WatchPullsRequest {
                    image: self.image.clone(),
                    known: self.known.clone(),
                })
                .await
            {
                Ok(news) => return Some(news),
                // As many pulls are watched as may be: one of them ends, by its own progress at the
                // latest.
                Err(status)
                    if status.code() == Code::ResourceExhausted && Instant::now() < until =>
                {
                    sleep(TURN).await
                }
                Err(status) => {
                    // An agent of before does not know of it.
                    if status.code() != Code::Unimplemented {
                        tracing::info!(
                            error = status.message(),
                            "a pull can't be watched; it may take no longer than one that stands still"
                        );
                    }
                    return None;
                }
            }
        }
    }

    /// The next news, of another watch when one has failed; `None` if there are no more.
    async fn next(
        &mut self,
        news: &mut BoxStream<'static, Result<PullNews, Status>>,
    ) -> Option<PullNews> {
        loop {
            let said = timeout(SILENCE, news.next()).await;
            match said.unwrap_or_else(|_| {
                Some(Err(Status::deadline_exceeded(format!(
                    "the cell has said nothing for {} s",
                    SILENCE.as_secs()
                ))))
            }) {
                Some(Ok(mut next)) => {
                    if let (None, Some(mut known)) = (&self.known, next.known.take()) {
                        known.manifests.truncate(KNOWN);
                        self.known = Some(known);
                    }
                    return Some(next);
                }
                failed => {
                    if let Some(suppressed) = self.lines.admit() {
                        let ended = Status::ok("it ended");
                        let status = failed.and_then(Result::err).unwrap_or(ended);
                        tracing::info!(
                            error = status.message(),
                            suppressed,
                            "the watch of a pull failed and is begun again"
                        );
                    }
                }
            }
            sleep(TURN).await;
            *news = self.begin().await?;
        }
    }
}

/// News of a pull for as long as there are any; then `None`, and nothing more. When this returns,
/// the first has come or there are none.
async fn watch<'a>(
    cell: &'a dyn Receiver,
    request: &cri::PullImageRequest,
    stall: Duration,
) -> impl Stream<Item = Option<PullNews>> + use<'a> {
    let image = request.image.as_ref().map(|image| normalized(&image.image)).unwrap_or_default();
    let watched = Watched { cell, image, stall, known: None, lines: LogLimit::default() };
    let begun = watched.begin().await.map(|news| (watched, news));
    let news = stream::unfold(begun, |begun| async move {
        let (mut watched, mut news) = begun?;
        let next = watched.next(&mut news).await?;
        Some((next, Some((watched, news))))
    });
    news.map(Some).chain(stream::once(std::future::ready(None))).chain(stream::pending())
}

/// The layers of an image that the cell lacks and the node has; `None` if they are not worth it.
async fn on_node(
    node: &dyn Node,
    cell: &dyn Receiver,
    told: &PulledManifest,
) -> Result<Option<(Box<Manifest>, Vec<Descriptor>)>, CopyError> {
    if told.digest != format!("sha256:{}", hex::encode(digest(&SHA256, &told.content))) {
        return Err(CopyError::Damaged(told.digest.clone()));
    }
    let blob = Descriptor::new(MANIFEST, &told.digest, told.content.len() as u64);
    let Parsed::Manifest(manifest) = parse(&blob, &told.content, architecture())? else {
        return Ok(None);
    };
    let digests = manifest.layers.iter().map(|layer| layer.digest.clone()).collect();
    let missing: HashSet<String> =
        cell.missing(digests).await.map_err(CopyError::Cell)?.into_iter().collect();
    let mut layers: Vec<Descriptor> = Vec::new();
    for layer in manifest.layers.iter().filter(|layer| missing.contains(&layer.digest)) {
        if !layers.contains(layer) && node.has(&layer.digest).await.map_err(CopyError::Node)? {
            layers.push(layer.clone());
        }
    }
    let worth = layers.iter().fold(0_u64, |sum, layer| sum.saturating_add(layer.size));
    Ok((worth >= WORTH).then(|| (Box::new(manifest), layers)))
}
