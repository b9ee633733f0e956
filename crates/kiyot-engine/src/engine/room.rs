//! The room for further pods: whether a cell would be launched for one now.

use std::collections::BTreeMap;

use crate::{
    engine::{BootKind, CellError, Engine, Limits, Now},
    placement::{Candidate, Choice},
};

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
    /// Returns the room for pods with these offerings, parameters and choice, as an order has them.
    pub fn room(
        &self,
        candidates: Result<Vec<Candidate>, CellError>,
        parameters: &BTreeMap<String, String>,
        choice: Option<&Choice>,
        now: Now,
    ) -> Room {
        let idle = match choice {
            Some(choice) if !self.is_cordoned => {
                self.warm_cells_for(choice, parameters, NO_NAMESPACE).count()
            }
            _ => 0,
        };
        let machine = choice.map(|choice| choice.needs.machine()).unwrap_or_default();
        let kind = BootKind::new(&self.capabilities, parameters, &machine);
        let refusal = candidates.and_then(|candidates| self.permit(&candidates, &kind, now)).err();
        Room { limits: self.config.limits, idle, refusal }
    }

    fn permit(&self, candidates: &[Candidate], kind: &BootKind, now: Now) -> Result<(), CellError> {
        if self.is_cordoned {
            return Err(CellError::Cordoned);
        }
        if let Some(instance) = self.evidence.foreign() {
            return Err(CellError::Foreign(instance.clone()));
        }
        let candidates = self.bootable(candidates, kind, now)?;
        if let Some(denial) = self.denials.of_all(now) {
            return Err(denial.error(now));
        }
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
