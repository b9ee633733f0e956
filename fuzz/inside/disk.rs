//! In-memory disk of a cell for tests and fuzzing. It has the features that plans need, and refuses
//! every change that a strict agent refuses.

use std::collections::BTreeMap;

use kiyot_proto::cell::{FileChange, MakeDir, WriteFile, file_change::Change};

use super::super::{
    plan::DATA_LINK,
    tree::{Attributes, Entry, Kind, Tree},
};

/// Copy of a volume, and the file that is being written.
#[derive(Debug, Default, Clone)]
pub(in super::super) struct Disk {
    pub(in super::super) entries: BTreeMap<String, Entry>,
    root: Option<Attributes>,
    open: Option<(String, Attributes, Vec<u8>)>,
}

impl Disk {
    /// Creates a disk with a complete copy.
    pub(in super::super) fn of(tree: &Tree) -> Self {
        Self { entries: tree.entries.clone(), root: Some(tree.root), open: None }
    }

    /// Returns whether the disk is exactly this tree.
    pub(in super::super) fn is(&self, tree: &Tree) -> bool {
        self.root == Some(tree.root) && self.entries == tree.entries && self.open.is_none()
    }

    /// Cuts the call that carries the changes.
    pub(in super::super) fn interrupt(&mut self) {
        self.open = None;
    }

    /// Applies a change to the copy at `place`. Panics if an agent would refuse it.
    pub(in super::super) fn apply(&mut self, place: &str, change: &FileChange) {
        let Some(path) = change.path.strip_prefix(place) else {
            panic!("{} is not in {place}", change.path)
        };
        let path = path.trim_start_matches('/').to_owned();
        let there = self.entries.get(&path).map(Entry::kind);
        let is_removal = matches!(change.change, Some(Change::Remove(_)));
        for (at, _) in path.match_indices('/') {
            let above = self.entries.get(&path[..at]);
            assert!(
                matches!(above, Some(Entry::Dir(_))) || (is_removal && above.is_none()),
                "{path} is not in a directory"
            );
        }
        match &change.change {
            Some(Change::MakeDir(MakeDir { mode, uid, gid, .. })) => {
                let attributes = Attributes { mode: *mode, uid: *uid, gid: *gid };
                assert!(matches!(there, None | Some(Kind::Dir)), "{path} is no directory");
                if path.is_empty() {
                    self.root = Some(attributes)
                } else {
                    drop(self.entries.insert(path, Entry::Dir(attributes)))
                }
            }
            Some(Change::WriteFile(WriteFile { mode, uid, gid, content, more, .. })) => {
                self.open = Some((
                    path,
                    Attributes { mode: *mode, uid: *uid, gid: *gid },
                    content.to_vec(),
                ));
                if !more {
                    self.put();
                }
            }
            Some(Change::Append(content)) => {
                let Some((_, _, written)) = self.open.as_mut().filter(|(open, ..)| *open == path)
                else {
                    panic!("{path} is not being written")
                };
                written.extend_from_slice(content);
                if content.is_empty() {
                    self.put();
                }
            }
            Some(Change::Symlink(target)) => {
                assert_ne!(there, Some(Kind::Dir), "{path} is a directory");
                self.entries.insert(path, Entry::Link(target.clone()));
            }
            Some(Change::Remove(_)) => {
                let below = format!("{path}/");
                self.entries.retain(|name, _| *name != path && !name.starts_with(&below));
            }
            other => panic!("{other:?}"),
        }
    }

    fn put(&mut self) {
        let Some((path, attributes, content)) = self.open.take() else { return };
        assert_ne!(
            self.entries.get(&path).map(Entry::kind),
            Some(Kind::Dir),
            "{path} is a directory"
        );
        self.entries.insert(path, Entry::File(attributes, content.into()));
    }

    /// Returns whether `..data` leads to a directory.
    pub(in super::super) fn resolves(&self) -> bool {
        let Some(Entry::Link(target)) = self.entries.get(DATA_LINK) else { return false };
        matches!(self.entries.get(target), Some(Entry::Dir(_)))
    }
}
