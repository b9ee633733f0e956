//! Token buckets, which limit a rate and permit bursts.

use std::time::{Duration, Instant};

/// The size of a bucket, and the rate at which it fills.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// The tokens of a full bucket.
    pub burst: u32,
    /// The time in which the bucket gains a token.
    pub period: Duration,
}

/// A bucket that is full at first.
#[derive(Debug, Default)]
pub struct TokenBucket {
    /// The time at which the bucket is full; `None` before the first token is taken.
    full_at: Option<Instant>,
}

impl TokenBucket {
    /// Takes tokens, in advance if the bucket lacks them.
    pub fn take(&mut self, tokens: u32, rate: Rate, now: impl Into<Instant>) {
        let now = now.into();
        self.full_at = Some(self.full_at.unwrap_or(now).max(now) + rate.period * tokens);
    }

    /// Returns the time until the bucket has gained all tokens that were taken in advance.
    pub fn pause(&self, rate: Rate, now: impl Into<Instant>) -> Duration {
        let now = now.into();
        let until_full = self.full_at.map(|full_at| full_at.saturating_duration_since(now));
        until_full.unwrap_or_default().saturating_sub(rate.period * rate.burst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: Rate = Rate { burst: 2, period: Duration::from_secs(10) };

    #[test]
    fn tokens_beyond_the_burst_need_a_pause() {
        let (mut bucket, now) = (TokenBucket::default(), Instant::now());
        assert_eq!(bucket.pause(RATE, now), Duration::ZERO);
        let pauses = [1, 1, 1, 2].map(|tokens| {
            bucket.take(tokens, RATE, now);
            bucket.pause(RATE, now).as_secs()
        });
        assert_eq!(pauses, [0, 0, 10, 30]);
        assert_eq!(bucket.pause(RATE, now + Duration::from_secs(25)).as_secs(), 5);
    }

    #[test]
    fn idle_bucket_gains_no_more_than_its_burst() {
        let (mut bucket, now) = (TokenBucket::default(), Instant::now());
        bucket.take(1, RATE, now);
        let later = now + Duration::from_secs(3600);
        bucket.take(3, RATE, later);
        assert_eq!(bucket.pause(RATE, later).as_secs(), 10);
    }
}
