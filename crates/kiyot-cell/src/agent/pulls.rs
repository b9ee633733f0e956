//! How far pulls are, as the content store of the cell's containerd has it.
//!
//! CRI says nothing of a pull until it has ended. What is being fetched is an ingest of the content store, and a manifest gets its labels before its layers are fetched.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use containerd_client::services::v1::{ListContentRequest, ListStatusesRequest, ReadContentRequest, content_client::ContentClient};
use futures::{
    StreamExt,
    stream::{self, BoxStream},
};
use kiyot_proto::cell::{PullNews, PulledManifest};
use tokio::{sync::OwnedSemaphorePermit, time::Instant};
use tonic::{Code, Status, transport::Channel};

use super::{
    blobs,
    runtime::{ASK, MESSAGE_LIMIT, Runtime, namespaced, within},
};

/// The pause between two looks until a manifest has come: its layers follow at once.
const SOON: Duration = Duration::from_millis(10);
/// The pause after that, and when none has come for [`PATIENCE`].
const LATER: Duration = Duration::from_millis(250);
/// How long a manifest is looked for often.
const PATIENCE: Duration = Duration::from_secs(30);
/// Nobody waits longer for news than this.
const HEARTBEAT: Duration = Duration::from_secs(4);
/// The longest manifest that is told: one of the most layers that a snapshotter takes has a tenth of it.
const MAX_MANIFEST: usize = 1 << 20;
/// Manifests with this label lead to an image's configuration; with it, all that they lead to is known (containerd, images.SetChildrenMappedLabels).
const CONFIG_LABEL: &str = "containerd.io/gc.ref.content.config";
/// Labels that lead from a blob to another one begin so.
const LEADS_TO: &str = "containerd.io/gc.ref.content";
/// The label that says from which repositories of a host a blob came begins so, and ends with the host (containerd, docker.AppendDistributionSourceLabel). A manifest gets it
/// after the labels above and before its layers are fetched.
const SOURCE: &str = "containerd.io/distribution.source.";

/// News of a pull, from now on; of all pulls, if no image is named.
pub fn watch(runtime: Runtime, image: &str, permit: OwnedSemaphorePermit) -> BoxStream<'static, Result<PullNews, Status>> {
    let progress = Progress { repository: repository(image).to_owned(), ..Progress::default() };
    let watch = Watch { runtime, progress, untold: Vec::new(), often_until: Instant::now() + PATIENCE, told: None, _permit: permit };
    Box::pin(stream::unfold(Some(watch), |watch| async {
        let mut watch = watch?;
        match watch.next().await {
            Ok(news) => Some((Ok(news), Some(watch))),
            Err(status) => Some((Err(status), None)),
        }
    }))
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
    async fn next(&mut self) -> Result<PullNews, Status> {
        loop {
            if self.told.is_some() && self.untold.is_empty() {
                tokio::time::sleep(if Instant::now() < self.often_until { SOON } else { LATER }).await;
            }
            let store = Store::of(&self.runtime).await?;
            let (new, fetching) = self.progress.look(&store);
            self.untold.extend(new);
            let state = (self.progress.moves, fetching);
            let now = Instant::now();
            let is_due = self.told.is_none_or(|(at, told)| told != state || now >= at + HEARTBEAT);
            if !is_due && self.untold.is_empty() {
                continue;
            }
            let mut manifest = None;
            if let Some(digest) = self.untold.pop() {
                self.often_until = now;
                manifest = read(&self.runtime, digest).await?;
            }
            self.told = Some((now, state));
            return Ok(PullNews { moves: state.0, fetching, manifest });
        }
    }
}

/// The repository of an image's whole name.
fn repository(image: &str) -> &str {
    let named = image.split_once('@').map_or(image, |(named, _)| named);
    // A colon behind the last slash begins a tag; one before it, a port.
    named.rsplit_once(':').filter(|(_, tag)| !tag.contains('/')).map_or(named, |(repository, _)| repository)
}

/// A manifest, by its labels.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Labelled {
    /// When it or its labels changed.
    changed: (i64, i32),
    /// Digests of what it leads to.
    leads_to: Vec<String>,
    /// The repositories that it came from, with their hosts.
    sources: Vec<String>,
}

impl Labelled {
    fn new(changed: (i64, i32), labels: impl IntoIterator<Item = (String, String)>) -> Self {
        let mut labelled = Self { changed, ..Self::default() };
        for (label, value) in labels {
            if let Some(host) = label.strip_prefix(SOURCE) {
                labelled.sources.extend(value.split(',').map(|repository| format!("{host}/{repository}")));
            } else if label.starts_with(LEADS_TO) {
                labelled.leads_to.push(value);
            }
        }
        labelled
    }
}

/// What is in the content store that says how far pulls are.
#[derive(Debug, Clone, Default)]
struct Store {
    /// Manifests by digest.
    manifests: BTreeMap<String, Labelled>,
    /// What is being fetched: how much of it is there.
    ingests: BTreeMap<String, i64>,
}

impl Store {
    async fn of(runtime: &Runtime) -> Result<Self, Status> {
        let mut store = Self::default();
        let filters = vec![format!("labels.\"{CONFIG_LABEL}\"")];
        let mut list = content(runtime).list(namespaced(within(ASK, ListContentRequest { filters }))).await?.into_inner();
        while let Some(part) = list.message().await? {
            for info in part.info {
                let changed = info.updated_at.map(|time| (time.seconds, time.nanos)).unwrap_or_default();
                store.manifests.insert(info.digest, Labelled::new(changed, info.labels));
            }
        }
        let statuses = content(runtime).list_statuses(namespaced(within(ASK, ListStatusesRequest { filters: Vec::new() }))).await?.into_inner();
        let fetched = statuses.statuses.into_iter().filter(|status| !blobs::is_ours(&status.r#ref));
        store.ingests = fetched.map(|status| (status.r#ref, status.offset)).collect();
        Ok(store)
    }
}

/// What has happened to one pull since the first look. Pure.
#[derive(Debug, Default)]
struct Progress {
    /// Where the pull is from; "": all pulls are meant. Two pulls from one repository can't be told apart.
    repository: String,
    moves: u64,
    /// What an earlier pull left unfinished, until something happens to it.
    left: BTreeMap<String, i64>,
    /// What the manifests lead to that have come since, of this pull and of others.
    wanted: BTreeSet<String>,
    foreign: BTreeSet<String>,
    last: Option<Store>,
}

impl Progress {
    fn is_from(&self, manifest: &Labelled) -> bool {
        self.repository.is_empty() || manifest.sources.contains(&self.repository)
    }

    /// Manifests that have come since the look before, and whether something is being fetched.
    fn look(&mut self, store: &Store) -> (Vec<String>, bool) {
        let Some(last) = self.last.replace(store.clone()) else {
            self.left = store.ingests.clone();
            // Another pull may be further on: what its manifest leads to is not of this one, unless this one's leads there too.
            let others = store.manifests.values().filter(|manifest| !manifest.sources.is_empty() && !self.is_from(manifest));
            self.foreign = others.flat_map(|manifest| manifest.leads_to.iter().cloned()).collect();
            return (Vec::new(), false);
        };
        let mut new = Vec::new();
        for (digest, manifest) in &store.manifests {
            if last.manifests.get(digest).is_some_and(|before| before.changed == manifest.changed) {
                continue;
            }
            if self.is_from(manifest) {
                self.wanted.extend(manifest.leads_to.iter().cloned());
                new.push(digest.clone());
            } else if !manifest.sources.is_empty() {
                self.foreign.extend(manifest.leads_to.iter().cloned());
            }
        }
        // The name of an ingest ends with the digest of what is fetched (containerd, remotes.MakeRefKey).
        let (left, wanted, foreign) = (&mut self.left, &self.wanted, &self.foreign);
        let is_of = |digests: &BTreeSet<String>, name: &str| digests.iter().any(|digest| name.ends_with(digest.as_str()));
        let counts = |(name, _): &(&String, &i64)| !is_of(foreign, name) || is_of(wanted, name);
        let (before, now): (BTreeMap<_, _>, BTreeMap<_, _>) =
            (last.ingests.iter().filter(counts).collect(), store.ingests.iter().filter(counts).collect());
        if before != now || !new.is_empty() {
            self.moves += 1;
        }
        left.retain(|name, offset| store.ingests.get(name) == Some(offset) && !is_of(wanted, name));
        (new, now.keys().any(|name| !left.contains_key(*name)))
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn labelled(changed: i64, leads_to: &[&str], repositories: &str) -> Labelled {
        let leads_to = leads_to.iter().enumerate().map(|(number, to)| (format!("{LEADS_TO}.{number}"), (*to).to_owned()));
        let source = (!repositories.is_empty()).then(|| (format!("{SOURCE}registry.example:5000"), repositories.to_owned()));
        Labelled::new((changed, 0), leads_to.chain(source))
    }

    fn store(manifests: &[(&str, i64, &[&str])], ingests: &[(&str, i64)]) -> Store {
        Store {
            manifests: manifests.iter().map(|(digest, changed, leads_to)| ((*digest).to_owned(), labelled(*changed, leads_to, ""))).collect(),
            ingests: ingests.iter().map(|(name, offset)| ((*name).to_owned(), *offset)).collect(),
        }
    }

    #[test]
    fn bytes_that_come_are_moves_and_silence_is_none() {
        let mut progress = Progress::default();
        assert_eq!(progress.look(&store(&[("sha256:old", 1, &[])], &[])), (vec![], false));
        let fetching = |offset| store(&[("sha256:old", 1, &[])], &[("layer-sha256:aa", offset)]);
        assert_eq!(progress.look(&fetching(0)), (vec![], true));
        assert_eq!((progress.look(&fetching(5)), progress.moves), ((vec![], true), 2));
        assert_eq!((progress.look(&fetching(5)), progress.moves), ((vec![], true), 2));
        // It is whole: now it is unpacked.
        assert_eq!((progress.look(&store(&[("sha256:old", 1, &[])], &[])), progress.moves), ((vec![], false), 3));
    }

    #[test]
    fn a_manifest_is_told_once_and_again_when_it_is_pulled_again() {
        let mut progress = Progress::default();
        progress.look(&store(&[("sha256:a", 1, &[])], &[]));
        let both = store(&[("sha256:a", 1, &[]), ("sha256:b", 2, &["sha256:c"])], &[]);
        assert_eq!(progress.look(&both), (vec!["sha256:b".to_owned()], false));
        assert_eq!(progress.look(&both), (vec![], false));
        assert_eq!(progress.look(&store(&[("sha256:a", 3, &[]), ("sha256:b", 2, &[])], &[])), (vec!["sha256:a".to_owned()], false));
        assert_eq!(progress.moves, 2);
    }

    #[test]
    fn what_an_earlier_pull_left_counts_only_when_it_is_taken_up() {
        let left = [("layer-sha256:aa", 7), ("layer-sha256:bb", 7)];
        let mut progress = Progress::default();
        assert_eq!(progress.look(&store(&[], &left)), (vec![], false));
        assert_eq!(progress.look(&store(&[], &left)), (vec![], false));
        let wants = [("sha256:m", 1, &["sha256:bb"] as &[&str])];
        assert_eq!(progress.look(&store(&wants, &left)), (vec!["sha256:m".to_owned()], true), "the manifest wants one of them");
        assert_eq!(progress.look(&store(&wants, &left[..1])), (vec![], false), "which is whole now");
        assert_eq!(progress.look(&store(&wants, &[("layer-sha256:aa", 8)])), (vec![], true));
    }

    #[test]
    fn a_repository_is_a_name_without_tag_and_digest() {
        for (image, named) in [
            ("docker.io/library/busybox:latest", "docker.io/library/busybox"),
            ("registry.example:5000/app", "registry.example:5000/app"),
            ("registry.example:5000/app:1@sha256:00", "registry.example:5000/app"),
            ("", ""),
        ] {
            assert_eq!(repository(image), named);
        }
    }

    #[test]
    fn another_pull_that_is_further_on_is_no_move_either() {
        let mut progress = Progress { repository: "registry.example:5000/mine".to_owned(), ..Progress::default() };
        let mut now = Store::default();
        now.manifests.insert("sha256:b".to_owned(), labelled(1, &["sha256:bb", "sha256:cc"], "theirs"));
        now.ingests.insert("layer-sha256:bb".to_owned(), 1);
        progress.look(&now);
        now.ingests.insert("layer-sha256:bb".to_owned(), 2);
        assert_eq!((progress.look(&now), progress.moves), ((vec![], false), 0));
        now.manifests.insert("sha256:a".to_owned(), labelled(2, &["sha256:cc"], "mine"));
        now.ingests.insert("layer-sha256:cc".to_owned(), 1);
        assert_eq!((progress.look(&now), progress.moves), ((vec!["sha256:a".to_owned()], true), 1), "a layer of both");
    }

    #[test]
    fn what_comes_of_another_pull_is_neither_told_nor_a_move() {
        let mut progress = Progress { repository: "registry.example:5000/mine".to_owned(), ..Progress::default() };
        let mut now = Store::default();
        progress.look(&now);
        // A manifest is told when it is known where it came from.
        now.manifests.insert("sha256:a".to_owned(), labelled(1, &["sha256:aa"], ""));
        now.manifests.insert("sha256:b".to_owned(), labelled(1, &["sha256:bb"], "theirs"));
        assert_eq!((progress.look(&now), progress.moves), ((vec![], false), 0));
        now.manifests.insert("sha256:a".to_owned(), labelled(2, &["sha256:aa"], "other,mine"));
        now.ingests.insert("layer-sha256:bb".to_owned(), 1);
        assert_eq!((progress.look(&now), progress.moves), ((vec!["sha256:a".to_owned()], false), 1));
        now.ingests.insert("layer-sha256:bb".to_owned(), 2);
        assert_eq!((progress.look(&now), progress.moves), ((vec![], false), 1), "the other one goes on");
        now.ingests.insert("layer-sha256:aa".to_owned(), 1);
        assert_eq!((progress.look(&now), progress.moves), ((vec![], true), 2));
        // A layer of both is this one's too.
        now.manifests.insert("sha256:b".to_owned(), labelled(2, &["sha256:bb", "sha256:aa"], "theirs"));
        now.ingests.insert("layer-sha256:aa".to_owned(), 2);
        assert_eq!((progress.look(&now), progress.moves), ((vec![], true), 3));
    }
}
