//! The catalogue: instance types and the prices of their offerings.

use std::fmt;

use kiyot_values::price::Price;

use crate::{
    placement::{Accuracy, Candidate, InstanceType, Market, Offering, Size},
    request::Architecture,
};

/// The instance types of a provider with their offers. Immutable: newer data makes a new catalogue.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Catalogue {
    entries: Vec<Entry>,
    any_size: Option<Offering>,
    /// True if each instance gets the size of its pod. The only entry is then the largest size.
    is_sized: bool,
    /// The architectures with an image of cells; empty for all.
    images: Vec<Architecture>,
}

/// An instance type with its offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The instance type.
    pub instance_type: InstanceType,
    /// Its offers; empty if its price is unknown or it is not offered.
    pub offers: Vec<Offer>,
    /// The reason why a known type is not offered.
    pub unoffered: Option<Unoffered>,
}

/// The reason why an existing instance type has no offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unoffered {
    /// No zone of this region has it.
    Region(String),
    /// Only these zones have it, and the provider does not launch in them.
    Zones(Vec<String>),
}

/// The price of an instance type in a zone and a market.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// The zone; empty if unknown.
    pub zone: String,
    /// The market.
    pub market: Market,
    /// The price of an instance.
    pub price: Price,
    /// The accuracy of the price.
    pub accuracy: Accuracy,
}

impl Catalogue {
    /// Returns a catalogue of these types. Of entries with the same name the first wins.
    pub fn new(mut entries: Vec<Entry>) -> Self {
        entries.sort_by(|one, other| one.instance_type.name.cmp(&other.instance_type.name));
        entries.dedup_by(|later, first| later.instance_type.name == first.instance_type.name);
        Self { entries, ..Self::default() }
    }

    /// Returns the catalogue of a provider that makes instances of any size as parts of the node,
    /// without a price.
    pub fn any_size(offering: Offering) -> Self {
        let images = vec![Architecture::of_node()];
        Self { any_size: Some(offering), images, ..Self::default() }
    }

    /// Returns the catalogue of a provider that makes each instance in the [`Size`] of its pod, up
    /// to `largest`, without a price. A larger pod does not fit.
    pub fn sized(name: &str, zone: &str, largest: Size, architecture: Architecture) -> Self {
        let offer = Offer {
            zone: zone.to_owned(),
            market: Market::OnDemand,
            price: Price::FREE,
            accuracy: Accuracy::Exact,
        };
        let instance_type = largest.instance_type(name.to_owned(), architecture);
        let entries = vec![Entry::new(instance_type, vec![offer])];
        Self { is_sized: true, images: vec![architecture], ..Self::new(entries) }
    }

    /// Returns whether instances have the [`Size`] of their pods.
    pub fn is_sized(&self) -> bool {
        self.is_sized
    }

    /// Returns the catalogue with images of cells for these architectures only.
    pub fn with_images(self, images: Vec<Architecture>) -> Self {
        Self { images, ..self }
    }

    /// Returns the catalogue with all prices as estimates.
    pub fn with_estimates(mut self) -> Self {
        for offer in self.entries.iter_mut().flat_map(|entry| &mut entry.offers) {
            offer.accuracy = Accuracy::Estimate;
        }
        self
    }

    /// Returns the architectures with an image of cells; empty for all.
    pub fn images(&self) -> &[Architecture] {
        &self.images
    }

    /// Returns whether the provider has an image of cells for an architecture.
    pub(super) fn has_image(&self, architecture: Architecture) -> bool {
        self.images.is_empty() || self.images.contains(&architecture)
    }

    /// Returns the only offering of a provider that makes instances of any size.
    pub fn any_size_offering(&self) -> Option<&Offering> {
        self.any_size.as_ref()
    }

    /// Returns the instance types, sorted by name.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns all offerings.
    pub fn offerings(&self) -> impl Iterator<Item = Offering> {
        let of_types = self
            .entries
            .iter()
            .flat_map(|entry| entry.offers.iter().map(|offer| entry.offering(offer)));
        self.any_size.iter().cloned().chain(of_types)
    }

    /// Returns the offerings of all types at their prices.
    pub fn candidates(&self) -> impl Iterator<Item = Candidate> {
        let candidate = |entry: &Entry, offer: &Offer| Candidate {
            offering: entry.offering(offer),
            price: offer.price,
            accuracy: offer.accuracy,
        };
        let of_type = move |entry: &Entry| -> Vec<_> {
            entry.offers.iter().map(|it| candidate(entry, it)).collect()
        };
        self.entries.iter().flat_map(of_type)
    }

    /// Returns the instance type of a machine; `None` if it is unknown or of any size.
    pub fn machine(&self, name: &str) -> Option<InstanceType> {
        if self.is_sized {
            return Some(Size::parse(name)?.instance_type(name.to_owned(), *self.images.first()?));
        }
        Some(self.named(name)?.instance_type.clone())
    }

    /// Returns the instance type with a name.
    pub fn named(&self, name: &str) -> Option<&Entry> {
        let key = |entry: &Entry| entry.instance_type.name.as_str().cmp(name);
        self.entries.binary_search_by(key).ok().map(|index| &self.entries[index])
    }
}

impl Entry {
    /// Returns an instance type with its offers.
    pub fn new(instance_type: InstanceType, offers: Vec<Offer>) -> Self {
        Self { instance_type, offers, unoffered: None }
    }

    /// Returns an existing instance type that is not offered.
    pub fn not_offered(instance_type: InstanceType, reason: Unoffered) -> Self {
        Self { instance_type, offers: Vec::new(), unoffered: Some(reason) }
    }

    /// Returns the offering of an offer.
    pub fn offering(&self, offer: &Offer) -> Offering {
        Offering {
            instance_type: self.instance_type.name.clone(),
            zone: offer.zone.clone(),
            market: offer.market,
        }
    }
}

impl fmt::Display for Unoffered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Region(region) => write!(f, "exists, but is offered in no zone of {region}"),
            Self::Zones(zones) => {
                let zones = zones.join(" and ");
                write!(
                    f,
                    "exists, but is offered in no zone with a subnet of cells, only in {zones}"
                )
            }
        }
    }
}
