//! Time within which a cell should start.

use std::{ops::RangeInclusive, time::Duration};

use kiyot_values::problems::Field;

/// Range of the time, in seconds.
const RANGE_SECS: RangeInclusive<u64> = 1..=3600;

/// Reads a number of seconds, minutes or hours.
pub(super) fn start_within(field: Field<'_>) -> Option<Duration> {
    let allowed = "a whole number of \"s\", \"m\" or \"h\" from \"1s\" to \"1h\", such as \"10s\"";
    field.read(allowed, |text| {
        let (unit, seconds) = [("s", 1), ("m", 60), ("h", 3600)]
            .into_iter()
            .find(|(unit, _)| text.ends_with(unit))?;
        let number = text.strip_suffix(unit)?;
        let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
        let number = number.parse::<u64>().ok().filter(|_| is_number)?;
        let seconds = number.checked_mul(seconds).filter(|it| RANGE_SECS.contains(it))?;
        Some(Duration::from_secs(seconds))
    })
}
