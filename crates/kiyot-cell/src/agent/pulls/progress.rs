//! Progress of a pull, computed from successive snapshots of the content store. Pure.

use std::collections::{BTreeMap, BTreeSet};

/// Prefix of the labels that reference another blob.
const GC_REF_LABEL: &str = "containerd.io/gc.ref.content";
/// Prefix of the label that lists the source repositories of a blob. The host without its port
/// follows the prefix (containerd, docker.AppendDistributionSourceLabel). A manifest, even one that
/// exists already, gets it after its reference labels and before its layers are fetched.
const SOURCE_LABEL: &str = "containerd.io/distribution.source.";

/// Update time of a manifest or its labels by containerd's clock: seconds and nanoseconds.
pub(super) type UpdatedAt = (i64, i32);

/// Returns the repository of an image reference in the form of labels: host without port, and path.
fn repository(image: &str) -> String {
    let named = image.split_once('@').map_or(image, |(named, _)| named);
    // A colon after the last slash separates the tag; a colon before it separates the port.
    let named = named
        .rsplit_once(':')
        .filter(|(_, tag)| !tag.contains('/'))
        .map_or(named, |(repository, _)| repository);
    let Some((host, path)) = named.split_once('/') else { return named.to_owned() };
    // Brackets enclose an IPv6 address in a reference, but not in a label.
    let host = host
        .rsplit_once(':')
        .filter(|(_, port)| !port.contains(']'))
        .map_or(host, |(host, _)| host);
    format!("{}/{path}", host.trim_matches(['[', ']']))
}

/// Labels and update time of a manifest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ManifestLabels {
    /// Set for manifests of the pull's repository only.
    changed: UpdatedAt,
    /// Digests of the referenced blobs.
    references: BTreeSet<String>,
    /// Source repositories of the manifest, with their hosts.
    sources: BTreeSet<String>,
}

impl ManifestLabels {
    /// Parses the labels of a manifest.
    pub(super) fn new(labels: impl IntoIterator<Item = (String, String)>) -> Self {
        let mut labelled = Self::default();
        for (label, value) in labels {
            if let Some(host) = label.strip_prefix(SOURCE_LABEL) {
                labelled
                    .sources
                    .extend(value.split(',').map(|repository| format!("{host}/{repository}")));
            } else if label.starts_with(GC_REF_LABEL) {
                labelled.references.insert(value);
            }
        }
        labelled
    }
}

/// Part of the content store that shows the progress of pulls.
#[derive(Debug, Clone, Default)]
pub(super) struct ContentSnapshot {
    /// Manifests by digest.
    pub(super) manifests: BTreeMap<String, ManifestLabels>,
    /// Ingests by name, with the bytes received.
    pub(super) ingests: BTreeMap<String, i64>,
}

/// Manifests of the repository at the beginning of a pull, by digest. They belong to the pull only
/// if they are updated later.
pub(super) type Baseline = BTreeMap<String, UpdatedAt>;

impl ContentSnapshot {
    /// Sets the update time of a manifest.
    pub(super) fn changed(&mut self, digest: &str, changed: UpdatedAt) {
        if let Some(manifest) = self.manifests.get_mut(digest) {
            manifest.changed = changed;
        }
    }
}

/// Progress of a pull since it began.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// Repository of the pull; `None` for all pulls. Two pulls from the same repository can't be
    /// distinguished.
    repository: Option<String>,
    /// Counts changes since the first snapshot: bytes received, blobs begun or completed.
    pub(super) moves: u64,
    baseline: Option<Baseline>,
    /// Ingests left by an earlier pull, until they change.
    stale: BTreeMap<String, i64>,
    /// References of manifests that have arrived since the pull began, by this pull or by other
    /// repositories.
    wanted: BTreeSet<String>,
    foreign: BTreeSet<String>,
    last: Option<ContentSnapshot>,
}

impl Progress {
    /// Tracks the pull of an image reference. `baseline` continues an earlier watch of the same
    /// pull.
    pub(super) fn new(image: &str, baseline: Option<Baseline>) -> Self {
        let repository = Some(repository(image)).filter(|own| !own.is_empty());
        Self { repository, baseline, ..Self::default() }
    }

    /// Returns the manifests at the beginning of the pull. Empty before the first snapshot.
    pub(super) fn baseline(&self) -> Baseline {
        self.baseline.clone().unwrap_or_default()
    }

    /// Returns the manifests of the pull's repository. An existing manifest belongs to the pull if
    /// its update time changes.
    pub(super) fn own(&self, store: &ContentSnapshot) -> Vec<String> {
        store
            .manifests
            .iter()
            .filter(|(_, manifest)| self.is_own(manifest))
            .map(|(digest, _)| digest.clone())
            .collect()
    }

    fn is_own(&self, manifest: &ManifestLabels) -> bool {
        self.repository.as_ref().is_none_or(|own| manifest.sources.contains(own))
    }

    /// Compares a snapshot with the previous snapshot. Returns the manifests that have arrived
    /// since (at the first snapshot, since the pull began), and whether a blob of the pull is being
    /// fetched.
    pub(super) fn observe(&mut self, store: &ContentSnapshot) -> (Vec<String>, bool) {
        let before = self.last.replace(store.clone()).unwrap_or_else(|| self.begin(store));
        let mut new = Vec::new();
        for (digest, manifest) in &store.manifests {
            // A manifest without a source label can't be attributed yet.
            if before.manifests.get(digest) == Some(manifest) {
                continue;
            }
            if self.is_own(manifest) {
                self.wanted.extend(manifest.references.iter().cloned());
                new.push(digest.clone());
            } else if !manifest.sources.is_empty() {
                self.foreign.extend(manifest.references.iter().cloned());
            }
        }
        // The name of an ingest ends with the digest of its blob (containerd, remotes.MakeRefKey).
        let (stale, wanted, foreign) = (&mut self.stale, &self.wanted, &self.foreign);
        let is_of = |digests: &BTreeSet<String>, name: &str| {
            digests.iter().any(|digest| name.ends_with(digest.as_str()))
        };
        let counts = |(name, _): &(&String, &i64)| !is_of(foreign, name) || is_of(wanted, name);
        let (then, now): (BTreeMap<_, _>, BTreeMap<_, _>) = (
            before.ingests.iter().filter(counts).collect(),
            store.ingests.iter().filter(counts).collect(),
        );
        if then != now || !new.is_empty() {
            self.moves += 1;
        }
        stale
            .retain(|name, offset| store.ingests.get(name) == Some(offset) && !is_of(wanted, name));
        (new, now.keys().any(|name| !stale.contains_key(*name)))
    }

    /// Reconstructs the store at the beginning of the pull from the first snapshot.
    fn begin(&mut self, store: &ContentSnapshot) -> ContentSnapshot {
        self.stale = store.ingests.clone();
        // References of other repositories don't count, unless this pull references them too.
        let others = store
            .manifests
            .values()
            .filter(|manifest| !manifest.sources.is_empty() && !self.is_own(manifest));
        self.foreign = others.flat_map(|manifest| manifest.references.iter().cloned()).collect();
        let own = self.own(store);
        let baseline = self.baseline.get_or_insert_with(|| {
            own.iter().map(|digest| (digest.clone(), store.manifests[digest].changed)).collect()
        });
        let mut before = store.clone();
        before.manifests.retain(|digest, _| !own.contains(digest) || baseline.contains_key(digest));
        for (digest, changed) in baseline {
            before.changed(digest, *changed);
        }
        before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINE: &str = "registry.example:5000/mine:1";

    fn labelled(changed: i64, references: &[&str], repositories: &str) -> ManifestLabels {
        let references = references
            .iter()
            .enumerate()
            .map(|(number, to)| (format!("{GC_REF_LABEL}.{number}"), (*to).to_owned()));
        let source = (!repositories.is_empty())
            .then(|| (format!("{SOURCE_LABEL}registry.example"), repositories.to_owned()));
        ManifestLabels { changed: (changed, 0), ..ManifestLabels::new(references.chain(source)) }
    }

    fn store(manifests: &[(&str, i64, &[&str])], ingests: &[(&str, i64)]) -> ContentSnapshot {
        ContentSnapshot {
            manifests: manifests
                .iter()
                .map(|(digest, changed, references)| {
                    ((*digest).to_owned(), labelled(*changed, references, ""))
                })
                .collect(),
            ingests: ingests.iter().map(|(name, offset)| ((*name).to_owned(), *offset)).collect(),
        }
    }

    #[test]
    fn received_bytes_count_as_moves() {
        let mut progress = Progress::default();
        assert_eq!(progress.observe(&store(&[("sha256:old", 1, &[])], &[])), (vec![], false));
        let fetching = |offset| store(&[("sha256:old", 1, &[])], &[("layer-sha256:aa", offset)]);
        assert_eq!(progress.observe(&fetching(0)), (vec![], true));
        assert_eq!((progress.observe(&fetching(5)), progress.moves), ((vec![], true), 2));
        assert_eq!((progress.observe(&fetching(5)), progress.moves), ((vec![], true), 2));
        // The blob is complete and is being unpacked.
        assert_eq!(
            (progress.observe(&store(&[("sha256:old", 1, &[])], &[])), progress.moves),
            ((vec![], false), 3)
        );
    }

    #[test]
    fn manifest_is_reported_once_per_pull() {
        let mut progress = Progress::default();
        progress.observe(&store(&[("sha256:a", 1, &[])], &[]));
        let both = store(&[("sha256:a", 1, &[]), ("sha256:b", 2, &["sha256:c"])], &[]);
        assert_eq!(progress.observe(&both), (vec!["sha256:b".to_owned()], false));
        assert_eq!(progress.observe(&both), (vec![], false));
        let again = store(&[("sha256:a", 3, &[]), ("sha256:b", 2, &["sha256:c"])], &[]);
        assert_eq!(progress.observe(&again), (vec!["sha256:a".to_owned()], false));
        assert_eq!(progress.moves, 2);
    }

    /// Verifies I10.
    #[test]
    fn stale_ingest_counts_only_when_resumed() {
        let stale = [("layer-sha256:aa", 7), ("layer-sha256:bb", 7)];
        let mut progress = Progress::default();
        assert_eq!(progress.observe(&store(&[], &stale)), (vec![], false));
        assert_eq!(progress.observe(&store(&[], &stale)), (vec![], false));
        let wants = [("sha256:m", 1, &["sha256:bb"] as &[&str])];
        assert_eq!(
            progress.observe(&store(&wants, &stale)),
            (vec!["sha256:m".to_owned()], true),
            "the manifest references one of them"
        );
        assert_eq!(
            progress.observe(&store(&wants, &stale[..1])),
            (vec![], false),
            "which is complete now"
        );
        assert_eq!(progress.observe(&store(&wants, &[("layer-sha256:aa", 8)])), (vec![], true));
    }

    #[test]
    fn repository_omits_port_tag_and_digest() {
        for (image, named) in [
            ("docker.io/library/busybox:latest", "docker.io/library/busybox"),
            ("registry.example:5000/app", "registry.example/app"),
            ("registry.example:5000/team/app:1@sha256:00", "registry.example/team/app"),
            ("[::1]:5000/app:1", "::1/app"),
            ("[::1]/app", "::1/app"),
            ("", ""),
        ] {
            assert_eq!(repository(image), named);
        }
    }

    #[test]
    fn pull_from_another_repository_is_ignored_from_the_start() {
        let mut progress = Progress::new(MINE, None);
        let mut now = ContentSnapshot::default();
        now.manifests
            .insert("sha256:b".to_owned(), labelled(1, &["sha256:bb", "sha256:cc"], "theirs"));
        now.ingests.insert("layer-sha256:bb".to_owned(), 1);
        progress.observe(&now);
        now.ingests.insert("layer-sha256:bb".to_owned(), 2);
        assert_eq!((progress.observe(&now), progress.moves), ((vec![], false), 0));
        now.manifests.insert("sha256:a".to_owned(), labelled(2, &["sha256:cc"], "mine"));
        now.ingests.insert("layer-sha256:cc".to_owned(), 1);
        assert_eq!(
            (progress.observe(&now), progress.moves),
            ((vec!["sha256:a".to_owned()], true), 1),
            "a layer of both"
        );
    }

    /// Verifies I13.
    #[test]
    fn manifest_is_reported_once_its_source_is_known() {
        // containerd lists manifests without update times, which are read for this repository only.
        let mut progress = Progress::new(MINE, None);
        let mut now = ContentSnapshot::default();
        progress.observe(&now);
        for (digest, to) in [("sha256:a", "sha256:aa"), ("sha256:b", "sha256:bb")] {
            now.manifests.insert(digest.to_owned(), labelled(0, &[to], ""));
        }
        assert_eq!((progress.observe(&now), progress.own(&now)), ((vec![], false), vec![]));
        now.manifests.insert("sha256:a".to_owned(), labelled(0, &["sha256:aa"], "mine"));
        now.manifests.insert("sha256:b".to_owned(), labelled(0, &["sha256:bb"], "theirs"));
        now.ingests.insert("layer-sha256:bb".to_owned(), 1);
        assert_eq!(
            (progress.observe(&now), progress.own(&now)),
            ((vec!["sha256:a".to_owned()], false), vec!["sha256:a".to_owned()])
        );
        now.changed("sha256:a", (1, 0));
        assert_eq!(progress.observe(&now), (vec!["sha256:a".to_owned()], false), "pulled again");
        assert_eq!(
            (progress.observe(&now), progress.moves),
            ((vec![], false), 2),
            "no blob belongs to both"
        );
    }

    /// Verifies I13.
    #[test]
    fn progress_of_another_repository_is_ignored() {
        let mut progress = Progress::new(MINE, None);
        let mut now = ContentSnapshot::default();
        progress.observe(&now);
        // A manifest is reported once its source is known.
        now.manifests.insert("sha256:a".to_owned(), labelled(1, &["sha256:aa"], ""));
        now.manifests.insert("sha256:b".to_owned(), labelled(1, &["sha256:bb"], "theirs"));
        assert_eq!((progress.observe(&now), progress.moves), ((vec![], false), 0));
        now.manifests.insert("sha256:a".to_owned(), labelled(2, &["sha256:aa"], "other,mine"));
        now.ingests.insert("layer-sha256:bb".to_owned(), 1);
        assert_eq!(
            (progress.observe(&now), progress.moves),
            ((vec!["sha256:a".to_owned()], false), 1)
        );
        now.ingests.insert("layer-sha256:bb".to_owned(), 2);
        assert_eq!(
            (progress.observe(&now), progress.moves),
            ((vec![], false), 1),
            "progress of the other pull"
        );
        now.ingests.insert("layer-sha256:aa".to_owned(), 1);
        assert_eq!((progress.observe(&now), progress.moves), ((vec![], true), 2));
        // A layer that both images reference counts.
        now.manifests
            .insert("sha256:b".to_owned(), labelled(2, &["sha256:bb", "sha256:aa"], "theirs"));
        now.ingests.insert("layer-sha256:aa".to_owned(), 2);
        assert_eq!((progress.observe(&now), progress.moves), ((vec![], true), 3));
    }

    /// Verifies I13.
    #[test]
    fn resumed_watch_reports_manifests_since_the_pull_began() {
        let mut now = ContentSnapshot::default();
        for (digest, source) in
            [("sha256:old", "mine"), ("sha256:older", "mine"), ("sha256:other", "theirs")]
        {
            now.manifests.insert(digest.to_owned(), labelled(1, &["sha256:00"], source));
        }
        let mut first = Progress::new(MINE, None);
        assert_eq!(first.observe(&now), (vec![], false));
        assert_eq!(
            first.baseline().keys().collect::<Vec<_>>(),
            ["sha256:old", "sha256:older"],
            "manifests of other repositories are left out"
        );
        // A manifest arrives, another is pulled again, and the watch fails before either is sent.
        now.manifests.insert("sha256:a".to_owned(), labelled(2, &["sha256:aa"], "mine"));
        now.manifests.insert("sha256:old".to_owned(), labelled(3, &["sha256:00"], "mine"));
        now.ingests.insert("layer-sha256:aa".to_owned(), 5);
        let mut again = Progress::new(MINE, Some(first.baseline()));
        assert_eq!(
            again.observe(&now),
            (vec!["sha256:a".to_owned(), "sha256:old".to_owned()], true),
            "a referenced ingest is not stale"
        );
        assert_eq!(again.baseline(), first.baseline(), "a third watch would report them too");
        assert_eq!(again.observe(&now), (vec![], true));
        // For a new pull they all are part of the baseline.
        assert_eq!(Progress::new(MINE, None).observe(&now), (vec![], false));
    }
}
