//! The room for further pods of the node.

use std::sync::Arc;

use kiyot_engine::{
    Wanted,
    engine::{Limits, Room},
    placement::{Most, Requested},
    request::{CellRequest, LaunchType},
};

use super::{Cells, shared::now};

impl Cells {
    /// Returns the room for pods without annotations, on either market; `None` while the daemon
    /// starts.
    pub(crate) async fn room(&self) -> Option<Room> {
        self.shared.links.get()?;
        let request =
            CellRequest { launch_type: LaunchType::SpotPreferred, ..CellRequest::default() };
        let needs = Arc::new(self.needs(&request, &Requested::default()));
        let wanted = Wanted { request, needs, ..Wanted::default() };
        let (candidates, parameters, choice) = self.offers(&wanted).await;
        let core = self.shared.core();
        Some(core.engine.room(candidates, &parameters, choice.as_ref(), now()))
    }

    /// Returns what cells can have at most within limits, if the provider's catalogue is known.
    pub(crate) async fn most(&self, limits: Limits) -> Option<Most> {
        let catalogue = self.shared.prices.current(&*self.shared.provider).await.ok()?;
        Some(Most::of(&catalogue, &self.rules, limits.max_cells, limits.price))
    }
}
