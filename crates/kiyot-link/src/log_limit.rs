//! Rate limits for log lines that a peer can cause.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// The most lines of a kind in each [`PERIOD`].
pub const MAX_LINES: u32 = 8;
/// The time after which the count of lines restarts.
pub const PERIOD: Duration = Duration::from_secs(60);
/// The most keys with a limit of their own; all others share one limit.
const MAX_KEYS: usize = 1024;

/// A rate limit for lines of a kind: [`MAX_LINES`] in each [`PERIOD`]. The next admitted line
/// carries the number of suppressed lines.
#[derive(Debug, Default)]
pub struct LogLimit(Mutex<LogLimitState>);

#[derive(Debug, Default)]
struct LogLimitState {
    /// The start of the current period; `None` before the first line.
    began: Option<Instant>,
    lines: u32,
    suppressed: u64,
}

impl LogLimit {
    /// Returns the number of lines suppressed since the last admitted line, or `None` if this line
    /// must be suppressed.
    pub fn admit(&self) -> Option<u64> {
        self.admit_at(Instant::now())
    }

    fn admit_at(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.began.is_none_or(|began| now.saturating_duration_since(began) >= PERIOD) {
            (state.began, state.lines) = (Some(now), 0);
        }
        if state.lines >= MAX_LINES {
            state.suppressed += 1;
            return None;
        }
        state.lines += 1;
        Some(std::mem::take(&mut state.suppressed))
    }

    /// Returns whether the period is over and no suppressed line is left to report.
    fn is_fresh(&self, now: Instant) -> bool {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.suppressed == 0
            && state.began.is_none_or(|began| now.saturating_duration_since(began) >= PERIOD)
    }
}

/// A [`LogLimit`] for each key, so that no key's lines suppress those of another.
#[derive(Debug)]
pub struct LogLimits<K> {
    of: Mutex<HashMap<K, LogLimit>>,
    others: LogLimit,
}

impl<K> Default for LogLimits<K> {
    fn default() -> Self {
        Self { of: Mutex::default(), others: LogLimit::default() }
    }
}

impl<K: Eq + Hash + Clone> LogLimits<K> {
    /// Admits a line of a key, as [`LogLimit::admit`] does.
    pub fn admit(&self, key: &K) -> Option<u64> {
        self.admit_at(key, Instant::now())
    }

    fn admit_at(&self, key: &K, now: Instant) -> Option<u64> {
        let mut of = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(limit) = of.get(key) {
            return limit.admit_at(now);
        }
        if of.len() >= MAX_KEYS {
            of.retain(|_, limit| !limit.is_fresh(now));
        }
        if of.len() >= MAX_KEYS {
            return self.others.admit_at(now);
        }
        of.entry(key.clone()).or_default().admit_at(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies L17.
    #[test]
    fn lines_beyond_the_limit_are_counted_and_reported_in_the_next_period() {
        let (limit, now) = (LogLimit::default(), Instant::now());
        for _ in 0..MAX_LINES {
            assert_eq!(limit.admit_at(now), Some(0));
        }
        for second in 0..60 {
            for _ in 0..100 {
                assert_eq!(limit.admit_at(now + Duration::from_secs(second)), None);
            }
        }
        assert_eq!(limit.admit_at(now + PERIOD), Some(6_000));
        assert_eq!(limit.admit_at(now + PERIOD), Some(0));
        assert_eq!(limit.admit_at(now + PERIOD * 9), Some(0));
    }

    /// Verifies L17.
    #[test]
    fn keys_have_limits_of_their_own_up_to_max_keys() {
        let (limits, now) = (LogLimits::default(), Instant::now());
        for key in 0..MAX_KEYS {
            assert_eq!(limits.admit_at(&key, now), Some(0));
        }
        let admitted =
            (MAX_KEYS..2 * MAX_KEYS).filter(|key| limits.admit_at(key, now).is_some()).count();
        assert_eq!(admitted, MAX_LINES as usize, "further keys share a limit");
        assert_eq!(limits.admit_at(&0, now), Some(0));
        // Keys without lines in the last period are forgotten.
        assert_eq!(limits.admit_at(&(3 * MAX_KEYS), now + PERIOD), Some(0));
        assert_eq!(limits.of.lock().unwrap().len(), 1);
    }
}
