//! The tap of pods for cells, which decides how many pods the node takes.
//!
//! A pod for a cell requests one unit of the resource [`CELL`]. While no cell can be launched,
//! the node declares only as many as its pods request: further pods stay Pending, or go to other
//! nodes. After that, a single further pod is the trial, and each step doubles the number of
//! further pods.
//!
//! [`CELL`]: kiyot_values::names::CELL

use std::fmt;

use async_trait::async_trait;

use crate::capacity::Figures;

/// The room for further pods in cells, by the daemon's knowledge.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Room {
    /// Bounds the node's cells.
    pub max_cells: u64,
    /// Cells that wait for a pod.
    pub idle: u64,
    /// Reason why no cell can be launched now.
    pub refusal: Option<String>,
    /// Figures of the node's capacity that its cells can have. Configured figures override them.
    pub figures: Figures,
}

/// The daemon's knowledge of room for pods.
#[async_trait]
pub trait RoomSource: fmt::Debug + Send + Sync {
    /// Returns the room for further pods; `None` until the daemon knows it.
    async fn room(&self) -> Option<Room>;
}

/// The state of the tap.
#[derive(Debug, Default)]
pub struct Tap {
    /// Bounds the further pods at the next step; `None` if there is no bound.
    step: Option<u64>,
}

impl Tap {
    /// Returns whether the node takes as many pods as cells are allowed.
    pub fn is_open(&self) -> bool {
        self.step.is_none()
    }

    /// Takes a step. Returns the number of cells to declare. The node's pods request `counted` of
    /// them.
    pub fn turn(&mut self, room: &Room, counted: u64) -> u64 {
        let used = counted.saturating_add(room.idle);
        let all = room.max_cells.max(counted);
        if room.refusal.is_some() {
            self.step = Some(1);
            return used.min(all);
        }
        let Some(step) = self.step else { return all };
        let declared = used.saturating_add(step);
        self.step = (declared < all).then_some(step.saturating_mul(2));
        declared.min(all)
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    fn room(max_cells: u64, idle: u64, is_refused: bool) -> Room {
        let refusal = is_refused.then(|| "no capacity".to_owned());
        Room { max_cells, idle, refusal, figures: Figures::new() }
    }

    /// Verifies K15.
    #[test]
    fn closed_tap_opens_by_one_pod_and_doubles() {
        let mut tap = Tap::default();
        assert_eq!(tap.turn(&room(20, 3, false), 4), 20);
        assert_eq!(tap.turn(&room(20, 3, true), 4), 7);
        assert!(!tap.is_open());
        let declared: Vec<u64> = (0..6).map(|_| tap.turn(&room(20, 0, false), 4)).collect();
        assert_eq!(declared, [5, 6, 8, 12, 20, 20]);
        assert!(tap.is_open());
        // Further pods are counted once they come.
        tap.turn(&room(20, 0, true), 4);
        assert_eq!([4, 5, 7].map(|counted| tap.turn(&room(20, 0, false), counted)), [5, 7, 11]);
        assert_eq!(tap.turn(&room(20, 0, true), 9), 9);
    }

    proptest! {
        /// Verifies K15.
        #[test]
        fn tap_declares_at_least_what_pods_request_and_at_most_what_is_allowed(
            turns in vec((0..30_u64, 0..9_u64, any::<bool>(), 0..40_u64), 1..40)
        ) {
            let mut tap = Tap::default();
            for (max_cells, idle, is_refused, counted) in turns {
                let room = room(max_cells, idle, is_refused);
                let declared = tap.turn(&room, counted);
                prop_assert!(declared >= counted && declared <= max_cells.max(counted));
                prop_assert!(!is_refused || !tap.is_open());
                prop_assert!(!is_refused || declared <= counted + idle);
                prop_assert!(!tap.is_open() || declared == max_cells.max(counted));
            }
        }
    }
}
