//! The catalogue of a region: instance types, their zones, and their prices.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kiyot_ec2::{SpotPrice, TypeInZone};

use crate::{
    annotations::Architecture,
    backends::milpa::placement::{Catalogue, Entry, Market, Offer},
    price::Price,
};

/// Returns the instance types that the zones of the subnets have, with their prices. `types` has
/// sizes and on-demand prices. Spot counts as on-demand where its price is not known.
pub(super) fn catalogue(
    types: &Catalogue,
    in_zones: &[TypeInZone],
    spot: &[SpotPrice],
    zones: &BTreeSet<String>,
    images: Vec<Architecture>,
) -> Catalogue {
    let mut zones_of: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for entry in in_zones.iter().filter(|entry| zones.contains(&entry.zone)) {
        zones_of.entry(&entry.instance_type).or_default().insert(&entry.zone);
    }
    let prices: HashMap<(&str, &str), Price> = spot
        .iter()
        .filter_map(|spot| {
            let price: Price = spot.price.parse().ok()?;
            Some(((spot.instance_type.as_str(), spot.zone.as_str()), price))
        })
        .collect();
    let entries = types.entries().iter().filter_map(|entry| {
        let name = entry.instance_type.name.as_str();
        let zones = zones_of.get(name)?;
        let offers = zones.iter().flat_map(|zone| {
            entry.offers.iter().map(|offer| {
                let live = (offer.market == Market::Spot)
                    .then(|| prices.get(&(name, *zone)).copied())
                    .flatten();
                Offer {
                    zone: (*zone).to_owned(),
                    market: offer.market,
                    price: live.unwrap_or(offer.price),
                    is_at_most: offer.is_at_most && live.is_none(),
                }
            })
        });
        Some(Entry { instance_type: entry.instance_type.clone(), offers: offers.collect() })
    });
    Catalogue::new(entries.collect()).with_images(images)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::milpa::placement::CatalogueFile;

    fn in_zone(instance_type: &str, zone: &str) -> TypeInZone {
        TypeInZone { instance_type: instance_type.into(), zone: zone.into() }
    }

    fn offer(catalogue: &Catalogue, name: &str, zone: &str, market: Market) -> Option<Offer> {
        let entry = catalogue.named(name)?;
        entry.offers.iter().find(|it| it.zone == zone && it.market == market).cloned()
    }

    #[test]
    fn catalogue_has_the_types_of_the_subnets_zones_at_live_spot_prices() {
        let types = CatalogueFile::built_in().catalogue;
        let in_zones = [
            in_zone("t3.nano", "us-east-1a"),
            in_zone("t3.nano", "us-east-1b"),
            in_zone("t3.micro", "us-east-1e"),
            in_zone("x.unheard", "us-east-1a"),
        ];
        let spot = [
            SpotPrice {
                instance_type: "t3.nano".into(),
                zone: "us-east-1a".into(),
                price: "0.0017".into(),
            },
            SpotPrice {
                instance_type: "t3.nano".into(),
                zone: "us-east-1b".into(),
                price: "free".into(),
            },
        ];
        let zones = ["us-east-1a", "us-east-1b"].map(str::to_owned).into();
        let catalogue = catalogue(&types, &in_zones, &spot, &zones, vec![Architecture::Amd64]);
        assert_eq!(catalogue.entries().len(), 1);
        assert_eq!(catalogue.images(), [Architecture::Amd64]);
        let live = offer(&catalogue, "t3.nano", "us-east-1a", Market::Spot).unwrap();
        assert_eq!((live.price, live.is_at_most), (Price::from_micros(1700), false));
        let unknown = offer(&catalogue, "t3.nano", "us-east-1b", Market::Spot).unwrap();
        assert_eq!((unknown.price, unknown.is_at_most), (Price::from_micros(5200), true));
        let fixed = offer(&catalogue, "t3.nano", "us-east-1b", Market::OnDemand).unwrap();
        assert_eq!((fixed.price, fixed.is_at_most), (Price::from_micros(5200), false));
        assert_eq!(offer(&catalogue, "t3.nano", "us-east-1e", Market::OnDemand), None);
    }
}
