//! Time limit of the silence of a cell's agent.

use std::time::Duration;

/// Shortest timeout, in seconds. An agent that was killed, or that reconnects to a restarted
/// daemon, is back within this time.
const MIN_HEALTHY_TIMEOUT_SECS: u32 = 5;

/// Time for which the agent of a cell may be silent before the cell and its pod are lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthyTimeout {
    /// No limit.
    Never,
    /// This time.
    After(Duration),
}

impl HealthyTimeout {
    /// Longest timeout, in seconds: a week.
    pub const MAX_SECS: u32 = 7 * 24 * 60 * 60;

    /// Returns the timeout for a number of seconds; 0 is no limit.
    pub fn of_secs(seconds: u32) -> Self {
        match seconds {
            0 => Self::Never,
            seconds => {
                let seconds = seconds.clamp(MIN_HEALTHY_TIMEOUT_SECS, Self::MAX_SECS);
                Self::After(Duration::from_secs(seconds.into()))
            }
        }
    }

    /// Returns the number of seconds; 0 is no limit.
    pub fn as_secs(self) -> u32 {
        self.limit().map_or(0, |limit| u32::try_from(limit.as_secs()).unwrap_or(u32::MAX))
    }

    /// Returns the limit; `None` for no limit.
    pub fn limit(self) -> Option<Duration> {
        match self {
            Self::Never => None,
            Self::After(limit) => Some(limit),
        }
    }
}
