//! The adaptive idle timeout of bulk connections.

use std::{ops::RangeInclusive, time::Duration};

use tokio::time::Instant;

/// An idle timeout for a cell's bulk connections that adapts to the cell's calls.
///
/// Most cells get no further call soon, and a bulk connection costs more memory than everything
/// else of a cell, so the timeout starts at its minimum. For periodic calls such as probes, the
/// timeout grows until the connection is kept between calls: if a connection is opened again soon
/// after it was closed, the timeout becomes twice the interval without calls, within bounds.
#[derive(Debug)]
pub(super) struct IdlePolicy {
    bounds: RangeInclusive<Duration>,
    timeout: Duration,
    /// The time at which the last connection was closed as idle; `None` after another connection
    /// was opened.
    idle_closed_at: Option<Instant>,
}

impl IdlePolicy {
    /// Creates a policy whose timeout starts at the lower bound.
    pub(super) fn new(bounds: RangeInclusive<Duration>) -> Self {
        Self { timeout: *bounds.start(), idle_closed_at: None, bounds }
    }

    /// Returns the time without calls after which the current connection is closed.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Records that a connection was closed as idle.
    pub(super) fn idle_closed(&mut self, now: Instant) {
        self.idle_closed_at = Some(now);
    }

    /// Records that a connection was opened, and adapts the timeout, unless the previous connection
    /// ended for another reason than being idle.
    pub(super) fn opened(&mut self, now: Instant) {
        let Some(closed_at) = self.idle_closed_at.take() else { return };
        let interval = self.timeout + now.saturating_duration_since(closed_at);
        self.timeout = if interval <= *self.bounds.end() {
            (interval * 2).min(*self.bounds.end())
        } else {
            *self.bounds.start()
        };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIN_TIMEOUT: Duration = Duration::from_secs(6);
    const MAX_TIMEOUT: Duration = Duration::from_secs(60);

    /// Makes calls that take no time, with these intervals between them. Returns the number of
    /// connections that the calls needed.
    fn connections_for(policy: &mut IdlePolicy, intervals: &[Duration]) -> usize {
        let (mut now, mut opened) = (Instant::now(), 1);
        policy.opened(now);
        for interval in intervals {
            let timeout = policy.timeout();
            if *interval >= timeout {
                policy.idle_closed(now + timeout);
                policy.opened(now + *interval);
                opened += 1;
            }
            now += *interval;
        }
        opened
    }

    /// Verifies L13.
    #[test]
    fn periodic_calls_within_the_bounds_share_a_connection() {
        for (seconds, connections) in [(1, 1), (5, 1), (6, 2), (10, 2), (30, 2), (45, 2), (59, 2)] {
            let mut policy = IdlePolicy::new(MIN_TIMEOUT..=MAX_TIMEOUT);
            assert_eq!(
                connections_for(&mut policy, &[Duration::from_secs(seconds); 100]),
                connections,
                "every {seconds} s"
            );
        }
    }

    /// Verifies L13.
    #[test]
    fn rare_calls_reset_the_timeout_to_its_minimum() {
        let mut policy = IdlePolicy::new(MIN_TIMEOUT..=MAX_TIMEOUT);
        assert_eq!(connections_for(&mut policy, &[Duration::from_secs(10); 5]), 2);
        assert_eq!(policy.timeout(), Duration::from_secs(20));
        assert_eq!(connections_for(&mut policy, &[Duration::from_secs(90); 5]), 6);
        assert_eq!(policy.timeout(), MIN_TIMEOUT);
    }

    #[test]
    fn failed_connection_does_not_change_the_timeout() {
        let mut policy = IdlePolicy::new(MIN_TIMEOUT..=MAX_TIMEOUT);
        let begin = Instant::now();
        for at in 0..10 {
            policy.opened(begin + Duration::from_secs(at));
        }
        assert_eq!(policy.timeout(), MIN_TIMEOUT);
        // An earlier close as idle does not count either.
        policy.idle_closed(begin);
        policy.opened(begin);
        policy.opened(begin + Duration::from_secs(1000));
        assert_eq!(policy.timeout(), 2 * MIN_TIMEOUT);
    }

    proptest! {
        #[test]
        fn timeout_stays_within_its_bounds(
            intervals in prop::collection::vec(0_u64..200_000, 0..50),
        ) {
            let mut policy = IdlePolicy::new(MIN_TIMEOUT..=MAX_TIMEOUT);
            for interval in intervals {
                connections_for(&mut policy, &[Duration::from_millis(interval)]);
                prop_assert!((MIN_TIMEOUT..=MAX_TIMEOUT).contains(&policy.timeout()));
            }
        }
    }
}
