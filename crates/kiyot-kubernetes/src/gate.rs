//! Pauses after failures, and the choice of failures to log.

use std::time::{Duration, Instant};

use crate::failure::Failure;

/// Pause after the first of successive failures. Each further failure doubles it.
pub const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause, as a multiple of the first.
const MAX_PAUSES: u32 = 120;
/// Pause after a denial or without the kind, as a multiple of the first. Both conditions last until
/// an operator acts.
const OPERATOR_PAUSES: u32 = 30;

/// Delays calls of a kind after failures.
#[derive(Debug)]
pub struct Gate {
    first_pause: Duration,
    failures: u32,
    open_at: Option<Instant>,
    /// The logged classes of the successive failures.
    logged: Vec<&'static str>,
}

impl Gate {
    /// Returns an open gate.
    pub fn new(first_pause: Duration) -> Self {
        Self { first_pause, failures: 0, open_at: None, logged: Vec::new() }
    }

    /// Returns the pause after a first failure.
    pub fn first_pause(&self) -> Duration {
        self.first_pause
    }

    /// Returns the time from which the next call may be made; `None` if it may be made at once.
    pub fn open_at(&self) -> Option<Instant> {
        self.open_at
    }

    /// Returns the time until the next call may be made.
    pub fn left(&self, now: Instant) -> Duration {
        self.open_at.map_or(Duration::ZERO, |open| open.saturating_duration_since(now))
    }

    /// Notes a failure. Returns whether to log it: it is the first of its class since the last
    /// success.
    ///
    /// `jitter`, from 0 to 1, spreads the calls of a cluster's nodes after an outage.
    pub fn failed(&mut self, failure: &Failure, now: Instant, jitter: f64) -> bool {
        let first = self.first_pause;
        let doubled = first.saturating_mul(1 << self.failures.min(10)).min(first * MAX_PAUSES);
        let pause = match failure {
            Failure::Throttled { retry_after: Some(pause), .. } => (*pause).max(first),
            Failure::Denied(_) | Failure::Unauthenticated(_) | Failure::NotFound(_) => {
                (first * OPERATOR_PAUSES).max(doubled)
            }
            _ => doubled,
        };
        self.failures = self.failures.saturating_add(1);
        self.open_at = Some(now + pause.mul_f64(1.0 + jitter.clamp(0.0, 1.0) / 4.0));
        self.noted(failure)
    }

    /// Notes a failure that delays no other call. Returns whether to log it, as [`Self::failed`]
    /// does.
    pub fn noted(&mut self, failure: &Failure) -> bool {
        let is_new = !self.logged.contains(&failure.class());
        if is_new {
            self.logged.push(failure.class());
        }
        is_new
    }

    /// Opens the gate. Logged classes of failures stay logged, because other failures last.
    pub fn resume(&mut self) {
        self.failures = 0;
        self.open_at = None;
    }

    /// Notes a success. Returns whether it ends a series of failures.
    pub fn succeeded(&mut self) -> bool {
        let is_end = !self.logged.is_empty();
        *self = Self::new(self.first_pause);
        is_end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies K6.
    #[test]
    fn failures_of_a_class_are_logged_once_and_pauses_grow_to_their_bound() {
        let (now, mut gate) = (Instant::now(), Gate::new(FIRST_PAUSE));
        let unreachable = Failure::Unreachable("refused".to_owned());
        let mut pauses = Vec::new();
        for attempt in 0..40 {
            assert_eq!(gate.failed(&unreachable, now, 0.0), attempt == 0);
            pauses.push(gate.open_at().unwrap() - now);
        }
        assert_eq!(pauses[..3], [1, 2, 4].map(Duration::from_secs));
        assert!(pauses.is_sorted() && pauses[39] == FIRST_PAUSE * MAX_PAUSES, "{pauses:?}");
        assert!(gate.failed(&Failure::Denied(String::new()), now, 0.0), "another class");
        // An overloaded server fails in alternating ways.
        assert!(!gate.failed(&unreachable, now, 0.0));
        assert!(!gate.failed(&Failure::Denied(String::new()), now, 0.0));
        assert!(gate.succeeded() && !gate.succeeded());
        assert_eq!(gate.open_at(), None);
        assert!(gate.failed(&unreachable, now, 0.0), "another series");
    }

    /// Verifies K6.
    #[test]
    fn noted_failure_delays_no_call_and_is_logged_once() {
        let (now, mut gate) = (Instant::now(), Gate::new(FIRST_PAUSE));
        let denied = Failure::Denied(String::new());
        assert!(gate.noted(&denied) && !gate.noted(&denied));
        assert_eq!(gate.open_at(), None);
        assert!(!gate.failed(&denied, now, 0.0) && gate.open_at().is_some());
        gate.resume();
        assert_eq!(gate.open_at(), None);
        assert!(!gate.noted(&denied), "the series goes on");
        assert!(gate.succeeded() && !gate.succeeded());
        assert!(gate.noted(&denied), "another series");
    }

    /// Verifies K6.
    #[test]
    fn pause_requested_by_the_server_is_kept() {
        let (now, mut gate) = (Instant::now(), Gate::new(FIRST_PAUSE));
        let retry_after = Some(Duration::from_secs(17));
        gate.failed(&Failure::Throttled { retry_after, message: String::new() }, now, 0.0);
        assert_eq!(gate.open_at(), Some(now + Duration::from_secs(17)));
    }
}
