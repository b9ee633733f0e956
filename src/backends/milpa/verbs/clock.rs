//! The node's clock, as records and answers have it.

use std::time::{SystemTime, UNIX_EPOCH};

/// Nanoseconds since 1970, as CRI has its times. Never 0, which means "not yet" there.
pub(super) fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).ok().and_then(|since| i64::try_from(since.as_nanos()).ok()).unwrap_or(1).max(1)
}
