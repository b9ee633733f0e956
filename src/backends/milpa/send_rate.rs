//! The rate at which the node sends images and agent programs over its network, to cells on other
//! machines.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use kiyot_values::token_bucket::{Rate, TokenBucket};
use tokio::time::{Instant, sleep_until};

/// Bytes per token.
const TOKEN_BYTES: u64 = 1024;
/// Bursts per second: a burst has the tokens of a tenth of a second.
const BURSTS_PER_SECOND: u32 = 10;

/// A rate that all senders share.
#[derive(Debug)]
pub struct SendRate {
    /// `None` for no limit.
    rate: Option<Rate>,
    bucket: Mutex<TokenBucket>,
}

impl SendRate {
    /// Creates a rate in bytes a second, 0 for no limit.
    pub fn new(bytes_per_second: u64) -> Self {
        let tokens = u32::try_from(bytes_per_second / TOKEN_BYTES).unwrap_or(u32::MAX);
        let rate = (bytes_per_second > 0).then(|| Rate {
            burst: tokens / BURSTS_PER_SECOND,
            period: Duration::from_secs(1) / tokens.max(1),
        });
        Self { rate, bucket: Mutex::default() }
    }

    /// Waits until bytes may be sent. Calls are served in order.
    pub async fn ready(&self, bytes: usize) {
        let Some(rate) = self.rate else { return };
        let now = Instant::now();
        let pause = {
            let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
            bucket.take(tokens(bytes), rate, now);
            bucket.pause(rate, now)
        };
        if !pause.is_zero() {
            sleep_until(now + pause).await;
        }
    }
}

fn tokens(bytes: usize) -> u32 {
    u32::try_from((bytes as u64).div_ceil(TOKEN_BYTES)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures::future::join_all;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Verifies I22.
    #[tokio::test(start_paused = true)]
    async fn senders_together_keep_to_the_rate_and_share_it() {
        let rate = Arc::new(SendRate::new(8 * MIB));
        let begun = Instant::now();
        let senders = (0..50).map(|_| {
            let rate = Arc::clone(&rate);
            async move {
                for _ in 0..4 {
                    rate.ready(1 << 20).await;
                }
                begun.elapsed()
            }
        });
        let ended = join_all(senders).await;
        // 200 MiB at 8 MiB/s, but for the last burst, which is sent a tenth of a second early.
        let all = ended.iter().max().unwrap();
        assert!((24.5..25.5).contains(&all.as_secs_f32()), "{all:?}");
        let first = ended.iter().min().unwrap();
        assert!(*first > *all * 3 / 4, "no sender waits for all bytes of another: {first:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn rate_of_zero_is_no_limit() {
        let (rate, begun) = (SendRate::new(0), Instant::now());
        for _ in 0..100 {
            rate.ready(usize::MAX).await;
        }
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }
}
