//! The node's clock, watched: what is said of it in the log explains what else is there.

use std::time::{Duration, Instant, SystemTime};

/// How often it is looked at.
pub(super) const LOOK: Duration = Duration::from_secs(10);
/// What time services correct without anybody's harm.
const SMALL: Duration = Duration::from_secs(5);

/// The time of day beside a clock that nobody sets.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    day: SystemTime,
    steady: Instant,
}

/// How far the time of day has jumped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Jump {
    Ahead(Duration),
    Back(Duration),
}

impl Clock {
    pub(super) fn now() -> Self {
        Self { day: SystemTime::now(), steady: Instant::now() }
    }

    /// How far the time of day has come otherwise than it should since an earlier look, if that is
    /// much. A machine that slept looks like one whose clock was set ahead.
    fn jump_since(self, earlier: Self) -> Option<Jump> {
        let expected =
            earlier.day.checked_add(self.steady.saturating_duration_since(earlier.steady))?;
        match self.day.duration_since(expected) {
            Ok(ahead) => (ahead > SMALL).then_some(Jump::Ahead(ahead)),
            Err(error) => (error.duration() > SMALL).then_some(Jump::Back(error.duration())),
        }
    }

    /// Looks again, and says so if it has jumped.
    pub(super) fn look(&mut self) {
        let now = Self::now();
        match now.jump_since(std::mem::replace(self, now)) {
            None => {}
            Some(Jump::Ahead(by)) => tracing::warn!(
                seconds = by.as_secs(),
                "The node's clock was set ahead, or the node slept. Pods go on."
            ),
            Some(Jump::Back(by)) => {
                tracing::warn!(seconds = by.as_secs(), "The node's clock was set back. Pods go on.")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies X16.
    #[test]
    fn only_a_jump_is_one() {
        let begin = Clock {
            day: SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000),
            steady: Instant::now(),
        };
        let later = |day: i64, steady: u64| Clock {
            day: if day < 0 {
                begin.day - Duration::from_secs(day.unsigned_abs())
            } else {
                begin.day + Duration::from_secs(day.unsigned_abs())
            },
            steady: begin.steady + Duration::from_secs(steady),
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
