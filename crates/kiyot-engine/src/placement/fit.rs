//! The fit of an instance type for a pod.

use std::fmt;

use kiyot_values::price::Price;

use crate::{
    placement::{Gpus, InstanceType, Market, Needs, Offer, Rules, Unoffered, catalogue::Entry},
    request::{Architecture, InstanceType as TypeChoice},
};

/// The price of a vCPU above the baseline of a burstable type, in EC2's unlimited mode for Linux
/// (`CPUCredits:t2`, `CPUCredits:t3` and `CPUCredits:t3a` of AWS's price list).
const SUSTAINED_CPU: Price = Price::from_micros(50_000);
/// The same for [`T4G`] (`CPUCredits:t4g`).
const SUSTAINED_CPU_OF_T4G: Price = Price::from_micros(40_000);
/// The prefix of the names of burstable arm64 types.
const T4G: &str = "t4g.";

/// A reason why an instance type does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason<'a> {
    /// A name that the annotation does not match.
    Name(&'a TypeChoice),
    /// Excluded by the configuration.
    Excluded(&'a TypeChoice),
    /// Bare metal, although the annotation does not name it.
    BareMetal,
    /// A previous generation, without an annotation that names types.
    PreviousGeneration,
    /// Other architectures: the type's, and the needed architecture.
    Architecture(&'a [Architecture], Architecture),
    /// Too few CPUs, in thousandths: the type's, and the needed number.
    Cpu(u64, u64),
    /// Too few CPUs in the baseline of a burstable type: its baseline, and the needed number.
    Baseline(u64, u64),
    /// Too little memory, in MiB: the usable part, the pod's need, and the cell's own need.
    Memory(u64, u64, u64),
    /// Too little memory even without a pod, in MiB: the usable part, and the cell's own need.
    Overhead(u64, u64),
    /// Too few GPUs, or GPUs of another kind.
    Gpus(&'a InstanceType, &'a Needs),
    /// No known price.
    NoPrice,
    /// No offer in any zone of the provider.
    Unoffered(&'a Unoffered),
    /// No offer in the pod's market.
    Market(Market),
    /// No offer in these configured zones; true if the zones of the offers are known.
    Zone(&'a [String], bool),
    /// A price above the pod's limit: the price, and the limit.
    Price(Price, Price),
}

/// Reports every reason why an instance type does not fit, except its price.
pub(super) fn check<'a>(
    instance_type: &'a InstanceType,
    needs: &'a Needs,
    rules: &'a Rules,
    mut report: impl FnMut(Reason<'a>),
) {
    let name = &instance_type.name;
    let is_exact = matches!(needs.instance_type, Some(TypeChoice::Exact(_)));
    match &needs.instance_type {
        Some(choice) if !choice.matches(name) => return report(Reason::Name(choice)),
        Some(TypeChoice::Exact(_)) => {}
        Some(TypeChoice::Glob(glob)) if glob.contains("metal") => {}
        _ if instance_type.is_bare_metal => report(Reason::BareMetal),
        _ => {}
    }
    if !instance_type.is_current && needs.instance_type.is_none() {
        report(Reason::PreviousGeneration);
    }
    if let Some(excluded) = rules.exclude.iter().find(|choice| choice.matches(name)) {
        report(Reason::Excluded(excluded));
    }
    if !instance_type.architectures.contains(&needs.architecture) {
        report(Reason::Architecture(&instance_type.architectures, needs.architecture));
    }
    // An exact type decides the size: only annotations can contradict it.
    if needs.milli_cpus.is_binding(is_exact) {
        let needed = needs.milli_cpus.value;
        if instance_type.milli_cpus < needed {
            report(Reason::Cpu(instance_type.milli_cpus, needed));
        } else if let Some(baseline) = instance_type.baseline_milli_cpus
            && !needs.is_sustained
            && baseline < needed
        {
            report(Reason::Baseline(baseline, needed));
        }
    }
    let (usable, needed) = (instance_type.usable_mib(), needs.memory_mib.value);
    let overhead = needs.overhead_mib;
    if needs.memory_mib.is_binding(is_exact) {
        if usable < needed.saturating_add(overhead) {
            report(Reason::Memory(usable, needed, overhead));
        }
    } else if usable < overhead {
        report(Reason::Overhead(usable, overhead));
    }
    if let Some(wanted) = &needs.gpus {
        let fits = |gpus: &Gpus| {
            gpus.count >= wanted.count
                && wanted.matches(gpus.manufacturer.as_deref(), gpus.name.as_deref())
        };
        if !instance_type.gpus.as_ref().is_some_and(fits) {
            report(Reason::Gpus(instance_type, needs));
        }
    }
}

/// Returns whether an instance type fits, regardless of its price.
pub(super) fn fits(instance_type: &InstanceType, needs: &Needs, rules: &Rules) -> bool {
    let mut fits = true;
    check(instance_type, needs, rules, |_| fits = false);
    fits
}

pub(super) fn price(instance_type: &InstanceType, offer: &Offer, needs: &Needs) -> Price {
    let above = match instance_type.baseline_milli_cpus {
        Some(baseline) if needs.is_sustained => needs.milli_cpus.value.saturating_sub(baseline),
        _ => 0,
    };
    let of_vcpu = match instance_type.name.starts_with(T4G) {
        true => SUSTAINED_CPU_OF_T4G,
        false => SUSTAINED_CPU,
    };
    offer.price + of_vcpu.of_milli(above)
}

/// Returns the reason why no offer of a type in these markets fits.
pub(super) fn check_offers<'a>(
    entry: &'a Entry,
    needs: &'a Needs,
    rules: &'a Rules,
    markets: &[Market],
) -> Option<Reason<'a>> {
    if let Some(reason) = &entry.unoffered {
        return Some(Reason::Unoffered(reason));
    }
    if entry.offers.is_empty() {
        return Some(Reason::NoPrice);
    }
    let of_markets = || entry.offers.iter().filter(|offer| markets.contains(&offer.market));
    if of_markets().next().is_none() {
        return Some(Reason::Market(markets[0]));
    }
    let offers = of_markets().filter(|offer| rules.has_zone(&offer.zone));
    let cheapest = offers.map(|offer| price(&entry.instance_type, offer, needs)).min();
    match (cheapest, needs.max_price) {
        (None, _) => {
            let is_known = of_markets().any(|offer| !offer.zone.is_empty());
            Some(Reason::Zone(&rules.zones, is_known))
        }
        (Some(cheapest), Some(cap)) if cheapest > cap => Some(Reason::Price(cheapest, cap)),
        _ => None,
    }
}

impl fmt::Display for Reason<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(choice) => write!(f, "is not {choice}"),
            Self::Excluded(choice) => write!(f, "is excluded by {choice}"),
            Self::BareMetal => f.write_str("is bare metal, which the annotation must name"),
            Self::PreviousGeneration => {
                f.write_str("is of a previous generation, which the annotation must name")
            }
            Self::Architecture(has, needed) => {
                let has: Vec<String> = has.iter().map(ToString::to_string).collect();
                write!(f, "is {}, and {needed} is needed", has.join(" and "))
            }
            Self::Cpu(has, needed) => {
                write!(f, "has {} CPU, and {} is needed", Cpus(*has), Cpus(*needed))
            }
            Self::Baseline(has, needed) => {
                write!(f, "has {} CPU all the time, and {} is needed", Cpus(*has), Cpus(*needed))
            }
            Self::Memory(usable, needed, overhead) => write!(
                f,
                "has {usable} MiB for processes, and {needed} + {overhead} for the cell is needed"
            ),
            Self::Overhead(usable, overhead) => {
                write!(f, "has {usable} MiB for processes, and the cell alone needs {overhead}")
            }
            Self::Gpus(instance_type, needs) => {
                match &instance_type.gpus {
                    None => f.write_str("has no GPU")?,
                    Some(gpus) => {
                        let (count, plural) = (gpus.count, if gpus.count == 1 { "" } else { "s" });
                        let of = [&gpus.manufacturer, &gpus.name];
                        let [maker, name] = of.map(|it| it.as_deref().unwrap_or_default());
                        write!(f, "has {count} GPU{plural} of {maker} {name}")?;
                    }
                }
                match &needs.gpus {
                    Some(wanted) => write!(f, " (needed: {wanted})"),
                    None => Ok(()),
                }
            }
            Self::NoPrice => f.write_str("has no known price"),
            Self::Unoffered(reason) => reason.fmt(f),
            Self::Market(market) => write!(f, "is not offered as {market}"),
            Self::Zone(zones, true) => {
                write!(f, "is not offered in zone {}", zones.join(" or "))
            }
            Self::Zone(zones, false) => {
                write!(f, "has no known zone, and zone {} is needed", zones.join(" or "))
            }
            Self::Price(price, cap) => {
                write!(f, "costs {price} an hour, and {cap} is the highest allowed")
            }
        }
    }
}

/// A number of CPUs in thousandths, displayed as `2` or `0.25`.
#[derive(Debug, Clone, Copy)]
pub struct Cpus(pub u64);

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fraction = format!("{:03}", self.0 % 1000);
        let fraction = fraction.trim_end_matches('0');
        let dot = if fraction.is_empty() { "" } else { "." };
        write!(f, "{}{dot}{fraction}", self.0 / 1000)
    }
}
