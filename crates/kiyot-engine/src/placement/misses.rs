//! Near misses: instance types that almost fit a pod, with the reasons.

use std::fmt;

use kiyot_values::price::Price;

use crate::{
    placement::{
        Catalogue, InstanceType, Needs, Reason, Rules, catalogue::Entry, fit, ranking::markets,
    },
    request::InstanceType as TypeChoice,
};

/// The distance of a reason without an amount: another architecture is farther than half the
/// memory.
const OTHER_KIND: u64 = 1000;

/// The distance of a letter in a name: a type with another name is farther than the named type,
/// however much the named type lacks.
const NEARLY_NAMED: u64 = 10 * OTHER_KIND;

/// An instance type that does not fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Miss<'a> {
    /// The instance type.
    pub instance_type: &'a InstanceType,
    /// Its lowest price in the pod's markets.
    pub price: Option<Price>,
    /// The reasons. Not empty.
    pub reasons: Vec<Reason<'a>>,
}

impl fmt::Display for Miss<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.instance_type.name)?;
        let mut separator = " ";
        for reason in &self.reasons {
            write!(f, "{separator}{reason}")?;
            separator = ", and ";
        }
        Ok(())
    }
}

/// Returns the instance types that almost fit a pod, the nearest first: by the number of their
/// reasons, then by the parts that they lack. With a price, returns only cheaper types whose name
/// the pod accepts.
pub fn misses<'a>(
    catalogue: &'a Catalogue,
    needs: &'a Needs,
    rules: &'a Rules,
    below: Option<Price>,
    most: usize,
) -> Vec<Miss<'a>> {
    let mut all: Vec<(u64, Miss<'a>)> = catalogue
        .entries()
        .iter()
        .filter_map(|entry| miss(entry, needs, rules))
        .filter(|miss| below.is_none_or(|below| is_beside(miss, below)))
        .map(|miss| (distance(&miss), miss))
        .collect();
    all.sort_by(|(one, left), (other, right)| {
        let price = |miss: &Miss<'_>| miss.price.unwrap_or(Price::from_micros(u64::MAX));
        one.cmp(other).then_with(|| price(left).cmp(&price(right)))
    });
    all.truncate(most);
    all.into_iter().map(|(_, miss)| miss).collect()
}

/// Returns whether a type is cheaper than the choice and has a name that the pod accepts.
fn is_beside(miss: &Miss<'_>, chosen: Price) -> bool {
    let has_other_name = miss.reasons.iter().any(|reason| matches!(reason, Reason::Name(_)));
    !has_other_name && miss.price.is_some_and(|price| price < chosen)
}

/// Returns a type with the reasons why it does not fit; `None` if it fits.
fn miss<'a>(entry: &'a Entry, needs: &'a Needs, rules: &'a Rules) -> Option<Miss<'a>> {
    let instance_type = &entry.instance_type;
    let mut reasons = Vec::new();
    fit::check(instance_type, needs, rules, |reason| reasons.push(reason));
    let markets = markets(needs.launch_type);
    reasons.extend(fit::check_offers(entry, needs, rules, markets));
    let offers = entry.offers.iter().filter(|offer| markets.contains(&offer.market));
    let price = offers.map(|offer| fit::price(instance_type, offer, needs)).min();
    (!reasons.is_empty()).then_some(Miss { instance_type, price, reasons })
}

/// Returns the distance of a type from a fit.
fn distance(miss: &Miss<'_>) -> u64 {
    let of_name = |reason: &Reason<'_>| match reason {
        // No type has the name. The meant type has a similar name.
        Reason::Name(TypeChoice::Exact(name)) => {
            let edits = strsim::osa_distance(name, &miss.instance_type.name);
            NEARLY_NAMED * edits as u64
        }
        reason => distance_of(reason),
    };
    miss.reasons.iter().map(of_name).sum()
}

/// Returns the distance of a reason. A missing amount counts in 500ths of the need.
fn distance_of(reason: &Reason<'_>) -> u64 {
    let lack = |has: u64, needed: u64| {
        needed.saturating_sub(has).saturating_mul(OTHER_KIND / 2) / needed.max(1)
    };
    1 + match reason {
        Reason::Cpu(has, needed) | Reason::Baseline(has, needed) => lack(*has, *needed),
        Reason::Memory(has, needed, overhead) => lack(*has, needed.saturating_add(*overhead)),
        Reason::Overhead(has, needed) => lack(*has, *needed),
        Reason::Price(price, cap) => lack(cap.micros(), price.micros()),
        Reason::Gpus(instance_type, _) if instance_type.gpus.is_some() => OTHER_KIND / 2,
        _ => OTHER_KIND,
    }
}
