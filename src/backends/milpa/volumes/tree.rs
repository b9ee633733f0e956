//! Content of a volume, and the known state of its copy in a cell. Plain data.

use std::collections::BTreeMap;

use bytes::Bytes;
use kiyot_linux::tree::RelPath;
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};

/// Mode bits (without file type) and owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Attributes {
    /// `chmod` bits.
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
}

/// Entry of a volume.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Entry {
    /// A directory.
    Dir(Attributes),
    /// A regular file with its content, which may be a secret.
    File(Attributes, Bytes),
    /// A symbolic link with its verbatim target.
    Link(String),
}

/// Snapshot of a volume: entries by their path below the root, including all parent directories.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tree {
    /// Attributes of the root.
    pub(super) root: Attributes,
    /// Entries below the root.
    pub(super) entries: BTreeMap<String, Entry>,
}

/// Kind of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Kind {
    #[serde(rename = "d")]
    Dir,
    #[serde(rename = "f")]
    File,
    #[serde(rename = "l")]
    Link,
    /// Unknown: it was being replaced by another kind.
    #[serde(rename = "a")]
    Any,
}

/// Known state of an entry in a cell, with the digest of a file instead of its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CopyEntry {
    /// A directory.
    Dir(Attributes),
    /// A file with the SHA-256 of its content.
    File(Attributes, [u8; 32]),
    /// A link with its target.
    Link(String),
    /// An entry of this kind may exist.
    Possible(Kind),
}

/// Known state of a volume's copy in a cell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct CopyState {
    /// Attributes of the root; `None` if unknown.
    pub(super) root: Option<Attributes>,
    /// Entries that may exist below the root.
    pub(super) entries: BTreeMap<String, CopyEntry>,
}

/// Names and kinds of a copy's entries, as stored in the cell.
#[derive(Serialize, Deserialize)]
struct Listing {
    entries: BTreeMap<String, Kind>,
}

impl Entry {
    pub(super) fn kind(&self) -> Kind {
        match self {
            Self::Dir(_) => Kind::Dir,
            Self::File(..) => Kind::File,
            Self::Link(_) => Kind::Link,
        }
    }

    /// Returns the state of the entry once it is in a cell.
    pub(super) fn copy_entry(&self) -> CopyEntry {
        match self {
            Self::Dir(attributes) => CopyEntry::Dir(*attributes),
            Self::File(attributes, content) => CopyEntry::File(*attributes, sha256(content)),
            Self::Link(target) => CopyEntry::Link(target.clone()),
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

impl CopyEntry {
    pub(super) fn kind(&self) -> Kind {
        match self {
            Self::Dir(_) => Kind::Dir,
            Self::File(..) => Kind::File,
            Self::Link(_) => Kind::Link,
            Self::Possible(kind) => *kind,
        }
    }
}

impl CopyState {
    /// Returns the state of a complete copy.
    pub(super) fn of(tree: &Tree) -> Self {
        Self {
            root: Some(tree.root),
            entries: tree
                .entries
                .iter()
                .map(|(path, entry)| (path.clone(), entry.copy_entry()))
                .collect(),
        }
    }

    /// Returns the state of a copy that is being turned into a tree.
    pub(super) fn between(&self, tree: &Tree) -> Self {
        let mut entries: BTreeMap<_, _> = self
            .entries
            .iter()
            .map(|(path, copy_entry)| (path.clone(), CopyEntry::Possible(copy_entry.kind())))
            .collect();
        for (path, entry) in &tree.entries {
            let kind = match self.entries.get(path) {
                Some(copy_entry) if copy_entry.kind() != entry.kind() => Kind::Any,
                _ => entry.kind(),
            };
            entries.insert(path.clone(), CopyEntry::Possible(kind));
        }
        Self { root: None, entries }
    }

    /// Encodes names and kinds, to be stored in the cell.
    pub(super) fn listing(&self) -> Vec<u8> {
        let listing = Listing {
            entries: self
                .entries
                .iter()
                .map(|(path, copy_entry)| (path.clone(), copy_entry.kind()))
                .collect(),
        };
        // Maps with text keys always serialise.
        serde_json::to_vec(&listing).unwrap_or_default()
    }

    /// Decodes a listing from a cell. Invalid bytes are an empty listing, which harms only the
    /// cell.
    pub(super) fn from_listing(bytes: &[u8]) -> Self {
        let entries = serde_json::from_slice::<Listing>(bytes)
            .map(|listing| listing.entries)
            .unwrap_or_default();
        let entries = entries
            .into_iter()
            .filter(|(path, _)| RelPath::parse(path).is_ok())
            .map(|(path, kind)| (path, CopyEntry::Possible(kind)))
            .collect();
        Self { root: None, entries }
    }
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
    fn listing_round_trips() {
        let file =
            Entry::File(Attributes { mode: 0o644, uid: 0, gid: 0 }, Bytes::from_static(b"secret"));
        assert!(!format!("{file:?}").contains("secret"));
        let tree = Tree {
            root: Attributes { mode: 0o755, uid: 0, gid: 0 },
            entries: [("a\n\"".to_owned(), file)].into(),
        };
        let shadow = CopyState::of(&tree);
        assert_eq!(
            CopyState::from_listing(&shadow.listing()),
            CopyState {
                root: None,
                entries: [("a\n\"".to_owned(), CopyEntry::Possible(Kind::File))].into()
            }
        );
        assert_eq!(
            CopyState::from_listing(b"{\"entries\":{\"../x\":\"f\",\"/y\":\"f\"}}"),
            CopyState::default()
        );
        assert_eq!(CopyState::from_listing(b"nonsense"), CopyState::default());
    }
}
