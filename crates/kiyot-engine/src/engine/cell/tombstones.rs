//! Tombstones: ended cells and their end reasons, kept for pods that are not removed yet.

use std::collections::VecDeque;

use crate::id::CellId;

/// Bounds the number of tombstones; the oldest is dropped first.
const MAX_TOMBSTONES: usize = 1000;

/// The tombstones, the oldest first.
#[derive(Debug, Default)]
pub(in crate::engine) struct Tombstones {
    cells: VecDeque<(CellId, String)>,
}

impl Tombstones {
    /// Adds a tombstone. Returns the cells whose tombstones were dropped to make room.
    pub(in crate::engine) fn add(&mut self, cell: CellId, reason: String) -> Vec<CellId> {
        self.cells.push_back((cell, reason));
        let excess = self.cells.len().saturating_sub(MAX_TOMBSTONES);
        self.cells.drain(..excess).map(|(cell, _)| cell).collect()
    }

    /// Drops all tombstones except those to keep. Returns the cells of the dropped tombstones.
    pub(in crate::engine) fn retain(&mut self, keep: impl Fn(&CellId) -> bool) -> Vec<CellId> {
        let (kept, forgotten): (VecDeque<_>, VecDeque<_>) =
            self.cells.drain(..).partition(|(cell, _)| keep(cell));
        self.cells = kept;
        forgotten.into_iter().map(|(cell, _)| cell).collect()
    }

    pub(in crate::engine) fn reason(&self, cell: &CellId) -> Option<&str> {
        self.cells.iter().find(|(ended, _)| ended == cell).map(|(_, reason)| reason.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_tombstone_is_dropped_beyond_the_limit() {
        let mut tombstones = Tombstones::default();
        let first = CellId::mint().unwrap();
        assert!(tombstones.add(first.clone(), "one".into()).is_empty());
        for _ in 1..MAX_TOMBSTONES {
            assert!(tombstones.add(CellId::mint().unwrap(), "more".into()).is_empty());
        }
        assert_eq!(tombstones.reason(&first), Some("one"));
        assert_eq!(
            tombstones.add(CellId::mint().unwrap(), "one too many".into()),
            std::slice::from_ref(&first)
        );
        assert_eq!(tombstones.reason(&first), None);
    }

    /// Verifies X13.
    #[test]
    fn tombstones_of_removed_pods_are_dropped() {
        let mut tombstones = Tombstones::default();
        let (kept, removed) = (CellId::mint().unwrap(), CellId::mint().unwrap());
        tombstones.add(kept.clone(), "one".into());
        tombstones.add(removed.clone(), "other".into());
        assert_eq!(tombstones.retain(|cell| *cell == kept), std::slice::from_ref(&removed));
        assert_eq!((tombstones.reason(&kept), tombstones.reason(&removed)), (Some("one"), None));
    }
}
