//! Pulls in cells: a stalled pull is ended, and the node supplies the layers that it has.

use std::{collections::HashSet, time::Duration};

use futures::{
    Stream, StreamExt as _,
    stream::{self, BoxStream},
};
use kiyot_link::log_limit::LogLimit;
use kiyot_proto::{
    cell::{KnownManifests, PullNews, WatchPullsRequest},
    cri,
};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::{
    copy::{self, CopyError},
    manifest::{Descriptor, Manifest},
    node::Node,
    receiver::Receiver,
    reference::{normalized, repository},
};
use crate::backends::milpa::failure::{Code, Failure};

/// Deadline of a whole pull, against a registry that sends single bytes endlessly.
const PULL_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Least bytes of the node's layers that justify interrupting a pull, because the new attempt sends
/// the registry several requests.
const MIN_USEFUL_BYTES: u64 = 1 << 20;

/// Most manifests for which a pull is interrupted. A pull has only one manifest, but manifests of
/// other pulls from its repository look the same.
const MAX_INTERRUPTIONS: usize = 4;

/// Most images of a repository that a pull may take layers from; bounds the work that a cell can
/// cause.
const MAX_IMAGES: usize = 64;

/// Most known manifests sent to a cell when its watch is restarted. The cell reports further
/// manifests as new.
const MAX_KNOWN_MANIFESTS: usize = 1024;

/// Longest silence of a cell about a pull. An agent reports every few seconds, and waits a minute
/// for a blocked containerd. Without this bound, only [`PULL_TIMEOUT`] would end a pull that
/// unpacks, and a kubelet may be pulling serially.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(120);
/// Delay before the watch of a pull is requested again, after a failure or at the cell's limit of
/// watches.
const WATCH_RETRY_DELAY: Duration = Duration::from_millis(500);

/// Outcome of a pull attempt.
enum PullOutcome {
    Pulled(String),
    /// Interrupted, because the node has these layers of this image.
    Interrupted(Box<Manifest>, Vec<Descriptor>),
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Pulled {
    pub(super) id: String,
    /// Number and bytes of the layers copied from the node.
    pub(super) from_node: (usize, u64),
}

/// Pulls an image in a cell. `stall` bounds the time without progress. Without `node`, all layers
/// come from the registry.
///
/// When the cell reports the manifest of an image of the pull's repository that the node has, the
/// node's layers are sent to the cell and the pull is restarted: it keeps its content and fetches
/// the rest. No other blob of the node is sent, whatever manifest the cell reports. A failure to
/// send does not fail the pull.
pub(super) async fn pull(
    node: Option<&dyn Node>,
    cell: &dyn Receiver,
    request: &cri::PullImageRequest,
    stall: Duration,
) -> Result<Pulled, Failure> {
    let (mut from_node, mut interruptions) = ((0, 0), 0);
    let mut supplier = node.map(|node| Supplier { node, manifests: None });
    loop {
        // Several interruptions, because the manifest of another pull may have been taken for this
        // pull's.
        let offer = supplier.as_mut().filter(|_| interruptions < MAX_INTERRUPTIONS);
        let (manifest, layers) = match attempt(offer, cell, request, stall).await? {
            PullOutcome::Pulled(id) => return Ok(Pulled { id, from_node }),
            PullOutcome::Interrupted(manifest, layers) => (manifest, layers),
        };
        interruptions += 1;
        let Some(node) = node else { continue };
        for layer in layers {
            match send_layer(node, cell, &manifest, &layer, stall).await {
                Ok(()) => from_node = (from_node.0 + 1, from_node.1 + layer.size),
                Err(error) => {
                    tracing::info!(
                        layer = layer.digest,
                        error = &error as &dyn std::error::Error,
                        "layer not copied from the node, pulled in the cell"
                    );
                }
            }
        }
    }
}

async fn send_layer(
    node: &dyn Node,
    cell: &dyn Receiver,
    manifest: &Manifest,
    layer: &Descriptor,
    stall: Duration,
) -> Result<(), CopyError> {
    let lease = node.acquire_lease(&layer.digest).await?;
    let sent = copy::put(node, cell, manifest, layer, stall).await;
    node.release_lease(&lease).await;
    sent
}

/// Pulls until the pull ends or stalls, or `node` has layers for it.
async fn attempt(
    mut supplier: Option<&mut Supplier<'_>>,
    cell: &dyn Receiver,
    request: &cri::PullImageRequest,
    stall: Duration,
) -> Result<PullOutcome, Failure> {
    let image = request.image.as_ref().map(|image| normalized(&image.image)).unwrap_or_default();
    // The watch begins first, so that it recognizes content from before the pull.
    let mut reports = std::pin::pin!(watch(cell, image.clone(), stall).await);
    let pulling = cell.pull(request.clone(), PULL_TIMEOUT);
    tokio::pin!(pulling);
    let (mut moves, mut last_progress, mut is_timed) = (0, Instant::now(), true);
    loop {
        tokio::select! {
            biased;
            pulled = &mut pulling => return pulled.map(PullOutcome::Pulled),
            Some(next) = reports.next() => match next {
                Some(next) => {
                    if next.moves != moves {
                        (moves, last_progress) = (next.moves, Instant::now());
                    }
                    // Between the first and the last byte, a pull that is not fetching is
                    // unpacking.
                    is_timed = next.fetching || moves == 0;
                    if let (Some(supplier), Some(manifest)) = (&mut supplier, next.manifest) {
                        match supplier.layers(cell, &image, &manifest.digest).await {
                            Ok(Some((manifest, layers))) => {
                                return Ok(PullOutcome::Interrupted(manifest, layers));
                            }
                            Ok(None) => {}
                            Err(error) => tracing::debug!(
                                image,
                                %error,
                                "no layer of a pull copied from the node"
                            ),
                        }
                    }
                }
                // Without a watch, the whole pull is bounded.
                None => is_timed = true,
            },
            () = sleep_until(last_progress + stall), if is_timed => {
                let image = request.image.as_ref().map_or("", |image| &image.image);
                return Err(Failure::cell(Code::DeadlineExceeded, format!(
                    "failed to pull image {image:?}: no progress for {} s \
                     (image_pull_progress_timeout)",
                    stall.as_secs_f32()
                )));
            }
        }
    }
}

/// Watch of a pull.
struct PullWatch<'a> {
    cell: &'a dyn Receiver,
    image: String,
    stall: Duration,
    /// Manifests from before the pull, from the first watch: a restarted watch can't tell them from
    /// later manifests.
    known: Option<KnownManifests>,
    log_limit: LogLimit,
}

impl PullWatch<'_> {
    /// Starts the watch and returns its reports after the first has arrived; `None` if the cell
    /// sends none.
    async fn start(&self) -> Option<BoxStream<'static, Result<PullNews, Failure>>> {
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
                Ok(reports) => return Some(reports),
                // The cell is at its limit of watches. Another watch ends with its pull at the
                // latest, which must make progress.
                Err(failure)
                    if failure.code() == Code::ResourceExhausted && Instant::now() < until =>
                {
                    sleep(WATCH_RETRY_DELAY).await
                }
                Err(failure) => {
                    // Older agents don't support watches.
                    if failure.code() != Code::Unimplemented {
                        tracing::info!(
                            error = %failure,
                            "pull not watched, limited to the progress timeout"
                        );
                    }
                    return None;
                }
            }
        }
    }

    /// Returns the next report, restarting a failed watch; `None` after the last report.
    async fn next(
        &mut self,
        reports: &mut BoxStream<'static, Result<PullNews, Failure>>,
    ) -> Option<PullNews> {
        loop {
            let report = timeout(SILENCE_TIMEOUT, reports.next()).await;
            match report.unwrap_or_else(|_| {
                Some(Err(Failure::cell(
                    Code::DeadlineExceeded,
                    format!("the cell was silent for {} s", SILENCE_TIMEOUT.as_secs()),
                )))
            }) {
                Some(Ok(mut next)) => {
                    if let (None, Some(mut known)) = (&self.known, next.known.take()) {
                        known.manifests.truncate(MAX_KNOWN_MANIFESTS);
                        self.known = Some(known);
                    }
                    return Some(next);
                }
                failed => {
                    if let Some(suppressed) = self.log_limit.admit() {
                        let failure = failed.and_then(Result::err);
                        let error = failure.map_or_else(
                            || "the watch ended".into(),
                            |failure| failure.message().to_owned(),
                        );
                        tracing::info!(error, suppressed, "watch of a pull restarted");
                    }
                }
            }
            sleep(WATCH_RETRY_DELAY).await;
            *reports = self.start().await?;
        }
    }
}

/// Returns reports on the pull of an image, by its full name, and `None` after the last report.
/// Waits for the first report.
async fn watch(
    cell: &dyn Receiver,
    image: String,
    stall: Duration,
) -> impl Stream<Item = Option<PullNews>> {
    let watched = PullWatch { cell, image, stall, known: None, log_limit: LogLimit::default() };
    let started = watched.start().await.map(|reports| (watched, reports));
    let reports = stream::unfold(started, |started| async move {
        let (mut watched, mut reports) = started?;
        let next = watched.next(&mut reports).await?;
        Some((next, Some((watched, reports))))
    });
    reports.map(Some).chain(stream::once(std::future::ready(None))).chain(stream::pending())
}

/// The node, with its images that a pull may take layers from.
struct Supplier<'a> {
    node: &'a dyn Node,
    /// Manifests of the images of the pull's repository, without those that the cell has reported.
    /// `None` until the cell's first report.
    manifests: Option<Vec<Manifest>>,
}

impl Supplier<'_> {
    /// Returns the layers of a reported manifest that the cell lacks and the node has; `None` if
    /// they aren't worth an interruption, or if no image of the repository on the node has this
    /// manifest. Each manifest counts once.
    async fn layers(
        &mut self,
        cell: &dyn Receiver,
        image: &str,
        digest: &str,
    ) -> Result<Option<(Box<Manifest>, Vec<Descriptor>)>, CopyError> {
        if self.manifests.is_none() {
            // A failure is final, so that endless reports cause no endless calls.
            self.manifests = Some(Vec::new());
            let found = manifests(self.node, repository(image), cell.architecture().await?);
            self.manifests = Some(found.await?);
        }
        let manifests = self.manifests.as_mut();
        let Some(manifest) = manifests.and_then(|manifests| {
            let reported = manifests.iter().position(|known| known.target.digest == digest)?;
            Some(manifests.swap_remove(reported))
        }) else {
            return Ok(None);
        };
        let digests = manifest.layers.iter().map(|layer| layer.digest.clone()).collect();
        let missing: HashSet<String> = cell.missing(digests).await?.into_iter().collect();
        let mut layers: Vec<Descriptor> = Vec::new();
        for layer in manifest.layers.iter().filter(|layer| missing.contains(&layer.digest)) {
            if !layers.contains(layer) && self.node.has(&layer.digest).await? {
                layers.push(layer.clone());
            }
        }
        let bytes = layers.iter().fold(0_u64, |sum, layer| sum.saturating_add(layer.size));
        Ok((bytes >= MIN_USEFUL_BYTES).then(|| (Box::new(manifest), layers)))
    }
}

/// Returns the manifests of a repository's images on the node, for a machine with an architecture.
async fn manifests(
    node: &dyn Node,
    repository: &str,
    architecture: &'static str,
) -> Result<Vec<Manifest>, CopyError> {
    let mut targets = node.targets(repository).await?;
    // An image has two names, for its tag and its digest.
    targets.sort_by(|one, other| one.digest.cmp(&other.digest));
    targets.dedup_by(|one, other| one.digest == other.digest);
    let mut manifests = Vec::new();
    for target in targets.into_iter().take(MAX_IMAGES) {
        match copy::manifest_of(node, target, architecture).await {
            Ok(manifest) => manifests.push(manifest),
            Err(error @ (CopyError::Failed(_) | CopyError::Stalled(..))) => return Err(error),
            // An image that is damaged or for another machine must not hide others.
            Err(_) => {}
        }
    }
    Ok(manifests)
}
