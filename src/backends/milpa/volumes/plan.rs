//! Changes that turn the copy in a cell into the volume on the node, in an order in which a reader
//! never sees a partial update. Pure.
//!
//! The order of the kubelet's atomic writer: the new directory and its files, `..data` replaced by
//! rename, new links, removal of old links, removal of the old directory.

use std::collections::BTreeSet;

use bytes::Bytes;
use kiyot_proto::cell::{FileChange, MakeDir, Root, WriteFile, file_change::Change};

use super::tree::{Attributes, CopyState, Entry, Kind, Tree};

/// Link that the kubelet replaces to publish an update atomically.
pub(super) const DATA_LINK: &str = "..data";

/// Most bytes of a file in one change.
const MAX_PART_BYTES: usize = 256 << 10;

/// Path in a cell.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct CellPath {
    /// Directory of the cell to which the path is relative.
    pub(super) root: Root,
    pub(super) path: String,
}

impl CellPath {
    pub(super) fn new(root: Root, path: impl Into<String>) -> Self {
        Self { root, path: path.into() }
    }

    /// Joins a relative path to this path.
    pub(super) fn below(&self, path: &str) -> Self {
        let path =
            if path.is_empty() { self.path.clone() } else { format!("{}/{path}", self.path) };
        Self { root: self.root, path }
    }

    /// Returns the parent directory; `None` for the root.
    fn parent(&self) -> Option<Self> {
        self.path.rsplit_once('/').map(|(parent, _)| Self::new(self.root, parent))
    }

    /// Returns a change at this path.
    pub(super) fn change(&self, change: Change) -> FileChange {
        FileChange { root: self.root.into(), path: self.path.clone(), change: Some(change) }
    }

    /// Returns the change that makes this a directory; with `keep`, only if it is absent.
    pub(super) fn directory(&self, attributes: Attributes, keep: bool) -> FileChange {
        let Attributes { mode, uid, gid } = attributes;
        self.change(Change::MakeDir(MakeDir { mode, uid, gid, keep }))
    }

    /// Returns the change that makes the parent directory if it is absent.
    pub(super) fn parent_directory(&self) -> Option<FileChange> {
        Some(self.parent()?.directory(Attributes { mode: 0o755, uid: 0, gid: 0 }, true))
    }

    /// Returns the changes that make this a file, in parts.
    pub(super) fn file(&self, attributes: Attributes, content: &Bytes) -> Vec<FileChange> {
        self.write(attributes, content, false)
    }

    /// Returns the changes that make this file, or replace its content in place, because containers
    /// may have mounted the file.
    pub(super) fn file_in_place(&self, attributes: Attributes, content: &Bytes) -> Vec<FileChange> {
        self.write(attributes, content, true)
    }

    fn write(&self, attributes: Attributes, content: &Bytes, in_place: bool) -> Vec<FileChange> {
        let Attributes { mode, uid, gid } = attributes;
        let mut rest = content.clone();
        let first = rest.split_to(rest.len().min(MAX_PART_BYTES));
        let more = !rest.is_empty();
        let mut changes = vec![self.change(Change::WriteFile(WriteFile {
            mode,
            uid,
            gid,
            content: first,
            more,
            in_place,
        }))];
        while !rest.is_empty() {
            let part = rest.split_to(rest.len().min(MAX_PART_BYTES));
            changes.push(self.change(Change::Append(part)));
        }
        if more {
            changes.push(self.change(Change::Append(Bytes::new())));
        }
        changes
    }
}

/// Returns the changes that turn a copy at `place` with the known state `old` into the tree `new`;
/// empty if they are equal.
pub(super) fn plan(old: &CopyState, new: &Tree, place: &CellPath) -> Vec<FileChange> {
    let mut changes = Vec::new();
    if old.root != Some(new.root) {
        changes.push(place.directory(new.root, false));
    }
    let conflicts: BTreeSet<&str> = old
        .entries
        .iter()
        .filter(|(path, copy_entry)| {
            new.entries
                .get(*path)
                .is_some_and(|entry| blocks_replacement(copy_entry.kind(), entry.kind()))
        })
        .map(|(path, _)| path.as_str())
        .collect();

    let differs = |path: &str, entry: &Entry| {
        conflicts.contains(path) || old.entries.get(path) != Some(&entry.copy_entry())
    };
    let is_top_link = |path: &str, entry: &Entry| entry.kind() == Kind::Link && !path.contains('/');
    // Sorted by path, directories precede their entries.
    let content = new.entries.iter().filter(|(path, entry)| !is_top_link(path, entry));
    let data =
        new.entries.iter().filter(|(path, entry)| is_top_link(path, entry) && *path == DATA_LINK);
    let links =
        new.entries.iter().filter(|(path, entry)| is_top_link(path, entry) && *path != DATA_LINK);
    for (path, entry) in
        content.chain(data).chain(links).filter(|(path, entry)| differs(path, entry))
    {
        let at = place.below(path);
        if conflicts.contains(path.as_str()) {
            changes.push(at.change(Change::Remove(true)));
        }
        match entry {
            Entry::Dir(attributes) => changes.push(at.directory(*attributes, false)),
            Entry::File(attributes, content) => changes.extend(at.file(*attributes, content)),
            Entry::Link(target) => changes.push(at.change(Change::Symlink(target.clone()))),
        }
    }

    let was_deleted = |path: &str| !new.entries.contains_key(path);
    let mut removed: Vec<_> = old
        .entries
        .iter()
        .filter(|(path, _)| {
            was_deleted(path)
                && !ancestors(path).any(|above| was_deleted(above) || conflicts.contains(above))
        })
        .collect();
    removed.sort_by_key(|(_, copy_entry)| copy_entry.kind() == Kind::Dir);
    changes.extend(
        removed.into_iter().map(|(path, _)| place.below(path).change(Change::Remove(true))),
    );
    changes
}

/// Returns whether an existing entry can't be replaced in place: a directory by another kind, or
/// the reverse.
fn blocks_replacement(there: Kind, new: Kind) -> bool {
    there == Kind::Any || (there != new && (there == Kind::Dir || new == Kind::Dir))
}

/// Returns the directories above a path, without the root.
fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/').map(|(at, _)| &path[..at])
}

#[cfg(test)]
mod tests;
