//! Timers of the engine, by time.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::id::{CellId, SandboxId};

/// A timer; setting it again replaces it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    /// The retry of changes that could not be written.
    Rewrite,
    /// The deadline of an order.
    Deadline(SandboxId),
    /// The time until which a call must join an abandoned order.
    Abandoned(SandboxId),
    /// The pause of a cell before a retry.
    Retry(CellId),
    /// The next description of a terminated instance.
    Confirm(CellId),
    /// The expiry of the token of a launch without an answer.
    Token(CellId),
    /// The orphan timeout of a cell without contact.
    Orphan(CellId),
    /// The next check of silent cells.
    Health,
    /// The limit of a warm cell's launch, or of its age.
    Warm(CellId),
    /// The next attempt to fill the warm pools.
    Pools,
}

#[derive(Debug, Default)]
pub(super) struct Timers {
    by_time: BTreeSet<(Duration, Timer)>,
    times: BTreeMap<Timer, Duration>,
}

impl Timers {
    pub(super) fn set(&mut self, timer: Timer, at: Duration) {
        if let Some(before) = self.times.insert(timer.clone(), at) {
            self.by_time.remove(&(before, timer.clone()));
        }
        self.by_time.insert((at, timer));
    }

    /// Sets a timer unless it is set. Returns whether it was unset.
    pub(super) fn set_once(&mut self, timer: Timer, at: Duration) -> bool {
        let is_new = !self.times.contains_key(&timer);
        if is_new {
            self.set(timer, at);
        }
        is_new
    }

    /// Sets a timer unless it is set for an earlier time.
    pub(super) fn set_earlier(&mut self, timer: Timer, at: Duration) {
        if self.times.get(&timer).is_none_or(|before| at < *before) {
            self.set(timer, at);
        }
    }

    pub(super) fn clear(&mut self, timer: &Timer) {
        if let Some(at) = self.times.remove(timer) {
            self.by_time.remove(&(at, timer.clone()));
        }
    }

    pub(super) fn clear_cell(&mut self, cell: &CellId) {
        for timer in [Timer::Retry, Timer::Confirm, Timer::Token, Timer::Orphan, Timer::Warm] {
            self.clear(&timer(cell.clone()));
        }
    }

    /// Returns the time of the next timer.
    pub(super) fn next(&self) -> Option<Duration> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// Removes and returns a timer that is due.
    pub(super) fn pop_due(&mut self, now: Duration) -> Option<Timer> {
        let (at, _) = self.by_time.first()?;
        if *at > now {
            return None;
        }
        let (_, timer) = self.by_time.pop_first()?;
        self.times.remove(&timer);
        Some(timer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_fire_in_order_of_time_and_once() {
        let (first, second) = (CellId::mint().unwrap(), CellId::mint().unwrap());
        let mut timers = Timers::default();
        let at = Duration::from_secs;
        timers.set(Timer::Retry(first.clone()), at(9));
        timers.set(Timer::Retry(second.clone()), at(2));
        timers.set(Timer::Retry(first.clone()), at(1));
        assert!(!timers.set_once(Timer::Retry(first.clone()), at(7)));
        timers.set(Timer::Token(first.clone()), at(3));
        assert_eq!(timers.next(), Some(at(1)));
        assert_eq!(timers.pop_due(at(0)), None);
        assert_eq!(timers.pop_due(at(5)), Some(Timer::Retry(first.clone())));
        assert_eq!(timers.pop_due(at(5)), Some(Timer::Retry(second)));
        timers.clear_cell(&first);
        assert_eq!((timers.next(), timers.pop_due(at(99))), (None, None));
    }
}
