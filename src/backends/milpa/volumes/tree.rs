//! What is in a volume, and what is known of its copy in a cell. Plain data.

use std::collections::BTreeMap;

use bytes::Bytes;
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};

/// Mode bits (no file type) and owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Attributes {
    /// `chmod` bits.
    pub(super) mode: u32,
    /// Owner.
    pub(super) uid: u32,
    /// Group.
    pub(super) gid: u32,
}

/// One thing in a volume.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Entry {
    /// A directory.
    Dir(Attributes),
    /// A regular file, with its content: it may be a secret.
    File(Attributes, Bytes),
    /// A symbolic link, with its target as it is.
    Link(String),
}

/// A volume at one moment: entries by their path below its root. With an entry, the directories
/// that it is in are there too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tree {
    /// Of the volume's root.
    pub(super) root: Attributes,
    /// All below it.
    pub(super) entries: BTreeMap<String, Entry>,
}

/// What kind of thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Kind {
    /// A directory.
    #[serde(rename = "d")]
    Dir,
    /// A regular file.
    #[serde(rename = "f")]
    File,
    /// A symbolic link.
    #[serde(rename = "l")]
    Link,
    /// Any of these: it was being replaced by one of another kind.
    #[serde(rename = "a")]
    Any,
}

/// What is known of one thing in a cell. A file's content isn't kept, only its digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Trace {
    /// A directory.
    Dir(Attributes),
    /// A file with a content of this SHA-256.
    File(Attributes, [u8; 32]),
    /// A link with this target.
    Link(String),
    /// Something of this kind may be there.
    Perhaps(Kind),
}

/// What is known of a volume's copy in a cell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Shadow {
    /// Of its root; `None` if that isn't known.
    pub(super) root: Option<Attributes>,
    /// All that may be below it.
    pub(super) entries: BTreeMap<String, Trace>,
}

/// Names and kinds of a shadow, as they are kept in the cell.
#[derive(Serialize, Deserialize)]
struct Listing {
    entries: BTreeMap<String, Kind>,
}

impl Entry {
    /// Its kind.
    pub(super) fn kind(&self) -> Kind {
        match self {
            Self::Dir(_) => Kind::Dir,
            Self::File(..) => Kind::File,
            Self::Link(_) => Kind::Link,
        }
    }

    /// What is known of it once it is in a cell.
    pub(super) fn trace(&self) -> Trace {
        match self {
            Self::Dir(attributes) => Trace::Dir(*attributes),
            Self::File(attributes, content) => Trace::File(*attributes, sha256(content)),
            Self::Link(target) => Trace::Link(target.clone()),
        }
    }
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Dir(attributes) => f.debug_tuple("Dir").field(attributes).finish(),
            Self::File(attributes, content) => {
                f.debug_tuple("File").field(attributes).field(&content.len()).finish()
            }
            Self::Link(target) => f.debug_tuple("Link").field(target).finish(),
        }
    }
}

impl Trace {
    /// Its kind.
    pub(super) fn kind(&self) -> Kind {
        match self {
            Self::Dir(_) => Kind::Dir,
            Self::File(..) => Kind::File,
            Self::Link(_) => Kind::Link,
            Self::Perhaps(kind) => *kind,
        }
    }
}

impl Shadow {
    /// Of a copy that is whole.
    pub(super) fn of(tree: &Tree) -> Self {
        Self {
            root: Some(tree.root),
            entries: tree
                .entries
                .iter()
                .map(|(path, entry)| (path.clone(), entry.trace()))
                .collect(),
        }
    }

    /// Of a copy that is on its way from this to a tree, or was left there.
    pub(super) fn between(&self, tree: &Tree) -> Self {
        let mut entries: BTreeMap<_, _> = self
            .entries
            .iter()
            .map(|(path, trace)| (path.clone(), Trace::Perhaps(trace.kind())))
            .collect();
        for (path, entry) in &tree.entries {
            let kind = match self.entries.get(path) {
                Some(trace) if trace.kind() != entry.kind() => Kind::Any,
                _ => entry.kind(),
            };
            entries.insert(path.clone(), Trace::Perhaps(kind));
        }
        Self { root: None, entries }
    }

    /// Names and kinds, to be kept in the cell.
    pub(super) fn listing(&self) -> Vec<u8> {
        let listing = Listing {
            entries: self
                .entries
                .iter()
                .map(|(path, trace)| (path.clone(), trace.kind()))
                .collect(),
        };
        // Maps with text as keys can always be written.
        serde_json::to_vec(&listing).unwrap_or_default()
    }

    /// From names and kinds that were kept in a cell. What isn't a listing says nothing; the cell
    /// can only harm itself by it.
    pub(super) fn from_listing(bytes: &[u8]) -> Self {
        let entries = serde_json::from_slice::<Listing>(bytes)
            .map(|listing| listing.entries)
            .unwrap_or_default();
        let entries = entries
            .into_iter()
            .filter(|(path, _)| is_plain(path))
            .map(|(path, kind)| (path, Trace::Perhaps(kind)))
            .collect();
        Self { root: None, entries }
    }
}

/// Whether a path is relative, with neither `.` nor `..` nor an empty component.
pub(super) fn is_plain(path: &str) -> bool {
    path.split('/').all(|component| !matches!(component, "" | "." | "..")) && !path.contains('\0')
}

fn sha256(content: &[u8]) -> [u8; 32] {
    let mut out = [0; 32];
    out.copy_from_slice(digest(&SHA256, content).as_ref());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listings_come_back() {
        let file =
            Entry::File(Attributes { mode: 0o644, uid: 0, gid: 0 }, Bytes::from_static(b"secret"));
        assert!(!format!("{file:?}").contains("secret"));
        let tree = Tree {
            root: Attributes { mode: 0o755, uid: 0, gid: 0 },
            entries: [("a\n\"".to_owned(), file)].into(),
        };
        let shadow = Shadow::of(&tree);
        assert_eq!(
            Shadow::from_listing(&shadow.listing()),
            Shadow {
                root: None,
                entries: [("a\n\"".to_owned(), Trace::Perhaps(Kind::File))].into()
            }
        );
        assert_eq!(
            Shadow::from_listing(b"{\"entries\":{\"../x\":\"f\",\"/y\":\"f\"}}"),
            Shadow::default()
        );
        assert_eq!(Shadow::from_listing(b"nonsense"), Shadow::default());
    }
}
