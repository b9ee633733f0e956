//! Wait for devices, which the kernel finds in the background.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Time within which the kernel finds all devices.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
/// Interval of the search.
const INTERVAL: Duration = Duration::from_millis(5);

/// Repeats a search until it returns a value. The argument of the last search is true: it returns
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
