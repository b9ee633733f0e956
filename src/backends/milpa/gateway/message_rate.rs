//! The rate limit of an agent's messages.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kiyot_values::token_bucket::{Rate, TokenBucket};
use tokio::time::{Instant, sleep_until};

/// The rate in units: 1,000 a second. An agent reports the growth of logs at most every 2 ms, and
/// other changes less often.
const RATE: Rate = Rate { burst: 2000, period: Duration::from_millis(1) };
/// The bytes that count as a further unit of a message.
const UNIT_BYTES: usize = 4096;

/// A limit on the rate of a cell's messages. Above it, the gateway does not read the agent's frames
/// until the bucket has a token, so that the agent has to wait.
#[derive(Debug, Default)]
pub(super) struct MessageRate(Mutex<TokenBucket>);

impl MessageRate {
    /// Waits until the next message may be read.
    pub(super) async fn ready(&self) {
        let now = Instant::now();
        let pause = self.pause(now);
        if !pause.is_zero() {
            sleep_until(now + pause).await;
        }
    }

    /// Takes the units of a read message.
    pub(super) fn take(&self, bytes: usize, now: Instant) {
        self.bucket().take(units(bytes), RATE, now);
    }

    /// Returns the time until the next message may be read.
    fn pause(&self, now: Instant) -> Duration {
        self.bucket().pause(RATE, now)
    }

    fn bucket(&self) -> MutexGuard<'_, TokenBucket> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn units(bytes: usize) -> u32 {
    u32::try_from(bytes / UNIT_BYTES).unwrap_or(u32::MAX).saturating_add(1)
}

#[cfg(test)]
mod tests {
    use kiyot_proto::bounds::MAX_CONTROL_FRAME_BYTES;
    use proptest::{collection::vec, prelude::*};

    use super::*;

    proptest! {
        /// Verifies L27.
        #[test]
        fn no_period_has_more_messages_than_burst_and_rate(
            messages in vec((0..50_u64, 0..=MAX_CONTROL_FRAME_BYTES), 1..200),
        ) {
            let mut now = Instant::now();
            let rate = MessageRate::default();
            let mut read = Vec::new();
            for (millis, bytes) in messages {
                now += Duration::from_millis(millis);
                now += rate.pause(now);
                rate.take(bytes, now);
                read.push((now, units(bytes)));
            }
            for (first, (begin, _)) in read.iter().enumerate() {
                let mut before = 0;
                for (end, units) in &read[first..] {
                    let allowed = RATE.period * RATE.burst + (*end - *begin);
                    prop_assert!(RATE.period * before <= allowed);
                    before += units;
                }
            }
        }

        /// Verifies L27.
        #[test]
        fn agent_below_the_rate_never_waits(messages in vec(0..20 * UNIT_BYTES, 1..200)) {
            let mut now = Instant::now();
            let rate = MessageRate::default();
            for bytes in messages {
                prop_assert_eq!(rate.pause(now), Duration::ZERO);
                rate.take(bytes, now);
                now += RATE.period * units(bytes);
            }
        }
    }
}
