//! Costs of a day and of a month.

use std::{fmt, time::Duration};

use jiff::{Timestamp, ToSpan, civil::Date, tz::TimeZone};

use crate::price::Cost;

/// The cost of a day, and of its month up to that day. Dates are in UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Spending {
    /// The date.
    pub date: Date,
    /// The cost of the day.
    pub day: Cost,
    /// The cost of the month.
    pub month: Cost,
}

impl Spending {
    /// Returns the costs that count on a date. The costs of a later date are unchanged.
    #[must_use]
    pub fn on(self, date: Date) -> Self {
        if date <= self.date {
            return self;
        }
        let is_month = date.first_of_month() == self.date.first_of_month();
        let month = if is_month { self.month } else { Cost::default() };
        Self { date, day: Cost::default(), month }
    }

    /// Adds the costs of `other` that count on the date of this one.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        let other = other.on(self.date);
        Self { day: self.day + other.day, month: self.month + other.month, ..self }
    }

    /// Adds the costs of `others` that count on the date of this one.
    #[must_use]
    pub fn plus_all<'s>(self, others: impl IntoIterator<Item = &'s Self>) -> Self {
        others.into_iter().fold(self, |sum, other| sum.plus(*other))
    }

    /// Returns by how much the costs exceed those of `other` on the date of this one.
    #[must_use]
    pub fn beyond(self, other: Self) -> Self {
        let other = other.on(self.date);
        let beyond =
            |own: Cost, other: Cost| Cost::from_micros(own.micros().saturating_sub(other.micros()));
        Self { day: beyond(self.day, other.day), month: beyond(self.month, other.month), ..self }
    }

    /// Returns the cost of a period.
    pub fn of(self, period: Period) -> Cost {
        match period {
            Period::Day => self.day,
            Period::Month => self.month,
        }
    }
}

/// Returns the date of a time since 1970.
pub fn date_of(unix: Duration) -> Date {
    let second = i64::try_from(unix.as_secs()).unwrap_or(i64::MAX);
    let time = Timestamp::from_second(second).unwrap_or(Timestamp::MAX);
    TimeZone::UTC.to_datetime(time).date()
}

/// Returns the time since 1970 at which a date begins.
pub fn midnight(date: Date) -> Duration {
    let time = TimeZone::UTC.to_timestamp(date.into());
    let second = time.map_or(0, Timestamp::as_second);
    Duration::from_secs(u64::try_from(second).unwrap_or(0))
}

/// A period with a limit of cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Period {
    /// A day.
    Day,
    /// A month of the calendar.
    Month,
}

impl Period {
    /// All periods.
    pub const ALL: [Self; 2] = [Self::Day, Self::Month];

    /// Returns the first date of the next period after a date.
    pub fn next(self, date: Date) -> Date {
        let next = match self {
            Self::Day => date.tomorrow(),
            Self::Month => date.first_of_month().checked_add(1.month()),
        };
        next.unwrap_or(Date::MAX)
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Day => "day",
            Self::Month => "month",
        })
    }
}

/// Limits of the cost of a day and of a month; `None` for no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpendingLimits {
    /// The limit of a day.
    pub day: Option<Cost>,
    /// The limit of a month.
    pub month: Option<Cost>,
}

impl SpendingLimits {
    /// Returns whether there is no limit.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the limit of a period.
    pub fn of(&self, period: Period) -> Option<Cost> {
        match period {
            Period::Day => self.day,
            Period::Month => self.month,
        }
    }

    /// Returns the longest period whose limit is reached.
    pub fn reached(&self, spent: Spending) -> Option<Period> {
        let is_reached =
            |period: &Period| self.of(*period).is_some_and(|limit| limit <= spent.of(*period));
        Period::ALL.into_iter().rev().find(is_reached)
    }
}

#[cfg(test)]
mod tests {
    use jiff::civil::date;
    use proptest::prelude::*;

    use super::*;

    fn spent(date: Date, day: u64, month: u64) -> Spending {
        Spending { date, day: Cost::from_micros(day), month: Cost::from_micros(month) }
    }

    /// Verifies K24.
    #[test]
    fn day_and_month_begin_at_midnight_utc() {
        let last = date(2026, 11, 30);
        let sum = spent(last, 5, 9);
        assert_eq!(sum.on(last), sum);
        assert_eq!(sum.on(date(2026, 11, 29)), sum, "a later date stays");
        assert_eq!(sum.on(date(2026, 12, 1)), spent(date(2026, 12, 1), 0, 0));
        let first = spent(date(2026, 11, 1), 5, 9);
        assert_eq!(first.on(last), spent(last, 0, 9));
        assert_eq!(first.on(date(2027, 11, 1)), spent(date(2027, 11, 1), 0, 0));
        assert_eq!(spent(last, 1, 1).plus(first), spent(last, 1, 10));
        assert_eq!(first.plus(sum), spent(first.date, 10, 18), "a clock that is ahead counts");
        assert_eq!(sum.beyond(spent(last, 7, 1)), spent(last, 0, 8));
        assert_eq!(spent(last, 1, 1).plus_all(&[first, sum]), spent(last, 6, 19));
        let begin = midnight(last);
        assert_eq!(begin.as_secs(), 1_795_996_800);
        let a_moment = Duration::from_nanos(1);
        assert_eq!((date_of(begin), date_of(begin - a_moment)), (last, date(2026, 11, 29)));
        assert_eq!((Period::Day.next(last), Period::Month.next(last)), {
            let first = date(2026, 12, 1);
            (first, first)
        });
        assert_eq!(Period::Month.next(date(2024, 12, 31)), date(2025, 1, 1));
        assert_eq!(Period::Day.next(date_of(Duration::MAX)), Date::MAX);
    }

    /// Verifies K24.
    #[test]
    fn cost_equal_to_the_limit_reaches_it() {
        let cost = |micros| Some(Cost::from_micros(micros));
        let limits = SpendingLimits { day: cost(5), month: cost(9) };
        let date = date(2026, 11, 30);
        for (day, month, reached) in
            [(4, 8, None), (5, 8, Some(Period::Day)), (4, 9, Some(Period::Month))]
        {
            assert_eq!(limits.reached(spent(date, day, month)), reached);
        }
        assert_eq!(SpendingLimits::default().reached(spent(date, 5, 5)), None);
        assert!(SpendingLimits::default().is_empty() && !limits.is_empty());
    }

    proptest! {
        #[test]
        fn midnight_begins_its_date(days in 0_u64..1_000_000) {
            let begin = Duration::from_secs(days * 86_400);
            prop_assert_eq!(midnight(date_of(begin)), begin);
            prop_assert_eq!(date_of(begin + Duration::from_secs(86_399)), date_of(begin));
        }
    }
}
