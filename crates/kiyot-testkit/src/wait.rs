//! Waits until conditions hold.

use std::{env, fmt::Display, sync::LazyLock, time::Duration};

use tokio::time::{Instant, sleep, timeout};

/// Time that a test allows for an operation that a slow and loaded machine still completes.
pub const LIMIT: Duration = Duration::from_secs(120);

/// The variable with the factor by which this machine, such as an emulated machine, is slower.
const SLOWNESS: &str = "KIYOT_TEST_SLOWNESS";

/// Period of [`wait_until`].
const POLL_PERIOD: Duration = Duration::from_millis(20);

/// Scales a limit by the slowness of this machine.
pub fn allowed(limit: Duration) -> Duration {
    static FACTOR: LazyLock<u32> =
        LazyLock::new(|| env::var(SLOWNESS).ok().and_then(|text| text.parse().ok()).unwrap_or(1));
    limit * *FACTOR
}

/// Polls `probe` until it returns a value, and returns that.
///
/// # Panics
/// After `limit`, with `what` was waited for.
pub async fn wait_until<T>(
    what: impl Display,
    limit: Duration,
    probe: impl AsyncFnMut() -> Option<T>,
) -> T {
    poll_until(what, limit, POLL_PERIOD, probe).await
}

/// Polls a condition until it holds, for [`LIMIT`] at most.
///
/// # Panics
/// After [`LIMIT`], with `what` was waited for.
pub async fn wait_for(what: impl Display, mut holds: impl FnMut() -> bool) {
    wait_until(what, LIMIT, async || holds().then_some(())).await;
}

/// Polls with a period of its own, for measurements that need a shorter period than
/// [`wait_until`]'s.
///
/// # Panics
/// After `limit`, with `what` was waited for.
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
