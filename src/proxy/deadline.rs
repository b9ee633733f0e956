//! The deadline of a call, from its `grpc-timeout` (up to eight digits and a unit).

use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::time::timeout_at;
use tonic::Status;

const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");
/// The largest number of eight digits.
const MAX_TIMEOUT_NUMBER: u128 = 99_999_999;
/// Elapsed time from which a call's header is rewritten. Forwarding usually takes less and rewrites
/// nothing.
const MIN_REWRITE_ELAPSED: Duration = Duration::from_millis(1);

/// A call's timeout and the time at which it began.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline {
    began: Instant,
    timeout: Option<Duration>,
}

impl Deadline {
    /// Reads the timeout of a call that begins now.
    pub(super) fn from_headers(headers: &HeaderMap) -> Self {
        Self {
            began: Instant::now(),
            timeout: headers.get(GRPC_TIMEOUT).and_then(|value| parse(value.as_bytes())),
        }
    }

    /// Returns the time at which the call fails; `None` without a timeout.
    pub(super) fn instant(&self) -> Option<Instant> {
        self.timeout.and_then(|timeout| self.began.checked_add(timeout))
    }

    /// Drives `work` until it completes or the deadline passes.
    pub(super) async fn limit<F: Future>(self, work: F) -> Result<F::Output, Status> {
        match self.instant() {
            Some(deadline) => {
                let late = "the node did not answer before the deadline";
                timeout_at(deadline.into(), work).await.map_err(|_| Status::deadline_exceeded(late))
            }
            None => Ok(work.await),
        }
    }

    /// Writes the remaining time to the header, for the next server.
    pub(super) fn write_remaining(&self, headers: &mut HeaderMap) {
        let (Some(timeout), elapsed) = (self.timeout, self.began.elapsed()) else { return };
        if elapsed >= MIN_REWRITE_ELAPSED {
            headers.insert(GRPC_TIMEOUT, format(timeout.saturating_sub(elapsed)));
        }
    }
}

fn parse(value: &[u8]) -> Option<Duration> {
    let (unit, digits) = value.split_last()?;
    if digits.is_empty() || digits.len() > 8 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number: u64 = str::from_utf8(digits).ok()?.parse().ok()?;
    match unit {
        b'H' => Some(Duration::from_secs(number * 3600)),
        b'M' => Some(Duration::from_secs(number * 60)),
        b'S' => Some(Duration::from_secs(number)),
        b'm' => Some(Duration::from_millis(number)),
        b'u' => Some(Duration::from_micros(number)),
        b'n' => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

/// Formats a timeout in the finest unit that has room for it, rounded up, as grpc-go does.
fn format(timeout: Duration) -> HeaderValue {
    let nanos = timeout.as_nanos();
    let units = [
        (1, 'n'),
        (1_000, 'u'),
        (1_000_000, 'm'),
        (1_000_000_000, 'S'),
        (60_000_000_000, 'M'),
        (3_600_000_000_000, 'H'),
    ];
    let (number, unit) = units
        .into_iter()
        .map(|(size, unit)| (nanos.div_ceil(size), unit))
        .find(|(number, _)| *number <= MAX_TIMEOUT_NUMBER)
        .unwrap_or((MAX_TIMEOUT_NUMBER, 'H'));
    HeaderValue::try_from(format!("{number}{unit}"))
        .unwrap_or(HeaderValue::from_static("99999999H"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn timeout_needs_up_to_eight_digits_and_a_known_unit() {
        assert_eq!(parse(b"2H"), Some(Duration::from_secs(7200)));
        assert_eq!(parse(b"1000m"), Some(Duration::from_secs(1)));
        for bad in ["", "S", "1", "1s", "123456789S", "-1S", "1.5S", " 1S"] {
            assert_eq!(parse(bad.as_bytes()), None, "{bad:?}");
        }
    }

    #[test]
    fn header_of_a_new_call_keeps_its_bytes() {
        let mut headers = HeaderMap::new();
        headers.insert(GRPC_TIMEOUT, HeaderValue::from_static("007S"));
        let deadline = Deadline {
            began: Instant::now() + Duration::from_secs(3600),
            timeout: Some(Duration::from_secs(7)),
        };
        deadline.write_remaining(&mut headers);
        assert_eq!(headers[GRPC_TIMEOUT], "007S");
    }

    #[test]
    fn elapsed_time_is_subtracted_from_the_header() {
        let mut headers = HeaderMap::new();
        headers.insert(GRPC_TIMEOUT, HeaderValue::from_static("100S"));
        let Some(began) = Instant::now().checked_sub(Duration::from_millis(40)) else { return };
        Deadline { began, timeout: Some(Duration::from_secs(100)) }.write_remaining(&mut headers);
        let left = parse(headers[GRPC_TIMEOUT].as_bytes()).unwrap();
        assert!(left <= Duration::from_millis(99_960), "{left:?}");
    }

    proptest! {
        #[test]
        fn formatted_timeout_is_never_shorter(nanos in any::<u64>()) {
            let timeout = Duration::from_nanos(nanos);
            let back = parse(format(timeout).as_bytes()).unwrap();
            prop_assert!(back >= timeout);
            let rounded_up = back.as_nanos() - timeout.as_nanos();
            prop_assert!(rounded_up <= (timeout.as_nanos() / 1_000).max(1));
        }

        #[test]
        fn random_header_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..12)) {
            let _ = parse(&bytes);
        }
    }
}
