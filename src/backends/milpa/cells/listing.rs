//! The periodic listing of the provider's instances.

use std::{sync::Arc, time::Duration};

use kiyot_engine::engine::Event;
use tokio::time::{Instant, sleep_until, timeout};

use super::{
    providers::CellSource,
    shared::{Shared, now},
};

/// Bounds a listing of the provider's instances.
const LIST_TIMEOUT: Duration = Duration::from_secs(60);

/// The shortest pause between listings of instances on other machines, however many links break.
const MIN_PAUSE: Duration = Duration::from_secs(1);
/// The shortest pause on this node, where a listing calls no API and shows each end at once.
const MIN_PAUSE_ON_NODE: Duration = Duration::from_millis(100);
/// The number of listings at short pauses after a broken link or a termination.
const SOON_LISTINGS: u32 = 6;
/// The fraction of the period that is a short pause.
const SOON_DIVISOR: u32 = 6;

/// Pauses between listings: a period at rest, a shorter pause after a change.
#[derive(Debug)]
struct Schedule {
    period: Duration,
    /// The shortest time between the starts of two listings, even if a link breaks.
    min_pause: Duration,
    soon: u32,
}

impl Schedule {
    fn new(period: Duration, min_pause: Duration) -> Self {
        Self { period, min_pause, soon: 0 }
    }

    /// Makes the next pauses short.
    fn hasten(&mut self) {
        self.soon = SOON_LISTINGS;
    }

    /// Returns the time of the listing for a broken link, if the last listing began at `began`:
    /// now, unless that was less than the shortest pause ago.
    fn after_a_break(&self, began: Instant, now: Instant) -> Instant {
        now.max(began + self.min_pause)
    }

    fn short(&self) -> Duration {
        self.period / SOON_DIVISOR
    }

    /// Returns the pause until the next listing.
    fn pause(&mut self) -> Duration {
        match self.soon.checked_sub(1) {
            Some(left) => {
                self.soon = left;
                self.short()
            }
            None => self.period,
        }
    }
}

/// Lists a provider's instances once a period, at once when a link breaks, and soon after a
/// termination. Returns when the provider is released.
pub(super) async fn run(shared: Arc<Shared>, source: Arc<CellSource>) {
    let capabilities = source.capabilities;
    let min_pause = if capabilities.remote { MIN_PAUSE } else { MIN_PAUSE_ON_NODE };
    let mut schedule = Schedule::new(capabilities.listing_period, min_pause);
    loop {
        let began = Instant::now();
        tokio::select! {
            () = source.stop.cancelled() => return,
            () = list(&shared, &source) => {}
        }
        let mut due = Instant::now() + schedule.pause();
        loop {
            tokio::select! {
                () = source.stop.cancelled() => return,
                () = source.list_now.notified() => {
                    // An instance that ends by itself does so slowly, except on this node.
                    if !capabilities.awaits_ends() {
                        schedule.hasten();
                    }
                    due = due.min(schedule.after_a_break(began, Instant::now()));
                }
                () = source.list_soon.notified() => {
                    schedule.hasten();
                    due = due.min(Instant::now() + schedule.short());
                }
                () = sleep_until(due) => break,
            }
        }
    }
}

async fn list(shared: &Arc<Shared>, source: &CellSource) {
    let (began, provider) = (now().boot, source.key());
    match timeout(LIST_TIMEOUT, source.provider.list_owned()).await {
        Ok(Ok(instances)) => shared.handle(Event::Listed { provider, began, instances }),
        Ok(Err(error)) => tracing::warn!(
            provider,
            error = &error as &dyn std::error::Error,
            "provider instances not listed"
        ),
        Err(_) => tracing::warn!(
            provider,
            seconds = LIST_TIMEOUT.as_secs(),
            "listing of provider instances timed out"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_are_short_after_a_change_and_then_the_period() {
        let period = Duration::from_secs(30);
        let mut schedule = Schedule::new(period, MIN_PAUSE);
        assert_eq!(schedule.pause(), period);
        schedule.hasten();
        for _ in 0..SOON_LISTINGS {
            assert_eq!(schedule.pause(), Duration::from_secs(5));
        }
        assert_eq!(schedule.pause(), period);
    }

    /// Verifies V52.
    #[test]
    fn links_broken_together_share_a_listing() {
        let schedule = Schedule::new(Duration::from_secs(30), MIN_PAUSE);
        let began = Instant::now();
        let at = |millis| began + Duration::from_millis(millis);
        // After a rest, the first broken link causes a listing at once.
        assert_eq!(schedule.after_a_break(began, at(9_000)), at(9_000));
        // The links that break afterwards share the next listing.
        for millis in [0, 1, 20, 999] {
            assert_eq!(schedule.after_a_break(began, at(millis)), at(1_000));
        }
    }
}
