//! Clock of a machine of the cell's own, which follows the daemon's.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, Timespec, clock_settime};

/// Smallest difference at which the clock is set. Smaller differences come from the message's
/// delay.
const MIN_DIFFERENCE: Duration = Duration::from_secs(2);

/// Sets the machine's clock to the daemon's, in nanoseconds since 1970, if they differ by at least
/// `MIN_DIFFERENCE`. 0 means that the time is unknown.
pub fn follow(unix_nanos: i64) {
    let Some(time) = to_set(unix_nanos, SystemTime::now()) else { return };
    match clock_settime(ClockId::Realtime, time) {
        Ok(()) => tracing::info!(unix_secs = time.tv_sec, "clock set to the daemon's"),
        Err(error) => tracing::warn!(%error, "clock not set"),
    }
}

/// Returns the time to set, or `None` if the clock stays. `now` is the machine's time.
fn to_set(unix_nanos: i64, now: SystemTime) -> Option<Timespec> {
    let since = Duration::from_nanos(u64::try_from(unix_nanos).ok().filter(|nanos| *nanos > 0)?);
    let differs = match now.duration_since(UNIX_EPOCH) {
        Ok(now) => now.abs_diff(since) >= MIN_DIFFERENCE,
        Err(_) => true,
    };
    let tv_sec = i64::try_from(since.as_secs()).ok()?;
    differs.then(|| Timespec { tv_sec, tv_nsec: since.subsec_nanos().into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_is_set_if_it_differs_much() {
        let now = UNIX_EPOCH + Duration::from_secs(1000);
        let secs = |unix_nanos| to_set(unix_nanos, now).map(|time| (time.tv_sec, time.tv_nsec));
        assert_eq!(secs(1_001_000_000_000), None);
        assert_eq!(secs(1_002_000_000_005), Some((1002, 5)));
        assert_eq!(secs(998_000_000_000), Some((998, 0)));
        assert_eq!(secs(0), None);
        assert_eq!(secs(-1), None);
    }
}
