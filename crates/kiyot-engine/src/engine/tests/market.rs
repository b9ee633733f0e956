//! The market of launches of pods that prefer spot.

use proptest::prelude::*;

use crate::engine::tests::{
    pools::{errors, launches, pool},
    *,
};

fn of_market(market: Market, zone: &str) -> Candidate {
    Candidate { offering: Offering { market, ..offering(zone) }, ..candidate(zone) }
}

/// Returns the candidates of a pod that prefers spot.
fn both() -> Vec<Candidate> {
    let spot = ["a", "b"].map(|zone| of_market(Market::Spot, zone));
    let on_demand = ["a", "b"].map(|zone| of_market(Market::OnDemand, zone));
    [spot, on_demand].concat()
}

fn preferring(pod: &str) -> OrderSpec {
    spec(pod).of(Ok(both()))
}

/// Returns the market of the only launch, and checks that all its candidates are of this market.
fn market(effects: &Effects) -> Market {
    let mut launches = effects.iter().filter_map(|(_, effect)| match effect {
        Effect::Launch(launch) => Some(launch.spec.candidates.clone()),
        _ => None,
    });
    let candidates = launches.next().expect("a launch");
    let market = candidates[0].offering.market;
    assert!(candidates.iter().all(|candidate| candidate.offering.market == market));
    assert!(launches.next().is_none());
    market
}

fn refuse(engine: &mut Engine, cell: &CellId, class: ErrorClass, now: u64) -> Effects {
    let refused = both().into_iter().map(|it| it.offering);
    let refused = refused.filter(|offering| offering.market == Market::Spot).collect();
    let refusal = Some(LaunchRefusal::Offerings(refused));
    let error = ProviderError { refusal, ..ProviderError::without_cause(class, "no") };
    engine.handle(Event::Launched(cell.clone(), Err(error)), at(now))
}

/// Verifies A25.
#[test]
fn pod_that_prefers_spot_is_launched_on_demand_once_spot_is_refused() {
    let mut engine = engine(capabilities::CLOUD);
    let (_, effects) = engine.order(preferring("pod"), at(1));
    assert_eq!(market(&effects), Market::Spot);
    let cell = launches(&effects).remove(0);
    let effects = refuse(&mut engine, &cell, ErrorClass::Capacity, 2);
    assert_eq!(market(&effects), Market::OnDemand);
}

/// Verifies A25.
#[test]
fn spot_deadline_of_a_pod_counts_over_several_orders() {
    for (began_again, expected) in [(40, Market::Spot), (61, Market::OnDemand)] {
        let mut engine = engine(capabilities::CLOUD);
        let (_, effects) = engine.order(preferring("pod"), at(1));
        let cell = launches(&effects).remove(0);
        // The failure refuses no offering, and ends the order.
        let error = ProviderError::without_cause(ErrorClass::Invalid, "wrong image");
        let effects = engine.handle(Event::Launched(cell, Err(error)), at(2));
        assert_eq!(errors(&effects).len(), 1);
        let (_, effects) = engine.order(preferring("pod"), at(began_again));
        assert_eq!(market(&effects), expected, "at {began_again} s");
        // Another pod has its own deadline.
        let (_, effects) = engine.order(preferring("other"), at(began_again));
        assert_eq!(market(&effects), Market::Spot);
    }
}

/// Verifies A25.
#[test]
fn deadline_counts_while_the_pod_waits_for_a_boot() {
    let mut engine = engine(capabilities::CLOUD);
    engine.set_limits(Limits { boots: Some(0), ..Limits::default() }, at(0));
    let (_, effects) = engine.order(preferring("pod"), at(1));
    assert_eq!(launches(&effects), []);
    let effects = engine.set_limits(Limits::default(), at(61));
    assert_eq!(market(&effects), Market::OnDemand);
}

/// Verifies A25.
#[test]
fn pool_that_prefers_spot_is_filled_on_demand_after_a_refusal_or_the_deadline() {
    let pool = || Pool { candidates: Some(both()), ..pool("small", 1) };
    let mut first = engine(capabilities::CLOUD);
    let effects = first.set_pools(vec![pool()], at(1));
    assert_eq!(market(&effects), Market::Spot);
    refuse(&mut first, &launches(&effects).remove(0), ErrorClass::Capacity, 2);
    assert_eq!(market(&first.handle(Event::Tick, at(5))), Market::OnDemand);

    let mut second = engine(capabilities::CLOUD);
    let mut effects = second.set_pools(vec![pool()], at(1));
    for (now, expected) in [(5, Market::Spot), (61, Market::OnDemand)] {
        let cell = launches(&effects).remove(0);
        let error = ProviderError::without_cause(ErrorClass::Invalid, "wrong image");
        second.handle(Event::Launched(cell, Err(error)), at(now - 4));
        effects = second.handle(Event::Tick, at(now + 20));
        assert_eq!(market(&effects), expected);
    }
}

proptest! {
    /// Verifies A25.
    #[test]
    fn launch_has_candidates_of_one_market_in_their_order(
        accepted in prop::collection::vec((any::<bool>(), "[a-d]"), 1..8),
        waited in 0..120_u64,
    ) {
        let engine = engine(capabilities::CLOUD);
        let candidates: Vec<Candidate> = accepted
            .iter()
            .map(|(is_spot, zone)| {
                of_market(if *is_spot { Market::Spot } else { Market::OnDemand }, zone)
            })
            .collect();
        let ranked = Ranked::merge([(ONLY, candidates.clone())]);
        let launched = engine.of_market(&ranked, at(1).boot, at(1 + waited));
        let launched: Vec<Candidate> = launched.into_iter().map(|it| it.candidate).collect();
        let has = |market| candidates.iter().any(|it| it.offering.market == market);
        let market = match (has(Market::Spot), has(Market::OnDemand)) {
            (true, true) if waited < 60 => Market::Spot,
            (true, false) => Market::Spot,
            _ => Market::OnDemand,
        };
        let expected: Vec<Candidate> =
            candidates.into_iter().filter(|it| it.offering.market == market).collect();
        prop_assert_eq!(launched, expected);
    }
}
