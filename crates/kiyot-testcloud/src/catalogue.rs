//! Instance types with their prices, from the daemon's built-in file.

use std::collections::BTreeMap;

/// File of the daemon's catalogue.
const FILE: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../config/ec2-us-east-1.csv"));

/// Spot price as a part of the on-demand price.
const SPOT_SHARE: f64 = 0.35;

/// An instance type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct InstanceType {
    pub(crate) vcpus: u32,
    /// On-demand price in USD an hour; `None`: unknown.
    pub(crate) price: Option<f64>,
    pub(crate) has_spot: bool,
    /// True if the type belongs to the Nitro System, as bare metal does.
    pub(crate) is_nitro: bool,
}

impl InstanceType {
    /// Returns the spot price in USD an hour.
    pub(crate) fn spot_price(self) -> Option<f64> {
        self.price.filter(|_| self.has_spot).map(|price| price * SPOT_SHARE)
    }
}

/// Reads the instance types by name.
///
/// # Panics
/// If the file's columns have changed.
pub(crate) fn read() -> BTreeMap<String, InstanceType> {
    let mut lines = FILE.lines();
    let header: Vec<_> = lines.next().unwrap_or_default().split(',').collect();
    let column = |name: &str| {
        header
            .iter()
            .position(|own| *own == name)
            .unwrap_or_else(|| panic!("the catalogue has no column {name}"))
    };
    let (name, vcpus) = (column("instance_type"), column("vcpus"));
    let (usage, price) = (column("usage_classes"), column("on_demand_usd_per_hour"));
    let hypervisor = column("hypervisor");
    let row = |line: &str| {
        let cells: Vec<_> = line.split(',').collect();
        let found = InstanceType {
            vcpus: cells.get(vcpus)?.parse().ok()?,
            price: cells.get(price)?.parse().ok(),
            has_spot: cells.get(usage)?.contains("spot"),
            is_nitro: *cells.get(hypervisor)? != "xen",
        };
        Some(((*cells.get(name)?).to_owned(), found))
    };
    lines.filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn catalogue_has_prices_of_common_types() {
        let types = super::read();
        let nano = types["t3.nano"];
        assert_eq!((nano.vcpus, nano.price), (2, Some(0.0052)));
        assert!(nano.spot_price().unwrap() < 0.0052 / 2.0);
    }
}
