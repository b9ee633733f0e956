//! The provider's catalogue, which is read again from time to time.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{sync::Mutex, time::timeout};

use crate::backends::milpa::{
    placement::Catalogue,
    providers::{Provider, ProviderError},
};

/// Bounds the time in which a provider returns its catalogue.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The age at which a catalogue is read again: spot prices change by the hour.
const MAX_AGE: Duration = Duration::from_secs(300);
/// The pause after a failed reading while an older catalogue is used.
const RETRY_PAUSE: Duration = Duration::from_secs(30);

/// The last catalogue.
#[derive(Debug, Default)]
pub(super) struct Prices {
    last: Mutex<Option<Last>>,
}

#[derive(Debug)]
struct Last {
    catalogue: Arc<Catalogue>,
    /// The time from which on it is read again.
    until: Instant,
}

impl Prices {
    /// Returns the provider's catalogue, not older than five minutes. While the provider does not
    /// answer, an older one is used; an error is returned only if there was none.
    pub(super) async fn current(
        &self,
        provider: &dyn Provider,
    ) -> Result<Arc<Catalogue>, ProviderError> {
        self.read(|| provider.catalogue()).await
    }

    async fn read<R>(&self, read: impl FnOnce() -> R) -> Result<Arc<Catalogue>, ProviderError>
    where
        R: Future<Output = Result<Catalogue, ProviderError>>,
    {
        let mut last = self.last.lock().await;
        let fresh = last.as_ref().filter(|last| Instant::now() < last.until);
        if let Some(last) = fresh {
            return Ok(Arc::clone(&last.catalogue));
        }
        let read = timeout(TIMEOUT, read())
            .await
            .unwrap_or_else(|_| Err(ProviderError::too_slow("read the catalogue", TIMEOUT)));
        match (read, last.as_mut()) {
            (Ok(catalogue), _) => {
                let catalogue = Arc::new(catalogue);
                let until = Instant::now() + MAX_AGE;
                *last = Some(Last { catalogue: Arc::clone(&catalogue), until });
                Ok(catalogue)
            }
            (Err(error), Some(last)) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "catalogue not read, using the previous one"
                );
                last.until = Instant::now() + RETRY_PAUSE;
                Ok(Arc::clone(&last.catalogue))
            }
            (Err(error), None) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::milpa::{
        placement::{Market, Offering},
        providers::ErrorClass,
    };

    fn named(zone: &str) -> Catalogue {
        let offering =
            Offering { instance_type: "a".into(), zone: zone.into(), market: Market::OnDemand };
        Catalogue::any_size(offering)
    }

    async fn read(
        prices: &Prices,
        catalogue: Option<Catalogue>,
    ) -> Result<Arc<Catalogue>, ProviderError> {
        let error = || ProviderError::without_cause(ErrorClass::Transient, "no catalogue");
        prices.read(|| async { catalogue.ok_or_else(error) }).await
    }

    /// Makes the catalogue so old that it is read again.
    async fn age(prices: &Prices) {
        prices.last.lock().await.as_mut().unwrap().until = Instant::now();
    }

    /// Verifies A27.
    #[tokio::test]
    async fn unreadable_catalogue_is_an_error_at_the_start_and_later_the_last_one_is_used() {
        let prices = Prices::default();
        assert!(read(&prices, None).await.unwrap_err().text().contains("no catalogue"));
        assert_eq!(*read(&prices, Some(named("one"))).await.unwrap(), named("one"));
        // Not read again yet.
        assert_eq!(*read(&prices, Some(named("two"))).await.unwrap(), named("one"));
        age(&prices).await;
        assert_eq!(*read(&prices, None).await.unwrap(), named("one"));
        age(&prices).await;
        assert_eq!(*read(&prices, Some(named("two"))).await.unwrap(), named("two"));
        age(&prices).await;
        // An empty one is an answer: the provider offers nothing.
        let empty = read(&prices, Some(Catalogue::default())).await.unwrap();
        assert_eq!(*empty, Catalogue::default());
    }
}
