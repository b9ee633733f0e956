//! The room of the node for further pods.

use std::sync::Arc;

use kiyot_engine::{
    Wanted,
    engine::{Limits, Room},
    placement::{Most, NodeShare, Requested},
    request::{CellRequest, LaunchType},
};

use super::{Cells, shared::now};

impl Cells {
    /// Returns the room for pods without annotations, in either market; `None` while the daemon
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

    /// Makes cells on the node leave its own pods the resources that they request.
    pub(crate) fn set_node_pods(&self, requests: NodeShare) {
        self.shared.with_core(|core, now| ((), core.engine.set_node_pods(requests, now)));
        if let Some((free, _)) = self.free_on_node() {
            tracing::debug!(pods = %requests, %free, "requests of pods on the node have changed");
        }
    }

    /// Returns the free part of the node for cells, and the requests of the node's pods; `None`
    /// without a bound.
    pub(crate) fn free_on_node(&self) -> Option<(NodeShare, NodeShare)> {
        self.shared.core().engine.free_on_node()
    }

    /// Returns the most that cells on other machines can have within limits, if their catalogue is
    /// known.
    pub(crate) async fn most(&self, limits: Limits) -> Option<Most> {
        let source = self
            .shared
            .sources
            .configured()
            .into_iter()
            .find(|source| source.capabilities.remote)?;
        let catalogue = source.catalogue().await.ok()?;
        Some(Most::of(&catalogue, &source.rules, limits.max_cells, limits.price))
    }
}
