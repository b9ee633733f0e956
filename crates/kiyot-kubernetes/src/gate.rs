//! Pauses after failures, and which of them are logged.

use std::time::{Duration, Instant};

use crate::failure::Failure;

/// Pause after the first failure of a row; each further one doubles it.
pub const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause, as a multiple of the first.
const MAX_PAUSES: u32 = 120;
/// Pause after a denial, and for want of the kind, as a multiple of the first: both last until an
/// operator acts.
const OPERATOR_PAUSES: u32 = 30;

/// Holds calls of a kind back after failures.
#[derive(Debug)]
pub struct Gate {
    first_pause: Duration,
    failures: u32,
    open_at: Option<Instant>,
    /// The classes of the row that were logged.
    logged: Vec<&'static str>,
}

impl Gate {
    /// Returns an open gate, with its pause after a first failure.
    pub fn new(first_pause: Duration) -> Self {
        Self { first_pause, failures: 0, open_at: None, logged: Vec::new() }
    }

    /// Returns the pause after a first failure.
    pub fn first_pause(&self) -> Duration {
        self.first_pause
    }

    /// Returns the time at which the next call may be made; `None` for at once.
    pub fn open_at(&self) -> Option<Instant> {
        self.open_at
    }

    /// Returns the time until the next call may be made.
    pub fn left(&self, now: Instant) -> Duration {
        self.open_at.map_or(Duration::ZERO, |open| open.saturating_duration_since(now))
    }

    /// Notes a failure. Returns true if it is to be logged: the first of its class in a row.
    ///
    /// `jitter` is from 0 to 1, and spreads the nodes of a cluster after an outage.
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

    /// Notes a failure that holds back no call of the kind. Returns true if it is to be logged: the
    /// first of its class in a row.
    pub fn noted(&mut self, failure: &Failure) -> bool {
        let is_new = !self.logged.contains(&failure.class());
        if is_new {
            self.logged.push(failure.class());
        }
        is_new
    }

    /// Notes a success that ends no row of failures: the next call may be made at once.
    pub fn resume(&mut self) {
        self.failures = 0;
        self.open_at = None;
    }

    /// Notes a success. Returns true if it ends a row of failures.
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
        // An overloaded server fails in turns.
        assert!(!gate.failed(&unreachable, now, 0.0));
        assert!(!gate.failed(&Failure::Denied(String::new()), now, 0.0));
        assert!(gate.succeeded() && !gate.succeeded());
        assert_eq!(gate.open_at(), None);
        assert!(gate.failed(&unreachable, now, 0.0), "another row");
    }

    /// Verifies K6.
    #[test]
    fn failure_that_holds_back_no_call_is_logged_once_in_a_row() {
        let (now, mut gate) = (Instant::now(), Gate::new(FIRST_PAUSE));
        let denied = Failure::Denied(String::new());
        assert!(gate.noted(&denied) && !gate.noted(&denied));
        assert_eq!(gate.open_at(), None);
        assert!(!gate.failed(&denied, now, 0.0) && gate.open_at().is_some());
        gate.resume();
        assert_eq!(gate.open_at(), None);
        assert!(!gate.noted(&denied), "the row goes on");
        assert!(gate.succeeded() && !gate.succeeded());
        assert!(gate.noted(&denied), "another row");
    }

    /// Verifies K6.
    #[test]
    fn pause_that_the_server_asks_for_is_kept() {
        let (now, mut gate) = (Instant::now(), Gate::new(FIRST_PAUSE));
        let retry_after = Some(Duration::from_secs(17));
        gate.failed(&Failure::Throttled { retry_after, message: String::new() }, now, 0.0);
        assert_eq!(gate.open_at(), Some(now + Duration::from_secs(17)));
    }
}
