//! The billed time of a cell.

use std::time::Duration;

use crate::engine::{Change, Now, Step, Timeline};

/// The time of a cell that is billed to its namespace.
#[derive(Debug, Default)]
pub(in crate::engine) struct Bill {
    /// The time from the launch until this daemon started.
    pub(in crate::engine) ran_before: Duration,
    /// The time from which this daemon bills the cell: its launch, or its pod's order.
    pub(in crate::engine) from: Option<Duration>,
    /// The cost of the cell's earlier time, with another pod or without a pod, until the next
    /// commit writes it.
    pub(in crate::engine) settled: Option<Change>,
}

impl Bill {
    /// Returns the bill of a cell that a previous daemon launched.
    pub(in crate::engine) fn resumed(timeline: &Timeline, now: Now) -> Self {
        Self { ran_before: since_launch(timeline, now), from: Some(now.boot), settled: None }
    }

    /// Restarts the bill after the cost until now was settled.
    pub(in crate::engine) fn restart(&mut self, settled: Option<Change>, now: Now) {
        *self = Self { ran_before: Duration::ZERO, from: self.from.map(|_| now.boot), settled };
    }

    /// Returns the billed time: since the launch was answered, or since the last restart.
    pub(in crate::engine) fn time(&self, now: Now) -> Duration {
        // The boot clock does not jump when the wall clock is set.
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
