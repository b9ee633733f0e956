//! Exponential backoff with jitter.

use std::time::Duration;

use ring::rand::{SecureRandom, SystemRandom};

/// Delay after the first failure.
const INITIAL_DELAY: Duration = Duration::from_millis(50);

/// Upper bound on the delay.
const MAX_DELAY: Duration = Duration::from_secs(2);

/// Delays that double, each shortened at random by up to a half, so that the cells of a node don't
/// reconnect at the same moment.
#[derive(Debug)]
pub(super) struct Backoff {
    next: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { next: INITIAL_DELAY }
    }
}

impl Backoff {
    pub(super) async fn wait(&mut self) {
        tokio::time::sleep(self.next_delay()).await;
    }

    /// Starts again with [`INITIAL_DELAY`].
    pub(super) fn reset(&mut self) {
        self.next = INITIAL_DELAY;
    }

    fn next_delay(&mut self) -> Duration {
        let full = self.next;
        self.next = (full * 2).min(MAX_DELAY);
        let mut random = [0_u8; 1];
        // Without random bytes there is no jitter.
        let _ = SystemRandom::new().fill(&mut random);
        full - full * u32::from(random[0]) / 512
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_maximum() {
        let mut backoff = Backoff::default();
        let mut max = INITIAL_DELAY;
        for _ in 0..20 {
            let wait = backoff.next_delay();
            assert!(wait <= max && wait >= max / 2, "{wait:?} of {max:?}");
            max = (max * 2).min(MAX_DELAY);
        }
        backoff.reset();
        assert!(backoff.next_delay() <= INITIAL_DELAY);
    }
}
