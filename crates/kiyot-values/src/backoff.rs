//! Pauses that grow with each failure.

use std::time::Duration;

/// Bounds the doublings of a pause.
const MAX_DOUBLINGS: u32 = 10;

/// Returns a pause after `doublings` doublings, at most `most`.
pub fn doubled(first: Duration, doublings: u32, most: Duration) -> Duration {
    first.saturating_mul(1 << doublings.min(MAX_DOUBLINGS)).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_doubles_up_to_its_bounds() {
        let (first, most) = (Duration::from_secs(2), Duration::from_secs(300));
        let seconds = |doublings| doubled(first, doublings, most).as_secs();
        assert_eq!([0, 1, 2, 7, 8, 40].map(seconds), [2, 4, 8, 256, 300, 300]);
        // A short first pause is doubled ten times.
        assert_eq!(doubled(Duration::from_millis(1), u32::MAX, most).as_millis(), 1024);
        assert_eq!(doubled(Duration::MAX, 5, most), most);
    }
}
