//! Limits of copies to cells on other machines, which leave the node by its network.

use std::{
    future::Future,
    pin::pin,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::Semaphore,
    time::{Instant, sleep_until, timeout},
};

use crate::token_bucket::{Rate, TokenBucket};

/// Most images of a lane that are copied at the same time.
const MAX_COPIES: usize = 4;
/// Time after which a copy goes on beside the others: a cell that takes its image slowly, as one
/// that was taken over may, delays no other for longer.
const MAX_TURN: Duration = Duration::from_secs(30);
/// Bytes of a token of the rate.
const TOKEN_BYTES: u64 = 1024;
/// Tokens that are sent at once: a tenth of a second's.
const BURSTS_PER_SECOND: u32 = 10;

/// The queue in which a copy waits for its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lane {
    /// Images of containers, which may be large.
    Containers,
    /// The pause image: small, and no pod starts without it.
    Pause,
}

/// Limits of the copies to all cells together.
#[derive(Debug)]
pub(super) struct CopyLimits {
    containers: Semaphore,
    pause: Semaphore,
    /// The rate of all copies; `None` for no limit.
    rate: Option<Rate>,
    bucket: Mutex<TokenBucket>,
}

impl CopyLimits {
    /// Creates limits of a rate in bytes a second, 0 for none.
    pub(super) fn new(bytes_per_second: u64) -> Self {
        let tokens = u32::try_from(bytes_per_second / TOKEN_BYTES).unwrap_or(u32::MAX);
        let rate = (bytes_per_second > 0).then(|| Rate {
            burst: tokens / BURSTS_PER_SECOND,
            period: Duration::from_secs(1) / tokens.max(1),
        });
        let [containers, pause] = [(); 2].map(|()| Semaphore::new(MAX_COPIES));
        Self { containers, pause, rate, bucket: Mutex::default() }
    }

    /// Runs a copy in its turn, which begins once few enough others of its lane are under way.
    pub(super) async fn in_turn<T>(&self, lane: Lane, copy: impl Future<Output = T>) -> T {
        let turns = match lane {
            Lane::Containers => &self.containers,
            Lane::Pause => &self.pause,
        };
        // Never closed.
        let turn = turns.acquire().await.ok();
        let mut copy = pin!(copy);
        if let Ok(outcome) = timeout(MAX_TURN, &mut copy).await {
            return outcome;
        }
        drop(turn);
        copy.await
    }

    /// Waits until bytes may be sent. Calls are served in their order.
    pub(super) async fn ready(&self, bytes: usize) {
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
    use std::{future::pending, sync::Arc};

    use futures::future::join_all;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Verifies I22.
    #[tokio::test(start_paused = true)]
    async fn copies_together_keep_to_the_rate_and_share_it() {
        let limits = Arc::new(CopyLimits::new(8 * MIB));
        let begun = Instant::now();
        let copies = (0..50).map(|_| {
            let limits = Arc::clone(&limits);
            async move {
                for _ in 0..4 {
                    limits.ready(1 << 20).await;
                }
                begun.elapsed()
            }
        });
        let ended = join_all(copies).await;
        // 200 MiB, of which the last are sent a tenth of a second before they are paid for.
        let all = ended.iter().max().unwrap();
        assert!((24.5..25.5).contains(&all.as_secs_f32()), "{all:?}");
        let first = ended.iter().min().unwrap();
        assert!(*first > *all * 3 / 4, "none waits for the whole image of another: {first:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn rate_of_zero_is_no_limit() {
        let (limits, begun) = (CopyLimits::new(0), Instant::now());
        for _ in 0..100 {
            limits.ready(usize::MAX).await;
        }
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }

    /// Verifies I22.
    #[tokio::test(start_paused = true)]
    async fn copies_that_never_end_delay_others_by_one_turn() {
        let limits = Arc::new(CopyLimits::new(MIB));
        for _ in 0..MAX_COPIES {
            let limits = Arc::clone(&limits);
            tokio::spawn(async move { limits.in_turn(Lane::Pause, pending::<()>()).await });
        }
        tokio::task::yield_now().await;
        let begun = Instant::now();
        let both = (0..2).map(|_| limits.in_turn(Lane::Pause, async { begun.elapsed() }));
        assert_eq!(join_all(both).await, [MAX_TURN; 2]);
    }
}
