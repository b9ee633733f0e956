//! The namespaces that deny events.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use crate::{failure::Failure, gate::Gate};

/// Time without a denial after which a namespace is removed. It may have ended.
const FORGET_AFTER: Duration = Duration::from_secs(3600);
/// Bounds the remembered namespaces. The latest denials are kept.
const MAX_NAMESPACES: usize = 256;

/// A series of denied events. It ends once no namespace denies events. It closes no lane.
#[derive(Debug)]
pub(super) struct Denials {
    gate: Gate,
    /// The time of the last denial, by namespace.
    namespaces: BTreeMap<String, Instant>,
}

impl Denials {
    /// Returns an empty series.
    pub(super) fn new(first_pause: Duration) -> Self {
        Self { gate: Gate::new(first_pause), namespaces: BTreeMap::new() }
    }

    /// Returns whether the pause after a denial lasts, in which further denials are expected.
    pub(super) fn is_awaited(&self, now: Instant) -> bool {
        self.gate.open_at().is_some_and(|open| open > now)
    }

    /// Notes that an event of a namespace was denied.
    pub(super) fn denied(&mut self, namespace: &str, now: Instant) {
        // In a namespace that has ended, no event can succeed and end the series.
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

    /// Begins the pause after an unexpected denial. Returns whether to log it: it is the first of a
    /// series.
    pub(super) fn pause(&mut self, failure: &Failure, now: Instant, jitter: f64) -> bool {
        self.gate.failed(failure, now, jitter)
    }

    /// Notes that an event of a namespace was written. Returns whether this ends a series.
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

    /// Plays a denied event of a namespace. Returns whether it is logged.
    fn deny(denials: &mut Denials, namespace: &str, now: Instant) -> bool {
        denials.denied(namespace, now);
        denials.pause(&Failure::Denied("exceeded quota".to_owned()), now, 0.0)
    }

    /// Verifies K8.
    #[test]
    fn series_of_denied_events_ends_once_no_namespace_denies_them() {
        let (now, mut denials) = (Instant::now(), Denials::new(FIRST_PAUSE));
        assert!(!denials.is_awaited(now) && !denials.written("quota", now));
        assert!(deny(&mut denials, "quota", now));
        assert!(denials.is_awaited(now));
        assert!(!deny(&mut denials, "other", now), "the same series");
        assert!(!denials.written("third", now), "it was not denied");
        assert!(!denials.written("quota", now), "the other is denied");
        assert!(denials.is_awaited(now));
        assert!(denials.written("other", now) && !denials.written("other", now));
        assert!(!denials.is_awaited(now));
        assert!(deny(&mut denials, "other", now), "another series");
    }

    /// Verifies K8.
    #[test]
    fn namespace_without_a_denial_for_an_hour_is_removed() {
        let (begin, mut denials) = (Instant::now(), Denials::new(FIRST_PAUSE));
        assert!(deny(&mut denials, "ended", begin));
        let later = begin + FORGET_AFTER / 2;
        assert!(!deny(&mut denials, "quota", later));
        assert!(!denials.written("quota", later));
        // Nothing else is written or denied before the right is lost.
        let hour = begin + FORGET_AFTER;
        assert!(deny(&mut denials, "default", hour), "the earlier series has ended");
        assert!(!deny(&mut denials, "default", hour + FORGET_AFTER / 2));
        // A success elsewhere ends a series whose namespaces are all removed.
        assert!(denials.written("third", hour + FORGET_AFTER * 2));
    }

    #[test]
    fn oldest_denied_namespace_is_removed_first() {
        let (begin, mut denials) = (Instant::now(), Denials::new(FIRST_PAUSE));
        for number in 0..=MAX_NAMESPACES {
            let now = begin + Duration::from_millis(number as u64);
            deny(&mut denials, &format!("team-{number}"), now);
        }
        assert_eq!(denials.namespaces.len(), MAX_NAMESPACES);
        assert!(!denials.namespaces.contains_key("team-0"));
    }
}
