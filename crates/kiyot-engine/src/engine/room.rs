//! The room for further pods: whether a cell would be launched for a further pod now.

use crate::engine::{CellError, Engine, Limits, Now, Offers};

/// The empty namespace, for a pod whose namespace is unknown.
const NO_NAMESPACE: &str = "";

/// The room for further pods.
#[derive(Debug)]
pub struct Room {
    /// The limits of launches.
    pub limits: Limits,
    /// The cells of warm pools that suit the pod.
    pub idle: usize,
    /// The reason why no cell would be launched now, whatever the pod's namespace. The bounds on
    /// cells and boots are not reasons: pods wait for them.
    pub refusal: Option<CellError>,
}

impl Engine {
    /// Returns the room for pods whose orders have these offers.
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
        // Warm cells give way to pods.
        match limits.affordable(cells, None, &candidates) {
            Err(over) if !limits.affords_without_pools(cells, None, &candidates) => {
                Err(CellError::OverBudget(over))
            }
            _ => Ok(()),
        }
    }
}
