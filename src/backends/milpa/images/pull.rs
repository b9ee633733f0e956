//! Pulls in cells: ended when they stall, and supplied with layers that the node has.

use std::{collections::HashSet, time::Duration};

use futures::{
    Stream, StreamExt as _,
    stream::{self, BoxStream},
};
use kiyot_link::{architecture::of_this_machine, log_limit::LogLimit};
use kiyot_proto::{
    cell::{KnownManifests, PullNews, PulledManifest, WatchPullsRequest},
    cri,
};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::{
    copy::{self, CopyError},
    manifest::{Descriptor, Manifest, Parsed, parse},
    node::Node,
    receiver::Receiver,
    reference::{digest_of, normalized},
};
use crate::backends::milpa::failure::{Class, Failure};

/// Deadline of a whole pull, against a registry that sends single bytes for ever.
const PULL_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Least bytes of the node's layers that justify interrupting a pull, as the new attempt asks the
/// registry several questions.
const MIN_USEFUL_BYTES: u64 = 1 << 20;

/// Most manifests for which a pull is interrupted. It has one, but manifests of other pulls from
/// its repository look the same.
const MAX_INTERRUPTIONS: usize = 4;

/// Most manifests that are looked up on the node during a pull, which bounds the work that a cell
/// can cause.
const MAX_LOOKUPS: usize = 16;

/// Most manifests that are sent back to a cell when its watch is restarted. The cell reports the
/// others as new.
const MAX_KNOWN_MANIFESTS: usize = 1024;

/// Longest silence of a cell about a pull. An agent reports every few seconds, and waits a minute
/// for a blocked containerd. While a pull unpacks, only the day bounds it otherwise, and a kubelet
/// may be pulling serially.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(120);
/// Delay before the watch of a pull is requested again, after a failure or at the cell's limit of
/// watches.
const WATCH_RETRY_DELAY: Duration = Duration::from_millis(500);

/// Media type of manifests that have none. Only manifests with a configuration get here.
const MANIFEST_MEDIA_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";

/// Outcome of an attempt to pull.
enum Outcome {
    /// The image's id.
    Pulled(String),
    /// Interrupted, because the node has these layers of this image.
    Interrupted(Box<Manifest>, Vec<Descriptor>),
}

/// Result of a pull.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Pulled {
    /// Id of the image.
    pub(super) id: String,
    /// Number of layers that were copied from the node, and their bytes.
    pub(super) from_node: (usize, u64),
}

/// Pulls an image in a cell. `stall` bounds the time without progress. Without `node` all layers
/// come from the registry.
///
/// Once the manifest has come, and so the registry has given it to this pod, the layers that the
/// node has are sent to the cell, and the pull is restarted: it keeps its content and fetches the
/// rest. No other blob of the node is sent. A failure to send does not fail the pull.
pub(super) async fn pull(
    node: Option<&dyn Node>,
    cell: &dyn Receiver,
    request: &cri::PullImageRequest,
    stall: Duration,
) -> Result<Pulled, Failure> {
    let mut from_node = (0, 0);
    let mut interrupted = Vec::new();
    loop {
        // More than one, because another pull's manifest may have been taken for this one's.
        let supplier = node.filter(|_| interrupted.len() < MAX_INTERRUPTIONS);
        let (manifest, layers) = match attempt(supplier, &interrupted, cell, request, stall).await?
        {
            Outcome::Pulled(id) => return Ok(Pulled { id, from_node }),
            Outcome::Interrupted(manifest, layers) => (manifest, layers),
        };
        interrupted.push(manifest.target.digest.clone());
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

/// Pulls until the end, a stall, or the discovery of layers on `node`.
async fn attempt(
    node: Option<&dyn Node>,
    interrupted: &[String],
    cell: &dyn Receiver,
    request: &cri::PullImageRequest,
    stall: Duration,
) -> Result<Outcome, Failure> {
    // The watch begins first, so that content from before the pull is known as such.
    let mut reports = std::pin::pin!(watch(cell, request, stall).await);
    let pulling = cell.pull(request.clone(), PULL_TIMEOUT);
    tokio::pin!(pulling);
    let (mut moves, mut last_progress, mut is_timed, mut lookups) = (0, Instant::now(), true, 0);
    loop {
        tokio::select! {
            biased;
            pulled = &mut pulling => return pulled.map(Outcome::Pulled),
            Some(next) = reports.next() => match next {
                Some(next) => {
                    if next.moves != moves {
                        (moves, last_progress) = (next.moves, Instant::now());
                    }
                    // Between the first and the last byte, a pull that is not fetching is
                    // unpacking.
                    is_timed = next.fetching || moves == 0;
                    let manifest = next.manifest.filter(|manifest| {
                        lookups < MAX_LOOKUPS && !interrupted.contains(&manifest.digest)
                    });
                    if let (Some(node), Some(manifest)) = (node, manifest) {
                        lookups += 1;
                        match node_layers(node, cell, &manifest).await {
                            Ok(Some((manifest, layers))) => {
                                return Ok(Outcome::Interrupted(manifest, layers));
                            }
                            Ok(None) => {}
                            Err(error) => tracing::debug!(
                                manifest = manifest.digest,
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
                return Err(Failure::cell(Class::DeadlineExceeded, format!(
                    "failed to pull image {image:?}: nothing of it has come for {} s \
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
    /// Manifests from before the pull, as the first watch reported them: a restarted watch can't
    /// tell them from later ones.
    known: Option<KnownManifests>,
    log_limit: LogLimit,
}

impl PullWatch<'_> {
    /// Starts the watch and returns its reports, the first of which has come; `None` if the cell
    /// has none.
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
                // At the cell's limit of watches. Another one ends with the progress of its pull at
                // the latest.
                Err(failure)
                    if failure.class() == Class::ResourceExhausted && Instant::now() < until =>
                {
                    sleep(WATCH_RETRY_DELAY).await
                }
                Err(failure) => {
                    // Older agents don't support it.
                    if failure.class() != Class::Unimplemented {
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

    /// Returns the next report, restarting a failed watch; `None` if there are no more.
    async fn next(
        &mut self,
        reports: &mut BoxStream<'static, Result<PullNews, Failure>>,
    ) -> Option<PullNews> {
        loop {
            let report = timeout(SILENCE_TIMEOUT, reports.next()).await;
            match report.unwrap_or_else(|_| {
                Some(Err(Failure::cell(
                    Class::DeadlineExceeded,
                    format!("the cell has said nothing for {} s", SILENCE_TIMEOUT.as_secs()),
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
                            || "it ended".into(),
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

/// Returns reports of a pull, and a final `None` when there are no more. Returns when the first has
/// come or there are none.
async fn watch<'a>(
    cell: &'a dyn Receiver,
    request: &cri::PullImageRequest,
    stall: Duration,
) -> impl Stream<Item = Option<PullNews>> + use<'a> {
    let image = request.image.as_ref().map(|image| normalized(&image.image)).unwrap_or_default();
    let watched = PullWatch { cell, image, stall, known: None, log_limit: LogLimit::default() };
    let started = watched.start().await.map(|reports| (watched, reports));
    let reports = stream::unfold(started, |started| async move {
        let (mut watched, mut reports) = started?;
        let next = watched.next(&mut reports).await?;
        Some((next, Some((watched, reports))))
    });
    reports.map(Some).chain(stream::once(std::future::ready(None))).chain(stream::pending())
}

/// Returns the layers of an image that the cell lacks and the node has; `None` if they aren't worth
/// an interruption.
async fn node_layers(
    node: &dyn Node,
    cell: &dyn Receiver,
    pulled: &PulledManifest,
) -> Result<Option<(Box<Manifest>, Vec<Descriptor>)>, CopyError> {
    if pulled.digest != digest_of(&pulled.content) {
        return Err(CopyError::Damaged(pulled.digest.clone()));
    }
    let blob = Descriptor::new(MANIFEST_MEDIA_TYPE, &pulled.digest, pulled.content.len() as u64);
    let Parsed::Manifest(manifest) = parse(&blob, &pulled.content, of_this_machine())? else {
        return Ok(None);
    };
    let digests = manifest.layers.iter().map(|layer| layer.digest.clone()).collect();
    let missing: HashSet<String> = cell.missing(digests).await?.into_iter().collect();
    let mut layers: Vec<Descriptor> = Vec::new();
    for layer in manifest.layers.iter().filter(|layer| missing.contains(&layer.digest)) {
        if !layers.contains(layer) && node.has(&layer.digest).await? {
            layers.push(layer.clone());
        }
    }
    let bytes = layers.iter().fold(0_u64, |sum, layer| sum.saturating_add(layer.size));
    Ok((bytes >= MIN_USEFUL_BYTES).then(|| (Box::new(manifest), layers)))
}
