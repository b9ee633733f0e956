//! The namespaces that deny events.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use crate::{failure::Failure, gate::Gate};

/// Time without a denial after which a namespace is forgotten: it may have ended.
const FORGET_AFTER: Duration = Duration::from_secs(3600);
/// Most namespaces that are remembered: those that were denied last.
const MAX_NAMESPACES: usize = 256;

/// A row of denied events, which ends once no namespace denies them. It closes no lane.
#[derive(Debug)]
pub(super) struct Denials {
    gate: Gate,
    /// The time of the last denial, by namespace.
    namespaces: BTreeMap<String, Instant>,
}

impl Denials {
    /// Returns an empty row, with its pause after a first failure.
    pub(super) fn new(first_pause: Duration) -> Self {
        Self { gate: Gate::new(first_pause), namespaces: BTreeMap::new() }
    }

    /// Returns true in the pause after a denial: another one was to be expected.
    pub(super) fn is_awaited(&self, now: Instant) -> bool {
        self.gate.open_at().is_some_and(|open| open > now)
    }

    /// Notes that an event of a namespace was denied.
    pub(super) fn denied(&mut self, namespace: &str, now: Instant) {
        // A namespace that has ended has no event whose success would end the row.
        self.forget(now);
        if self.namespaces.is_empty() {
            self.gate.succeeded();
        }
        if self.namespaces.len() >= MAX_NAMESPACES && !self.namespaces.contains_key(namespace) {
            let oldest = self.namespaces.iter().min_by_key(|(_, at)| **at);
            if let Some(oldest) = oldest.map(|(namespace, _)| namespace.clone()) {
                self.namespaces.remove(&oldest);
            }
        }
        self.namespaces.insert(namespace.to_owned(), now);
    }

    /// Begins the pause after a denial that was not awaited. Returns true if it is to be logged:
    /// the first of a row.
    pub(super) fn pause(&mut self, failure: &Failure, now: Instant, jitter: f64) -> bool {
        self.gate.failed(failure, now, jitter)
    }

    /// Notes that an event of a namespace was written. Returns true if that ends a row.
    pub(super) fn written(&mut self, namespace: &str, now: Instant) -> bool {
        self.namespaces.remove(namespace);
        self.forget(now);
        self.namespaces.is_empty() && self.gate.succeeded()
    }

    fn forget(&mut self, now: Instant) {
        self.namespaces.retain(|_, at| now.saturating_duration_since(*at) < FORGET_AFTER);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::FIRST_PAUSE;

    /// Has an event of a namespace denied. Returns true if it is logged.
    fn deny(denials: &mut Denials, namespace: &str, now: Instant) -> bool {
        denials.denied(namespace, now);
        denials.pause(&Failure::Denied("exceeded quota".to_owned()), now, 0.0)
    }

    /// Verifies K8.
    #[test]
    fn row_of_denied_events_ends_once_no_namespace_denies_them() {
        let (now, mut denials) = (Instant::now(), Denials::new(FIRST_PAUSE));
        assert!(!denials.is_awaited(now) && !denials.written("quota", now));
        assert!(deny(&mut denials, "quota", now));
        assert!(denials.is_awaited(now));
        assert!(!deny(&mut denials, "other", now), "the same row");
        assert!(!denials.written("third", now), "it was not denied");
        assert!(!denials.written("quota", now), "the other is denied");
        assert!(denials.is_awaited(now));
        assert!(denials.written("other", now) && !denials.written("other", now));
        assert!(!denials.is_awaited(now));
        assert!(deny(&mut denials, "other", now), "another row");
    }

    /// Verifies K8.
    #[test]
    fn namespace_without_a_denial_for_an_hour_is_forgotten() {
        let (begin, mut denials) = (Instant::now(), Denials::new(FIRST_PAUSE));
        assert!(deny(&mut denials, "ended", begin));
        let later = begin + FORGET_AFTER / 2;
        assert!(!deny(&mut denials, "quota", later));
        assert!(!denials.written("quota", later));
        // Nothing else is written or denied before the right is lost.
        let hour = begin + FORGET_AFTER;
        assert!(deny(&mut denials, "default", hour), "the earlier row has ended");
        assert!(!deny(&mut denials, "default", hour + FORGET_AFTER / 2));
        // A success elsewhere ends a row whose namespaces are all forgotten.
        assert!(denials.written("third", hour + FORGET_AFTER * 2));
    }

    #[test]
    fn namespace_that_was_denied_the_longest_ago_makes_room_for_another() {
        let (begin, mut denials) = (Instant::now(), Denials::new(FIRST_PAUSE));
        for number in 0..=MAX_NAMESPACES {
            let now = begin + Duration::from_millis(number as u64);
            deny(&mut denials, &format!("team-{number}"), now);
        }
        assert_eq!(denials.namespaces.len(), MAX_NAMESPACES);
        assert!(!denials.namespaces.contains_key("team-0"));
    }
}
