//! DescribeSpotPriceHistory, for which moto has no realistic prices.

use super::ok;
use crate::{client::Reply, query::Query, shared::Shared, xml::Element};

/// Zones with prices: all of moto's zones.
const ZONES: [&str; 6] =
    ["us-east-1a", "us-east-1b", "us-east-1c", "us-east-1d", "us-east-1e", "us-east-1f"];

/// Operating system of the prices.
const PRODUCT: &str = "Linux/UNIX";

/// Most entries of a page.
const MAX_PAGE_ENTRIES: usize = 1000;

pub(super) fn history(query: &Query, shared: &Shared) -> Reply {
    let wanted = |list: &str, filter: &str| {
        let mut all: Vec<_> = query.list(list);
        all.extend(query.filter(filter).unwrap_or_default());
        all
    };
    let types = wanted("InstanceType", "instance-type");
    let products = wanted("ProductDescription", "product-description");
    let mut zones = query.filter("availability-zone").unwrap_or_default();
    zones.extend(Some(query.get("AvailabilityZone")).filter(|zone| !zone.is_empty()));
    let allows = |list: &[&str], value: &str| list.is_empty() || list.contains(&value);
    let now = jiff::Timestamp::now().to_string();
    let mut entries = Vec::new();
    for (name, found) in &shared.types {
        let Some(price) = found.spot_price().filter(|_| allows(&types, name)) else { continue };
        let offered =
            ZONES.iter().filter(|zone| allows(&zones, zone) && allows(&products, PRODUCT));
        entries.extend(offered.map(|zone| (name, zone, price)));
    }
    let first: usize = query.get("NextToken").parse().unwrap_or(0);
    let page = query.get("MaxResults").parse().unwrap_or(MAX_PAGE_ENTRIES).min(MAX_PAGE_ENTRIES);
    let last = first.saturating_add(page);
    let items = entries.iter().skip(first).take(page).map(|(name, zone, price)| {
        Element::parent(
            "item",
            vec![
                Element::text("instanceType", name.as_str()),
                Element::text("productDescription", PRODUCT),
                Element::text("spotPrice", format!("{price:.6}")),
                Element::text("timestamp", now.as_str()),
                Element::text("availabilityZone", **zone),
            ],
        )
    });
    let next = if last < entries.len() { last.to_string() } else { String::new() };
    let fields = vec![
        Element::text("requestId", "test-cloud"),
        Element::parent("spotPriceHistorySet", items.collect()),
        Element::text("nextToken", next),
    ];
    ok(&Element::response("DescribeSpotPriceHistoryResponse", fields))
}
