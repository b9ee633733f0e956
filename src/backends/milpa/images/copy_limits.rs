//! Limits of copies to cells on other machines, which use the node's network.

use std::{future::Future, pin::pin, sync::Arc, time::Duration};

use tokio::{sync::Semaphore, time::timeout};

use crate::backends::milpa::send_rate::SendRate;

/// Most images copied at the same time in a lane.
const MAX_COPIES: usize = 4;
/// Time after which a copy gives up its turn and continues beside other copies, so that a slow
/// cell, perhaps a compromised one, delays other copies no longer.
const MAX_TURN: Duration = Duration::from_secs(30);

/// The queue in which a copy waits for its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lane {
    /// Images of containers, which may be large.
    Containers,
    /// The pause image: small, and no pod starts without it.
    Pause,
}

/// Limits of the copies to all cells.
#[derive(Debug)]
pub(super) struct CopyLimits {
    containers: Semaphore,
    pause: Semaphore,
    /// The rate shared by all copies and the downloads of agent programs.
    rate: Arc<SendRate>,
}

impl CopyLimits {
    pub(super) fn new(rate: Arc<SendRate>) -> Self {
        let [containers, pause] = [(); 2].map(|()| Semaphore::new(MAX_COPIES));
        Self { containers, pause, rate }
    }

    /// Runs a copy in its turn, which begins when few enough copies of its lane are under way.
    pub(super) async fn in_turn<T>(&self, lane: Lane, copy: impl Future<Output = T>) -> T {
        let turns = match lane {
            Lane::Containers => &self.containers,
            Lane::Pause => &self.pause,
        };
        // The semaphore is never closed.
        let turn = turns.acquire().await.ok();
        let mut copy = pin!(copy);
        if let Ok(outcome) = timeout(MAX_TURN, &mut copy).await {
            return outcome;
        }
        drop(turn);
        copy.await
    }

    /// Waits until bytes may be sent.
    pub(super) async fn ready(&self, bytes: usize) {
        self.rate.ready(bytes).await;
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use futures::future::join_all;
    use tokio::time::Instant;

    use super::*;

    /// Verifies I22.
    #[tokio::test(start_paused = true)]
    async fn copies_that_never_end_delay_others_by_one_turn() {
        let limits = Arc::new(CopyLimits::new(Arc::new(SendRate::new(1 << 20))));
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
