//! The timeline of a cell's start: a time for each step, by the node's clock.

use std::time::Duration;

use kiyot_proto::store;

/// A step of a cell's start, in the usual order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The provider has answered the launch.
    Launched,
    /// The cell's PID 1 has started, as its agent reports.
    Booted,
    /// The agent has spent its token.
    Enrolled,
    /// The cell is bound to its pod.
    Bound,
    /// The image of the first container is in the cell.
    ImageReady,
    /// The first container runs.
    FirstContainer,
}

/// The times of the steps, in nanoseconds since 1970; `None` while a step is pending.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Timeline {
    steps: [Option<i64>; 6],
}

impl Timeline {
    pub(in crate::engine) const STEPS: [(Step, &'static str); 6] = [
        (Step::Launched, "launched"),
        (Step::Booted, "booted"),
        (Step::Enrolled, "enrolled"),
        (Step::Bound, "bound"),
        (Step::ImageReady, "imageReady"),
        (Step::FirstContainer, "firstContainer"),
    ];

    /// Sets the time of a step unless it is set. Returns whether it was unset.
    pub(in crate::engine) fn reach(&mut self, step: Step, unix: Duration) -> bool {
        let time = &mut self.steps[step as usize];
        let is_new = time.is_none();
        if is_new {
            *time = Some(nanos(unix).max(1));
        }
        is_new
    }

    /// Returns the time of a step, in nanoseconds since 1970, if the step is reached.
    pub fn at(&self, step: Step) -> Option<i64> {
        self.steps[step as usize]
    }

    /// Returns the reached steps by name, with the milliseconds since `begin_nanos`.
    pub fn since(&self, begin_nanos: i64) -> impl Iterator<Item = (&'static str, i64)> {
        let reached = |(step, name)| self.at(step).map(|time| (name, time));
        let times: Vec<_> = Self::STEPS.into_iter().filter_map(reached).collect();
        times
            .into_iter()
            .map(move |(name, time)| (name, time.saturating_sub(begin_nanos).max(0) / 1_000_000))
    }

    pub(in crate::engine) fn stored(&self) -> store::Timeline {
        let [launched, booted, enrolled, bound, image_ready, first_container] =
            self.steps.map(Option::unwrap_or_default);
        store::Timeline { launched, booted, enrolled, bound, image_ready, first_container }
    }

    pub(in crate::engine) fn from_stored(stored: &store::Timeline) -> Self {
        let store::Timeline { launched, booted, enrolled, bound, image_ready, first_container } =
            *stored;
        let steps = [launched, booted, enrolled, bound, image_ready, first_container];
        Self { steps: steps.map(|time| (time > 0).then_some(time)) }
    }
}

/// Returns a time since 1970 in nanoseconds.
pub(in crate::engine) fn nanos(unix: Duration) -> i64 {
    i64::try_from(unix.as_nanos()).unwrap_or(i64::MAX)
}
