//! Products of AWS's price list.
//!
//! A product is a JSON document with attributes and terms ("Finding services and products using the
//! AWS Price List Query API"). All used fields are checked; reserved terms are skipped.

use std::collections::BTreeMap;

use kiyot_values::price::Price;
use serde::Deserialize;

/// Bounds a product, in bytes: some have 40 KiB, mostly of reserved terms.
const MAX_PRODUCT_BYTES: usize = 512 * 1024;
/// Bounds the name of an instance type, in bytes.
const MAX_NAME_BYTES: usize = 64;
/// Bounds the on-demand prices of a product: the current price, and a price for each later date.
const MAX_PRICES: usize = 16;
/// The unit of prices of instances.
const HOURS: &str = "Hrs";
/// The currency of prices.
const DOLLARS: &str = "USD";

/// The on-demand price of an instance type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// The name of the instance type.
    pub instance_type: String,
    /// The price; more than 0.
    pub price: Price,
}

/// Reason why a product has no usable on-demand price of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// The product is too large.
    #[error("the product has {0} bytes; allowed: {MAX_PRODUCT_BYTES}")]
    TooLarge(usize),
    /// The text is not JSON of a product.
    #[error("the product is not the JSON of a product")]
    NotAProduct,
    /// The product is not an instance of Linux on shared hardware in the region.
    #[error("the product is not an instance of Linux on shared hardware in the region")]
    Other,
    /// The name of the instance type is not usable.
    #[error("the product has no valid name of an instance type")]
    Name,
    /// The product has no usable price.
    #[error("the product has no valid on-demand price in dollars an hour, more than 0")]
    Price,
}

#[derive(Deserialize)]
struct Document {
    product: Product,
    terms: Terms,
}

#[derive(Deserialize)]
struct Product {
    attributes: Attributes,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Attributes {
    instance_type: String,
    region_code: String,
    operating_system: String,
    tenancy: String,
    pre_installed_sw: String,
    #[serde(rename = "capacitystatus")]
    capacity_status: String,
}

#[derive(Deserialize)]
struct Terms {
    #[serde(rename = "OnDemand", default)]
    on_demand: BTreeMap<String, Term>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Term {
    #[serde(default)]
    price_dimensions: BTreeMap<String, Dimension>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Dimension {
    unit: String,
    price_per_unit: BTreeMap<String, String>,
}

impl Listed {
    /// Parses a product of the price list of a region. The highest of several prices counts.
    pub fn parse(text: &str, region: &str) -> Result<Self, Unusable> {
        if text.len() > MAX_PRODUCT_BYTES {
            return Err(Unusable::TooLarge(text.len()));
        }
        let document: Document = serde_json::from_str(text).map_err(|_| Unusable::NotAProduct)?;
        let attributes = document.product.attributes;
        let is_instance = attributes.region_code == region
            && attributes.operating_system == "Linux"
            && attributes.tenancy == "Shared"
            && attributes.pre_installed_sw == "NA"
            && attributes.capacity_status == "Used";
        if !is_instance {
            return Err(Unusable::Other);
        }
        let name = attributes.instance_type;
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
        if !(1..=MAX_NAME_BYTES).contains(&name.len()) || !name.bytes().all(fits) {
            return Err(Unusable::Name);
        }
        let terms = document.terms.on_demand.values();
        let dimensions = terms.flat_map(|term| term.price_dimensions.values());
        let mut highest = None;
        for (index, dimension) in dimensions.enumerate() {
            let price = dimension.price_per_unit.get(DOLLARS).ok_or(Unusable::Price)?;
            let price: Price = price.parse().map_err(|_| Unusable::Price)?;
            if index >= MAX_PRICES || dimension.unit != HOURS || price == Price::FREE {
                return Err(Unusable::Price);
            }
            highest = highest.max(Some(price));
        }
        let price = highest.ok_or(Unusable::Price)?;
        Ok(Self { instance_type: name, price })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Product from AWS's documentation, with its unused parts.
    const PRODUCT: &str = r#"{
        "product": {
            "productFamily": "Compute Instance",
            "attributes": {
                "memory": "0.5 GiB", "vcpu": "2", "instanceType": "t3.nano", "tenancy": "Shared",
                "usagetype": "BoxUsage:t3.nano", "operatingSystem": "Linux",
                "regionCode": "us-east-1", "preInstalledSw": "NA", "capacitystatus": "Used"
            },
            "sku": "A1"
        },
        "serviceCode": "AmazonEC2",
        "terms": {
            "OnDemand": {"A1.JRTCKXETXF": {
                "priceDimensions": {"A1.JRTCKXETXF.6YS6EN2CT7": {
                    "unit": "Hrs", "endRange": "Inf", "beginRange": "0", "appliesTo": [],
                    "description": "$0.0052 per On Demand Linux t3.nano Instance Hour",
                    "pricePerUnit": {"USD": "0.0052000000"}
                }},
                "sku": "A1", "offerTermCode": "JRTCKXETXF", "termAttributes": {}
            }},
            "Reserved": {"A1.38NPMPTW36": {"termAttributes": {"LeaseContractLength": "3yr"}}}
        },
        "version": "20260720000000", "publicationDate": "2026-07-20T00:00:00Z"
    }"#;

    fn parse(from: &str, to: &str) -> Result<Listed, Unusable> {
        assert!(PRODUCT.contains(from), "{from}");
        Listed::parse(&PRODUCT.replacen(from, to, 1), "us-east-1")
    }

    #[test]
    fn product_is_an_instance_type_with_its_price() {
        let listed = parse("", "").unwrap();
        assert_eq!(listed.instance_type, "t3.nano");
        assert_eq!(listed.price, Price::from_micros(5200));
    }

    /// Verifies V72.
    #[test]
    fn broken_product_is_refused() {
        for (from, to, unusable) in [
            ("\"product\"", "\"goods\"", Unusable::NotAProduct),
            ("\"terms\": {", "\"terms\": 7, \"x\": {", Unusable::NotAProduct),
            ("\"A1\"", "\"A1", Unusable::NotAProduct),
            ("\"USD\": \"0.0052000000\"", "\"USD\": 0.0052", Unusable::NotAProduct),
            ("us-east-1", "eu-west-1", Unusable::Other),
            ("\"Linux\"", "\"Windows\"", Unusable::Other),
            ("\"Shared\"", "\"Dedicated\"", Unusable::Other),
            ("\"NA\"", "\"SQL Std\"", Unusable::Other),
            ("\"Used\"", "\"UnusedCapacityReservation\"", Unusable::Other),
            ("\"t3.nano\"", "\"\"", Unusable::Name),
            ("\"t3.nano\"", "\"t3\\nnano\"", Unusable::Name),
            ("\"Hrs\"", "\"Quantity\"", Unusable::Price),
            ("\"USD\"", "\"CNY\"", Unusable::Price),
            ("0.0052000000", "0.0000000000", Unusable::Price),
            ("0.0052000000", "-0.0052", Unusable::Price),
            ("0.0052000000", "NaN", Unusable::Price),
            ("0.0052000000", "inf", Unusable::Price),
            ("0.0052000000", "1e9", Unusable::Price),
            ("0.0052000000", "", Unusable::Price),
            ("0.0052000000", "0.00520000000000000000000000000000001", Unusable::Price),
            ("\"priceDimensions\"", "\"dimensions\"", Unusable::Price),
        ] {
            assert_eq!(parse(from, to), Err(unusable), "{from} -> {to}");
        }
        let long = parse("A1", &"A".repeat(MAX_PRODUCT_BYTES));
        assert!(matches!(long, Err(Unusable::TooLarge(_))), "{long:?}");
    }

    #[test]
    fn highest_of_several_prices_counts() {
        let later = "{\"USD\": \"0.0052000000\"}}, \"later\": {\"unit\": \"Hrs\", \
                     \"pricePerUnit\": {\"USD\": \"0.0061\"}";
        let listed = parse("{\"USD\": \"0.0052000000\"}", later).unwrap();
        assert_eq!(listed.price, Price::from_micros(6100));
    }
}
