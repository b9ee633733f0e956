//! Waiting for what must come true.

use std::{env, fmt::Display, sync::LazyLock, time::Duration};

use tokio::time::{Instant, sleep, timeout};

/// How long a test waits for what a slow and loaded machine still does in time.
pub const LIMIT: Duration = Duration::from_secs(90);

/// The variable that says how many times slower than others this machine is: an emulated one.
const SLOWNESS: &str = "KIYOT_TEST_SLOWNESS";

/// Returns how long something may take on this machine that may take so long on others.
pub fn allowed(limit: Duration) -> Duration {
    static FACTOR: LazyLock<u32> =
        LazyLock::new(|| env::var(SLOWNESS).ok().and_then(|text| text.parse().ok()).unwrap_or(1));
    limit * *FACTOR
}

/// Between two looks at what is waited for.
const POLL: Duration = Duration::from_millis(20);

/// Asks `probe` until it answers with something, and gives that. The one place of the tests that
/// sleeps.
///
/// # Panics
/// After `limit`, naming `what` was waited for.
pub async fn wait_until<T>(
    what: impl Display,
    limit: Duration,
    mut probe: impl AsyncFnMut() -> Option<T>,
) -> T {
    let (begun, limit) = (Instant::now(), allowed(limit));
    loop {
        let left = limit.saturating_sub(begun.elapsed());
        match timeout(left, probe()).await {
            Ok(Some(found)) => return found,
            Ok(None) if begun.elapsed() < limit => sleep(POLL).await,
            _ => panic!("waited {limit:?} in vain until {what}"),
        }
    }
}
