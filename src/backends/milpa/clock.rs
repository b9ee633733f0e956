//! The node's clock, in the unit of records and responses.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the nanoseconds since 1970, the unit of CRI's times. Never 0, which means "not yet".
pub(crate) fn now() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .ok()
        .and_then(|since| i64::try_from(since.as_nanos()).ok())
        .unwrap_or(1)
        .max(1)
}

/// Returns a creation time after `latest`: now, or just after `latest` if the clock was set back
/// since. The kubelet treats the latest sandbox of a pod and the latest container of a name as
/// current (`podSandboxByCreated`, `containerStatusByCreated`).
pub(crate) fn now_after(latest: i64) -> i64 {
    later(now(), latest)
}

fn later(now: i64, latest: i64) -> i64 {
    now.max(latest.saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn creation_time_grows_even_if_the_clock_is_set_back() {
        assert_eq!(later(100, 0), 100);
        assert_eq!(later(100, 99), 100);
        assert_eq!(later(100, 100), 101);
        // The clock was set back.
        assert_eq!(later(100, 5_000), 5_001);
        assert_eq!(later(1, i64::MAX), i64::MAX);
        assert!(now_after(now()) > 0);
    }
}
