//! Random decisions of a simulation.

use std::{cell::RefCell, rc::Rc, time::Duration};

/// The unit of probabilities.
const PPM: u64 = 1_000_000;

/// A distribution of times by its quantiles: probabilities in parts per million, and milliseconds.
/// Times between two quantiles are equally likely. It uses only integers, so that every machine
/// draws the same times.
#[derive(Debug, Clone, Copy)]
pub(super) struct Quantiles([(u64, u64); 5]);

impl Quantiles {
    /// Returns a distribution of boot times by their median, at most an hour long.
    pub(super) fn of_boots(median: Duration) -> Self {
        let median = u64::try_from(median.as_millis()).unwrap_or(u64::MAX).min(3_600_000);
        let part = |percent: u64| median * percent / 100;
        Self([
            (0, part(60)),
            (PPM / 2, median),
            (PPM / 10 * 9, part(150)),
            (PPM / 100 * 99, part(250)),
            (PPM, part(500)),
        ])
    }

    /// Returns a distribution by its shortest time, median, 90th and 99th percentile, and longest
    /// time, in seconds.
    pub(super) const fn new(least: u64, p50: u64, p90: u64, p99: u64, most: u64) -> Self {
        Self([
            (0, least * 1000),
            (PPM / 2, p50 * 1000),
            (PPM / 10 * 9, p90 * 1000),
            (PPM / 100 * 99, p99 * 1000),
            (PPM, most * 1000),
        ])
    }
}

/// A source of random decisions. Cheap to clone: all clones share a sequence.
#[derive(Debug, Clone)]
pub(super) struct Rng(Rc<RefCell<fastrand::Rng>>);

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        Self(Rc::new(RefCell::new(fastrand::Rng::with_seed(seed))))
    }

    /// Returns true once in `of` times on average.
    pub(super) fn once_in(&self, of: u32) -> bool {
        of != 0 && self.0.borrow_mut().u32(0..of) == 0
    }

    pub(super) fn between(&self, least: Duration, most: Duration) -> Duration {
        let least = u64::try_from(least.as_millis()).unwrap_or(u64::MAX);
        let most = u64::try_from(most.as_millis()).unwrap_or(u64::MAX);
        Duration::from_millis(self.0.borrow_mut().u64(least..=most.max(least)))
    }

    pub(super) fn seconds(&self, least: u64, most: u64) -> Duration {
        self.between(Duration::from_secs(least), Duration::from_secs(most))
    }

    pub(super) fn millis(&self, least: u64, most: u64) -> Duration {
        self.between(Duration::from_millis(least), Duration::from_millis(most))
    }

    /// Returns a time, mostly short and rarely long.
    pub(super) fn long_tailed(&self, usual: Duration, longest: Duration) -> Duration {
        if self.once_in(20) { self.between(usual, longest) } else { self.between(usual / 4, usual) }
    }

    /// Returns a random time of a distribution.
    pub(super) fn time_of(&self, distribution: &Quantiles) -> Duration {
        let draw = self.0.borrow_mut().u64(0..PPM);
        let mut lower = (0, 0);
        for &upper in &distribution.0 {
            if draw < upper.0 {
                let (width, height) = (upper.0 - lower.0, upper.1 - lower.1);
                let above = height * (draw - lower.0) / width;
                return Duration::from_millis(lower.1 + above);
            }
            lower = upper;
        }
        Duration::from_millis(lower.1)
    }

    /// Returns a number from 0 up to, but not including, a limit.
    pub(super) fn below(&self, limit: usize) -> usize {
        self.0.borrow_mut().usize(0..limit.max(1))
    }

    pub(super) fn shuffle<T>(&self, values: &mut [T]) {
        self.0.borrow_mut().shuffle(values);
    }

    pub(super) fn fill(&self, buffer: &mut [u8]) {
        self.0.borrow_mut().fill(buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_a_distribution_have_its_quantiles() {
        let distribution = Quantiles::new(10, 20, 40, 100, 200);
        let rng = Rng::new(1);
        let mut times: Vec<_> = (0..10_000).map(|_| rng.time_of(&distribution)).collect();
        times.sort();
        let is_about = |permille: usize, seconds: u64| {
            let time = times[(permille * 10).min(times.len() - 1)].as_secs_f64();
            (time / seconds as f64 - 1.0).abs() < 0.1
        };
        assert!(is_about(0, 10) && is_about(500, 20) && is_about(900, 40), "{:?}", times[9000]);
        assert!(is_about(990, 100) && is_about(1000, 200), "{:?}", times[9900]);
    }
}
