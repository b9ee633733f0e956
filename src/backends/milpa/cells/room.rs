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
        let offers = self.offers(&wanted).await;
        Some(self.shared.core().engine.room(&offers, now()))
    }

    /// Returns what cells on other machines can have at most within limits, if their catalogue is
    /// known.
    pub(crate) async fn most(&self, limits: Limits) -> Option<Most> {
        let source = self.shared.sources.iter().find(|source| source.capabilities.remote)?;
        let catalogue = source.catalogue().await.ok()?;
        Some(Most::of(&catalogue, &source.rules, limits.max_cells, limits.price))
    }
}
