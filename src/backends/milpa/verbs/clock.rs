//! The node's clock, as records and answers have it.

use std::time::{SystemTime, UNIX_EPOCH};

/// Nanoseconds since 1970, as CRI has its times. Never 0, which means "not yet" there.
pub(super) fn now() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .ok()
        .and_then(|since| i64::try_from(since.as_nanos()).ok())
        .unwrap_or(1)
        .max(1)
}

/// The creation time of what comes after something that was created at `latest` (0: nothing): now,
/// or just after that, if the clock was set back since. The kubelet takes the latest sandbox and
/// the latest container of a name for the current one (`podSandboxByCreated`,
/// `containerStatusByCreated`).
pub(super) fn now_after(latest: i64) -> i64 {
    later(now(), latest)
}

fn later(now: i64, latest: i64) -> i64 {
    now.max(latest.saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_later_is_created_later_whatever_the_clock_says() {
        assert_eq!(later(100, 0), 100);
        assert_eq!(later(100, 99), 100);
        assert_eq!(later(100, 100), 101);
        // The clock was set back.
        assert_eq!(later(100, 5_000), 5_001);
        assert_eq!(later(1, i64::MAX), i64::MAX);
        assert!(now_after(now()) > 0);
    }
}
