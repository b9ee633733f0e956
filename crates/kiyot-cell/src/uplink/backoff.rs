//! How long to wait before the next attempt.

use std::time::Duration;

use ring::rand::{SecureRandom, SystemRandom};

/// The first wait.
const INITIAL_DELAY: Duration = Duration::from_millis(50);

/// The longest wait.
const MAX_DELAY: Duration = Duration::from_secs(2);

/// Waits that double, each shortened at random by up to a half, so that the cells of a node don't
/// come all at once.
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
        tokio::time::sleep(self.step()).await;
    }

    /// After a success.
    pub(super) fn reset(&mut self) {
        self.next = INITIAL_DELAY;
    }

    fn step(&mut self) -> Duration {
        let whole = self.next;
        self.next = (whole * 2).min(MAX_DELAY);
        let mut random = [0_u8; 1];
        // Without randomness the waits are merely equal.
        let _ = SystemRandom::new().fill(&mut random);
        whole - whole * u32::from(random[0]) / 512
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_a_bound() {
        let mut backoff = Backoff::default();
        let mut most = INITIAL_DELAY;
        for _ in 0..20 {
            let wait = backoff.step();
            assert!(wait <= most && wait >= most / 2, "{wait:?} of {most:?}");
            most = (most * 2).min(MAX_DELAY);
        }
        backoff.reset();
        assert!(backoff.step() <= INITIAL_DELAY);
    }
}
