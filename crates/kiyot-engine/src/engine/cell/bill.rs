//! The time for which a cell is paid.

use std::time::Duration;

use crate::engine::{Change, Now, Step, Timeline};

/// The time of a cell that is at the cost of its namespace.
#[derive(Debug, Default)]
pub(in crate::engine) struct Bill {
    /// The time from its launch until this daemon began.
    pub(in crate::engine) ran_before: Duration,
    /// The time from which on this daemon counts its cost: of its launch, or of its pod's order.
    pub(in crate::engine) from: Option<Duration>,
    /// The cost of its time before, with another pod or none, until its next commit.
    pub(in crate::engine) settled: Option<Change>,
}

impl Bill {
    /// Returns the bill of a cell that a previous daemon launched.
    pub(in crate::engine) fn resumed(timeline: &Timeline, now: Now) -> Self {
        Self { ran_before: since_launch(timeline, now), from: Some(now.boot), settled: None }
    }

    /// Begins again, after the cost until now was settled.
    pub(in crate::engine) fn restart(&mut self, settled: Option<Change>, now: Now) {
        *self = Self { ran_before: Duration::ZERO, from: self.from.map(|_| now.boot), settled };
    }

    /// Returns the time since the launch was answered.
    pub(in crate::engine) fn time(&self, now: Now) -> Duration {
        // A clock that is set while the daemon runs changes nothing.
        let billed = self.from.map(|from| now.boot.saturating_sub(from));
        self.ran_before + billed.unwrap_or_default()
    }
}

/// Returns the time since a recorded launch.
fn since_launch(timeline: &Timeline, now: Now) -> Duration {
    let launched = timeline.at(Step::Launched).and_then(|nanos| u64::try_from(nanos).ok());
    let launched = launched.map(Duration::from_nanos);
    launched.map_or(Duration::ZERO, |launched| now.unix.saturating_sub(launched))
}
