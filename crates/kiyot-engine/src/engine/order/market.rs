//! The market of a launch, for an order or a pool that prefers spot and accepts on-demand.
//!
//! A launch has candidates of a single market: spot, until the spot offerings were refused or the
//! deadline has passed; then on-demand.

use std::time::Duration;

use crate::{
    engine::{Engine, Now, cell::Cell, order::Order},
    placement::{Market, Ranked},
};

impl Order {
    /// Returns whether it prefers spot and accepts on-demand.
    fn has_choice_of_market(&self) -> bool {
        let has = |market| self.candidates().any(|it| it.offering.market == market);
        has(Market::Spot) && has(Market::OnDemand)
    }
}

impl Cell {
    /// Returns whether its launch was for spot, or its instance is spot.
    pub(in crate::engine) fn was_for_spot(&self) -> bool {
        let mut all = self.launch.candidates().chain(self.offering());
        all.any(|candidate| candidate.offering.market == Market::Spot)
    }
}

impl Engine {
    /// Returns the candidates of a launch now, among the offerings that an order or a pool accepts.
    /// All offerings of a provider with a single market are candidates.
    pub(in crate::engine) fn of_market(
        &self,
        ranked: &[Ranked],
        since: Duration,
        now: Now,
    ) -> Vec<Ranked> {
        let is_over = now.boot >= since + self.config.spot_deadline;
        let market = if is_over { Market::OnDemand } else { Market::Spot };
        let has_both = |provider| {
            let has = |market| {
                let mut own = ranked.iter().filter(|it| it.provider == provider);
                own.any(|it| it.candidate.offering.market == market)
            };
            has(Market::Spot) && has(Market::OnDemand)
        };
        let is_launched =
            |it: &&Ranked| it.candidate.offering.market == market || !has_both(it.provider);
        ranked.iter().filter(is_launched).cloned().collect()
    }

    /// Keeps the time since which the pod of a failed order waits for spot: the pod's next order
    /// has the same deadline.
    pub(in crate::engine) fn keep_spot_wait(&mut self, order: &Order) {
        let uid = &order.wanted.key.pod_uid;
        if order.has_choice_of_market() && !uid.is_empty() {
            self.spot_waits.keep(uid, order.spot_since, order.began);
        }
    }
}
