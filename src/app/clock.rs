//! Watch of the node's clock. A logged jump explains odd times elsewhere.

use std::time::{Duration, Instant, SystemTime};

/// Period of the check.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Largest correction that is not logged. Time services make such corrections all the time.
const MAX_CORRECTION: Duration = Duration::from_secs(5);

/// Wall clock beside the monotonic clock.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    wall: SystemTime,
    monotonic: Instant,
}

/// Jump of the wall clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Jump {
    Ahead(Duration),
    Back(Duration),
}

impl Clock {
    pub(super) fn now() -> Self {
        Self { wall: SystemTime::now(), monotonic: Instant::now() }
    }

    /// Returns the jump since an earlier reading, if it is large. A machine that slept looks like a
    /// clock set ahead.
    fn jump_since(self, earlier: Self) -> Option<Jump> {
        let expected = earlier
            .wall
            .checked_add(self.monotonic.saturating_duration_since(earlier.monotonic))?;
        match self.wall.duration_since(expected) {
            Ok(ahead) => (ahead > MAX_CORRECTION).then_some(Jump::Ahead(ahead)),
            Err(error) => {
                (error.duration() > MAX_CORRECTION).then_some(Jump::Back(error.duration()))
            }
        }
    }

    /// Reads the clocks, and logs a jump.
    pub(super) fn check(&mut self) {
        let now = Self::now();
        match now.jump_since(std::mem::replace(self, now)) {
            None => {}
            Some(Jump::Ahead(by)) => tracing::warn!(
                seconds = by.as_secs(),
                "node clock jumped ahead or node slept, pods go on"
            ),
            Some(Jump::Back(by)) => {
                tracing::warn!(seconds = by.as_secs(), "node clock jumped back, pods go on")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies X16.
    #[test]
    fn small_clock_corrections_are_no_jump() {
        let begin = Clock {
            wall: SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000),
            monotonic: Instant::now(),
        };
        let later = |day: i64, steady: u64| Clock {
            wall: if day < 0 {
                begin.wall - Duration::from_secs(day.unsigned_abs())
            } else {
                begin.wall + Duration::from_secs(day.unsigned_abs())
            },
            monotonic: begin.monotonic + Duration::from_secs(steady),
        };
        for (day, steady, jump) in [
            (10, 10, None),
            (14, 10, None),
            (6, 10, None),
            (3600, 3600, None),
            (3610, 10, Some(Jump::Ahead(Duration::from_secs(3600)))),
            (-3590, 10, Some(Jump::Back(Duration::from_secs(3600)))),
        ] {
            assert_eq!(later(day, steady).jump_since(begin), jump, "{day} {steady}");
        }
    }
}
