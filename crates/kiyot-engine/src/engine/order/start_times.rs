//! Times of recent starts, which rank the offerings for a pod with `start-within`.

use std::{
    borrow::Cow,
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use crate::{
    engine::{Engine, ProviderKey},
    placement::Ranked,
    wanted::Wanted,
};

/// The number of latest starts that are kept for a provider, and for each family of its instance
/// types.
const KEPT_STARTS: usize = 20;
/// The number of starts from which a time counts as measured.
const LEAST_STARTS: usize = 3;
/// The percentage of the kept starts that took no longer than the measured time.
const PERCENTILE: usize = 90;
/// Bounds the families that are kept.
const MAX_FAMILIES: usize = 100;

/// The times of cold starts, from the request of the cell until it was bound to its pod.
#[derive(Debug, Clone, Default)]
pub struct StartTimes {
    of_providers: BTreeMap<ProviderKey, Recent>,
    of_families: BTreeMap<(ProviderKey, Cow<'static, str>), Recent>,
}

/// The latest times, the oldest first.
#[derive(Debug, Clone, Default)]
struct Recent(VecDeque<Duration>);

impl Recent {
    fn add(&mut self, time: Duration) {
        if self.0.len() == KEPT_STARTS {
            self.0.pop_front();
        }
        self.0.push_back(time);
    }

    /// Returns the percentile by the nearest rank; `None` for too few starts.
    fn time(&self) -> Option<Duration> {
        let mut times: Vec<Duration> = self.0.iter().copied().collect();
        times.sort_unstable();
        let rank = (times.len() * PERCENTILE).div_ceil(100);
        times.get(rank.checked_sub(1)?).copied().filter(|_| times.len() >= LEAST_STARTS)
    }
}

/// Returns the family of an instance type: `t4g` of `t4g.nano`.
pub(super) fn family(instance_type: &str) -> &str {
    instance_type.split('.').next().unwrap_or_default()
}

impl StartTimes {
    /// Adds a start.
    pub fn add(&mut self, provider: ProviderKey, instance_type: &str, time: Duration) {
        self.of_providers.entry(provider).or_default().add(time);
        let key = (provider, Cow::Owned(family(instance_type).to_owned()));
        if self.of_families.len() < MAX_FAMILIES || self.of_families.contains_key(&key) {
            self.of_families.entry(key).or_default().add(time);
        }
    }

    /// Returns the measured time of an offering's family, or else of its provider.
    pub fn of(&self, offering: &Ranked) -> Option<Duration> {
        let Ranked { provider, candidate } = offering;
        let key = (*provider, Cow::Borrowed(family(&candidate.offering.instance_type)));
        let of_family = self.of_families.get(&key).and_then(Recent::time);
        of_family.or_else(|| self.of_providers.get(provider).and_then(Recent::time))
    }

    /// Ranks offerings by their measured times: first the offerings within the limit, then the
    /// offerings without a measurement, both in their order; last the slower offerings, the fastest
    /// first.
    pub fn rank(&self, mut ranked: Vec<Ranked>, within: Duration) -> Vec<Ranked> {
        ranked.sort_by_cached_key(|it| match self.of(it) {
            Some(time) if time <= within => (0, Duration::ZERO),
            None => (1, Duration::ZERO),
            Some(time) => (2, time),
        });
        ranked
    }

    /// Returns the shortest time of ranked offerings if all of them are measured and beyond the
    /// limit.
    pub fn beyond(&self, ranked: &[Ranked], within: Duration) -> Option<Duration> {
        ranked.first().and_then(|first| self.of(first)).filter(|time| *time > within)
    }
}

impl Engine {
    /// Returns the times of recent starts.
    pub fn start_times(&self) -> &StartTimes {
        &self.start_times
    }

    /// Ranks the offerings of an order by measured times, if its pod asks for a start within a
    /// time.
    pub(super) fn by_start(&self, wanted: &Wanted, ranked: Vec<Ranked>) -> Vec<Ranked> {
        match wanted.request.start_within {
            Some(within) => self.start_times.rank(ranked, within),
            None => ranked,
        }
    }
}
