//! The room for further pods of the node.

use std::sync::Arc;

use kiyot_engine::{
    Wanted,
    engine::Room,
    placement::{Most, Requested},
    request::{CellRequest, LaunchType},
};

use super::{Cells, shared::now};

impl Cells {
    /// Returns the room for pods without annotations, on either market, and what cells can have at
    /// most, if the provider's catalogue is known; `None` while the daemon starts.
    pub(crate) async fn room(&self) -> Option<(Room, Option<Most>)> {
        self.shared.links.get()?;
        let request =
            CellRequest { launch_type: LaunchType::SpotPreferred, ..CellRequest::default() };
        let needs = Arc::new(self.needs(&request, &Requested::default()));
        let wanted = Wanted { request, needs, ..Wanted::default() };
        let (candidates, parameters, choice) = self.offers(&wanted).await;
        let room = self.shared.core().engine.room(candidates, &parameters, choice.as_ref(), now());
        let (cells, price) = (room.limits.max_cells, room.limits.price);
        let most = choice.map(|choice| Most::of(&choice.catalogue, &choice.rules, cells, price));
        Some((room, most))
    }
}
