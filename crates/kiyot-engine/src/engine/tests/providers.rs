//! Several providers of one engine.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::{
    pools::{errors, launches, pool},
    *,
};
use crate::{
    placement::{Catalogue, Defaults, Needs, Requested, Rules},
    provider::THIS_NODE,
    request::CellRequest,
};

mod set;

pub(super) const NODE: ProviderKey = "node";
pub(super) const AWAY: ProviderKey = "away";
const PLACE_AWAY: &str = "region us-east-1";

pub(super) fn node() -> ProviderSetup {
    let capabilities = Capabilities { provider: NODE, ..capabilities::LOCAL };
    ProviderSetup { max_launches: 1, ..provider_in(capabilities, Some(THIS_NODE)) }
}

fn away() -> ProviderSetup {
    let capabilities = Capabilities { provider: AWAY, ..capabilities::EC2 };
    provider_in(capabilities, Some(PLACE_AWAY))
}

/// Returns an engine with both providers. Their listings have no instances.
pub(super) fn with(node: ProviderSetup) -> Engine {
    let seams = Box::new(Counting::default());
    let mut engine = Engine::new(config(), vec![node, away()], seams);
    for provider in [NODE, AWAY] {
        shown(&mut engine, provider, 0, &[]);
    }
    engine
}

pub(super) fn shown(
    engine: &mut Engine,
    provider: ProviderKey,
    at: u64,
    instances: &[Instance],
) -> Effects {
    let now = super::at(at);
    engine.handle(Event::Listed { provider, began: now.boot, instances: instances.to_vec() }, now)
}

/// Returns an order with the prices of its candidates at each provider, in dollars.
pub(super) fn offered(pod: &str, node: &[u64], away: &[u64]) -> OrderSpec {
    let offers = |provider, prices: &[u64]| {
        let candidate = |price: &u64| Candidate {
            price: Price::from_micros(price * 1_000_000),
            ..candidate(&format!("{provider}-{price}"))
        };
        Offers {
            provider,
            candidates: Ok(prices.iter().map(candidate).collect()),
            parameters: BTreeMap::new(),
            choice: None,
        }
    };
    OrderSpec { offers: vec![offers(NODE, node), offers(AWAY, away)], ..spec(pod) }
}

/// Returns the provider and the zone of each launch among effects.
pub(super) fn launched_by(engine: &Engine, effects: &Effects) -> Vec<(ProviderKey, Vec<String>)> {
    let launched = effects.iter().filter_map(|(cell, effect)| match effect {
        Effect::Launch(launch) => Some((engine.provider_of(cell.as_ref()?)?, launch)),
        _ => None,
    });
    launched
        .map(|(key, launch)| (key, launch.spec.offerings().map(|it| it.zone.clone()).collect()))
        .collect()
}

pub(super) fn launch(engine: &mut Engine, spec: OrderSpec, seconds: u64) -> (CellId, ProviderKey) {
    let (_, effects) = engine.order(spec, at(seconds));
    let cell = launches(&effects).remove(0);
    let provider = engine.provider_of(&cell).unwrap();
    (cell, provider)
}

fn refused(class: ErrorClass, refusal: Option<LaunchRefusal>) -> ProviderError {
    ProviderError { refusal, ..ProviderError::without_cause(class, "launch: refused") }
}

/// Answers a launch with an error, and returns the providers of the next launches.
fn fail(
    engine: &mut Engine,
    cell: &CellId,
    error: ProviderError,
    seconds: u64,
) -> Vec<ProviderKey> {
    let mut effects = engine.handle(Event::Launched(cell.clone(), Err(error)), at(seconds));
    if engine.contains(cell) {
        // A local provider may leave parts of an instance.
        let outcome = Ok(Termination::Confirmed);
        let ended = Event::Terminated { cell: cell.clone(), outcome, console: String::new() };
        effects.extend(engine.handle(ended, at(seconds)));
    }
    launched_by(engine, &effects).into_iter().map(|(provider, _)| provider).collect()
}

/// Verifies A30.
#[test]
fn cheapest_offering_of_all_providers_is_launched_and_equal_ones_in_order() {
    for (node, away, expected) in [
        (&[1][..], &[2, 3][..], (NODE, vec!["node-1"])),
        (&[4], &[2, 3, 5], (AWAY, vec!["away-2", "away-3"])),
        (&[2], &[2], (NODE, vec!["node-2"])),
        (&[], &[7], (AWAY, vec!["away-7"])),
    ] {
        let mut engine = with(super::providers::node());
        let (_, effects) = engine.order(offered("pod", node, away), at(1));
        let launched = launched_by(&engine, &effects);
        let zones = expected.1.into_iter().map(ToOwned::to_owned).collect();
        assert_eq!(launched, [(expected.0, zones)]);
    }
}

/// Verifies A31.
#[test]
fn refusing_or_failing_provider_removes_only_its_own_offerings() {
    for (class, refusal) in [
        (ErrorClass::Capacity, Some(LaunchRefusal::Offerings(vec![offering("node-1")]))),
        (ErrorClass::Auth, Some(LaunchRefusal::All(vec![offering("node-1")]))),
        (ErrorClass::Invalid, None),
        (ErrorClass::Transient, None),
    ] {
        let mut engine = with(node());
        let (cell, provider) = launch(&mut engine, offered("pod", &[1], &[2]), 1);
        assert_eq!(provider, NODE);
        let next = fail(&mut engine, &cell, refused(class, refusal), 2);
        assert_eq!(next, [AWAY], "{class:?}");
    }
    // No offering is left: the order is answered, and the error has both causes.
    let mut engine = with(node());
    let (cell, _) = launch(&mut engine, offered("pod", &[1], &[2]), 1);
    fail(&mut engine, &cell, refused(ErrorClass::Invalid, None), 2);
    let cell = engine.ids().next().cloned().unwrap();
    let effects =
        engine.handle(Event::Launched(cell, Err(refused(ErrorClass::Invalid, None))), at(3));
    let errors = errors(&effects);
    assert_eq!(errors.len(), 1);
    assert!(errors[0].starts_with("2 launches failed"), "{errors:?}");
}

/// Verifies A31.
#[test]
fn provider_without_permission_is_left_out_of_further_orders_for_a_while() {
    let mut engine = with(node());
    let (cell, _) = launch(&mut engine, offered("first", &[9], &[2]), 1);
    let all = Some(LaunchRefusal::All(vec![offering("away-2")]));
    assert_eq!(fail(&mut engine, &cell, refused(ErrorClass::Auth, all), 2), [NODE]);
    assert_eq!(launch(&mut engine, offered("second", &[9], &[2]), 3).1, NODE);
    let (_, effects) = engine.order(offered("third", &[], &[2]), at(4));
    assert!(errors(&effects)[0].contains("not permitted"), "{effects:?}");
    assert_eq!(launch(&mut engine, offered("fourth", &[9], &[2]), 200).1, AWAY);
}

/// Verifies A32.
#[test]
fn unanswered_launch_is_tried_at_another_provider_only_after_proven_absence() {
    let mut engine = with(node());
    let (first, _) = launch(&mut engine, offered("pod", &[9], &[2]), 1);
    let unanswered = || Err(ProviderError::without_cause(ErrorClass::Unanswered, "launch"));
    engine.handle(Event::Launched(first.clone(), unanswered()), at(2));
    // The order ends at its deadline, and so do the orders of the kubelet's retries.
    let deadline = 2 + config().launch_timeout.as_secs();
    engine.handle(Event::Tick, at(deadline));
    let retried = OrderSpec { sandbox: SandboxId::mint().unwrap(), ..offered("pod", &[9], &[2]) };
    let (_, effects) = engine.order(retried, at(deadline + 1));
    let launched = launched_by(&engine, &effects);
    assert!(launched.iter().all(|(provider, _)| *provider == AWAY), "{launched:?}");
    // An order with other offers, as after a change of the pod.
    let only_node = || OrderSpec {
        wanted: Arc::new(Wanted { identity: "other".into(), ..Wanted::clone(&spec("pod").wanted) }),
        ..offered("pod", &[9], &[])
    };
    // Its error names the cell whose launch has no answer.
    let (_, effects) = engine.order(only_node(), at(deadline + 2));
    assert_eq!(launched_by(&engine, &effects), []);
    let begin = deadline + 3 + config().launch_timeout.as_secs();
    let blocked = errors(&engine.handle(Event::Tick, at(begin))).remove(0);
    let named = format!("an earlier cell of the pod has not ended: {first}");
    assert!(blocked.ends_with(&named), "{blocked}");
    // Lists without the instance prove its absence, and the order goes on.
    let age = capabilities::EC2.not_found_believed_after.as_secs();
    let mut launched = None;
    for seconds in (begin..begin + 10 * age).step_by(30) {
        let (_, mut effects) = engine.order(only_node(), super::at(seconds));
        effects.extend(shown(&mut engine, AWAY, seconds, &[]));
        // Replays have no answer either.
        let away = |cell: &&CellId| engine.provider_of(cell) == Some(AWAY);
        let cells: Vec<CellId> = engine.ids().filter(away).cloned().collect();
        for cell in cells {
            effects.extend(engine.handle(Event::Launched(cell, unanswered()), super::at(seconds)));
        }
        if launched_by(&engine, &effects).iter().any(|(provider, _)| *provider == NODE) {
            launched = Some(seconds);
            break;
        }
    }
    assert!(launched.is_some_and(|at| at > begin + age), "{launched:?}");
}

/// Verifies A33.
#[test]
fn list_of_a_provider_is_no_evidence_for_cells_of_another() {
    let mut engine = with(node());
    let mut cells = BTreeMap::new();
    for (pod, spec) in [("near", offered("near", &[1], &[])), ("far", offered("far", &[], &[1]))] {
        let (cell, provider) = launch(&mut engine, spec, 1);
        let launched = launched_as(&format!("i-{pod}"), &cell);
        engine.handle(Event::Launched(cell.clone(), Ok(launched)), at(1));
        cells.insert(provider, cell);
    }
    let far = launched_as("i-far", &cells[AWAY]);
    for seconds in (10..=2000).step_by(10) {
        let effects = shown(&mut engine, AWAY, seconds, std::slice::from_ref(&far));
        let of_near = |cell: Option<&CellId>| cell == Some(&cells[NODE]);
        let is_silent = !effects.iter().any(|(cell, _)| of_near(cell.as_ref()));
        assert!(is_silent && !ends_strays(&effects), "{effects:?}");
    }
    // Its own list is evidence.
    let effects = shown(&mut engine, NODE, 2001, &[]);
    assert!(effects.iter().any(|(cell, effect)| {
        cell.as_ref() == Some(&cells[NODE]) && matches!(effect, Effect::Describe(_))
    }));
}

/// Verifies A34.
#[test]
fn cell_of_a_provider_that_is_not_configured_is_unknown_and_never_absent() {
    let mut engine = with(node());
    let (cell, _) = launch(&mut engine, offered("pod", &[], &[1]), 1);
    engine.handle(Event::Launched(cell.clone(), Ok(launched_as("i-1", &cell))), at(1));
    let record = store::Cell { phase: CellPhase::Bound.into(), ..engine.cells[&cell].stored() };
    assert_eq!((record.provider.as_str(), record.place.as_str()), (AWAY, PLACE_AWAY));
    let sandbox = sandbox_of(&record);
    let journal = || Journal {
        cells: vec![(record.id.clone(), record.clone())],
        sandboxes: vec![sandbox.clone()],
        ..Journal::default()
    };
    let seams = || Box::new(Counting(1000));
    let (mut left, ..) = Engine::recover(config(), vec![node()], seams(), journal(), at(2));
    for seconds in (10..=4000).step_by(10) {
        shown(&mut left, NODE, seconds, &[]);
    }
    assert!(matches!(left.cells[&cell].state, State::Bound { .. }));
    assert_eq!(left.cell_view(&cell, at(4000)).unwrap().provider.as_deref(), Some(AWAY));
    let elsewhere: Vec<CellId> = left.other_places().into_values().flatten().collect();
    assert_eq!(elsewhere, std::slice::from_ref(&cell));
    let ended = Event::Terminate { cell: cell.clone(), reason: "stopped".into() };
    left.handle(ended, at(4001));
    let not_found = ProviderError::without_cause(ErrorClass::NotFound, "terminate");
    let answer =
        Event::Terminated { cell: cell.clone(), outcome: Err(not_found), console: String::new() };
    left.handle(answer, at(4002));
    assert!(left.contains(&cell));
    // Configured again, beside the other.
    let providers = vec![node(), away()];
    let (engine, ..) = Engine::recover(config(), providers, seams(), journal(), at(2));
    assert_eq!((engine.other_places().len(), engine.provider_of(&cell)), (0, Some(AWAY)));
    assert_eq!(engine.cells[&cell].stored(), record);
}

/// Verifies K2.
#[test]
fn cell_of_an_older_daemon_is_shown_with_the_provider_of_its_place() {
    let mut engine = with(node());
    let (cell, _) = launch(&mut engine, offered("pod", &[], &[1]), 1);
    engine.handle(Event::Launched(cell.clone(), Ok(launched_as("i-1", &cell))), at(1));
    engine.cells.get_mut(&cell).unwrap().provider = None;
    assert_eq!(engine.cell_view(&cell, at(2)).unwrap().provider.as_deref(), Some(AWAY));
}

/// Returns an order for a part of the node, or for an instance away.
fn sized(pod: &str, milli_cpus: u64, mebibytes: u64) -> OrderSpec {
    let request = CellRequest {
        milli_cpus: Some(milli_cpus),
        memory_bytes: Some(mebibytes << 20),
        ..CellRequest::default()
    };
    let rules = Rules::default();
    let needs = Needs::new(
        &request,
        &Requested::default(),
        &Defaults { overhead_mib: 0, ..rules.defaults },
    );
    let mut spec = offered(pod, &[0], &[2]);
    spec.offers[0].choice = Some(Choice {
        catalogue: Arc::new(Catalogue::any_size(offering("node-0"))),
        needs: Arc::new(needs),
        rules: Arc::new(rules),
    });
    spec
}

/// Verifies A35.
#[test]
fn node_fills_first_and_the_rest_overflows() {
    let machine = Some(NodeShare { milli_cpus: 4000, memory_mib: 1000 });
    let mut engine = with(ProviderSetup { machine, ..node() });
    let (first, provider) = launch(&mut engine, sized("first", 3000, 100), 1);
    assert_eq!(provider, NODE);
    assert_eq!(launch(&mut engine, sized("too many CPUs", 1001, 100), 2).1, AWAY);
    assert_eq!(launch(&mut engine, sized("too much memory", 0, 901), 3).1, AWAY);
    assert_eq!(launch(&mut engine, sized("fits", 1000, 900), 4).1, NODE);
    assert_eq!(launch(&mut engine, sized("full", 1, 1), 5).1, AWAY);
    // Without another provider the error says what is left.
    let mut alone = sized("alone", 1, 1);
    alone.offers.truncate(1);
    let (_, effects) = engine.order(alone, at(6));
    let full = "cells on the node may have 0m CPU and 0 MiB more (reserve_cpu, \
                   reserve_memory), and the pod's cell needs 1m CPU and 1 MiB";
    assert_eq!(errors(&effects), [full]);
    // The record has the share, and the end of the cell frees it.
    let stored = engine.cells[&first].stored();
    assert_eq!((stored.node_milli_cpus, stored.node_memory_mib), (3000, 100));
    engine.handle(Event::Terminate { cell: first.clone(), reason: "stopped".into() }, at(7));
    fail(&mut engine, &first, refused(ErrorClass::Ended, None), 8);
    assert_eq!(launch(&mut engine, sized("again", 3000, 100), 9).1, NODE);
}

/// Verifies A39.
#[test]
fn pods_on_the_node_leave_less_room_for_further_cells_and_end_no_cell() {
    let share = |milli_cpus, memory_mib| NodeShare { milli_cpus, memory_mib };
    let mut engine = with(ProviderSetup { machine: Some(share(4000, 1000)), ..node() });
    assert!(engine.set_node_pods(share(1000, 100), at(1)).is_empty());
    assert_eq!(engine.free_on_node(), Some((share(3000, 900), share(1000, 100))));
    let (first, provider) = launch(&mut engine, sized("first", 2000, 100), 2);
    assert_eq!(provider, NODE);
    assert_eq!(launch(&mut engine, sized("too many CPUs", 1001, 1), 3).1, AWAY);
    assert_eq!(launch(&mut engine, sized("too much memory", 1, 801), 3).1, AWAY);
    // The pods request more than is left, less, and more again: running cells go on.
    for milli_cpus in [9000, 0, 1500, 9000] {
        assert!(engine.set_node_pods(share(milli_cpus, 100), at(4)).is_empty());
        assert!(engine.contains(&first));
    }
    assert_eq!(launch(&mut engine, sized("beside", 1, 1), 5).1, AWAY);
    let mut alone = sized("alone", 1, 1);
    alone.offers.truncate(1);
    let (_, effects) = engine.order(alone, at(6));
    let full = "cells on the node may have 0m CPU and 800 MiB more (reserve_cpu, reserve_memory, \
                9000m CPU and 100 MiB of pods on the node), and the pod's cell needs 1m CPU and 1 \
                MiB";
    assert_eq!(errors(&effects), [full]);
    engine.set_node_pods(share(2000, 900), at(7));
    assert_eq!(launch(&mut engine, sized("no CPU", 1, 0), 8).1, AWAY);
    engine.set_node_pods(share(1000, 800), at(9));
    assert_eq!(launch(&mut engine, sized("fits", 1000, 100), 10).1, NODE);
    // A pool is filled once there is room.
    let mut pool = pool("small", 1);
    (pool.provider, pool.share) = (NODE, share(1000, 100));
    assert_eq!(launches(&engine.set_pools(vec![pool], at(11))), []);
    assert_eq!(launches(&engine.set_node_pods(share(0, 0), at(12))).len(), 1);
}

proptest! {
    /// Verifies A30.
    #[test]
    fn merged_ranking_keeps_the_order_of_each_provider_and_prefers_the_cheapest(
        lists in prop::collection::vec(prop::collection::vec(0..4_u64, 0..5), 1..4),
    ) {
        let keys = ["one", "two", "three"];
        let candidate = |price: &u64| Candidate {
            price: Price::from_micros(*price),
            ..candidate("a")
        };
        let given = |list: &Vec<u64>| list.iter().map(candidate).collect::<Vec<_>>();
        let merged = Ranked::merge(keys.into_iter().zip(lists.iter().map(given)));
        prop_assert_eq!(merged.len(), lists.iter().map(Vec::len).sum::<usize>());
        for (key, list) in keys.iter().zip(&lists) {
            let own = merged.iter().filter(|it| it.provider == *key);
            let own: Vec<u64> = own.map(|it| it.candidate.price.micros()).collect();
            prop_assert_eq!(&own, list);
        }
        // Each offering is the cheapest of the next ones, and at equal prices that of the first
        // provider.
        let mut taken = [0; 3];
        for next in &merged {
            let heads = keys.iter().zip(&lists).zip(&taken);
            let heads = heads.filter_map(|((key, list), taken)| Some((*list.get(*taken)?, *key)));
            let cheapest = heads.clone().map(|(price, _)| price).min();
            let first = heads.into_iter().find(|(price, _)| Some(*price) == cheapest);
            prop_assert_eq!(Some((next.candidate.price.micros(), next.provider)), first);
            taken[keys.iter().position(|key| *key == next.provider).unwrap()] += 1;
        }
        let run = Ranked::first_run(&merged).map_or(0, |(_, run)| run.len());
        let providers: BTreeSet<_> = merged.iter().take(run).map(|it| it.provider).collect();
        prop_assert!(providers.len() <= 1 && (run > 0 || merged.is_empty()));
    }
}
