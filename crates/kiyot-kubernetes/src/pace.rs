//! The pace of writes.

use std::time::{Duration, Instant};

/// Bounds the writes in a second.
pub const MAX_WRITES_PER_SECOND: u32 = 5;

/// Spaces writes evenly, so that every second keeps the bound.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    interval: Duration,
    next: Option<Instant>,
}

impl Pace {
    /// Returns a pace with this number of writes in a second.
    pub fn per_second(writes: u32) -> Self {
        // Longer than the exact share, because timers have a resolution of milliseconds and may
        // fire early.
        let share = Duration::from_secs(1) / writes.max(1);
        Self { interval: share + Duration::from_millis(2), next: None }
    }

    /// Returns the time of the next write; `None` if it may be made at once.
    pub fn next(&self) -> Option<Instant> {
        self.next
    }

    /// Notes a write. Unused time is not saved up.
    pub fn wrote(&mut self, now: Instant) {
        self.next = Some(now + self.interval);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies K5.
    #[test]
    fn writes_after_a_pause_are_spaced() {
        let (start, mut pace) = (Instant::now(), Pace::per_second(MAX_WRITES_PER_SECOND));
        let (mut now, mut times) = (start, Vec::new());
        for write in 0..40 {
            if write == 20 {
                now += Duration::from_secs(60);
            }
            now = pace.next().map_or(now, |next| next.max(now));
            pace.wrote(now);
            times.push(now - start);
        }
        for window in times.windows(6) {
            assert!(window[5] - window[0] > Duration::from_secs(1), "{times:?}");
        }
    }
}
