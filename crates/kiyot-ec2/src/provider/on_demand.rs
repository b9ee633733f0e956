//! On-demand prices of the region, read from AWS's price list in the background.
//!
//! No pod waits for these prices: built-in prices are used until they are read, and for types that
//! the list lacks.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kiyot_config::PriceSource;
use kiyot_engine::provider::ErrorClass;
use kiyot_values::price::Price;
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};

use crate::{
    CallError, Ec2Api,
    provider::{error_codes::classify, price_list::Listed},
};

/// The time after which the prices are read again.
const MAX_AGE: Duration = Duration::from_secs(12 * 3600);
/// The pause after a failed reading.
const RETRY_PAUSE: Duration = Duration::from_secs(3600);
/// Bounds the pages of the list: ten times the pages of a region.
const MAX_PAGES: usize = 200;
/// Bounds the calls for a page.
const MAX_CALLS_OF_PAGE: u32 = 6;
/// The pause after the first failed call for a page, which doubles.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Prices by instance type.
pub(super) type Prices = HashMap<String, Price>;

/// The on-demand prices of the region. The task that reads them ends with this value.
#[derive(Debug)]
pub(super) struct OnDemand {
    reader: Reader,
    source: PriceSource,
    shared: Arc<Mutex<Shared>>,
}

/// The last prices, and the running reading of new prices.
#[derive(Debug, Default)]
struct Shared {
    prices: Option<Arc<Prices>>,
    /// The time from which the prices are read again.
    until: Option<Instant>,
    reading: Option<JoinHandle<()>>,
    /// True if the last reading failed and this was logged.
    has_failed: bool,
}

/// Reads the price list.
#[derive(Debug, Clone)]
struct Reader {
    api: Arc<dyn Ec2Api>,
    region: String,
}

/// Price list that was read.
#[derive(Debug, Default)]
struct PriceList {
    prices: Prices,
    /// The products without a usable price.
    set_aside: usize,
}

impl OnDemand {
    pub(super) fn new(api: Arc<dyn Ec2Api>, source: PriceSource, region: &str) -> Self {
        let reader = Reader { api, region: region.to_owned() };
        Self { reader, source, shared: Arc::default() }
    }

    /// Returns the last prices, or `None` if they were never read. Begins to read absent or old
    /// prices.
    pub(super) fn current(&self) -> Option<Arc<Prices>> {
        let mut shared = lock(&self.shared);
        let is_due = shared.until.is_none_or(|until| Instant::now() >= until);
        let is_read = shared.reading.as_ref().is_some_and(|reading| !reading.is_finished());
        if self.source == PriceSource::Live && is_due && !is_read {
            let (reader, own) = (self.reader.clone(), Arc::clone(&self.shared));
            shared.reading = Some(tokio::spawn(async move {
                let read = reader.read().await;
                lock(&own).take(read);
            }));
        }
        shared.prices.clone()
    }
}

impl Drop for OnDemand {
    fn drop(&mut self) {
        if let Some(reading) = &lock(&self.shared).reading {
            reading.abort();
        }
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Stores the outcome of a reading. A list without a usable price changes nothing.
    fn take(&mut self, read: Result<PriceList, CallError>) {
        match read {
            Ok(PriceList { prices, set_aside }) if !prices.is_empty() => {
                let types = prices.len();
                tracing::info!(types, set_aside, "on-demand prices read");
                self.prices = Some(Arc::new(prices));
                self.until = Some(Instant::now() + MAX_AGE);
                self.has_failed = false;
            }
            failed => {
                self.until = Some(Instant::now() + RETRY_PAUSE);
                if std::mem::replace(&mut self.has_failed, true) {
                    return;
                }
                let kept = if self.prices.is_some() { "previous" } else { "built-in" };
                match failed {
                    Ok(PriceList { set_aside, .. }) => tracing::warn!(
                        set_aside,
                        kept,
                        "the price list has no usable price, older on-demand prices are used"
                    ),
                    Err(error) => tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        kept,
                        "on-demand prices not read, older prices are used (docs/ec2.md)"
                    ),
                }
            }
        }
    }
}

impl Reader {
    async fn read(&self) -> Result<PriceList, CallError> {
        let mut list = PriceList::default();
        let mut next = None;
        for _ in 0..MAX_PAGES {
            let page = self.page(next).await?;
            for product in &page.products {
                match Listed::parse(product, &self.region) {
                    Ok(Listed { instance_type, price }) => {
                        let known = list.prices.entry(instance_type).or_insert(price);
                        *known = price.max(*known);
                    }
                    Err(unusable) => {
                        tracing::debug!(error = %unusable, "product of the price list set aside");
                        list.set_aside += 1;
                    }
                }
            }
            next = page.next;
            if next.is_none() {
                break;
            }
        }
        Ok(list)
    }

    /// Reads a page. The call has no effect, so it is repeated after every transient failure.
    async fn page(&self, page: Option<String>) -> Result<crate::ProductPage, CallError> {
        let mut pause = FIRST_PAUSE;
        for _ in 1..MAX_CALLS_OF_PAGE {
            match self.api.products(page.clone()).await {
                Err(error) if passes(&error) => sleep(pause).await,
                answered => return answered,
            }
            pause *= 2;
        }
        self.api.products(page).await
    }
}

fn passes(error: &CallError) -> bool {
    let class = classify(error).0;
    matches!(class, ErrorClass::Throttled | ErrorClass::Transient | ErrorClass::Unanswered)
}
