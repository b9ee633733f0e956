//! Limits of cells, boots and prices.

use proptest::{collection::vec, prelude::*};

use super::*;

pub(super) fn dollars(dollars: u64) -> Price {
    Price::from_micros(dollars * 1_000_000)
}

/// Returns an engine with limits.
fn limited(limits: Limits) -> Engine {
    let mut engine = engine(capabilities::CLOUD);
    engine.set_limits(limits, at(0));
    engine
}

/// Returns the order of a pod whose candidates have these prices in dollars.
pub(super) fn priced(namespace: &str, pod: &str, prices: &[u64]) -> OrderSpec {
    let mut spec = with(spec(pod), |wanted| wanted.key.namespace = namespace.into());
    let candidates = prices
        .iter()
        .map(|price| Candidate { price: dollars(*price), ..candidate(&price.to_string()) });
    spec.offers[0].candidates = Ok(candidates.collect());
    spec
}

/// Returns the launched cells among effects, with their candidates' prices in dollars.
pub(super) fn launches(effects: &Effects) -> Vec<(CellId, Vec<u64>)> {
    let launches = effects.iter().filter_map(|(cell, effect)| match effect {
        Effect::Launch(launch) => {
            let candidates = launch.spec.candidates.iter();
            let prices = candidates.map(|candidate| candidate.price.micros() / 1_000_000);
            Some((cell.clone()?, prices.collect()))
        }
        _ => None,
    });
    launches.collect()
}

/// Returns the errors that answer orders among effects.
pub(super) fn refusals(effects: &Effects) -> Vec<String> {
    let refusals = effects.iter().filter_map(|(_, effect)| match effect {
        Effect::AnswerOrder(_, Err(error)) => Some(error_chain(error)),
        _ => None,
    });
    refusals.collect()
}

/// Answers a launch with the candidate of this price.
pub(super) fn answer(engine: &mut Engine, cell: &CellId, price: u64, seconds: u64) {
    let instance = Instance { offering: offering(&price.to_string()), ..launched_as("i", cell) };
    let instance = Instance { id: InstanceId(format!("i-{cell}")), ..instance };
    engine.handle(Event::Launched(cell.clone(), Ok(instance)), at(seconds));
}

/// Binds a cell whose launch is answered. Returns the effects.
fn bind(engine: &mut Engine, cell: &CellId, seconds: u64) -> Effects {
    let mut effects = engine.handle(Event::Connected(cell.clone()), at(seconds));
    effects
        .extend(engine.handle(Event::Attached(cell.clone(), Ok(Attached::default())), at(seconds)));
    effects
}

/// Verifies A18.
#[test]
fn order_over_the_price_limit_of_the_node_is_refused_and_names_the_holders() {
    let mut engine = limited(Limits { price: Some(dollars(5)), ..Limits::default() });
    let (_, effects) = engine.order(priced("web", "one", &[1, 3]), at(1));
    let (cell, prices) = launches(&effects).remove(0);
    assert_eq!(prices, [1, 3]);
    // Until the launch is answered, it counts as the most expensive candidate.
    let (_, effects) = engine.order(priced("batch", "two", &[3, 4]), at(1));
    let refused = refusals(&effects).remove(0);
    let expected = format!(
        "the cells of the node may cost $5.0000 an hour, and the cheapest offering for the pod \
         costs $3.0000; held by 1 cell: $3.0000 an hour (the most expensive: {cell} $3.0000)"
    );
    assert_eq!(refused, expected);
    answer(&mut engine, &cell, 1, 2);
    // Only the candidates within the limit are launched.
    let (_, effects) = engine.order(priced("batch", "two", &[3, 4, 5]), at(3));
    assert_eq!(launches(&effects)[0].1, [3, 4]);
    let (_, effects) = engine.order(priced("batch", "free", &[0]), at(3));
    assert_eq!(launches(&effects)[0].1, [0]);
}

/// Verifies A18.
#[test]
fn price_limit_of_namespaces_counts_each_alone_until_the_proven_end() {
    let mut engine = limited(Limits { namespace_price: Some(dollars(2)), ..Limits::default() });
    let (_, effects) = engine.order(priced("web", "one", &[2]), at(1));
    let (cell, _) = launches(&effects).remove(0);
    answer(&mut engine, &cell, 2, 1);
    bind(&mut engine, &cell, 1);
    let (_, effects) = engine.order(priced("batch", "two", &[2]), at(1));
    assert_eq!(launches(&effects).len(), 1);
    engine.handle(Event::Terminate { cell: cell.clone(), reason: "".into() }, at(2));
    engine.handle(Event::ShutDown(cell.clone(), true), at(2));
    engine.handle(Event::Detached(cell.clone(), Ok(())), at(2));
    let accepted = Event::Terminated {
        cell: cell.clone(),
        outcome: Ok(Termination::Accepted),
        console: String::new(),
    };
    engine.handle(accepted, at(3));
    let (_, effects) = engine.order(priced("web", "three", &[1]), at(3));
    let refused = refusals(&effects).remove(0);
    assert!(refused.starts_with("the cells of namespace web may cost $2.0000"), "{refused}");
    let ended = Instance { state: InstanceState::Terminated, ..launched_as("i", &cell) };
    engine.handle(Event::Described(cell.clone(), Ok(ended)), at(9));
    let (_, effects) = engine.order(priced("web", "three", &[1]), at(10));
    assert_eq!(launches(&effects).len(), 1);
}

/// Verifies A18, A27.
#[test]
fn waiting_order_is_launched_at_the_prices_of_its_last_call() {
    let mut engine =
        limited(Limits { boots: Some(0), price: Some(dollars(5)), ..Limits::default() });
    let (sandbox, _) = engine.order(priced("web", "pod", &[1, 3]), at(1));
    // The offerings are dearer now: one is over the limit.
    let (joined, effects) = engine.order(priced("web", "pod", &[4, 6]), at(2));
    assert_eq!((joined, launches(&effects)), (sandbox.clone(), vec![]));
    // A call without a fitting offering leaves the order as it was.
    let none = priced("web", "pod", &[]).of(Err(CellError::Starting));
    engine.order(none, at(3));
    let limits = Limits { price: Some(dollars(5)), ..Limits::default() };
    let effects = engine.set_limits(limits, at(4));
    assert_eq!(launches(&effects)[0].1, [4]);

    let mut engine = limited(Limits { boots: Some(0), ..Limits::default() });
    engine.order(priced("web", "pod", &[1]), at(1));
    engine.order(priced("web", "pod", &[6]), at(2));
    let refused = refusals(&engine.set_limits(limits, at(3)));
    assert!(refused[0].contains("the cheapest offering for the pod costs $6.0000"), "{refused:?}");
}

/// Verifies A18.
#[test]
fn price_limit_of_zero_allows_only_what_costs_nothing() {
    let mut engine = limited(Limits { price: Some(Price::FREE), ..Limits::default() });
    let (_, effects) = engine.order(priced("web", "paid", &[1]), at(1));
    assert_eq!(refusals(&effects).len(), 1);
    let (_, effects) = engine.order(priced("web", "free", &[0]), at(1));
    assert_eq!(launches(&effects).len(), 1);
}

/// Verifies A19.
#[test]
fn order_over_the_limit_of_boots_waits_for_the_namespace_with_the_fewest() {
    let mut engine = limited(Limits { boots: Some(2), ..Limits::default() });
    let mut first = Vec::new();
    for (number, namespace) in ["web", "web", "web", "web", "batch"].into_iter().enumerate() {
        let pod = format!("{namespace}-{number}");
        let (_, effects) = engine.order(priced(namespace, &pod, &[1]), at(number as u64));
        assert_eq!(refusals(&effects), [""; 0]);
        first.extend(launches(&effects).into_iter().map(|(cell, _)| cell));
    }
    assert_eq!(first.len(), 2);
    let mut order = Vec::new();
    for (round, cell) in (10..).zip(first.clone()) {
        answer(&mut engine, &cell, 1, round);
        for (next, _) in launches(&bind(&mut engine, &cell, round)) {
            order.push(engine.cells[&next].pod_uid().to_owned());
        }
    }
    assert_eq!(order, ["batch-4", "web-2"]);
}

/// Verifies A19.
#[test]
fn pod_keeps_its_place_when_its_order_times_out() {
    let mut engine = limited(Limits { boots: Some(1), ..Limits::default() });
    let (_, effects) = engine.order(priced("web", "first", &[1]), at(0));
    let (cell, _) = launches(&effects).remove(0);
    answer(&mut engine, &cell, 1, 0);
    let short = |pod, seconds| OrderSpec {
        timeout: Some(Duration::from_secs(seconds)),
        ..priced("web", pod, &[1])
    };
    engine.order(short("early", 10), at(1));
    engine.order(short("late", 100), at(2));
    let refused = refusals(&engine.handle(Event::Tick, at(11))).remove(0);
    let expected = format!(
        "no cell was launched for 10 s, because 1 cell boots ({cell}) and limits.boots allows no \
         more; 2 pods wait in turn"
    );
    assert_eq!(refused, expected);
    engine.order(short("early", 100), at(20));
    let next = launches(&bind(&mut engine, &cell, 21)).remove(0).0;
    assert_eq!(engine.cells[&next].pod_uid(), "early");
}

/// Verifies A19.
#[test]
fn pod_keeps_its_place_when_several_of_its_orders_time_out() {
    let mut engine = limited(Limits { boots: Some(1), ..Limits::default() });
    let (_, effects) = engine.order(priced("web", "first", &[1]), at(0));
    let (cell, _) = launches(&effects).remove(0);
    answer(&mut engine, &cell, 1, 0);
    let early =
        || OrderSpec { timeout: Some(Duration::from_secs(10)), ..priced("web", "early", &[1]) };
    engine.order(early(), at(1));
    engine.order(priced("web", "late", &[1]), at(2));
    for again in [20, 40] {
        assert_eq!(refusals(&engine.handle(Event::Tick, at(again - 5))).len(), 1, "{again}");
        engine.order(early(), at(again));
    }
    let next = launches(&bind(&mut engine, &cell, 41)).remove(0).0;
    assert_eq!(engine.cells[&next].pod_uid(), "early");
}

/// Verifies A18.
#[test]
fn order_over_the_limit_of_cells_is_refused_and_names_the_limit_and_the_namespaces() {
    let mut engine = limited(Limits::default());
    for (namespace, pod) in [("web", "one"), ("web", "two"), ("batch", "three")] {
        engine.order(priced(namespace, pod, &[1]), at(1));
    }
    engine.set_limits(Limits { max_cells: 2, ..Limits::default() }, at(2));
    let (_, effects) = engine.order(priced("web", "four", &[1]), at(3));
    let expected = "3 cells have not ended, and max_cells allows no more than 2; most of them are \
                    of namespace web (2), namespace batch (1)";
    assert_eq!(refusals(&effects), [expected]);
}

/// Verifies A13.
#[test]
fn quota_of_a_market_is_remembered_and_the_other_market_is_tried() {
    let mut engine = limited(Limits::default());
    let on_demand = |price| {
        let offering = Offering { market: Market::OnDemand, ..offering("on-demand") };
        Candidate { offering, price: dollars(price), accuracy: Accuracy::Exact }
    };
    let mut spec = priced("web", "one", &[1, 2]);
    spec.offers[0].candidates.as_mut().unwrap().push(on_demand(3));
    let (_, effects) = engine.order(spec, at(1));
    let (cell, prices) = launches(&effects).remove(0);
    assert_eq!(prices, [1, 2], "one market after the other");
    let quota = ProviderError::without_cause(ErrorClass::Quota, "no more vCPUs");
    let effects = engine.handle(Event::Launched(cell, Err(quota)), at(2));
    assert_eq!(launches(&effects)[0].1, [3]);
    let refusals = engine.refusals(ONLY);
    let refused = refusals.at(at(100).boot);
    use crate::placement::Refused;
    assert!(["1", "2"].iter().all(|zone| refused.is_refused("small", zone, Market::Spot)));
    assert!(!refused.is_refused("small", "on-demand", Market::OnDemand));
}

/// Verifies A18.
#[test]
fn raised_limit_of_boots_launches_waiting_orders() {
    let mut engine = limited(Limits { boots: Some(1), ..Limits::default() });
    for pod in ["one", "two", "three"] {
        engine.order(priced("web", pod, &[1]), at(1));
    }
    let effects = engine.set_limits(Limits { boots: Some(2), ..Limits::default() }, at(2));
    assert_eq!(launches(&effects).len(), 1);
    let effects = engine.set_limits(Limits::default(), at(3));
    assert_eq!(launches(&effects).len(), 1);
}

proptest! {
    /// Verifies A18, A19.
    #[test]
    fn limits_hold_and_every_order_is_launched_or_refused(
        steps in vec((0_u8..4, 0_usize..6, 1_u64..4), 1..120),
        boots in 1_usize..4,
    ) {
        let limits = Limits {
            boots: Some(boots),
            price: Some(dollars(9)),
            namespace_price: Some(dollars(5)),
            ..Limits::default()
        };
        let mut engine = limited(limits);
        for (number, (kind, which, price)) in steps.into_iter().enumerate() {
            let seconds = number as u64;
            let ids: Vec<CellId> = engine.ids().cloned().collect();
            let cell = ids.get(which % ids.len().max(1)).cloned();
            match (kind, cell) {
                (0, _) | (_, None) => {
                    let namespace = ["a", "b", "c"][which % 3];
                    let pod = format!("pod-{number}");
                    engine.order(priced(namespace, &pod, &[price]), at(seconds));
                }
                (1, Some(cell)) => {
                    let request = engine.cells[&cell].launch.request.clone();
                    if let Some(request) = request {
                        let price = request.spec.candidates[0].price.micros() / 1_000_000;
                        answer(&mut engine, &cell, price, seconds);
                    }
                }
                (2, Some(cell)) => drop(bind(&mut engine, &cell, seconds)),
                (_, Some(cell)) => {
                    let reason = "".into();
                    engine.handle(Event::Terminate { cell: cell.clone(), reason }, at(seconds));
                    engine.handle(Event::ShutDown(cell.clone(), true), at(seconds));
                    engine.handle(Event::Detached(cell.clone(), Ok(())), at(seconds));
                    let outcome = Ok(Termination::Confirmed);
                    let console = String::new();
                    engine.handle(Event::Terminated { cell, outcome, console }, at(seconds));
                }
            }
            prop_assert!(engine.cells.values().filter(|cell| cell.boots()).count() <= boots);
            let price = |namespace: Option<&str>| {
                let of = engine.cells.values();
                let of = of.filter(|cell| namespace.is_none_or(|own| cell.namespace() == own));
                of.fold(Price::FREE, |sum, cell| sum + cell.limited_price())
            };
            prop_assert!(price(None) <= dollars(9));
            for namespace in ["a", "b", "c"] {
                prop_assert!(price(Some(namespace)) <= dollars(5));
            }
            // No order waits while a cell may boot.
            let waiting = engine.orders.values().any(|order| order.state.cell().is_none());
            prop_assert!(!waiting || !engine.may_boot(ONLY));
        }
    }
}
