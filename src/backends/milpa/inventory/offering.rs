//! Offerings and their prices.

use std::sync::Arc;

use kiyot_engine::{
    engine::{ProviderKey, StartTimes},
    placement::{Accuracy, Candidate, Catalogue, Entry, Market, Offer, Offering},
    provider::ProviderError,
    request::Architecture,
};
use kiyot_proto::admin;

use super::Inventory;
use crate::backends::milpa::cells::ProviderCatalogue;

impl Inventory {
    /// Returns each provider's catalogue with current prices, and the offerings that were refused
    /// lately.
    pub(crate) async fn catalogues(&self) -> Vec<ProviderCatalogue> {
        self.cells.catalogues().await
    }

    pub(crate) fn start_times(&self) -> StartTimes {
        self.cells.start_times()
    }

    /// Returns the offerings of all catalogues with current prices. An offering of a provider
    /// without sizes has neither CPU nor memory. Fails only if no catalogue could be read.
    pub async fn offerings(&self) -> Result<Vec<admin::CatalogueOffering>, ProviderError> {
        let (mut offerings, mut failure) = (Vec::new(), None);
        let mut is_any_known = false;
        for ProviderCatalogue { provider, catalogue, refusals, now } in self.catalogues().await {
            match catalogue {
                Ok(catalogue) => {
                    is_any_known = true;
                    let reason = |offering: &Offering| refusals.reason(offering, now);
                    offerings.extend(self.offerings_of(provider, &catalogue, reason));
                }
                Err(error) => failure = Some(error),
            }
        }
        match failure.filter(|_| !is_any_known) {
            Some(error) => Err(error),
            None => Ok(offerings),
        }
    }

    fn offerings_of(
        &self,
        provider: ProviderKey,
        catalogue: &Catalogue,
        reason: impl Fn(&Offering) -> Option<Arc<str>>,
    ) -> Vec<admin::CatalogueOffering> {
        let message = |priced: &Candidate| admin::CatalogueOffering {
            refused: reason(&priced.offering).map(|it| it.to_string()).unwrap_or_default(),
            offering: Some(self::priced(priced)),
            backend: self.backend.to_string(),
            provider: provider.to_owned(),
            ..admin::CatalogueOffering::default()
        };
        let of_type = |entry: &Entry, offer: &Offer| {
            let kind = &entry.instance_type;
            let (price, accuracy) = (offer.price, offer.accuracy);
            let priced = Candidate { offering: entry.offering(offer), price, accuracy };
            let architectures: Vec<_> =
                kind.architectures.iter().map(ToString::to_string).collect();
            admin::CatalogueOffering {
                cpu_millis: kind.milli_cpus,
                memory_bytes: kind.memory_mib.saturating_mul(1 << 20),
                architecture: architectures.join(","),
                gpus: kind.gpus.as_ref().map_or(0, |gpus| gpus.count),
                ..message(&priced)
            }
        };
        let any_size = catalogue.any_size_offering().map(|offering| admin::CatalogueOffering {
            architecture: Architecture::of_node().to_string(),
            ..message(&Candidate::free(offering.clone()))
        });
        let of_types = catalogue
            .entries()
            .iter()
            .flat_map(|entry| entry.offers.iter().map(|offer| of_type(entry, offer)));
        any_size.into_iter().chain(of_types).collect()
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
