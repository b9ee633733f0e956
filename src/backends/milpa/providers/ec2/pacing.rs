//! Pacing of calls, so that a burst of pods does not exhaust the account's rate.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, sleep};

use crate::token_bucket::{Rate, TokenBucket};

/// An action of the API that is paced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// RunInstances.
    Launch,
    /// TerminateInstances.
    Terminate,
    /// Describe calls.
    Describe,
    /// CreateTags.
    Tag,
    /// CreateRoute, DeleteRoute, ModifyInstanceAttribute.
    Route,
    /// GetProducts, of an account's other limit.
    Prices,
    /// ModifyInstanceMetadataOptions.
    Metadata,
}

impl Action {
    /// The number of actions: the last one's index and one more.
    const COUNT: usize = Self::Metadata as usize + 1;

    /// Returns the rate: EC2's documented one of an account ("Request throttling for the Amazon EC2
    /// API"), of which others use a part.
    fn rate(self) -> Rate {
        let (burst, millis) = match self {
            Self::Launch => (5, 500),
            Self::Terminate => (20, 200),
            Self::Describe => (50, 100),
            Self::Tag => (20, 200),
            Self::Route => (20, 200),
            Self::Prices => (5, 200),
            Self::Metadata => (50, 100),
        };
        Rate { burst, period: Duration::from_millis(millis) }
    }
}

/// The pace of all actions. Waiting calls go on in order.
#[derive(Debug, Default)]
pub(super) struct Pacing {
    buckets: [Mutex<TokenBucket>; Action::COUNT],
}

impl Pacing {
    /// Waits until a call may be made.
    pub(super) async fn wait(&self, action: Action) {
        let wait = self.reserve(action, Instant::now());
        if !wait.is_zero() {
            sleep(wait).await;
        }
    }

    /// Reserves a call, and returns the time to wait for it.
    fn reserve(&self, action: Action, now: Instant) -> Duration {
        let bucket = &self.buckets[action as usize];
        let mut bucket = bucket.lock().unwrap_or_else(PoisonError::into_inner);
        bucket.take(1, action.rate(), now);
        bucket.pause(action.rate(), now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn burst_passes_at_once_and_further_calls_at_the_rate() {
        let (pacing, now) = (Pacing::default(), Instant::now());
        let waits: Vec<_> = (0..8).map(|_| pacing.reserve(Action::Launch, now)).collect();
        assert_eq!(waits[..5], [Duration::ZERO; 5]);
        assert_eq!(waits[5..], [500, 1000, 1500].map(Duration::from_millis));
        // Other actions have rates of their own.
        assert_eq!(pacing.reserve(Action::Describe, now), Duration::ZERO);
    }

    #[test]
    fn bucket_fills_while_no_call_is_made() {
        let (pacing, now) = (Pacing::default(), Instant::now());
        for _ in 0..5 {
            pacing.reserve(Action::Launch, now);
        }
        let later = now + Duration::from_millis(1000);
        let waits: Vec<_> = (0..3).map(|_| pacing.reserve(Action::Launch, later)).collect();
        assert_eq!(waits, [0, 0, 500].map(Duration::from_millis));
        let much_later = now + Duration::from_secs(3600);
        let waits: Vec<_> = (0..6).map(|_| pacing.reserve(Action::Launch, much_later)).collect();
        assert_eq!(waits, [0, 0, 0, 0, 0, 500].map(Duration::from_millis));
    }
}
