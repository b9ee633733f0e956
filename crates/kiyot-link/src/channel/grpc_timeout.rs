//! Parser of the header `grpc-timeout`.

use std::time::Duration;

use http::HeaderMap;

/// The longest timeout. A longer one is shortened, so that adding it to an instant can't overflow.
const MAX_TIMEOUT: Duration = Duration::from_secs(366 * 24 * 3600);

/// Returns the timeout of a call, or `None` unless its header has gRPC's form: at most 8 digits and
/// a unit.
pub(super) fn parse(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let unit = text.chars().last()?;
    let digits = text.strip_suffix(unit)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    let duration = match unit {
        'H' => Duration::from_secs(number * 3600),
        'M' => Duration::from_secs(number * 60),
        'S' => Duration::from_secs(number),
        'm' => Duration::from_millis(number),
        'u' => Duration::from_micros(number),
        'n' => Duration::from_nanos(number),
        _ => return None,
    };
    Some(duration.min(MAX_TIMEOUT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_timeout_is_parsed_as_grpc_defines_it() {
        let parse = |text: &str| {
            parse(&HeaderMap::from_iter([(
                http::header::HeaderName::from_static("grpc-timeout"),
                text.parse().unwrap(),
            )]))
        };
        assert_eq!(parse("5S"), Some(Duration::from_secs(5)));
        assert_eq!(parse("1500m"), Some(Duration::from_millis(1500)));
        assert_eq!(parse("20000000u"), Some(Duration::from_secs(20)));
        assert_eq!(parse("99999999n"), Some(Duration::from_nanos(99_999_999)));
        assert_eq!(parse("2M"), Some(Duration::from_secs(120)));
        assert_eq!(parse("99999999H"), Some(MAX_TIMEOUT));
        for wrong in ["", "S", "5", "5s", "-5S", "123456789S", "5 S", "+5S"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
