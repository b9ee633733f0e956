//! Spot prices of the subnets' zones, read in the background and separately for each zone.
//!
//! A zone whose list fails or is slow keeps its last prices, and this is logged. A launch waits
//! only for the first reading of a zone, for a bounded time.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::watch,
    time::{Instant, timeout},
};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    CallError, Ec2Api, SpotPrice,
    provider::{RETRY_PAUSE, pause_of_denied, within},
};

/// The time after which prices are read again.
const MAX_AGE: Duration = Duration::from_secs(30 * 60);
/// Time limit of a zone's list with all its pages, and of the wait for its first reading.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// The spot prices by zone. The tasks that read them end with this value.
#[derive(Debug)]
pub(super) struct Spot {
    reader: Reader,
    tasks: Mutex<BTreeMap<String, AbortOnDropHandle<()>>>,
}

/// Reads the prices of a zone.
#[derive(Debug, Clone)]
struct Reader {
    api: Arc<dyn Ec2Api>,
    zones: Arc<watch::Sender<BTreeMap<String, ZonePrices>>>,
}

/// The outcome of the readings of a zone.
#[derive(Debug)]
struct ZonePrices {
    /// The last prices; `None` if prices were never read.
    prices: Option<Arc<Vec<SpotPrice>>>,
    /// The time from which the prices are read again.
    until: Instant,
    /// True if the last reading failed and this was logged.
    has_failed: bool,
}

impl Spot {
    pub(super) fn new(api: Arc<dyn Ec2Api>) -> Self {
        let reader = Reader { api, zones: Arc::default() };
        Self { reader, tasks: Mutex::default() }
    }

    /// Begins to read absent or old prices.
    pub(super) fn begin<'a>(&self, zones: impl IntoIterator<Item = &'a String>) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.reader.zones.borrow();
        for zone in zones {
            let is_due = known.get(zone).is_none_or(|it| Instant::now() >= it.until);
            let is_read = tasks.get(zone).is_some_and(|task| !task.is_finished());
            if is_due && !is_read {
                let task = tokio::spawn(self.reader.clone().read(zone.clone()));
                tasks.insert(zone.clone(), AbortOnDropHandle::new(task));
            }
        }
    }

    /// Returns the last prices of the zones, and begins to read absent or old prices.
    pub(super) async fn current(&self, zones: &BTreeSet<String>) -> Vec<Arc<Vec<SpotPrice>>> {
        self.begin(zones);
        let mut known = self.reader.zones.subscribe();
        let all_read = known.wait_for(|known| zones.iter().all(|zone| known.contains_key(zone)));
        // Without prices, spot counts as at most the on-demand price.
        let _ = timeout(READ_TIMEOUT, all_read).await;
        let known = self.reader.zones.borrow();
        zones.iter().filter_map(|zone| known.get(zone)?.prices.clone()).collect()
    }

    /// Waits until the begun readings have ended.
    #[cfg(test)]
    pub(super) async fn readings_ended(&self) {
        let begun = std::mem::take(&mut *self.tasks.lock().unwrap());
        futures::future::join_all(begun.into_values()).await;
    }
}

impl Reader {
    async fn read(self, zone: String) {
        let list = self.api.spot_prices(std::slice::from_ref(&zone));
        let read = within(READ_TIMEOUT, "DescribeSpotPriceHistory", list).await;
        self.zones.send_modify(|zones| {
            let before = zones.remove(&zone);
            let after = ZonePrices::after(before, read, &zone);
            zones.insert(zone, after);
        });
    }
}

impl ZonePrices {
    fn after(before: Option<Self>, read: Result<Vec<SpotPrice>, CallError>, zone: &str) -> Self {
        let error = match read {
            Ok(prices) => {
                let (prices, until) = (Some(Arc::new(prices)), Instant::now() + MAX_AGE);
                return Self { prices, until, has_failed: false };
            }
            Err(error) => error,
        };
        let was_logged = before.as_ref().is_some_and(|before| before.has_failed);
        let prices = before.and_then(|before| before.prices);
        if !was_logged {
            let used = if prices.is_some() { "previous" } else { "on-demand price" };
            let error = &error as &dyn std::error::Error;
            tracing::warn!(zone, used, error, "spot prices of a zone not read");
        }
        let until = Instant::now() + pause_of_denied(&error).unwrap_or(RETRY_PAUSE);
        Self { prices, until, has_failed: true }
    }
}

#[cfg(test)]
mod tests {
    use kiyot_testkit::log::CapturedLog;

    use super::{super::fake_api::FakeApi, *};

    fn zones() -> BTreeSet<String> {
        ["us-east-1a", "us-east-1b"].map(str::to_owned).into()
    }

    /// Returns the zones with prices, and the time that the call took.
    async fn priced(spot: &Spot) -> (Vec<String>, Duration) {
        let began = Instant::now();
        let prices = spot.current(&zones()).await;
        let zones = prices.iter().flat_map(|prices| prices.iter().map(|it| it.zone.clone()));
        (zones.collect(), began.elapsed())
    }

    fn spot() -> (Arc<FakeApi>, Spot) {
        let api = Arc::new(FakeApi::default());
        (Arc::clone(&api), Spot::new(api))
    }

    /// Verifies V98.
    #[tokio::test(start_paused = true)]
    async fn slow_list_of_a_zone_leaves_the_prices_of_the_others() {
        let log = CapturedLog::start();
        let (api, spot) = spot();
        api.slow_zones.lock().unwrap().insert("us-east-1b".into());
        let (zones, first) = priced(&spot).await;
        assert_eq!((zones, first <= READ_TIMEOUT), (vec!["us-east-1a".to_owned()], true));
        spot.readings_ended().await;
        let lines = log.lines();
        assert!(lines.iter().any(|it| it.contains("us-east-1b") && it.contains("on-demand")));
        // No later launch waits.
        assert_eq!(priced(&spot).await, (vec!["us-east-1a".to_owned()], Duration::ZERO));
    }

    /// Verifies V98.
    #[tokio::test(start_paused = true)]
    async fn old_prices_are_used_while_and_after_a_list_is_slow() {
        let (api, spot) = spot();
        let all: Vec<String> = zones().into_iter().collect();
        assert_eq!(priced(&spot).await, (all.clone(), Duration::ZERO));
        api.slow_zones.lock().unwrap().extend(all.clone());
        for pause in [MAX_AGE, READ_TIMEOUT * 2, RETRY_PAUSE, MAX_AGE] {
            tokio::time::sleep(pause).await;
            assert_eq!(priced(&spot).await, (all.clone(), Duration::ZERO), "{pause:?}");
        }
    }
}
