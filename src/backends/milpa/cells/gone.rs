//! Cells that are gone, and why: remembered for pods that have not been removed.

use std::{collections::VecDeque, sync::Mutex};

use super::{super::id::CellId, shared::locked};

/// So many are remembered; then the oldest is forgotten.
const REMEMBERED: usize = 1000;

/// The cells that are gone, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Gone {
    cells: Mutex<VecDeque<(CellId, String)>>,
}

impl Gone {
    /// Remembers one. Returns those that are forgotten for it.
    pub(super) fn remember(&self, cell: CellId, reason: String) -> Vec<CellId> {
        let mut cells = locked(&self.cells);
        cells.push_back((cell, reason));
        let excess = cells.len().saturating_sub(REMEMBERED);
        cells.drain(..excess).map(|(cell, _)| cell).collect()
    }

    /// Forgets those that need not be kept, and returns them.
    pub(super) fn forget_unless(&self, keep: impl Fn(&CellId) -> bool) -> Vec<CellId> {
        let mut cells = locked(&self.cells);
        let (kept, forgotten) = cells.drain(..).partition(|(cell, _)| keep(cell));
        *cells = kept;
        let forgotten: VecDeque<(CellId, String)> = forgotten;
        forgotten.into_iter().map(|(cell, _)| cell).collect()
    }

    pub(super) fn reason(&self, cell: &CellId) -> Option<String> {
        locked(&self.cells).iter().find(|(gone, _)| gone == cell).map(|(_, reason)| reason.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_forgotten() {
        let gone = Gone::default();
        let first = CellId::mint().unwrap();
        assert!(gone.remember(first.clone(), "one".into()).is_empty());
        for _ in 1..REMEMBERED {
            assert!(gone.remember(CellId::mint().unwrap(), "more".into()).is_empty());
        }
        assert_eq!(gone.reason(&first).as_deref(), Some("one"));
        assert_eq!(
            gone.remember(CellId::mint().unwrap(), "one too many".into()),
            std::slice::from_ref(&first)
        );
        assert_eq!(gone.reason(&first), None);
    }
    /// Verifies X13.
    #[test]
    fn cells_of_removed_pods_are_forgotten() {
        let gone = Gone::default();
        let (kept, removed) = (CellId::mint().unwrap(), CellId::mint().unwrap());
        gone.remember(kept.clone(), "one".into());
        gone.remember(removed.clone(), "other".into());
        assert_eq!(gone.forget_unless(|cell| *cell == kept), std::slice::from_ref(&removed));
        assert_eq!((gone.reason(&kept).as_deref(), gone.reason(&removed)), (Some("one"), None));
    }
}
