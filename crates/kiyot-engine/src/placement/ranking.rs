//! The ranking of the offerings that fit a pod.

use kiyot_values::price::Price;

use crate::{
    placement::{
        Accuracy, Catalogue, Market, Needs, Offer, Offering, Refused, Rules, Size,
        catalogue::Entry, fit,
    },
    request::LaunchType,
};

/// Bounds the candidates of a launch.
pub const MAX_CANDIDATES: usize = 16;
/// Bounds the further candidates of a warm pool: some forty instance types in three zones and both
/// markets.
const MAX_FURTHER_CANDIDATES: usize = 256;

/// An offering that fits a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// The offering.
    pub offering: Offering,
    /// The price for the pod, with its sustained CPU.
    pub price: Price,
    /// The accuracy of the price.
    pub accuracy: Accuracy,
}

impl AsRef<Self> for Candidate {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl Candidate {
    /// Returns the candidate of an offering that costs nothing.
    pub fn free(offering: Offering) -> Self {
        Self { offering, price: Price::FREE, accuracy: Accuracy::Exact }
    }
}

/// Returns the markets of a launch type, the preferred first.
pub(super) fn markets(launch_type: LaunchType) -> &'static [Market] {
    match launch_type {
        LaunchType::OnDemand => &[Market::OnDemand],
        LaunchType::Spot => &[Market::Spot],
        LaunchType::SpotPreferred => &[Market::Spot, Market::OnDemand],
    }
}

/// Returns the offerings that fit a pod and were not refused recently, the preferred market first,
/// then the cheapest first.
///
/// At equal prices the larger memory is first, then names and zones decide. Takes at most
/// [`MAX_CANDIDATES`], the same number of each market, and then drops offerings whose quota is
/// full. With both markets, drops spot offerings that are not cheaper than the first on-demand
/// offering: they could only cost more, and be reclaimed.
pub fn rank(
    catalogue: &Catalogue,
    needs: &Needs,
    rules: &Rules,
    refused: &impl Refused,
) -> Vec<Candidate> {
    let mut candidates = rank_at_most(catalogue, needs, rules, refused, MAX_CANDIDATES);
    leave_out_dear_spot(&mut candidates);
    candidates
}

/// Returns the offerings from which [`rank`] chooses while some are refused. They include spot
/// offerings that are not cheaper than on-demand.
pub fn rank_refused(catalogue: &Catalogue, needs: &Needs, rules: &Rules) -> Vec<Candidate> {
    rank_at_most(catalogue, needs, rules, &(), MAX_CANDIDATES)
}

/// Returns the offerings after those of [`rank`]. A warm pool, whose offerings are ranked before
/// any refusal, is filled from them while all offerings of [`rank`] are refused.
/// [`leave_out_dear_spot`] then drops dear spot offerings among those that are not refused.
pub fn rank_further(catalogue: &Catalogue, needs: &Needs, rules: &Rules) -> Vec<Candidate> {
    let preferred = rank(catalogue, needs, rules, &());
    let most = MAX_CANDIDATES + MAX_FURTHER_CANDIDATES;
    let mut further = rank_at_most(catalogue, needs, rules, &(), most);
    further.retain(|candidate| !preferred.contains(candidate));
    further
}

fn rank_at_most(
    catalogue: &Catalogue,
    needs: &Needs,
    rules: &Rules,
    refused: &impl Refused,
    most: usize,
) -> Vec<Candidate> {
    if !catalogue.has_image(needs.architecture) {
        return Vec::new();
    }
    if let Some(offering) = catalogue.any_size_offering() {
        let memory_mib = needs.memory_mib.value.saturating_add(needs.overhead_mib);
        let price = rules.machine_price.price(needs.milli_cpus.value, memory_mib);
        return vec![Candidate { price, ..Candidate::free(offering.clone()) }];
    }
    if catalogue.is_sized() {
        return sized(catalogue, needs, rules);
    }
    let fitting: Vec<&Entry> = catalogue
        .entries()
        .iter()
        .filter(|entry| fit::fits(&entry.instance_type, needs, rules))
        .collect();
    let markets = markets(needs.launch_type);
    let most = most / markets.len();
    let of_market = |market: &Market| {
        let is_taken = |offer: &Offer| offer.market == *market && rules.has_zone(&offer.zone);
        cheapest(&fitting, needs, is_taken, refused, most)
    };
    let mut candidates: Vec<Candidate> = markets.iter().flat_map(of_market).collect();
    candidates.retain(|candidate| !refused.is_over_quota(&candidate.offering));
    candidates
}

/// Drops a spot offering that costs at least as much as the cheapest on-demand offering, if both
/// prices are known.
pub fn leave_out_dear_spot(candidates: &mut Vec<Candidate>) {
    let is_known = |market: Market| {
        move |it: &&Candidate| it.offering.market == market && it.accuracy == Accuracy::Exact
    };
    let on_demand = candidates.iter().filter(is_known(Market::OnDemand));
    let Some(bound) = on_demand.map(|candidate| candidate.price).min() else { return };
    let is_spot = is_known(Market::Spot);
    candidates.retain(|candidate| !is_spot(&candidate) || candidate.price < bound);
}

/// Returns the offering of a pod's size, if the pod fits the largest size.
fn sized(catalogue: &Catalogue, needs: &Needs, rules: &Rules) -> Vec<Candidate> {
    let needs = needs.of_size();
    let fitting =
        catalogue.entries().iter().filter(|entry| fit::fits(&entry.instance_type, &needs, rules));
    let offers = fitting.flat_map(|entry| entry.offers.iter().map(|offer| entry.offering(offer)));
    let size = Size::of(&needs);
    let price = rules.machine_price.price(u64::from(size.cpus) * 1000, size.memory_mib);
    let candidate = |offering| Candidate {
        price,
        ..Candidate::free(Offering { instance_type: size.to_string(), ..offering })
    };
    offers.map(candidate).collect()
}

/// Returns the cheapest allowed offers.
fn cheapest(
    entries: &[&Entry],
    needs: &Needs,
    is_taken: impl Fn(&Offer) -> bool,
    refused: &impl Refused,
    most: usize,
) -> Vec<Candidate> {
    let mut offers = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        let instance_type = &entry.instance_type;
        for offer in entry.offers.iter().filter(|offer| is_taken(offer)) {
            let price = fit::price(instance_type, offer, needs);
            let is_allowed = needs.max_price.is_none_or(|cap| price <= cap);
            if is_allowed && !refused.is_refused(&instance_type.name, &offer.zone, offer.market) {
                let memory = u64::MAX - instance_type.memory_mib;
                offers.push(((price, memory, index, offer.zone.as_str()), offer));
            }
        }
    }
    if offers.len() > most {
        offers.select_nth_unstable_by(most, |(one, _), (other, _)| one.cmp(other));
        offers.truncate(most);
    }
    offers.sort_unstable_by_key(|(order, _)| *order);
    let candidate = |((price, _, index, _), offer): ((Price, u64, usize, &str), &Offer)| {
        Candidate { offering: entries[index].offering(offer), price, accuracy: offer.accuracy }
    };
    offers.into_iter().map(candidate).collect()
}
