//! Refused offerings, which are avoided for a while.

use std::{collections::BTreeMap, time::Duration};

use super::{Market, Offering};

/// Bounds the refused offerings that are kept: more than EC2 has in a region.
const MAX_REFUSED: usize = 20_000;

/// Offerings that are avoided now.
pub trait Refused {
    /// Returns true if an offering is avoided.
    fn is_refused(&self, instance_type: &str, zone: &str, market: Market) -> bool;
}

/// Avoids no offering.
impl Refused for () {
    fn is_refused(&self, _: &str, _: &str, _: Market) -> bool {
        false
    }
}

/// Memory of the offerings that were refused for capacity.
#[derive(Debug, Clone, Default)]
pub struct Refusals {
    until: BTreeMap<Offering, Duration>,
}

/// The refusals at a time.
#[derive(Debug, Clone, Copy)]
pub struct RefusedAt<'a> {
    refusals: &'a Refusals,
    now: Duration,
}

impl Refusals {
    /// Records that offerings were refused now, and are avoided until a time.
    pub fn add<'a>(
        &mut self,
        offerings: impl IntoIterator<Item = &'a Offering>,
        now: Duration,
        until: Duration,
    ) {
        self.until.retain(|_, until| *until > now);
        for offering in offerings {
            if self.until.len() < MAX_REFUSED || self.until.contains_key(offering) {
                self.until.insert(offering.clone(), until);
            }
        }
    }

    /// Returns the offerings that are avoided at a time.
    pub fn at(&self, now: Duration) -> RefusedAt<'_> {
        RefusedAt { refusals: self, now }
    }

    /// Returns the time at which the next of these offerings is not avoided any more.
    pub fn next_end<'a>(
        &self,
        offerings: impl IntoIterator<Item = &'a Offering>,
    ) -> Option<Duration> {
        offerings.into_iter().filter_map(|offering| self.until.get(offering)).min().copied()
    }
}

impl Refused for RefusedAt<'_> {
    fn is_refused(&self, instance_type: &str, zone: &str, market: Market) -> bool {
        if self.refusals.until.is_empty() {
            return false;
        }
        let offering =
            Offering { instance_type: instance_type.to_owned(), zone: zone.to_owned(), market };
        self.refusals.until.get(&offering).is_some_and(|until| *until > self.now)
    }
}
