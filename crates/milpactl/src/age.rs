//! Ages and times as kubectl shows them.

use jiff::Timestamp;

const NANOS: i64 = 1_000_000_000;

/// Returns a time in nanoseconds since 1970 as RFC 3339; empty for 0, which means "not yet".
pub(crate) fn time(unix_nanos: i64) -> String {
    if unix_nanos == 0 {
        return String::new();
    }
    let time = Timestamp::from_nanosecond(i128::from(unix_nanos));
    time.map(|time| time.to_string()).unwrap_or_default()
}

/// Returns the current time in nanoseconds since 1970.
pub(crate) fn now() -> i64 {
    i64::try_from(Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX)
}

/// Returns an age such as `12s`, `3m4s` or `5d`, as kubectl does (`HumanDuration` of
/// apimachinery); `<unknown>` for a time that is 0.
pub(crate) fn age(unix_nanos: i64, now: i64) -> String {
    if unix_nanos == 0 {
        return "<unknown>".to_owned();
    }
    human(now.saturating_sub(unix_nanos).max(0) / NANOS)
}

fn human(seconds: i64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    let with = |whole: i64, unit: &str, part: i64, part_unit: &str| match part {
        0 => format!("{whole}{unit}"),
        _ => format!("{whole}{unit}{part}{part_unit}"),
    };
    match seconds {
        ..120 => format!("{seconds}s"),
        120..600 => with(minutes, "m", seconds % 60, "s"),
        600..10_800 => format!("{minutes}m"),
        10_800..28_800 => with(hours, "h", minutes % 60, "m"),
        28_800..172_800 => format!("{hours}h"),
        172_800..691_200 => with(days, "d", hours % 24, "h"),
        691_200..63_072_000 => format!("{days}d"),
        63_072_000..252_288_000 => with(days / 365, "y", days % 365, "d"),
        _ => format!("{}y", days / 365),
    }
}

/// Reads the time of `--since`: a duration before now, such as `10m`, or a time in RFC 3339.
pub(crate) fn since(text: &str, now: i64) -> Result<i64, String> {
    if let Ok(time) = text.parse::<Timestamp>() {
        return Ok(i64::try_from(time.as_nanosecond()).unwrap_or_default().max(1));
    }
    let duration = text.parse::<jiff::SignedDuration>().ok();
    let nanos = duration.and_then(|duration| i64::try_from(duration.as_nanos()).ok());
    match nanos.filter(|nanos| *nanos >= 0) {
        Some(nanos) => Ok(now.saturating_sub(nanos).max(1)),
        None => Err(format!(
            "since {text:?} is invalid; allowed: a duration such as 10m, or a time such as \
             2026-01-31T10:00:00Z"
        )),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn age_has_the_units_of_kubectl() {
        let day = 86_400;
        for (seconds, expected) in [
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (183, "3m3s"),
            (600, "10m"),
            (10_800, "3h"),
            (11_220, "3h7m"),
            (28_800, "8h"),
            (2 * day, "2d"),
            (2 * day + 3600, "2d1h"),
            (8 * day, "8d"),
            (2 * 365 * day, "2y"),
            (9 * 365 * day, "9y"),
        ] {
            assert_eq!(age(1, 1 + seconds * NANOS), expected, "{seconds} s");
        }
        assert_eq!(age(0, 5), "<unknown>");
        assert_eq!(age(10, 5), "0s", "a clock that was set back");
    }

    #[test]
    fn since_is_a_duration_or_a_time() {
        assert_eq!(since("10m", 601 * NANOS), Ok(NANOS));
        assert_eq!(since("1970-01-01T00:00:05Z", 0), Ok(5 * NANOS));
        assert!(since("yesterday", 0).unwrap_err().contains("\"yesterday\" is invalid"));
        since("-5m", 0).unwrap_err();
    }

    proptest! {
        #[test]
        fn age_below_two_minutes_is_in_seconds(seconds in 0..119_i64) {
            prop_assert_eq!(age(1, 1 + seconds * NANOS), format!("{seconds}s"));
        }

        #[test]
        fn any_time_has_a_text(nanos: i64, now: i64) {
            let _ = (age(nanos, now), time(nanos));
        }
    }
}
