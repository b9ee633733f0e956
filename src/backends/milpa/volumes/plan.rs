//! From what is in a cell to what is in a volume: the changes, in an order in which a reader never
//! sees a half of it. Pure.
//!
//! The order is that of the kubelet's atomic writer: the new directory and its files, `..data`
//! replaced by rename, new links, old links away, old directory away.

use std::collections::BTreeSet;

use bytes::Bytes;
use kiyot_proto::cell::{FileChange, MakeDir, Root, WriteFile, file_change::Change};

use super::tree::{Attributes, Entry, Kind, Shadow, Tree};

/// The link that the kubelet replaces to make an update visible at once.
pub(super) const DATA: &str = "..data";

/// Largest part of a file in one change.
const PART: usize = 256 << 10;

/// Where something is in a cell.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Place {
    /// Under which of the cell's directories.
    pub(super) root: Root,
    /// Relative to it.
    pub(super) path: String,
}

impl Place {
    /// Something at a path.
    pub(super) fn new(root: Root, path: impl Into<String>) -> Self {
        Self { root, path: path.into() }
    }

    /// Something below this.
    pub(super) fn below(&self, path: &str) -> Self {
        let path =
            if path.is_empty() { self.path.clone() } else { format!("{}/{path}", self.path) };
        Self { root: self.root, path }
    }

    /// The directory that this is in; `None` if that is the root.
    fn parent(&self) -> Option<Self> {
        self.path.rsplit_once('/').map(|(parent, _)| Self::new(self.root, parent))
    }

    /// One change at this place.
    pub(super) fn change(&self, change: Change) -> FileChange {
        FileChange { root: self.root.into(), path: self.path.clone(), change: Some(change) }
    }

    /// Makes this a directory; `keep`: unless something is there.
    pub(super) fn directory(&self, attributes: Attributes, keep: bool) -> FileChange {
        let Attributes { mode, uid, gid } = attributes;
        self.change(Change::MakeDir(MakeDir { mode, uid, gid, keep }))
    }

    /// Makes the directory that this is in, unless it is there.
    pub(super) fn directory_above(&self) -> Option<FileChange> {
        Some(self.parent()?.directory(Attributes { mode: 0o755, uid: 0, gid: 0 }, true))
    }

    /// Makes this a file, in parts.
    pub(super) fn file(&self, attributes: Attributes, content: &Bytes) -> Vec<FileChange> {
        let Attributes { mode, uid, gid } = attributes;
        let mut rest = content.clone();
        let first = rest.split_to(rest.len().min(PART));
        let more = !rest.is_empty();
        let mut changes = vec![self.change(Change::WriteFile(WriteFile {
            mode,
            uid,
            gid,
            content: first,
            more,
        }))];
        while !rest.is_empty() {
            let part = rest.split_to(rest.len().min(PART));
            changes.push(self.change(Change::Append(part)));
        }
        if more {
            changes.push(self.change(Change::Append(Bytes::new())));
        }
        changes
    }
}

/// The changes that make a copy at `place`, of which `old` is known, the tree `new`. None if it is
/// that already.
pub(super) fn plan(old: &Shadow, new: &Tree, place: &Place) -> Vec<FileChange> {
    let mut changes = Vec::new();
    if old.root != Some(new.root) {
        changes.push(place.directory(new.root, false));
    }
    let in_the_way: BTreeSet<&str> = old
        .entries
        .iter()
        .filter(|(path, trace)| {
            new.entries.get(*path).is_some_and(|entry| is_in_the_way(trace.kind(), entry.kind()))
        })
        .map(|(path, _)| path.as_str())
        .collect();

    let differs = |path: &str, entry: &Entry| {
        in_the_way.contains(path) || old.entries.get(path) != Some(&entry.trace())
    };
    let is_top_link = |path: &str, entry: &Entry| entry.kind() == Kind::Link && !path.contains('/');
    // In the order of their paths, directories come before what is in them.
    let content = new.entries.iter().filter(|(path, entry)| !is_top_link(path, entry));
    let data = new.entries.iter().filter(|(path, entry)| is_top_link(path, entry) && *path == DATA);
    let links =
        new.entries.iter().filter(|(path, entry)| is_top_link(path, entry) && *path != DATA);
    for (path, entry) in
        content.chain(data).chain(links).filter(|(path, entry)| differs(path, entry))
    {
        let at = place.below(path);
        if in_the_way.contains(path.as_str()) {
            changes.push(at.change(Change::Remove(true)));
        }
        match entry {
            Entry::Dir(attributes) => changes.push(at.directory(*attributes, false)),
            Entry::File(attributes, content) => changes.extend(at.file(*attributes, content)),
            Entry::Link(target) => changes.push(at.change(Change::Symlink(target.clone()))),
        }
    }

    let is_gone = |path: &str| !new.entries.contains_key(path);
    let mut gone: Vec<_> = old
        .entries
        .iter()
        .filter(|(path, _)| {
            is_gone(path)
                && !ancestors(path).any(|above| is_gone(above) || in_the_way.contains(above))
        })
        .collect();
    gone.sort_by_key(|(_, trace)| trace.kind() == Kind::Dir);
    changes
        .extend(gone.into_iter().map(|(path, _)| place.below(path).change(Change::Remove(true))));
    changes
}

/// Whether what is there can't be replaced as it is: a directory and what is none never can.
fn is_in_the_way(there: Kind, new: Kind) -> bool {
    there == Kind::Any || (there != new && (there == Kind::Dir || new == Kind::Dir))
}

/// The directories above a path, its own excluded.
fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/').map(|(at, _)| &path[..at])
}

#[cfg(test)]
mod tests;
