//! Catalogue of a region: instance types, their zones, and their prices.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kiyot_engine::{
    placement::{Accuracy, Catalogue, Entry, Market, Offer, Unoffered},
    request::Architecture,
};
use kiyot_values::price::Price;

use crate::{
    SpotPrice, TypeInZone,
    provider::{added_types::AddedType, on_demand::Prices},
};

/// The instance types of a region.
#[derive(Debug, Clone, Copy)]
pub(super) struct Types<'a> {
    pub(super) region: &'a str,
    /// Sizes and built-in prices. Live prices replace built-in prices.
    pub(super) built_in: &'a Catalogue,
    /// The types without a built-in price.
    pub(super) added: &'a [AddedType],
}

/// Returns the instance types of a region. Types that the zones of the subnets offer have prices;
/// other types have no offer. An unknown spot price counts as at most the on-demand price.
pub(super) fn catalogue<'a>(
    types: Types<'_>,
    on_demand: Option<&Prices>,
    in_zones: &[TypeInZone],
    spot: impl IntoIterator<Item = &'a SpotPrice>,
    zones: &BTreeSet<String>,
    images: Vec<Architecture>,
) -> Catalogue {
    let mut zones_of: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for entry in in_zones {
        zones_of.entry(&entry.instance_type).or_default().insert(&entry.zone);
    }
    let prices: HashMap<(&str, &str), Price> = spot
        .into_iter()
        .filter_map(|spot| {
            let price: Price = spot.price.parse().ok()?;
            Some(((spot.instance_type.as_str(), spot.zone.as_str()), price))
        })
        .collect();
    let live = |name: &str| on_demand.and_then(|live| live.get(name)).copied();
    let built_in = types.built_in.entries().iter().map(|entry| {
        let own = &entry.instance_type;
        (own, with_on_demand(&entry.offers, live(&own.name)))
    });
    let added = types.added.iter().map(|added| {
        let own = &added.instance_type;
        let price = live(&own.name);
        let offer = |market: &Market| price.map(|price| offer_at(price, *market));
        (own, added.markets.iter().filter_map(offer).collect::<Vec<_>>())
    });
    let entries = built_in.chain(added).map(|(instance_type, priced)| {
        let name = instance_type.name.as_str();
        let all: Vec<&str> = zones_of.get(name).into_iter().flatten().copied().collect();
        let own: Vec<&str> = all.iter().copied().filter(|zone| zones.contains(*zone)).collect();
        if own.is_empty() {
            let reason = match all.as_slice() {
                [] => Unoffered::Region(types.region.to_owned()),
                others => Unoffered::Zones(others.iter().map(|&zone| zone.to_owned()).collect()),
            };
            return Entry::not_offered(instance_type.clone(), reason);
        }
        let offers = own.iter().flat_map(|zone| {
            priced.iter().map(|offer| {
                let live = (offer.market == Market::Spot)
                    .then(|| prices.get(&(name, *zone)).copied())
                    .flatten();
                Offer {
                    zone: (*zone).to_owned(),
                    market: offer.market,
                    price: live.unwrap_or(offer.price),
                    accuracy: live.map_or(offer.accuracy, |_| Accuracy::Exact),
                }
            })
        });
        Entry::new(instance_type.clone(), offers.collect())
    });
    Catalogue::new(entries.collect()).with_images(images)
}

/// Returns the offers of a type with its live on-demand price, which is the upper bound of the spot
/// price. A type without a built-in price gets an offer.
fn with_on_demand(offers: &[Offer], live: Option<Price>) -> Vec<Offer> {
    let Some(price) = live else { return offers.to_vec() };
    match offers {
        [] => vec![offer_at(price, Market::OnDemand)],
        offers => offers.iter().map(|offer| offer_at(price, offer.market)).collect(),
    }
}

/// Returns the offer of a market at a live on-demand price.
fn offer_at(price: Price, market: Market) -> Offer {
    let accuracy = match market {
        Market::OnDemand => Accuracy::Exact,
        Market::Spot => Accuracy::AtMost,
    };
    Offer { zone: String::new(), market, price, accuracy }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiyot_engine::{
        placement::{CatalogueFile, Defaults, InstanceType, Needs, NoFit, Requested, Rules, rank},
        request::{CellRequest, InstanceType as TypeChoice},
    };

    fn built_in(types: &Catalogue) -> Types<'_> {
        Types { region: "us-east-1", built_in: types, added: &[] }
    }

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
        let catalogue =
            catalogue(built_in(&types), None, &in_zones, &spot, &zones, vec![Architecture::Amd64]);
        let offered = catalogue.entries().iter().filter(|entry| !entry.offers.is_empty());
        let names: Vec<&str> = offered.map(|entry| entry.instance_type.name.as_str()).collect();
        assert_eq!(names, ["t3.nano"]);
        assert_eq!(catalogue.images(), [Architecture::Amd64]);
        let live = offer(&catalogue, "t3.nano", "us-east-1a", Market::Spot).unwrap();
        assert_eq!((live.price, live.accuracy), (Price::from_micros(1700), Accuracy::Exact));
        let unknown = offer(&catalogue, "t3.nano", "us-east-1b", Market::Spot).unwrap();
        assert_eq!((unknown.price, unknown.accuracy), (Price::from_micros(5200), Accuracy::AtMost));
        let fixed = offer(&catalogue, "t3.nano", "us-east-1b", Market::OnDemand).unwrap();
        assert_eq!((fixed.price, fixed.accuracy), (Price::from_micros(5200), Accuracy::Exact));
        assert_eq!(offer(&catalogue, "t3.nano", "us-east-1e", Market::OnDemand), None);
    }

    /// Verifies V79.
    #[test]
    fn added_type_has_an_offer_in_each_market_once_its_price_is_known() {
        let types = CatalogueFile::built_in().catalogue;
        let added = AddedType {
            instance_type: InstanceType {
                name: "z9.large".into(),
                ..types.named("m5.large").unwrap().instance_type.clone()
            },
            markets: vec![Market::OnDemand, Market::Spot],
        };
        let in_zones = [in_zone("z9.large", "us-east-1a")];
        let zones = ["us-east-1a".to_owned()].into();
        let with = |live: Option<&Prices>| {
            let added = std::slice::from_ref(&added);
            let catalogue = catalogue(
                Types { added, ..built_in(&types) },
                live,
                &in_zones,
                &[],
                &zones,
                Vec::new(),
            );
            [Market::OnDemand, Market::Spot].map(|market| {
                let offer = offer(&catalogue, "z9.large", "us-east-1a", market)?;
                Some((offer.price.micros(), offer.accuracy))
            })
        };
        assert_eq!(with(None), [None, None]);
        let live = Prices::from([("z9.large".to_owned(), Price::from_micros(9000))]);
        let known = [Some((9000, Accuracy::Exact)), Some((9000, Accuracy::AtMost))];
        assert_eq!(with(Some(&live)), known);
    }

    /// Verifies A12.
    #[test]
    fn type_in_no_zone_of_the_subnets_fits_nothing_with_this_reason() {
        let in_zones = [
            in_zone("t3.nano", "us-east-1a"),
            in_zone("t3.micro", "us-east-1e"),
            in_zone("t3.micro", "us-east-1f"),
        ];
        let types = CatalogueFile::built_in().catalogue;
        let zones = ["us-east-1a".to_owned()].into();
        let catalogue = catalogue(built_in(&types), None, &in_zones, &[], &zones, Vec::new());
        let (defaults, requested) = (Defaults::default(), Requested::default());
        let rules = Rules::default();
        for (name, expected) in [
            ("t3.small", "t3.small exists, but is offered in no zone of us-east-1"),
            (
                "t3.micro",
                "t3.micro exists, but is offered in no zone with a subnet of cells, only in \
                 us-east-1e and us-east-1f",
            ),
        ] {
            let instance_type = Some(TypeChoice::Exact(name.into()));
            let architecture = Some(Architecture::Amd64);
            let request = CellRequest { instance_type, architecture, ..CellRequest::default() };
            let needs = Needs::new(&request, &requested, &defaults);
            assert_eq!(rank(&catalogue, &needs, &rules, &()), []);
            let error = NoFit::new(&catalogue, &needs, &rules).to_string();
            assert!(error.contains(&format!("nearest: {expected} | ")), "{error}");
        }
    }

    /// Verifies V70, V71.
    #[test]
    fn live_on_demand_prices_replace_the_estimates_of_another_region() {
        let types = CatalogueFile::built_in_for("eu-west-1");
        let in_zones = ["t3.nano", "t3.micro"].map(|name| in_zone(name, "eu-west-1a"));
        let spot = [SpotPrice {
            instance_type: "t3.micro".into(),
            zone: "eu-west-1a".into(),
            price: "0.0034".into(),
        }];
        let zones = ["eu-west-1a".to_owned()].into();
        let live = Prices::from([("t3.nano".to_owned(), Price::from_micros(5700))]);
        let types = Types { region: "eu-west-1", ..built_in(&types) };
        let catalogue = catalogue(types, Some(&live), &in_zones, &spot, &zones, Vec::new());
        let offers = |name: &str| {
            [Market::OnDemand, Market::Spot].map(|market| {
                let offer = offer(&catalogue, name, "eu-west-1a", market).unwrap();
                (offer.price.micros(), offer.accuracy)
            })
        };
        assert_eq!(offers("t3.nano"), [(5700, Accuracy::Exact), (5700, Accuracy::AtMost)]);
        assert_eq!(offers("t3.micro"), [(10_400, Accuracy::Estimate), (3400, Accuracy::Exact)]);
    }
}
