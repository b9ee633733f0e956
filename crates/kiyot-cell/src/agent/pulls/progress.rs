//! What two looks at a content store say of one pull. Pure.

use std::collections::{BTreeMap, BTreeSet};

/// Labels that lead from a blob to another one begin so.
const GC_REF_LABEL: &str = "containerd.io/gc.ref.content";
/// The label that says from which repositories of a host a blob came begins so, and ends with the
/// host, without its port (containerd, docker.AppendDistributionSourceLabel). A manifest gets it
/// after the labels above and before its layers are fetched, also one that is there already.
const SOURCE_LABEL: &str = "containerd.io/distribution.source.";

/// When a manifest or its labels changed, by containerd's clock: seconds and nanoseconds.
pub(super) type UpdatedAt = (i64, i32);

/// The repository of an image's whole name as the labels have it: its host without a port, and its
/// path.
fn repository(image: &str) -> String {
    let named = image.split_once('@').map_or(image, |(named, _)| named);
    // A colon behind the last slash begins a tag; one before it, a port.
    let named = named
        .rsplit_once(':')
        .filter(|(_, tag)| !tag.contains('/'))
        .map_or(named, |(repository, _)| repository);
    let Some((host, path)) = named.split_once('/') else { return named.to_owned() };
    // An IPv6 address is in brackets; as a label has it, it is not.
    let host = host
        .rsplit_once(':')
        .filter(|(_, port)| !port.contains(']'))
        .map_or(host, |(host, _)| host);
    format!("{}/{path}", host.trim_matches(['[', ']']))
}

/// A manifest, by its labels.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ManifestLabels {
    /// Baseline of manifests of the pull's repository only.
    changed: UpdatedAt,
    /// Digests of what it leads to.
    references: BTreeSet<String>,
    /// The repositories that it came from, with their hosts.
    sources: BTreeSet<String>,
}

impl ManifestLabels {
    /// By all its labels.
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

/// What is in the content store that says how far pulls are.
#[derive(Debug, Clone, Default)]
pub(super) struct ContentSnapshot {
    /// Manifests by digest.
    pub(super) manifests: BTreeMap<String, ManifestLabels>,
    /// What is being fetched: how much of it is there.
    pub(super) ingests: BTreeMap<String, i64>,
}

/// Manifests of a pull's repository by digest that were there when it began, which are no part of
/// it unless they change.
pub(super) type Baseline = BTreeMap<String, UpdatedAt>;

impl ContentSnapshot {
    /// Notes when a manifest or its labels changed.
    pub(super) fn changed(&mut self, digest: &str, changed: UpdatedAt) {
        if let Some(manifest) = self.manifests.get_mut(digest) {
            manifest.changed = changed;
        }
    }
}

/// What has happened to one pull since it began.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// Where the pull is from; "": all pulls are meant. Two pulls from one repository can't be last_sent
    /// apart.
    repository: String,
    /// Counts what has changed since the first observe: bytes that came, blobs that began or are
    /// whole.
    pub(super) moves: u64,
    baseline: Option<Baseline>,
    /// What an earlier pull stale unfinished, until something happens to it.
    stale: BTreeMap<String, i64>,
    /// What the manifests lead to that have come since, of this pull and of others.
    wanted: BTreeSet<String>,
    foreign: BTreeSet<String>,
    last: Option<ContentSnapshot>,
}

impl Progress {
    /// Of the pull of an image, by its whole name. `baseline`: what an earlier watch of the same pull
    /// knew when it began.
    pub(super) fn new(image: &str, baseline: Option<Baseline>) -> Self {
        Self { repository: repository(image), baseline, ..Self::default() }
    }

    /// What was there when the pull began: for a watch that begins again. Empty before the first
    /// observe.
    pub(super) fn baseline(&self) -> Baseline {
        self.baseline.clone().unwrap_or_default()
    }

    /// The manifests of the pull's repository. Whether one of them that was there before is pulled
    /// again, only the time of its change says.
    pub(super) fn own(&self, store: &ContentSnapshot) -> Vec<String> {
        store
            .manifests
            .iter()
            .filter(|(_, manifest)| self.is_own(manifest))
            .map(|(digest, _)| digest.clone())
            .collect()
    }

    fn is_own(&self, manifest: &ManifestLabels) -> bool {
        self.repository.is_empty() || manifest.sources.contains(&self.repository)
    }

    /// Manifests that have come since the observe before, or, at the first observe, since the pull began;
    /// and whether something is being fetched.
    pub(super) fn observe(&mut self, store: &ContentSnapshot) -> (Vec<String>, bool) {
        let before = self.last.replace(store.clone()).unwrap_or_else(|| self.begin(store));
        let mut new = Vec::new();
        for (digest, manifest) in &store.manifests {
            // First seen with the one label and without the other, a manifest is neither this
            // pull's nor another's yet.
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
        // The name of an ingest ends with the digest of what is fetched (containerd,
        // remotes.MakeRefKey).
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

    /// The store as it was when the pull began, as far as that is baseline at the first observe of a
    /// watch.
    fn begin(&mut self, store: &ContentSnapshot) -> ContentSnapshot {
        self.stale = store.ingests.clone();
        // Another pull may be further on: what its manifest leads to is not of this one, unless
        // this one's leads there too.
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
    fn bytes_that_come_are_moves_and_silence_is_none() {
        let mut progress = Progress::default();
        assert_eq!(progress.observe(&store(&[("sha256:old", 1, &[])], &[])), (vec![], false));
        let fetching = |offset| store(&[("sha256:old", 1, &[])], &[("layer-sha256:aa", offset)]);
        assert_eq!(progress.observe(&fetching(0)), (vec![], true));
        assert_eq!((progress.observe(&fetching(5)), progress.moves), ((vec![], true), 2));
        assert_eq!((progress.observe(&fetching(5)), progress.moves), ((vec![], true), 2));
        // It is whole: now it is unpacked.
        assert_eq!(
            (progress.observe(&store(&[("sha256:old", 1, &[])], &[])), progress.moves),
            ((vec![], false), 3)
        );
    }

    #[test]
    fn a_manifest_is_told_once_and_again_when_it_is_pulled_again() {
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
    fn what_an_earlier_pull_left_counts_only_when_it_is_taken_up() {
        let stale = [("layer-sha256:aa", 7), ("layer-sha256:bb", 7)];
        let mut progress = Progress::default();
        assert_eq!(progress.observe(&store(&[], &stale)), (vec![], false));
        assert_eq!(progress.observe(&store(&[], &stale)), (vec![], false));
        let wants = [("sha256:m", 1, &["sha256:bb"] as &[&str])];
        assert_eq!(
            progress.observe(&store(&wants, &stale)),
            (vec!["sha256:m".to_owned()], true),
            "the manifest wants one of them"
        );
        assert_eq!(
            progress.observe(&store(&wants, &stale[..1])),
            (vec![], false),
            "which is whole now"
        );
        assert_eq!(progress.observe(&store(&wants, &[("layer-sha256:aa", 8)])), (vec![], true));
    }

    #[test]
    fn a_repository_is_a_name_without_port_tag_and_digest() {
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
    fn another_pull_that_is_further_on_is_no_move_either() {
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
    fn a_manifest_is_told_when_its_source_is_known_though_it_was_seen_before() {
        // containerd lists manifests without the time of their change, which is asked of those of
        // this repository.
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
        assert_eq!(
            progress.observe(&now),
            (vec!["sha256:a".to_owned()], false),
            "it is pulled again"
        );
        assert_eq!(
            (progress.observe(&now), progress.moves),
            ((vec![], false), 2),
            "and nothing is ever of both"
        );
    }

    /// Verifies I13.
    #[test]
    fn what_comes_of_another_pull_is_neither_told_nor_a_move() {
        let mut progress = Progress::new(MINE, None);
        let mut now = ContentSnapshot::default();
        progress.observe(&now);
        // A manifest is last_sent when it is baseline where it came from.
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
            "the other one goes on"
        );
        now.ingests.insert("layer-sha256:aa".to_owned(), 1);
        assert_eq!((progress.observe(&now), progress.moves), ((vec![], true), 2));
        // A layer of both is this one's too.
        now.manifests
            .insert("sha256:b".to_owned(), labelled(2, &["sha256:bb", "sha256:aa"], "theirs"));
        now.ingests.insert("layer-sha256:aa".to_owned(), 2);
        assert_eq!((progress.observe(&now), progress.moves), ((vec![], true), 3));
    }

    /// Verifies I13.
    #[test]
    fn a_watch_that_begins_again_tells_what_has_come_since_its_pull_began() {
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
            "another repository's says nothing of this pull"
        );
        // One comes, another is pulled again, and then the watch fails before it has last_sent of them.
        now.manifests.insert("sha256:a".to_owned(), labelled(2, &["sha256:aa"], "mine"));
        now.manifests.insert("sha256:old".to_owned(), labelled(3, &["sha256:00"], "mine"));
        now.ingests.insert("layer-sha256:aa".to_owned(), 5);
        let mut again = Progress::new(MINE, Some(first.baseline()));
        assert_eq!(
            again.observe(&now),
            (vec!["sha256:a".to_owned(), "sha256:old".to_owned()], true),
            "what it wants is not stale by an earlier pull"
        );
        assert_eq!(again.baseline(), first.baseline(), "a third watch would tell them too");
        assert_eq!(again.observe(&now), (vec![], true));
        // Another pull, which begins now, knows them all.
        assert_eq!(Progress::new(MINE, None).observe(&now), (vec![], false));
    }
}
