//! The rate at which an agent's messages are read.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, sleep_until};

/// The time in which a unit of messages may be read: 1,000 units in a second. An agent reports the
/// growth of logs every 2 ms at most, and other changes less often.
const UNIT: Duration = Duration::from_millis(1);
/// The units that may be read at once after a pause.
const BURST: u32 = 2000;
/// The bytes that count as a unit, beside the unit of each message.
const UNIT_BYTES: usize = 4096;

/// A limit on the rate of a cell's messages, as a token bucket. The frames of an agent that sends
/// more are not read until the bucket has a token, so that the agent has to wait.
#[derive(Debug)]
pub(super) struct MessageRate {
    /// The time at which the bucket is full.
    full_at: Mutex<Instant>,
}

impl MessageRate {
    /// Creates a limit with a full bucket.
    pub(super) fn new(now: Instant) -> Self {
        Self { full_at: Mutex::new(now) }
    }

    /// Waits until the next message may be read.
    pub(super) async fn ready(&self) {
        let now = Instant::now();
        let pause = self.pause(now);
        if !pause.is_zero() {
            sleep_until(now + pause).await;
        }
    }

    /// Takes the units of a message that was read.
    pub(super) fn take(&self, bytes: usize, now: Instant) {
        let mut full_at = self.full_at();
        *full_at = (*full_at).max(now) + UNIT * units(bytes);
    }

    /// Returns the time until the next message may be read.
    fn pause(&self, now: Instant) -> Duration {
        self.full_at().saturating_duration_since(now).saturating_sub(UNIT * BURST)
    }

    fn full_at(&self) -> MutexGuard<'_, Instant> {
        self.full_at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the units of a message.
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
            let rate = MessageRate::new(now);
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
                    let allowed = UNIT * BURST + (*end - *begin);
                    prop_assert!(UNIT * before <= allowed);
                    before += units;
                }
            }
        }

        /// Verifies L27.
        #[test]
        fn agent_below_the_rate_never_waits(messages in vec(0..20 * UNIT_BYTES, 1..200)) {
            let mut now = Instant::now();
            let rate = MessageRate::new(now);
            for bytes in messages {
                prop_assert_eq!(rate.pause(now), Duration::ZERO);
                rate.take(bytes, now);
                now += UNIT * units(bytes);
            }
        }
    }
}
