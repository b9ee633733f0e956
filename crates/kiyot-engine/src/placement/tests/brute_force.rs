//! Compares the choice with a brute-force search over all offers of a catalogue.

use std::collections::BTreeSet;

use proptest::{
    option,
    sample::{select, subsequence},
    test_runner::TestCaseError,
};

use crate::{
    placement::{
        Entry, Gpus, InstanceType, Offer, Refused, rank_further, ranking::markets, tests::*,
    },
    request::{GpuRequest, LaunchType},
};

fn instance_types() -> impl Strategy<Value = InstanceType> {
    let architectures = select(vec![
        vec![Architecture::Amd64],
        vec![Architecture::Arm64],
        vec![Architecture::Amd64, Architecture::Arm64],
    ]);
    let gpus = (0..4_u32, select(vec!["NVIDIA", "AMD"]), select(vec!["T4", "L4"]));
    (
        select(vec!["a.large", "a.metal", "b.large", "b.small", "c.nano", "c.huge", "d.x"]),
        1..16_u64,
        1..64_u64,
        architectures,
        option::of(0..4000_u64),
        gpus,
        any::<bool>(),
    )
        .prop_map(
            |(name, cpus, memory, architectures, baseline, (count, maker, gpu), current)| {
                InstanceType {
                    name: name.to_owned(),
                    milli_cpus: cpus * 1000,
                    memory_mib: memory * 256,
                    architectures,
                    baseline_milli_cpus: baseline.map(|baseline| baseline.min(cpus * 1000)),
                    gpus: (count > 0).then(|| Gpus {
                        count,
                        manufacturer: Some(maker.to_owned()),
                        name: Some(gpu.to_owned()),
                    }),
                    is_bare_metal: name.ends_with("metal"),
                    is_nitro: current,
                    is_current: current,
                }
            },
        )
}

fn catalogues() -> impl Strategy<Value = Catalogue> {
    let offer = (select(vec!["", "z1", "z2"]), any::<bool>(), 0..40_u64).prop_map(
        |(zone, is_spot, price)| Offer {
            zone: zone.to_owned(),
            market: if is_spot { Market::Spot } else { Market::OnDemand },
            price: Price::from_micros(price * 5000),
            // Equal offerings at equal prices have the same accuracy.
            accuracy: match (price % 3, is_spot) {
                (0, true) => Accuracy::AtMost,
                (0, false) => Accuracy::Estimate,
                _ => Accuracy::Exact,
            },
        },
    );
    let entry = (instance_types(), vec(offer, 0..5))
        .prop_map(|(instance_type, offers)| Entry::new(instance_type, offers));
    vec(entry, 0..12).prop_map(Catalogue::new)
}

fn needs() -> impl Strategy<Value = Needs> {
    let amount = |most: u64| {
        let source = select(vec![Source::Annotation, Source::Limits, Source::Default]);
        (0..most, source).prop_map(|(value, source)| Amount { value, source })
    };
    let choice = select(vec![
        TypeChoice::Exact("b.large".into()),
        TypeChoice::Glob("*.large".into()),
        TypeChoice::Glob("?.m*".into()),
        TypeChoice::Glob("a.metal*".into()),
        TypeChoice::Glob("*".into()),
    ]);
    let gpus = (1..3_u32, option::of(select(vec!["nvidia", "L4", "none"])))
        .prop_map(|(count, name)| GpuRequest { count, name: name.map(str::to_owned) });
    let launch_type =
        select(vec![LaunchType::OnDemand, LaunchType::Spot, LaunchType::SpotPreferred]);
    (
        (amount(8000), amount(8000), 0..200_u64),
        option::weighted(0.3, gpus),
        select(vec![Architecture::Amd64, Architecture::Arm64]),
        option::weighted(0.5, choice),
        launch_type,
        option::weighted(0.5, 0..50_u64),
        any::<bool>(),
    )
        .prop_map(|(size, gpus, architecture, instance_type, launch_type, cap, sustained)| {
            Needs {
                milli_cpus: size.0,
                memory_mib: size.1,
                overhead_mib: size.2,
                storage_bytes: 0,
                gpus,
                architecture,
                instance_type,
                launch_type,
                max_price: cap.map(|cap| Price::from_micros(cap * 5000)),
                is_sustained: sustained,
            }
        })
}

fn zones() -> impl Strategy<Value = Vec<String>> {
    let zone = select(vec!["z1", "z2", "z3"]).prop_map(str::to_owned);
    prop_oneof![Just(Vec::new()), vec(zone, 1..3)]
}

/// Returns the price of an offer if it fits, by a second implementation of the rules.
fn price_if_fits(entry: &Entry, offer: &Offer, needs: &Needs, rules: &Rules) -> Option<u64> {
    let of_type = &entry.instance_type;
    let is_exact = matches!(needs.instance_type, Some(TypeChoice::Exact(_)));
    let decides = |amount: Amount| !is_exact || amount.source == Source::Annotation;
    let baseline = of_type.baseline_milli_cpus.unwrap_or(of_type.milli_cpus);
    let cpus = if needs.is_sustained { of_type.milli_cpus } else { baseline };
    let above = needs.milli_cpus.value.saturating_sub(baseline);
    let is_burstable = of_type.baseline_milli_cpus.is_some();
    let rate = if of_type.name.starts_with("t4g") { 40_000 } else { 50_000 };
    let credits =
        if needs.is_sustained && is_burstable { (above * rate).div_ceil(1000) } else { 0 };
    let price = offer.price.micros() + credits;
    let named = match &needs.instance_type {
        Some(choice) => choice.matches(&of_type.name),
        None => true,
    };
    let may_be_metal = is_exact
        || matches!(&needs.instance_type, Some(TypeChoice::Glob(glob)) if glob.contains("metal"));
    let has_gpus = match (&needs.gpus, &of_type.gpus) {
        (None, _) => true,
        (Some(_), None) => false,
        (Some(wanted), Some(gpus)) => {
            gpus.count >= wanted.count
                && wanted.name.as_ref().is_none_or(|name| {
                    let name = name.to_lowercase();
                    let is_named =
                        |it: &Option<String>| it.as_ref().unwrap().to_lowercase() == name;
                    is_named(&gpus.manufacturer) || is_named(&gpus.name)
                })
        }
    };
    let memory = if decides(needs.memory_mib) { needs.memory_mib.value } else { 0 };
    let fits = named
        && (may_be_metal || !of_type.is_bare_metal)
        && (of_type.is_current || needs.instance_type.is_some())
        && !rules.exclude.iter().any(|choice| choice.matches(&of_type.name))
        && of_type.architectures.contains(&needs.architecture)
        && (!decides(needs.milli_cpus) || cpus >= needs.milli_cpus.value)
        && of_type.usable_mib() >= memory + needs.overhead_mib
        && has_gpus
        && (rules.zones.is_empty() || rules.zones.contains(&offer.zone))
        && needs.max_price.is_none_or(|cap| price <= cap.micros());
    fits.then_some(price)
}

/// Returns the choice of a pod by brute force: the first of all sorted offers in each market that
/// fit and are not refused.
fn choice_by_brute_force(
    catalogue: &Catalogue,
    needs: &Needs,
    rules: &Rules,
    refused: &impl Refused,
) -> Vec<(Offering, u64)> {
    let images = catalogue.images();
    if !images.is_empty() && !images.contains(&needs.architecture) {
        return Vec::new();
    }
    let markets = markets(needs.launch_type);
    let of_market = |market: &Market| {
        let mut fitting = Vec::new();
        for entry in catalogue.entries() {
            let InstanceType { name, memory_mib, .. } = &entry.instance_type;
            for offer in entry.offers.iter().filter(|offer| offer.market == *market) {
                let price = price_if_fits(entry, offer, needs, rules);
                let price = price.filter(|_| !refused.is_refused(name, &offer.zone, *market));
                fitting.extend(price.map(|price| {
                    let order = (price, std::cmp::Reverse(*memory_mib), entry.offering(offer));
                    (order, offer.accuracy)
                }));
            }
        }
        fitting.sort_by(|(one, _), (other, _)| one.cmp(other));
        fitting.truncate(MAX_CANDIDATES / markets.len());
        fitting
    };
    let all: Vec<_> = markets.iter().flat_map(of_market).collect();
    let is_dear = |price: u64, accuracy: Accuracy, offering: &Offering| {
        let is_bound = |((other, _, it), other_accuracy): &((u64, _, Offering), Accuracy)| {
            it.market == Market::OnDemand && *other_accuracy == Accuracy::Exact && *other <= price
        };
        let is_known_spot = offering.market == Market::Spot && accuracy == Accuracy::Exact;
        is_known_spot && all.iter().any(is_bound)
    };
    let taken =
        all.iter().filter(|((price, _, offering), accuracy)| !is_dear(*price, *accuracy, offering));
    taken.map(|((price, _, offering), _)| (offering.clone(), *price)).collect()
}

/// Returns refusals of a pod's first `best` offerings, and of a zone.
fn refusals_of(
    (catalogue, needs, rules): (&Catalogue, &Needs, &Rules),
    best: usize,
    zone: Option<&str>,
) -> Refusals {
    let mut refusals = Refusals::default();
    let refusal = Refusal { until: Duration::from_secs(180), reason: "full".into() };
    let ranked = rank(catalogue, needs, rules, &());
    let offerings = ranked.into_iter().take(best).map(|candidate| candidate.offering).collect();
    refusals.add(&Offerings(offerings), Duration::ZERO, &refusal);
    if let Some(zone) = zone {
        refusals.add(&Zone(zone.to_owned()), Duration::ZERO, &refusal);
    }
    refusals
}

/// Checks the choice of a pod, and that every type either fits or has a reason.
fn check_choice(
    catalogue: &Catalogue,
    needs: &Needs,
    rules: &Rules,
    refusals: &Refusals,
) -> Result<(), TestCaseError> {
    let refused = refusals.at(Duration::from_secs(1));
    let ranked = rank(catalogue, needs, rules, &refused);
    let chosen: Vec<_> = ranked.into_iter().map(|it| (it.offering, it.price.micros())).collect();
    prop_assert_eq!(chosen, choice_by_brute_force(catalogue, needs, rules, &refused));
    let missed = misses(catalogue, needs, rules, None, usize::MAX);
    let names: BTreeSet<&str> =
        missed.iter().map(|miss| miss.instance_type.name.as_str()).collect();
    for entry in catalogue.entries() {
        let fits = entry.offers.iter().any(|offer| {
            markets(needs.launch_type).contains(&offer.market)
                && price_if_fits(entry, offer, needs, rules).is_some()
        });
        let name = entry.instance_type.name.as_str();
        prop_assert_eq!(fits, !names.contains(name), "{}", name);
    }
    prop_assert!(missed.iter().all(|miss| !miss.reasons.is_empty()));
    Ok(())
}

fn images() -> impl Strategy<Value = Vec<Architecture>> {
    use Architecture::{Amd64, Arm64};
    select(vec![vec![], vec![Amd64], vec![Arm64], vec![Amd64, Arm64]])
}

proptest! {
    /// Verifies A10, A13, A26.
    #[test]
    fn choice_equals_brute_force(
        catalogue in catalogues(),
        needs in needs(),
        exclude in option::weighted(0.2, select(vec!["c.*", "b.large"])),
        zones in zones(),
        images in images(),
        best in 0..=MAX_CANDIDATES,
        refused_zone in option::weighted(0.2, select(vec!["", "z1", "z2"])),
    ) {
        let catalogue = catalogue.with_images(images);
        let exclude = exclude.map(|glob| TypeChoice::Glob(glob.into())).into_iter().collect();
        let rules = Rules { exclude, zones, ..RULES.clone() };
        let refusals = refusals_of((&catalogue, &needs, &rules), best, refused_zone);
        check_choice(&catalogue, &needs, &rules, &refusals)?;
    }
}

/// The zones of [`REGION`].
const ZONES: [&str; 3] = ["us-east-1a", "us-east-1b", "us-east-1c"];

/// The types of EC2 in three zones, with a spot price of each.
static REGION: LazyLock<Catalogue> = LazyLock::new(|| {
    let numbered = EC2.entries().iter().zip(0_u64..);
    let entries = numbered.map(|(entry, number)| {
        let in_zone = |offer: &Offer, (zone, shift): (&str, u64)| match offer.market {
            Market::OnDemand => Offer { zone: zone.to_owned(), ..offer.clone() },
            Market::Spot => Offer {
                zone: zone.to_owned(),
                price: offer.price.of_milli(200 + (number * 37 + shift * 211) % 600),
                accuracy: Accuracy::Exact,
                ..offer.clone()
            },
        };
        let offers = entry
            .offers
            .iter()
            .flat_map(|offer| ZONES.into_iter().zip(0..).map(move |zone| in_zone(offer, zone)));
        Entry::new(entry.instance_type.clone(), offers.collect())
    });
    Catalogue::new(entries.collect())
});

/// Needs of pods for the types of EC2, each of them for some type.
fn needs_of_region() -> impl Strategy<Value = Needs> {
    let source = || select(vec![Source::Annotation, Source::Limits, Source::Default]);
    let amount = |most: u32| {
        // Small amounts are as likely as large amounts.
        ((0..most).prop_flat_map(|bits| 0..1_u64 << bits), source())
            .prop_map(|(value, source)| Amount { value, source })
    };
    let choice = select(vec![
        TypeChoice::Exact("m5.large".into()),
        TypeChoice::Exact("t3.nano".into()),
        TypeChoice::Exact("c5.metal".into()),
        TypeChoice::Glob("t*".into()),
        TypeChoice::Glob("c5*".into()),
        TypeChoice::Glob("?7g.*".into()),
        TypeChoice::Glob("*.24xlarge".into()),
        TypeChoice::Glob("*metal*".into()),
        TypeChoice::Glob("*".into()),
    ]);
    let name = select(vec!["nvidia", "T4", "l4", "a100", "Radeon Pro V520", "none"]);
    let gpus = (1..9_u32, option::of(name))
        .prop_map(|(count, name)| GpuRequest { count, name: name.map(str::to_owned) });
    let launch_type =
        select(vec![LaunchType::OnDemand, LaunchType::Spot, LaunchType::SpotPreferred]);
    // Thousandths of a dollar.
    let cap = (0..18_u32).prop_flat_map(|bits| 0..1_u64 << bits);
    (
        (amount(18), amount(22)),
        option::weighted(0.2, gpus),
        select(vec![Architecture::Amd64, Architecture::Arm64]),
        option::weighted(0.4, choice),
        launch_type,
        option::weighted(0.3, cap),
        any::<bool>(),
    )
        .prop_map(|(size, gpus, architecture, instance_type, launch_type, cap, sustained)| {
            Needs {
                milli_cpus: size.0,
                memory_mib: size.1,
                overhead_mib: 96,
                storage_bytes: 0,
                gpus,
                architecture,
                instance_type,
                launch_type,
                max_price: cap.map(|cap| Price::from_micros(cap * 1000)),
                is_sustained: sustained,
            }
        })
}

proptest! {
    // Each case looks at 7,000 offers.
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Verifies A10, A13, A26.
    #[test]
    fn choice_in_a_region_equals_brute_force(
        needs in needs_of_region(),
        exclude in option::weighted(0.3, select(vec!["t*", "*.large", "?7*"])),
        zones in prop_oneof![Just(Vec::new()), subsequence(ZONES.to_vec(), 1..3)],
        best in 0..=MAX_CANDIDATES,
        refused_zone in option::weighted(0.2, select(ZONES.to_vec())),
    ) {
        let exclude = exclude.map(|glob| TypeChoice::Glob(glob.into())).into_iter().collect();
        let zones = zones.into_iter().map(str::to_owned).collect();
        let rules = Rules { exclude, zones, ..RULES.clone() };
        let refusals = refusals_of((&REGION, &needs, &rules), best, refused_zone);
        check_choice(&REGION, &needs, &rules, &refusals)?;
    }

    /// Verifies A21.
    #[test]
    fn further_offerings_of_a_pool_come_after_its_first(needs in needs_of_region()) {
        let first = rank(&REGION, &needs, &RULES, &());
        let further = rank_further(&REGION, &needs, &RULES);
        prop_assert!(first.iter().all(|candidate| !further.contains(candidate)));
        let on_demand = first.iter().filter(|it| it.offering.market == Market::OnDemand);
        let on_demand = on_demand.map(|candidate| candidate.price.micros()).min();
        for market in markets(needs.launch_type) {
            let of = |all: &[Candidate]| -> Vec<u64> {
                let of_market = all.iter().filter(|it| it.offering.market == *market);
                of_market.map(|candidate| candidate.price.micros()).collect()
            };
            let (first, further) = (of(&first), of(&further));
            prop_assert!(first.iter().chain(&further).is_sorted());
            let is_full = first.len() == MAX_CANDIDATES / markets(needs.launch_type).len();
            // Dropped from the first offerings.
            let is_dear = |price: &u64| on_demand.is_some_and(|cheapest| *price >= cheapest);
            prop_assert!(is_full || *market == Market::Spot && further.iter().all(is_dear)
                || further.is_empty());
        }
    }
}

proptest! {
    /// Verifies A20.
    #[test]
    fn running_instance_suits_a_pod_if_its_offering_fits(
        catalogue in catalogues(),
        needs in needs(),
        zones in zones(),
    ) {
        let catalogue = Arc::new(catalogue);
        let (needs, rules) = (Arc::new(needs), Arc::new(Rules { zones, ..RULES.clone() }));
        let choice = Choice {
            catalogue: Arc::clone(&catalogue),
            needs: Arc::clone(&needs),
            rules: Arc::clone(&rules),
        };
        for entry in catalogue.entries() {
            let keeps_gpus = entry.instance_type.gpus.is_none() || needs.gpus.is_some();
            for offer in &entry.offers {
                let offering = entry.offering(offer);
                let accuracy = offer.accuracy;
                let running = Candidate { offering, price: offer.price, accuracy };
                let expected = price_if_fits(entry, offer, &needs, &rules)
                    .filter(|_| keeps_gpus && markets(needs.launch_type).contains(&offer.market));
                let suited = choice.suited(&running);
                prop_assert_eq!(suited.as_ref().map(|suited| suited.price.micros()), expected);
                prop_assert!(suited.is_none_or(|suited| suited.offering == running.offering));
            }
        }
        let gone = offering_of_no_catalogue();
        prop_assert_eq!(choice.suited(&Candidate::free(gone)), None);
    }
}
