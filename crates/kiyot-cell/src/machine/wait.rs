//! The wait for devices, which the kernel finds in its own time.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Time within which the kernel finds all devices.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
/// Interval of the search.
const INTERVAL: Duration = Duration::from_millis(5);

/// Searches until something is found. The search is told when it is the last one, and then returns
/// an error instead of `None`.
pub(crate) fn until<T, E>(mut search: impl FnMut(bool) -> Result<Option<T>, E>) -> Result<T, E> {
    let begin = Instant::now();
    loop {
        if let Some(found) = search(begin.elapsed() > LIMIT)? {
            return Ok(found);
        }
        thread::sleep(INTERVAL);
    }
}
