//! Offerings and their prices.

use std::{sync::Arc, time::Duration};

use kiyot_engine::{
    placement::{Accuracy, Candidate, Catalogue, Entry, Market, Offer, Offering, Refusals},
    provider::ProviderError,
    request::Architecture,
};
use kiyot_proto::admin;
use kiyot_values::price::Price;

use super::Inventory;

impl Inventory {
    /// Returns the catalogue with the prices of now, the offerings that were refused lately, and
    /// the time for which they are looked up.
    pub async fn catalogue(&self) -> Result<(Arc<Catalogue>, Refusals, Duration), ProviderError> {
        self.cells.catalogue().await
    }

    /// Returns the catalogue's offerings with the prices of now. That of a provider without sizes
    /// has neither CPU nor memory.
    pub async fn offerings(&self) -> Result<Vec<admin::CatalogueOffering>, ProviderError> {
        let (catalogue, refusals, now) = self.cells.catalogue().await?;
        let reason = |offering: &Offering| refusals.reason(offering, now);
        let message = |entry: &Entry, offer: &Offer| {
            let kind = &entry.instance_type;
            let offering = Offering {
                instance_type: kind.name.clone(),
                zone: offer.zone.clone(),
                market: offer.market,
            };
            let refused = reason(&offering).map(|reason| reason.to_string()).unwrap_or_default();
            let priced = Candidate { offering, price: offer.price, accuracy: offer.accuracy };
            let architectures: Vec<_> =
                kind.architectures.iter().map(ToString::to_string).collect();
            admin::CatalogueOffering {
                offering: Some(self::priced(&priced)),
                cpu_millis: kind.milli_cpus,
                memory_bytes: kind.memory_mib.saturating_mul(1 << 20),
                architecture: architectures.join(","),
                gpus: kind.gpus.as_ref().map_or(0, |gpus| gpus.count),
                refused,
                backend: self.backend.to_string(),
            }
        };
        let offers = |entry: &Entry| {
            let messages: Vec<_> = entry.offers.iter().map(|offer| message(entry, offer)).collect();
            messages
        };
        let any_size = catalogue.any_size_offering().map(|offering| {
            let refused = reason(offering).map(|reason| reason.to_string()).unwrap_or_default();
            let (offering, price) = (offering.clone(), Price::FREE);
            let priced = Candidate { offering, price, accuracy: Accuracy::Exact };
            admin::CatalogueOffering {
                offering: Some(self::priced(&priced)),
                architecture: Architecture::of_node().to_string(),
                refused,
                backend: self.backend.to_string(),
                ..admin::CatalogueOffering::default()
            }
        });
        let of_types = catalogue.entries().iter().flat_map(offers);
        Ok(any_size.into_iter().chain(of_types).collect())
    }
}

/// Returns the message of an offering with its price.
pub(super) fn priced(candidate: &Candidate) -> admin::Offering {
    let Candidate { offering, price, accuracy } = candidate;
    admin::Offering {
        instance_type: offering.instance_type.clone(),
        zone: offering.zone.clone(),
        spot: offering.market == Market::Spot,
        price_micros: price.micros(),
        price_is_at_most: *accuracy == Accuracy::AtMost,
        price_is_estimate: *accuracy == Accuracy::Estimate,
    }
}
