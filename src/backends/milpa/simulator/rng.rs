//! Random decisions of a simulation.

use std::{cell::RefCell, rc::Rc, time::Duration};

/// A source of random decisions. Cheap to clone: all clones continue the same sequence.
#[derive(Debug, Clone)]
pub(super) struct Rng(Rc<RefCell<fastrand::Rng>>);

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        Self(Rc::new(RefCell::new(fastrand::Rng::with_seed(seed))))
    }

    /// Returns true once in `of` times.
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

    /// Returns a time with many short and few long values.
    pub(super) fn long_tailed(&self, usual: Duration, longest: Duration) -> Duration {
        if self.once_in(20) { self.between(usual, longest) } else { self.between(usual / 4, usual) }
    }

    pub(super) fn fill(&self, buffer: &mut [u8]) {
        self.0.borrow_mut().fill(buffer);
    }
}
