//! The largest resources of many cells together.

use kiyot_values::price::Price;

use crate::{
    placement::{Catalogue, Needs, Requested, Rules, fit, ranking::markets},
    request::{CellRequest, LaunchType},
};

/// The CPUs and the memory of cells together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Most {
    /// The CPUs without bursts.
    pub cpus: u64,
    /// The memory of their processes, in MiB.
    pub memory_mib: u64,
}

impl Most {
    /// Returns the most CPUs and the most memory of at most `cells` cells of one offering within a
    /// price limit. Considers the offerings for pods that name no instance type.
    pub fn of(catalogue: &Catalogue, rules: &Rules, cells: usize, limit: Option<Price>) -> Self {
        let request =
            CellRequest { launch_type: LaunchType::SpotPreferred, ..CellRequest::default() };
        let needs = Needs::new(&request, &Requested::default(), &rules.defaults);
        let cells = u64::try_from(cells).unwrap_or(u64::MAX);
        let affordable = |price: Price| match limit {
            Some(limit) if price > Price::FREE => cells.min(limit.micros() / price.micros()),
            _ => cells,
        };
        let mut most = Self::default();
        for entry in catalogue.entries() {
            let instance_type = &entry.instance_type;
            let offers = entry.offers.iter().filter(|offer| {
                markets(needs.launch_type).contains(&offer.market) && rules.has_zone(&offer.zone)
            });
            let Some(price) = offers.map(|offer| offer.price).min() else { continue };
            if !fit::fits(instance_type, &needs, rules) {
                continue;
            }
            let (cells, baseline) = (affordable(price), instance_type.baseline_milli_cpus);
            let milli_cpus = baseline.unwrap_or(instance_type.milli_cpus);
            most.cpus = most.cpus.max(milli_cpus.saturating_mul(cells) / 1000);
            most.memory_mib = most.memory_mib.max(instance_type.usable_mib().saturating_mul(cells));
        }
        most
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::{Accuracy, Entry, InstanceType, Market, Offer};
    use crate::request::{Architecture, InstanceType as TypeChoice};

    fn entry(name: &str, cpus: u64, memory_mib: u64, prices: &[(&str, u64)]) -> Entry {
        let instance_type = InstanceType {
            name: name.to_owned(),
            milli_cpus: cpus * 1000,
            memory_mib,
            architectures: vec![Architecture::of_node()],
            baseline_milli_cpus: None,
            gpus: None,
            is_bare_metal: false,
            is_nitro: true,
            is_current: true,
        };
        let offer = |(zone, micros): &(&str, u64)| Offer {
            zone: (*zone).to_owned(),
            market: Market::OnDemand,
            price: Price::from_micros(*micros),
            accuracy: Accuracy::Exact,
        };
        Entry::new(instance_type, prices.iter().map(offer).collect())
    }

    /// Verifies K15.
    #[test]
    fn most_resources_respect_cell_count_price_limit_and_rules() {
        let mut burstable = entry("t3.large", 2, 8192, &[("a", 10_000)]);
        burstable.instance_type.baseline_milli_cpus = Some(600);
        let mut metal = entry("m5.metal", 96, 393_216, &[("a", 4_000_000)]);
        metal.instance_type.is_bare_metal = true;
        let catalogue = Catalogue::new(vec![
            burstable,
            metal,
            entry("c5.large", 2, 4096, &[("a", 85_000), ("b", 80_000)]),
            entry("c5.9xlarge", 36, 73_728, &[("a", 1_530_000)]),
            entry("x1.unpriced", 500, 1_000_000, &[]),
        ]);
        let most = |rules: &Rules, cells, limit: Option<u64>| {
            let Most { cpus, memory_mib } =
                Most::of(&catalogue, rules, cells, limit.map(Price::from_micros));
            (cpus, memory_mib)
        };
        let usable = |memory_mib: u64| entry("", 1, memory_mib, &[]).instance_type.usable_mib();
        let all = Rules::default();
        assert_eq!(most(&all, 10, None), (360, 10 * usable(73_728)));
        // A dollar buys twelve c5.large, no c5.9xlarge, and as many t3.large as cells are allowed.
        assert_eq!(most(&all, 50, Some(1_000_000)), (30, 50 * usable(8192)));
        assert_eq!(most(&all, 10, Some(1_000_000)), (20, 10 * usable(8192)));
        let exclude =
            vec![TypeChoice::Glob("c5.9*".to_owned()), TypeChoice::Glob("t3*".to_owned())];
        let rules = Rules { exclude, zones: vec!["a".to_owned()], ..Rules::default() };
        assert_eq!(most(&rules, 50, Some(1_000_000)), (22, 11 * usable(4096)));
        assert_eq!(most(&rules, 0, None), (0, 0));
    }
}
