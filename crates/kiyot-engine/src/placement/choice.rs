//! The choice of a running instance for a pod.

use std::sync::Arc;

use crate::placement::{Candidate, Catalogue, Needs, Offer, Rules, Size, fit, ranking};

/// A pod's needs with the types that they are compared with. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Choice {
    /// The instance types of the provider.
    pub catalogue: Arc<Catalogue>,
    /// The needs of the pod.
    pub needs: Arc<Needs>,
    /// The configured rules.
    pub rules: Arc<Rules>,
}

impl Choice {
    /// Returns an instance's offering at its price for the pod; `None` if it does not suit the pod.
    /// An instance with GPUs suits only pods that request GPUs.
    pub fn suited(&self, running: &Candidate) -> Option<Candidate> {
        let Candidate { offering, price, accuracy } = running;
        if !self.catalogue.has_image(self.needs.architecture) {
            return None;
        }
        if let Some(any_size) = self.catalogue.any_size_offering() {
            return (any_size == offering).then(|| running.clone());
        }
        if self.catalogue.is_sized() {
            let size = Size::parse(&offering.instance_type)?;
            let architecture = self.needs.architecture;
            let instance_type = size.instance_type(offering.instance_type.clone(), architecture);
            return fit::fits(&instance_type, &self.needs.of_size(), &self.rules)
                .then(|| running.clone());
        }
        let instance_type = &self.catalogue.named(&offering.instance_type)?.instance_type;
        let keeps_gpus = instance_type.gpus.is_none() || self.needs.gpus.is_some();
        let has_market = ranking::markets(self.needs.launch_type).contains(&offering.market);
        let is_taken = has_market && self.rules.has_zone(&offering.zone);
        if !keeps_gpus || !is_taken || !fit::fits(instance_type, &self.needs, &self.rules) {
            return None;
        }
        let offer = Offer {
            zone: offering.zone.clone(),
            market: offering.market,
            price: *price,
            accuracy: *accuracy,
        };
        let price = fit::price(instance_type, &offer, &self.needs);
        let is_allowed = self.needs.max_price.is_none_or(|cap| price <= cap);
        is_allowed.then(|| Candidate { price, ..running.clone() })
    }
}
