//! Time limit of a cell's bad health.

use std::time::Duration;

use crate::problems::Field;

/// Longest timeout, in seconds: a week.
const MAX_HEALTHY_TIMEOUT_SECS: u64 = 7 * 24 * 60 * 60;

/// Time that a cell may be unhealthy before its pod's containers are reported failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthyTimeout {
    /// No limit.
    Never,
    /// This time.
    After(Duration),
}

/// Reads seconds.
pub(super) fn healthy_timeout(field: Field<'_>) -> Option<HealthyTimeout> {
    field.read(&format!("whole seconds from 0 (never) to {MAX_HEALTHY_TIMEOUT_SECS}"), |text| {
        match text.parse().ok()? {
            0 => Some(HealthyTimeout::Never),
            seconds => (seconds <= MAX_HEALTHY_TIMEOUT_SECS)
                .then_some(HealthyTimeout::After(Duration::from_secs(seconds))),
        }
    })
}
