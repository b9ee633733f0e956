//! The provider's catalogue, read again from time to time.

use std::{sync::Arc, time::Duration};

use kiyot_ec2::cached::Cached;
use kiyot_engine::{
    placement::Catalogue,
    provider::{CATALOGUE_TIMEOUT, Provider, ProviderError},
};

use crate::backends::milpa::providers::within;

/// The age at which a catalogue is read again: spot prices change by the hour.
const MAX_AGE: Duration = Duration::from_secs(300);
/// The pause after a failed read while an older catalogue is used.
const RETRY_PAUSE: Duration = Duration::from_secs(30);

/// The last catalogue.
#[derive(Debug)]
pub(super) struct Prices {
    last: Cached<Catalogue, ProviderError>,
}

impl Default for Prices {
    fn default() -> Self {
        Self { last: Cached::new("catalogue", MAX_AGE, RETRY_PAUSE) }
    }
}

impl Prices {
    /// Returns the provider's catalogue, at most five minutes old. While the provider does not
    /// answer, returns the previous catalogue; without a previous catalogue, an error.
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
        let bounded = || within(CATALOGUE_TIMEOUT, "read the catalogue", read());
        self.last.get(bounded).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiyot_engine::{
        placement::{Market, Offering},
        provider::ErrorClass,
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
    async fn age() {
        tokio::time::advance(MAX_AGE).await;
    }

    /// Verifies A27.
    #[tokio::test(start_paused = true)]
    async fn unreadable_catalogue_is_an_error_without_a_previous_catalogue() {
        let prices = Prices::default();
        assert!(read(&prices, None).await.unwrap_err().text().contains("no catalogue"));
        assert_eq!(*read(&prices, Some(named("one"))).await.unwrap(), named("one"));
        // Not read again yet.
        assert_eq!(*read(&prices, Some(named("two"))).await.unwrap(), named("one"));
        age().await;
        assert_eq!(*read(&prices, None).await.unwrap(), named("one"));
        age().await;
        assert_eq!(*read(&prices, Some(named("two"))).await.unwrap(), named("two"));
        age().await;
        // An empty catalogue is an answer: the provider offers nothing.
        let empty = read(&prices, Some(Catalogue::default())).await.unwrap();
        assert_eq!(*empty, Catalogue::default());
    }

    #[tokio::test(start_paused = true)]
    async fn catalogue_of_a_hanging_provider_times_out() {
        let started = tokio::time::Instant::now();
        let error = Prices::default().read(std::future::pending).await.unwrap_err();
        assert_eq!((error.class, started.elapsed()), (ErrorClass::Unanswered, CATALOGUE_TIMEOUT));
    }
}
