//! The room for further pods: whether a cell would be launched for one now.

use crate::engine::{CellError, Engine, Limits, Now, Offers};

/// The namespace of a pod that is in none.
const NO_NAMESPACE: &str = "";

/// The room for further pods.
#[derive(Debug)]
pub struct Room {
    /// The limits of launches.
    pub limits: Limits,
    /// The cells of warm pools that suit the pod.
    pub idle: usize,
    /// The reason for which no cell would be launched now, whatever the pod's namespace. The
    /// bounds of cells and of boots are none: over them pods wait.
    pub refusal: Option<CellError>,
}

impl Engine {
    /// Returns the room for pods with these offers, as an order has them.
    pub fn room(&self, offers: &[Offers], now: Now) -> Room {
        let idle =
            if self.is_cordoned { 0 } else { self.warm_cells_for(offers, NO_NAMESPACE).count() };
        Room { limits: self.config.limits, idle, refusal: self.permit(offers, now).err() }
    }

    fn permit(&self, offers: &[Offers], now: Now) -> Result<(), CellError> {
        if self.is_cordoned {
            return Err(CellError::Cordoned);
        }
        let candidates = self.launchable(offers, now)?;
        let (limits, cells) = (self.config.limits, &self.cells);
        // Cells of pools give way.
        match limits.affordable(cells, None, &candidates) {
            Err(over) if !limits.affords_without_pools(cells, None, &candidates) => {
                Err(CellError::OverBudget(over))
            }
            _ => Ok(()),
        }
    }
}
