//! Subscription to the metrics of cells. Metrics are many, so a cell sends them only while they are
//! scraped. A scrape renews the subscription.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use super::CellSync;
use crate::backends::milpa::cells::Cell;

/// Time after a scrape within which the next scrape is expected.
const SCRAPE_INTERVAL: Duration = Duration::from_secs(60);
/// Shortest time between two renewals.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(20);
/// Time for which a cell sends metrics after a renewal. The last scrape may come a renewal interval
/// after the last renewal.
const SUBSCRIPTION: Duration = Duration::from_secs(80);

/// Times of scrapes.
#[derive(Debug, Clone, Copy)]
struct Scrapes {
    /// The first scrape after a pause.
    first: Instant,
    last: Instant,
    /// The last renewal.
    renewed: Instant,
}

/// State of the subscription; `None` before the first scrape.
#[derive(Debug, Default)]
pub(super) struct MetricsSubscription(Mutex<Option<Scrapes>>);

impl MetricsSubscription {
    /// Records a scrape. Returns whether to renew the subscription, and the time of the first
    /// scrape.
    fn scrape(&self, now: Instant) -> (bool, Instant) {
        let mut scrapes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = scrapes.filter(|scrapes| now < scrapes.last + SCRAPE_INTERVAL);
        let renews = before.is_none_or(|scrapes| now >= scrapes.renewed + RENEWAL_INTERVAL);
        let (first, renewed) =
            before.map_or((now, now), |scrapes| (scrapes.first, scrapes.renewed));
        let renewed = if renews { now } else { renewed };
        *scrapes = Some(Scrapes { first, last: now, renewed });
        (renews, first)
    }

    fn is_active(&self, now: Instant) -> bool {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some_and(|scrapes| now < scrapes.last + SCRAPE_INTERVAL)
    }
}

impl CellSync {
    /// Renews the subscription for a scrape of metrics. Returns the time from which cells send
    /// metrics.
    pub(crate) fn renew_metrics(&self) -> Instant {
        let (renews, since) = self.metrics.scrape(Instant::now());
        if renews {
            for sandbox in self.pods.all_sandboxes() {
                if let Some(cell) = self.cells.get(&sandbox.cell) {
                    cell.link.control.measure(SUBSCRIPTION);
                }
            }
        }
        since
    }

    /// Subscribes to the metrics of a cell that has connected, if they are scraped.
    pub(super) fn subscribe_to_metrics(&self, cell: &Cell) {
        if self.metrics.is_active(Instant::now()) {
            cell.link.control.measure(SUBSCRIPTION);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies U25.
    #[test]
    fn subscription_lasts_while_metrics_are_scraped() {
        let (metrics, began) = (MetricsSubscription::default(), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        assert!(!metrics.is_active(at(0)));
        let mut subscribed_until = at(0);
        // Every 15 s, then as rarely as possible: cells are subscribed at every scrape.
        for second in (0..=300).step_by(15).chain([319, 378, 437]) {
            let is_subscribed = metrics.is_active(at(second)) && subscribed_until >= at(second);
            assert!(second == 0 || is_subscribed, "{second}");
            let (renews, since) = metrics.scrape(at(second));
            assert_eq!(since, at(0));
            if renews {
                subscribed_until = at(second) + SUBSCRIPTION;
            }
        }
        let end = at(437) + SCRAPE_INTERVAL;
        assert!(!metrics.is_active(end));
        assert_eq!(metrics.scrape(end), (true, end));
        assert_eq!(metrics.scrape(end + Duration::from_secs(1)), (false, end));
    }
}
