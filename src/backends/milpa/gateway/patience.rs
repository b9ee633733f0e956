//! How long a bulk connection that nothing uses is kept.

use std::{ops::RangeInclusive, time::Duration};

use tokio::time::Instant;

/// How long one cell's bulk connection is kept without a call. Briefly: it costs more than all else
/// of a cell, and most cells are not called again soon. Where calls come again and again, as those
/// of probes do, it is kept from one to the next: twice the silence that the last one did not
/// outlast, within bounds.
#[derive(Debug)]
pub(super) struct Patience {
    bounds: RangeInclusive<Duration>,
    long: Duration,
    /// When one was closed for being idle, if none has been opened since.
    closed: Option<Instant>,
}

impl Patience {
    /// The least at first.
    pub(super) fn new(bounds: RangeInclusive<Duration>) -> Self {
        Self { long: *bounds.start(), closed: None, bounds }
    }

    /// How long the current connection is kept after its last call.
    pub(super) fn long(&self) -> Duration {
        self.long
    }

    /// A connection was closed for being idle.
    pub(super) fn ran_out(&mut self, now: Instant) {
        self.closed = Some(now);
    }

    /// A connection was opened. One that ended in another way says nothing of how long it should
    /// have been kept.
    pub(super) fn opened(&mut self, now: Instant) {
        let Some(closed) = self.closed.take() else { return };
        let silence = self.long + now.saturating_duration_since(closed);
        self.long = if silence <= *self.bounds.end() {
            (silence * 2).min(*self.bounds.end())
        } else {
            *self.bounds.start()
        };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LEAST: Duration = Duration::from_secs(6);
    const MOST: Duration = Duration::from_secs(60);

    /// Calls that begin so long one after another and take no time. Returns how many connections
    /// they needed.
    fn calls(patience: &mut Patience, every: &[Duration]) -> usize {
        let (mut now, mut opened) = (Instant::now(), 1);
        patience.opened(now);
        for silence in every {
            let kept = patience.long();
            if *silence >= kept {
                patience.ran_out(now + kept);
                patience.opened(now + *silence);
                opened += 1;
            }
            now += *silence;
        }
        opened
    }

    /// Verifies L13.
    #[test]
    fn what_is_called_again_and_again_is_kept() {
        for (seconds, connections) in [(1, 1), (5, 1), (6, 2), (10, 2), (30, 2), (45, 2), (59, 2)] {
            let mut patience = Patience::new(LEAST..=MOST);
            assert_eq!(
                calls(&mut patience, &[Duration::from_secs(seconds); 100]),
                connections,
                "every {seconds} s"
            );
        }
    }

    /// Verifies L13.
    #[test]
    fn what_is_called_seldom_is_let_go_as_soon_as_at_first() {
        let mut patience = Patience::new(LEAST..=MOST);
        assert_eq!(calls(&mut patience, &[Duration::from_secs(10); 5]), 2);
        assert_eq!(patience.long(), Duration::from_secs(20));
        assert_eq!(calls(&mut patience, &[Duration::from_secs(90); 5]), 6);
        assert_eq!(patience.long(), LEAST);
    }

    #[test]
    fn one_that_broke_says_nothing() {
        let mut patience = Patience::new(LEAST..=MOST);
        let begin = Instant::now();
        for at in 0..10 {
            patience.opened(begin + Duration::from_secs(at));
        }
        assert_eq!(patience.long(), LEAST);
        // As little as what was idle before that.
        patience.ran_out(begin);
        patience.opened(begin);
        patience.opened(begin + Duration::from_secs(1000));
        assert_eq!(patience.long(), 2 * LEAST);
    }

    proptest! {
        #[test]
        fn it_stays_within_its_bounds(silences in prop::collection::vec(0_u64..200_000, 0..50)) {
            let mut patience = Patience::new(LEAST..=MOST);
            for silence in silences {
                calls(&mut patience, &[Duration::from_millis(silence)]);
                prop_assert!((LEAST..=MOST).contains(&patience.long()));
            }
        }
    }
}
