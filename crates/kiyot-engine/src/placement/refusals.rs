//! Refused offerings, which are avoided for a while.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use crate::placement::{LaunchRefusal, Market, Offering};

/// Bounds the refused offerings that are kept: more than EC2 has in a region.
const MAX_REFUSED: usize = 20_000;
/// Bounds the refused zones that are kept: more than a region has.
const MAX_REFUSED_ZONES: usize = 100;
/// Bounds the refused quotas that are kept: more than EC2 has families of types and markets.
const MAX_REFUSED_QUOTAS: usize = 100;

/// Offerings that are avoided now.
pub trait Refused {
    /// Returns whether an offering is avoided in favour of another.
    fn is_refused(&self, instance_type: &str, zone: &str, market: Market) -> bool;

    /// Returns whether an offering is avoided because its quota is full. No other offering replaces
    /// it: a family of types with its own quota, such as types with GPUs, can cost many times more.
    fn is_over_quota(&self, _: &Offering) -> bool {
        false
    }
}

/// Avoids no offering.
impl Refused for () {
    fn is_refused(&self, _: &str, _: &str, _: Market) -> bool {
        false
    }
}

/// A quota without room for some instance types, in any zone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedQuota {
    /// The market of the quota.
    pub market: Market,
    /// The names of the types that count in it and need at least as much of it as the refused type.
    pub types: BTreeSet<String>,
}

impl RefusedQuota {
    /// Returns whether the quota has no room for an offering.
    pub fn refuses(&self, offering: &Offering) -> bool {
        self.market == offering.market && self.types.contains(&offering.instance_type)
    }

    /// Returns whether the quota refuses everything that another quota refuses.
    fn covers(&self, other: &Self) -> bool {
        self.market == other.market && self.types.is_superset(&other.types)
    }
}

/// The refused offerings. A clone is cheap and does not change.
#[derive(Debug, Clone, Default)]
pub struct Refusals {
    /// Copied on a write while a clone is in use.
    refused: Arc<BTreeMap<Offering, Refusal>>,
    /// Zones that refuse every offering, copied likewise.
    zones: Arc<BTreeMap<String, Refusal>>,
    /// Markets that refuse every offering, copied likewise.
    markets: Arc<BTreeMap<Market, Refusal>>,
    /// Full quotas, copied likewise.
    quotas: Arc<Vec<(Arc<RefusedQuota>, Refusal)>>,
}

/// The refusal of an offering.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The time until which it is avoided.
    pub until: Duration,
    /// The provider's reason.
    pub reason: Arc<str>,
}

/// The refusals at a time.
#[derive(Debug, Clone, Copy)]
pub struct RefusedAt<'a> {
    refusals: &'a Refusals,
    now: Duration,
}

impl Refusals {
    /// Records the refusal of a launch at a time.
    pub fn add(&mut self, refused: &LaunchRefusal, now: Duration, refusal: &Refusal) {
        match refused {
            LaunchRefusal::Offerings(offerings) | LaunchRefusal::Type { offerings, .. } => {
                let refused = Arc::make_mut(&mut self.refused);
                refused.retain(|_, refusal| refusal.until > now);
                for offering in offerings {
                    if refused.len() < MAX_REFUSED || refused.contains_key(offering) {
                        refused.insert(offering.clone(), refusal.clone());
                    }
                }
            }
            LaunchRefusal::Zone(zone) => {
                let zones = Arc::make_mut(&mut self.zones);
                zones.retain(|_, refusal| refusal.until > now);
                if zones.len() < MAX_REFUSED_ZONES || zones.contains_key(zone) {
                    zones.insert(zone.clone(), refusal.clone());
                }
            }
            LaunchRefusal::Market(market) => {
                Arc::make_mut(&mut self.markets).insert(*market, refusal.clone());
            }
            // If its offerings counted as refused, dearer offerings would replace them.
            LaunchRefusal::Quota { quota, .. } => {
                let quotas = Arc::make_mut(&mut self.quotas);
                quotas.retain(|(known, refusal)| refusal.until > now && !quota.covers(known));
                if quotas.len() < MAX_REFUSED_QUOTAS {
                    quotas.push((Arc::clone(quota), refusal.clone()));
                }
            }
            // No other offering replaces these.
            LaunchRefusal::All(_) => {}
        }
    }

    /// Returns the refusal of an offering, its zone or its market that ends last.
    fn refusal(&self, offering: &Offering) -> Option<&Refusal> {
        let of_zone = self.zones.get(&offering.zone);
        let of_market = self.markets.get(&offering.market);
        let own = self.refused.get(offering).into_iter();
        own.chain(of_zone).chain(of_market).max_by_key(|it| it.until)
    }

    /// Returns the refusal of an offering's quotas that ends last.
    fn refusal_of_quota(&self, offering: &Offering) -> Option<&Refusal> {
        let of_quota = self.quotas.iter().filter(|(quota, _)| quota.refuses(offering));
        of_quota.map(|(_, refusal)| refusal).max_by_key(|it| it.until)
    }

    /// Returns the refusal of an offering that ends last, quotas included.
    fn any_refusal(&self, offering: &Offering) -> Option<&Refusal> {
        let all = self.refusal(offering).into_iter().chain(self.refusal_of_quota(offering));
        all.max_by_key(|it| it.until)
    }

    /// Returns the offerings that are avoided at a time.
    pub fn at(&self, now: Duration) -> RefusedAt<'_> {
        RefusedAt { refusals: self, now }
    }

    /// Returns the reason why an offering is avoided at a time.
    pub fn reason(&self, offering: &Offering, now: Duration) -> Option<Arc<str>> {
        let refusal = self.any_refusal(offering).filter(|refusal| refusal.until > now)?;
        Some(Arc::clone(&refusal.reason))
    }

    /// Returns the first refusal of these offerings to end, with its offering.
    pub fn first_end<'a>(
        &'a self,
        offerings: impl IntoIterator<Item = &'a Offering>,
    ) -> Option<(&'a Offering, &'a Refusal)> {
        let refused = offerings.into_iter().filter_map(|it| Some((it, self.any_refusal(it)?)));
        refused.min_by_key(|(_, refusal)| refusal.until)
    }
}

impl Refused for RefusedAt<'_> {
    fn is_refused(&self, instance_type: &str, zone: &str, market: Market) -> bool {
        let Refusals { refused, zones, markets, .. } = self.refusals;
        if refused.is_empty() && zones.is_empty() && markets.is_empty() {
            return false;
        }
        let offering =
            Offering { instance_type: instance_type.to_owned(), zone: zone.to_owned(), market };
        self.refusals.refusal(&offering).is_some_and(|refusal| refusal.until > self.now)
    }

    fn is_over_quota(&self, offering: &Offering) -> bool {
        let refusal = self.refusals.refusal_of_quota(offering);
        refusal.is_some_and(|refusal| refusal.until > self.now)
    }
}
