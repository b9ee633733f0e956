//! Parameters of a launch, and their form in the journal.

use std::collections::BTreeMap;

use kiyot_link::bootstrap::Bootstrap;
use kiyot_proto::store;
use kiyot_values::price::Price;

use crate::{
    engine::sha256,
    id::CellId,
    placement::{Accuracy, Candidate, Market, Offering},
    provider::LaunchSpec,
};

/// A launch: all parameters of the call, so that a replay repeats them. Holds secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// The token by which the provider recognises a replay.
    pub token: String,
    /// The parameters.
    pub spec: LaunchSpec,
}

impl Launch {
    pub(super) fn stored(&self) -> store::Launch {
        store::Launch {
            token: self.token.clone(),
            candidates: self.spec.candidates.iter().map(stored_candidate).collect(),
            tags: self.spec.tags.clone().into_iter().collect(),
            // Bootstrap has no part whose encoding can fail.
            bootstrap_json: serde_json::to_vec(&self.spec.bootstrap).unwrap_or_default().into(),
            parameters: self.spec.parameters.clone().into_iter().collect(),
        }
    }

    /// Returns the launch of a record; `None` if the launch can't be replayed.
    pub(super) fn from_stored(cell: &CellId, stored: &store::Launch) -> Option<Self> {
        let bootstrap: Bootstrap = serde_json::from_slice(&stored.bootstrap_json).ok()?;
        let candidates: Vec<Candidate> = stored.candidates.iter().map(candidate).collect();
        let spec = LaunchSpec {
            cell: cell.clone(),
            candidates,
            tags: stored.tags.clone().into_iter().collect(),
            bootstrap,
            parameters: stored.parameters.clone().into_iter().collect(),
        };
        let is_complete = !stored.token.is_empty()
            && !spec.candidates.is_empty()
            && spec.bootstrap.cell == cell.as_str();
        is_complete.then(|| Self { token: stored.token.clone(), spec })
    }
}

/// Returns the digest of the provider's own parameters of a launch; `None` without parameters.
pub(super) fn parameters_digest(parameters: &BTreeMap<String, String>) -> Option<String> {
    // A map of texts has no part whose encoding can fail.
    let encoded = || serde_json::to_vec(parameters).unwrap_or_default();
    (!parameters.is_empty()).then(|| sha256(&encoded()))
}

pub(super) fn stored_candidate(candidate: &Candidate) -> store::Offering {
    let Candidate { offering, price, accuracy } = candidate;
    store::Offering {
        instance_type: offering.instance_type.clone(),
        zone: offering.zone.clone(),
        spot: offering.market == Market::Spot,
        price_micros: price.micros(),
        price_is_at_most: *accuracy == Accuracy::AtMost,
        price_is_estimate: *accuracy == Accuracy::Estimate,
    }
}

/// Returns the priced offering of a record.
pub(super) fn candidate(stored: &store::Offering) -> Candidate {
    let offering = Offering {
        instance_type: stored.instance_type.clone(),
        zone: stored.zone.clone(),
        market: if stored.spot { Market::Spot } else { Market::OnDemand },
    };
    let price = Price::from_micros(stored.price_micros);
    let accuracy = match stored {
        stored if stored.price_is_estimate => Accuracy::Estimate,
        stored if stored.price_is_at_most => Accuracy::AtMost,
        _ => Accuracy::Exact,
    };
    Candidate { offering, price, accuracy }
}
