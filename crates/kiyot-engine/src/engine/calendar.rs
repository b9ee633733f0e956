//! The date on which costs are counted.

use std::time::Duration;

use jiff::civil::Date;
use kiyot_values::spending::{date_of, midnight};

use crate::engine::Now;

/// The date on which costs are counted, in UTC. The date never goes back: setting the clock back
/// does not begin an earlier day again.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Calendar {
    date: Date,
    /// The start of the date here: the time since midnight, and the time by [`Now::boot`].
    begun: (Duration, Duration),
}

impl Calendar {
    /// Begins a date if it is later than the current date.
    pub(super) fn reach(&mut self, date: Date, now: Now) {
        if date > self.date {
            let since_midnight = now.unix.saturating_sub(midnight(date));
            *self = Self { date, begun: (since_midnight, now.boot) };
        }
    }

    /// Begins the date of the clock if it is later than the current date.
    pub(super) fn advance(&mut self, now: Now) {
        self.reach(date_of(now.unix), now);
    }

    pub(super) fn date(&self) -> Date {
        self.date
    }

    /// Returns the time since the start of the day and of the month.
    pub(super) fn elapsed(&self, now: Now) -> (Duration, Duration) {
        let (since_midnight, began) = self.begun;
        let day = since_midnight + now.boot.saturating_sub(began);
        let days = self.date.day().saturating_sub(1).unsigned_abs();
        (day, day + Duration::from_hours(24) * days.into())
    }
}
