//! The time of events, by two clocks.

use std::time::Duration;

/// The time of an event, by two clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Now {
    /// The time since the boot of the node, suspended time included (`CLOCK_BOOTTIME`). It never
    /// jumps; all waits of the engine are measured by it.
    pub boot: Duration,
    /// The time since 1970. Only for records: it may jump.
    pub unix: Duration,
}

impl Now {
    /// Returns the time a duration before this time.
    pub(super) fn earlier(self, by: Duration) -> Self {
        Self { boot: self.boot.saturating_sub(by), unix: self.unix.saturating_sub(by) }
    }
}
