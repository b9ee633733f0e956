//! Limit on the silence of a cell's agent.

use kiyot_engine::request::HealthyTimeout;
use kiyot_values::problems::Field;

/// Reads seconds.
pub(super) fn healthy_timeout(field: Field<'_>) -> Option<HealthyTimeout> {
    field.read(
        &format!("whole seconds from 0 (never) to {max}", max = HealthyTimeout::MAX_SECS),
        |text| {
            let seconds = text.parse().ok()?;
            (seconds <= HealthyTimeout::MAX_SECS).then(|| HealthyTimeout::of_secs(seconds))
        },
    )
}
