//! Waits for conditions.

use std::{env, fmt::Display, sync::LazyLock, time::Duration};

use tokio::time::{Instant, sleep, timeout};

/// Time limit for an operation of a test, long enough for a slow and loaded machine.
pub const LIMIT: Duration = Duration::from_secs(120);

/// The variable with the factor by which this machine is slower, such as an emulated machine.
const SLOWNESS: &str = "KIYOT_TEST_SLOWNESS";

/// Period of [`wait_until`].
const POLL_PERIOD: Duration = Duration::from_millis(20);

/// Scales a limit by the slowness of this machine.
pub fn allowed(limit: Duration) -> Duration {
    static FACTOR: LazyLock<u32> =
        LazyLock::new(|| env::var(SLOWNESS).ok().and_then(|text| text.parse().ok()).unwrap_or(1));
    limit * *FACTOR
}

/// Polls `probe` until it returns a value, and returns the value.
///
/// # Panics
/// After `limit`. `what` names the condition.
pub async fn wait_until<T>(
    what: impl Display,
    limit: Duration,
    probe: impl AsyncFnMut() -> Option<T>,
) -> T {
    poll_until(what, limit, POLL_PERIOD, probe).await
}

/// Polls a condition until it holds, for at most [`LIMIT`].
///
/// # Panics
/// After [`LIMIT`]. `what` names the condition.
pub async fn wait_for(what: impl Display, mut holds: impl FnMut() -> bool) {
    wait_until(what, LIMIT, async || holds().then_some(())).await;
}

/// Polls with its own period, for measurements that need a shorter period than [`wait_until`] has.
///
/// # Panics
/// After `limit`. `what` names the condition.
pub async fn poll_until<T>(
    what: impl Display,
    limit: Duration,
    period: Duration,
    mut probe: impl AsyncFnMut() -> Option<T>,
) -> T {
    let (begun, limit) = (Instant::now(), allowed(limit));
    loop {
        let left = limit.saturating_sub(begun.elapsed());
        match timeout(left, probe()).await {
            Ok(Some(found)) => return found,
            Ok(None) if begun.elapsed() < limit => sleep(period).await,
            _ => panic!("waited {limit:?} in vain until {what}"),
        }
    }
}
