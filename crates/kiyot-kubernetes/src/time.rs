//! Times in the form of the Kubernetes API.

use jiff::Timestamp;

/// Returns a time with milliseconds; `None` for 0.
pub(crate) fn optional(unix_nanos: i64) -> Option<String> {
    let time = Timestamp::from_nanosecond(i128::from(unix_nanos)).ok()?;
    (unix_nanos > 0).then(|| format!("{time:.3}"))
}

/// Returns a time in whole seconds, in the form of `metav1.Time`.
pub(crate) fn seconds(unix_nanos: i64) -> String {
    let time = Timestamp::from_nanosecond(i128::from(unix_nanos)).unwrap_or_default();
    format!("{time:.0}")
}

/// Returns the current time, in nanoseconds since 1970.
pub(crate) fn now() -> i64 {
    i64::try_from(Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_the_form_of_the_api() {
        let nanos = 1_795_661_275_987_654_321;
        assert_eq!(seconds(nanos), "2026-11-26T02:47:55Z");
        assert_eq!(optional(nanos).as_deref(), Some("2026-11-26T02:47:55.987Z"));
        assert_eq!(optional(0), None);
    }
}
