//! Warm pools.

use super::*;
use crate::{
    placement::{
        Catalogue, CatalogueFile, Choice, MAX_CANDIDATES, Needs, Refused, RefusedQuota, Rules,
    },
    request::Architecture,
};

pub(super) fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

pub(super) fn pool(name: &str, count: usize) -> Pool {
    let candidates = Some(["a", "b"].map(candidate).to_vec());
    let (name, machine) = (name.into(), String::new());
    let (provider, ttl, share) = (ONLY, seconds(3600), NodeShare::default());
    Pool { name, provider, machine, share, count, ttl, candidates, further: Vec::new() }
}

/// Returns an engine with one pool.
fn pooled(count: usize) -> (Engine, Effects) {
    let mut engine = engine(capabilities::CLOUD);
    let effects = engine.set_pools(vec![pool("small", count)], at(1));
    (engine, effects)
}

/// Returns the order of a pod that takes cells of offering `a`.
pub(super) fn taking(pod: &str) -> OrderSpec {
    let choice = Choice {
        catalogue: Arc::new(Catalogue::any_size(offering("a"))),
        needs: Arc::new(Needs::default()),
        rules: Arc::new(Rules::default()),
    };
    spec(pod).choosing(choice)
}

pub(super) fn launches(effects: &Effects) -> Vec<CellId> {
    let launch = |effect: &Effect| matches!(effect, Effect::Launch(_));
    effects.iter().filter(|(_, effect)| launch(effect)).filter_map(|(id, _)| id.clone()).collect()
}

pub(super) fn attaches(effects: &Effects) -> Vec<CellId> {
    let attach = |effect: &Effect| matches!(effect, Effect::Attach(..));
    effects.iter().filter(|(_, effect)| attach(effect)).filter_map(|(id, _)| id.clone()).collect()
}

pub(super) fn errors(effects: &Effects) -> Vec<String> {
    let errors = effects.iter().filter_map(|(_, effect)| match effect {
        Effect::AnswerOrder(_, Err(error)) => Some(error_chain(error)),
        _ => None,
    });
    errors.collect()
}

/// Answers the launch of a cell, and connects its agent.
pub(super) fn warm(engine: &mut Engine, cell: &CellId, now: u64) -> Effects {
    let instance = launched_as(&format!("i-{cell}"), cell);
    let mut effects = engine.handle(Event::Launched(cell.clone(), Ok(instance)), at(now));
    effects.extend(engine.handle(Event::Connected(cell.clone()), at(now)));
    effects
}

fn terminated(engine: &mut Engine, cell: &CellId, now: u64) -> Effects {
    let outcome = Ok(Termination::Confirmed);
    let event = Event::Terminated { cell: cell.clone(), outcome, console: String::new() };
    engine.handle(event, at(now))
}

/// Verifies A20.
#[test]
fn order_takes_an_idle_cell_and_another_is_launched() {
    let (mut engine, effects) = pooled(2);
    let cells = launches(&effects);
    assert_eq!(cells.len(), 2);
    assert_eq!(launches(&warm(&mut engine, &cells[0], 5)).len(), 0);
    let (sandbox, effects) = engine.order(taking("pod"), at(1000));
    assert_eq!(attaches(&effects), [cells[0].clone()]);
    assert_eq!(engine.cell_of_order(&sandbox), Some(&cells[0]));
    // The pod's part of the cost and of the timeline begins with its order.
    let account = engine.account(&cells[0], at(1010)).unwrap();
    assert_eq!(account.cost, PRICE.over(seconds(10)));
    assert_eq!(account.created_unix_nanos, crate::engine::cell::timeline::nanos(at(1000).unix));
    let steps: Vec<_> = account.timeline.since(account.created_unix_nanos).collect();
    assert_eq!(steps, [("launched", 0), ("booted", 0), ("enrolled", 0)]);
    let settled = engine.account(&cells[1], at(1010)).unwrap().namespace.cost;
    assert_eq!(settled, PRICE.over(seconds(995)));
    let effects =
        engine.handle(Event::Attached(cells[0].clone(), Ok(Attached::default())), at(1001));
    let bound = effects.iter().any(|(_, effect)| matches!(effect, Effect::AnswerOrder(_, Ok(_))));
    assert!(bound, "{effects:?}");
    assert_eq!(launches(&effects).len(), 1, "the pool is filled again");
}

/// Verifies A20.
#[test]
fn order_takes_the_cheapest_idle_cell_and_the_oldest_at_equal_prices() {
    let architecture =
        if Needs::default().architecture == Architecture::Arm64 { "arm64" } else { "x86_64" };
    let file = format!(
        "instance_type,vcpus,memory_mib,architectures,on_demand_usd_per_hour\n\
         cheap,2,4096,{architecture},1\ndear,2,4096,{architecture},3\n"
    );
    let catalogue = Arc::new(CatalogueFile::parse(file.as_bytes()).unwrap().catalogue);
    let offering = |name: &str| Offering {
        instance_type: name.into(),
        zone: String::new(),
        market: Market::OnDemand,
    };
    let pool_of = |name: &str, dollars: u64, count| {
        let price = Price::from_micros(dollars * 1_000_000);
        let candidate = Candidate { offering: offering(name), price, accuracy: Accuracy::Exact };
        Pool { candidates: Some(vec![candidate]), ..pool(name, count) }
    };
    // The ids of cells follow from this number: the id of the third cell is the smallest.
    let seams = Box::new(Counting(19));
    let mut engine = Engine::new(config(), only(capabilities::CLOUD), seams);
    listed(&mut engine, 0, &[]);
    let mut cells = Vec::new();
    for (now, name, pools) in [
        (1, "dear", vec![pool_of("dear", 3, 1)]),
        (2, "cheap", vec![pool_of("dear", 3, 1), pool_of("cheap", 1, 1)]),
        (3, "cheap", vec![pool_of("dear", 3, 1), pool_of("cheap", 1, 2)]),
    ] {
        let cell = launches(&engine.set_pools(pools, at(now))).remove(0);
        let instance = Instance { offering: offering(name), ..launched_as("i", &cell) };
        engine.handle(Event::Launched(cell.clone(), Ok(instance)), at(now));
        engine.handle(Event::Connected(cell.clone()), at(now));
        cells.push(cell);
    }
    let [dear, first, second] = &cells[..] else { panic!("{cells:?}") };
    assert!(second < dear && dear < first, "{cells:?}");
    for (number, expected) in [first, second, dear].into_iter().enumerate() {
        let choice = Choice {
            catalogue: Arc::clone(&catalogue),
            needs: Arc::new(Needs::default()),
            rules: Arc::new(Rules::default()),
        };
        let order = spec(&format!("pod-{number}")).choosing(choice);
        let (_, effects) = engine.order(order, at(10));
        assert_eq!(attaches(&effects), std::slice::from_ref(expected), "pod {number}");
    }
}

fn groups(group: &str) -> BTreeMap<String, String> {
    BTreeMap::from([("security-groups".into(), group.into())])
}

/// Verifies A20, A21.
#[test]
fn cell_with_other_parameters_is_not_taken_and_is_replaced() {
    let mut engine = engine(capabilities::CLOUD);
    engine.set_pool_parameters(ONLY, groups("sg-1"), at(1));
    let cells = launches(&engine.set_pools(vec![pool("small", 2)], at(1)));
    warm(&mut engine, &cells[0], 2);
    let ordered = |pod, group| taking(pod).with_parameters(groups(group));
    assert!(!engine.has_warm_cell(&ordered("other", "sg-2")));
    let (_, effects) = engine.order(ordered("other", "sg-2"), at(3));
    assert_eq!((attaches(&effects), launches(&effects).len()), (vec![], 1));
    let (_, effects) = engine.order(ordered("same", "sg-1"), at(4));
    assert_eq!(attaches(&effects), [cells[0].clone()]);
    // The second cell, and the cell that replaced the first, are of an earlier configuration now.
    let effects = engine.set_pool_parameters(ONLY, groups("sg-2"), at(5));
    let replaced = launches(&effects);
    assert!(matches!(engine.cells[&cells[1]].state, State::Terminating { .. }));
    assert!(
        engine
            .cells
            .values()
            .filter(|cell| cell.is_warm())
            .all(|cell| { replaced.contains(&cell.id) && engine.has_parameters_of_pools(cell) })
    );
    // The record has the parameters of the cell.
    let record = engine.cells[&cells[0]].stored();
    assert_eq!(Some(record.parameters_sha256), launch::parameters_digest(&groups("sg-1")));
}

/// Returns an engine with a pool of idle cells on the node.
fn warmed_on_node(count: usize) -> (Engine, Vec<CellId>) {
    let mut engine = engine(capabilities::LOCAL);
    let cells = launches(&engine.set_pools(vec![pool("small", count)], at(1)));
    for cell in &cells {
        warm(&mut engine, cell, 2);
    }
    (engine, cells)
}

/// Gives a pod an idle cell.
fn take(engine: &mut Engine, pod: &str, now: u64) -> (CellId, Effects) {
    let (_, mut effects) = engine.order(taking(pod), at(now));
    let cell = attaches(&effects).remove(0);
    let attached = Event::Attached(cell.clone(), Ok(Attached::default()));
    effects.extend(engine.handle(attached, at(now)));
    (cell, effects)
}

fn started(engine: &mut Engine, cell: &CellId, now: u64) -> Effects {
    engine.handle(Event::Reached(cell.clone(), Step::FirstContainer), at(now))
}

/// Verifies A21.
#[test]
fn refill_waits_until_all_pods_have_a_container() {
    let (mut engine, _) = warmed_on_node(2);
    let (first, effects) = take(&mut engine, "first", 10);
    assert_eq!(launches(&effects), []);
    let (second, effects) = take(&mut engine, "second", 12);
    assert_eq!(launches(&effects), []);
    let image = Event::Reached(first.clone(), Step::ImageReady);
    assert_eq!(launches(&engine.handle(image, at(13))), []);
    assert_eq!(launches(&started(&mut engine, &first, 14)), []);
    assert_eq!(launches(&started(&mut engine, &second, 15)).len(), 2);
}

/// Verifies A21.
#[test]
fn refill_waits_ten_seconds_at_most_for_pods_that_overlap() {
    let (mut engine, _) = warmed_on_node(3);
    take(&mut engine, "first", 10);
    take(&mut engine, "second", 18);
    assert_eq!(launches(&engine.handle(Event::Tick, at(19))), []);
    assert_eq!(engine.next_timer(), Some(at(20).boot));
    assert_eq!(launches(&engine.handle(Event::Tick, at(20))).len(), 2);
    // The second pod still starts: a further pod does not prolong the delay.
    let (_, effects) = take(&mut engine, "third", 21);
    assert_eq!(launches(&effects).len(), 1);
}

/// Verifies A21.
#[test]
fn refill_waits_for_a_later_pod_while_the_first_has_no_container() {
    let (mut engine, _) = warmed_on_node(2);
    take(&mut engine, "never", 10);
    let next = launches(&engine.handle(Event::Tick, at(20))).remove(0);
    warm(&mut engine, &next, 30);
    let (later, effects) = take(&mut engine, "later", 40);
    assert_eq!(launches(&effects), []);
    assert_eq!(launches(&started(&mut engine, &later, 44)).len(), 1);
}

/// Verifies A21.
#[test]
fn refill_begins_when_the_starting_pod_ends() {
    let (mut engine, _) = warmed_on_node(1);
    let (cell, _) = take(&mut engine, "pod", 10);
    let end = Event::Terminate { cell: cell.clone(), reason: "deleted".into() };
    assert_eq!(launches(&engine.handle(end, at(12))).len(), 1);
}

/// Verifies A21.
#[test]
fn refill_of_remote_cells_does_not_wait() {
    let (mut engine, effects) = pooled(1);
    warm(&mut engine, &launches(&effects)[0], 2);
    let (_, effects) = take(&mut engine, "pod", 10);
    assert_eq!(launches(&effects).len(), 1);
}

/// Verifies A21.
#[test]
fn pod_beside_a_starting_pod_is_launched_without_delay() {
    let (mut engine, _) = warmed_on_node(1);
    take(&mut engine, "first", 10);
    let (sandbox, effects) = engine.order(taking("second"), at(11));
    let cell = engine.cell_of_order(&sandbox).unwrap().clone();
    assert_eq!(launches(&effects), [cell]);
}

/// Verifies A20.
#[test]
fn cell_that_does_not_suit_or_is_silent_is_not_taken() {
    let (mut engine, effects) = pooled(1);
    let cell = launches(&effects).remove(0);
    warm(&mut engine, &cell, 2);
    // A pod without a choice, as after a restart.
    let (_, effects) = engine.order(spec("other"), at(3));
    assert_eq!((launches(&effects).len(), attaches(&effects).len()), (1, 0));
    engine.handle(Event::Disconnected(cell.clone()), at(4));
    let (_, effects) = engine.order(taking("pod"), at(5));
    assert_eq!((launches(&effects).len(), attaches(&effects).len()), (1, 0));
    // A warm cell that stays silent is ended, and replaced.
    let mut effects = Effects::new();
    for second in (10..110).step_by(5) {
        effects.extend(engine.handle(Event::Tick, at(second)));
    }
    let described = effects
        .iter()
        .any(|(id, effect)| id.as_ref() == Some(&cell) && matches!(effect, Effect::Describe(_)));
    assert!(described, "{effects:?}");
    let alive = Event::Described(cell.clone(), Ok(launched_as("i", &cell)));
    engine.handle(alive, at(110));
    assert!(matches!(engine.cells[&cell].state, State::Terminating { .. }));
}

/// Verifies A21.
#[test]
fn smaller_pool_is_drained_and_a_larger_one_filled() {
    let (mut engine, effects) = pooled(2);
    let cells = launches(&effects);
    warm(&mut engine, &cells[1], 2);
    // Booting cells end first.
    engine.set_pools(vec![pool("small", 1)], at(3));
    assert!(matches!(engine.cells[&cells[0]].state, State::Terminating { .. }));
    assert!(matches!(engine.cells[&cells[1]].state, State::Idle { .. }));
    // Without new candidates a pool keeps its candidates.
    let unknown = Pool { candidates: None, ..pool("small", 3) };
    assert_eq!(launches(&engine.set_pools(vec![unknown], at(4))).len(), 2);
    let effects = engine.set_pools(vec![pool("other", 1)], at(5));
    assert!(
        engine
            .cells
            .values()
            .filter(|cell| cell.pool.as_deref() == Some("small"))
            .all(|c| !c.is_warm())
    );
    assert_eq!(launches(&effects).len(), 1);
    engine.set_pools(Vec::new(), at(6));
    assert!(engine.cells.values().all(|cell| !cell.is_warm()));
}

/// Verifies A21.
#[test]
fn pool_gives_way_to_a_pod_at_a_limit() {
    for limits in [
        Limits { max_cells: 2, ..Limits::default() },
        Limits { price: Some(PRICE + PRICE), ..Limits::default() },
    ] {
        let (mut engine, effects) = pooled(2);
        let cells = launches(&effects);
        for cell in &cells {
            warm(&mut engine, cell, 2);
        }
        engine.set_limits(limits, at(3));
        // No idle cell suits the pod.
        let (sandbox, effects) = engine.order(spec("pod"), at(4));
        assert_eq!((launches(&effects).len(), errors(&effects)), (0, Vec::new()));
        let warm = |engine: &Engine| engine.cells.values().filter(|cell| cell.is_warm()).count();
        assert_eq!(warm(&engine), 1);
        // Cells end one at a time.
        engine.handle(Event::Tick, at(5));
        assert_eq!(warm(&engine), 1);
        let ending = cells.iter().find(|cell| !engine.cells[*cell].is_warm()).unwrap().clone();
        let effects = terminated(&mut engine, &ending, 6);
        assert_eq!(launches(&effects), [engine.cell_of_order(&sandbox).unwrap().clone()]);
        assert_eq!(warm(&engine), 1, "the pool is not filled above a limit");
    }
}

/// Verifies A21.
#[test]
fn pool_waits_while_a_pod_waits_for_the_end_of_its_earlier_cell() {
    let mut engine = engine(capabilities::CLOUD);
    let cell = bound(&mut engine, "pod", "i");
    let again = with(spec("pod"), |wanted| wanted.key.attempt = 1);
    let (sandbox, _) = engine.order(again, at(2));
    assert_eq!(launches(&engine.set_pools(vec![pool("small", 1)], at(3))), []);
    engine.handle(Event::Terminate { cell: cell.clone(), reason: "".into() }, at(4));
    engine.handle(Event::ShutDown(cell.clone(), true), at(4));
    let effects = launches(&engine.handle(Event::Detached(cell, Ok(())), at(4)));
    assert_eq!((effects.len(), effects.first()), (2, engine.cell_of_order(&sandbox)));
}

/// Verifies A21.
#[test]
fn pool_keeps_its_cells_if_their_end_would_not_help_the_pod() {
    let of_namespace = Limits { namespace_price: Some(Price::from_micros(1)), ..Limits::default() };
    let of_node = Limits { price: Some(Price::from_micros(1)), ..Limits::default() };
    for limits in [of_namespace, of_node] {
        let (mut engine, effects) = pooled(2);
        for cell in launches(&effects) {
            warm(&mut engine, &cell, 2);
        }
        engine.set_limits(limits, at(3));
        let (_, effects) = engine.order(spec("pod"), at(4));
        assert!(errors(&effects)[0].contains("may cost"), "{effects:?}");
        assert!(engine.cells.values().all(|cell| cell.is_warm()), "{limits:?}");
    }
}

/// Verifies A18, A21.
#[test]
fn order_that_waits_for_the_end_of_a_warm_cell_names_the_limit_at_its_deadline() {
    let (mut engine, effects) = pooled(1);
    warm(&mut engine, &launches(&effects)[0], 2);
    engine.set_limits(Limits { price: Some(PRICE), ..Limits::default() }, at(3));
    let short = OrderSpec { timeout: Some(seconds(10)), ..spec("pod") };
    let (_, effects) = engine.order(short, at(4));
    assert_eq!(errors(&effects), Vec::<String>::new());
    let effects = engine.handle(Event::Tick, at(14));
    assert!(errors(&effects)[0].contains("the cells of the node may cost"), "{effects:?}");
}

/// Verifies A18.
#[test]
fn warm_cell_that_costs_a_pod_more_is_taken_only_within_the_limits() {
    for (limit, is_taken) in [(PRICE + PRICE, false), (PRICE + PRICE + PRICE, true)] {
        let (mut engine, effects) = pooled(2);
        for cell in launches(&effects) {
            warm(&mut engine, &cell, 2);
        }
        engine.set_limits(Limits { price: Some(limit), ..Limits::default() }, at(3));
        let (_, cell) = engine.cells.first_key_value().unwrap();
        let affords =
            |price| engine.config.limits.affords_warm(&engine.cells, "default", cell, price);
        assert_eq!(affords(PRICE + PRICE), is_taken);
        assert!(affords(PRICE));
    }
}

/// Verifies O22.
#[test]
fn cordon_ends_the_cells_of_pools() {
    let (mut engine, effects) = pooled(2);
    let cells = launches(&effects);
    warm(&mut engine, &cells[0], 2);
    engine.set_cordoned(true, at(3));
    assert!(engine.cells.values().all(|cell| !cell.is_warm()));
    // After the cordon the pool is filled again.
    engine.set_cordoned(false, at(4));
    assert_eq!(launches(&engine.handle(Event::Tick, at(200))).len(), 0);
    assert_eq!(engine.cells.values().filter(|cell| cell.is_warm()).count(), 2);
}

/// Verifies O22.
#[test]
fn cordon_ends_the_warm_cells_of_a_previous_daemon() {
    let record = store::Cell { pool: "small".into(), ..stored(CellPhase::Idle) };
    let (mut engine, cell) = recovered(record, false, at(1));
    engine.start_cordoned();
    engine.start(at(1));
    assert!(engine.cells[&cell].is_warm());
    let effects = engine.set_pools(vec![pool("small", 1)], at(1));
    assert_eq!((engine.cells[&cell].is_warm(), launches(&effects)), (false, vec![]));
}

/// Verifies A21.
#[test]
fn pool_keeps_to_limits() {
    for limits in [
        Limits { max_cells: 1, ..Limits::default() },
        Limits { boots: Some(1), ..Limits::default() },
        Limits { price: Some(PRICE), ..Limits::default() },
        // The limit of a namespace does not count cells without a namespace.
        Limits { max_cells: 1, namespace_price: Some(Price::FREE), ..Limits::default() },
    ] {
        let mut engine = engine(capabilities::CLOUD);
        engine.set_limits(limits, at(0));
        let effects = engine.set_pools(vec![pool("small", 3)], at(1));
        assert_eq!(launches(&effects).len(), 1, "{limits:?}");
    }
    let mut engine = engine(capabilities::CLOUD);
    engine.set_limits(Limits { price: Some(Price::FREE), ..Limits::default() }, at(0));
    assert_eq!(launches(&engine.set_pools(vec![pool("small", 3)], at(1))).len(), 0);
    let effects = engine.set_limits(Limits::default(), at(2));
    assert_eq!(launches(&effects).len(), 3);
}

/// Verifies A21.
#[test]
fn failed_launch_of_a_pool_is_repeated_after_growing_pauses() {
    let (mut engine, effects) = pooled(1);
    let mut cell = launches(&effects).remove(0);
    let mut now = 1;
    for pause in [3, 6, 12] {
        let error = ProviderError::without_cause(ErrorClass::Invalid, "wrong image");
        let effects = engine.handle(Event::Launched(cell.clone(), Err(error)), at(now));
        let failed = effects.iter().find_map(|(_, effect)| match effect {
            Effect::Log(Notice::PoolFailed { reason, seconds, .. }) => Some((reason, *seconds)),
            _ => None,
        });
        let (reason, seconds) = failed.unwrap();
        assert!(reason.contains("wrong image") && seconds == pause, "{reason} {seconds}");
        assert_eq!(launches(&engine.handle(Event::Tick, at(now + pause - 1))).len(), 0);
        now += pause;
        assert_eq!(engine.next_timer(), Some(at(now).boot));
        cell = launches(&engine.handle(Event::Tick, at(now))).remove(0);
    }
    // An idle cell ends the series.
    warm(&mut engine, &cell, now);
    assert_eq!(engine.pools.by_name["small"].failures, 0);
}

/// Verifies A15, A21.
#[test]
fn refused_credentials_and_quotas_are_logged_once_for_a_pool_and_not_tried_for_three_minutes() {
    for class in [ErrorClass::Auth, ErrorClass::Quota] {
        let (mut engine, effects) = pooled(1);
        let cell = launches(&effects).remove(0);
        let error = ProviderError {
            refusal: Some(LaunchRefusal::Offerings(vec![offering("a"), offering("b")])),
            ..ProviderError::without_cause(class, "launch: refused")
        };
        let mut effects = engine.handle(Event::Launched(cell, Err(error)), at(2));
        for second in 3..182 {
            effects.extend(engine.handle(Event::Tick, at(second)));
        }
        let failed = |effect: &Effect| matches!(effect, Effect::Log(Notice::PoolFailed { .. }));
        let failures = effects.iter().filter(|(_, effect)| failed(effect)).count();
        assert_eq!((failures, launches(&effects)), (1, vec![]), "{class:?}");
        assert_eq!(launches(&engine.handle(Event::Tick, at(182))).len(), 1, "{class:?}");
    }
}

/// Verifies A15.
#[test]
fn retries_of_a_pod_make_no_call_after_refused_credentials_and_quotas() {
    for class in [ErrorClass::Auth, ErrorClass::Quota] {
        let mut engine = engine(capabilities::CLOUD);
        let (cell, _) = launched(&mut engine, "pod", at(1));
        let error = ProviderError {
            refusal: Some(LaunchRefusal::Offerings(vec![offering("a"), offering("b")])),
            ..ProviderError::without_cause(class, "launch: refused")
        };
        let effects = engine.handle(Event::Launched(cell, Err(error)), at(2));
        assert_eq!((launches(&effects), errors(&effects).len()), (vec![], 1), "{class:?}");
        if class == ErrorClass::Quota {
            // The refused offerings are no candidates of the next call.
            let refused = |zone: &str, seconds: u64| {
                let refusals = engine.refusals(ONLY);
                refusals.at(at(seconds).boot).is_refused("small", zone, Market::Spot)
            };
            assert!(["a", "b"].iter().all(|zone| refused(zone, 181) && !refused(zone, 182)));
            continue;
        }
        for second in (3..182).step_by(10) {
            let (_, effects) = engine.order(spec("pod"), at(second));
            assert_eq!((launches(&effects), errors(&effects).len()), (vec![], 1), "{class:?}");
        }
        assert_eq!(launches(&engine.order(spec("pod"), at(182)).1).len(), 1, "{class:?}");
    }
}

/// Verifies A21.
#[test]
fn refused_offering_of_a_pool_is_avoided() {
    let (mut engine, effects) = pooled(1);
    let cell = launches(&effects).remove(0);
    let error = ProviderError::no_capacity("none left", vec![offering("a"), offering("b")]);
    engine.handle(Event::Launched(cell, Err(error)), at(1));
    assert_eq!(launches(&engine.handle(Event::Tick, at(100))).len(), 0);
    assert_eq!(engine.next_timer(), Some(at(181).boot));
    assert_eq!(launches(&engine.handle(Event::Tick, at(181))).len(), 1);
}

/// Returns the candidates of the only launch of effects, by their zones.
fn zones_of_launch(effects: &Effects) -> Vec<String> {
    let mut launches = effects.iter().filter_map(|(_, effect)| match effect {
        Effect::Launch(launch) => Some(launch),
        _ => None,
    });
    let zones = launches.next().unwrap().spec.offerings().map(|it| it.zone.clone()).collect();
    assert!(launches.next().is_none(), "{effects:?}");
    zones
}

/// Verifies A10, A21.
#[test]
fn pool_is_filled_with_dear_spot_while_on_demand_is_refused() {
    for (refused, expected) in [(&["b"][..], &["dear"][..]), (&[], &["b"])] {
        let mut engine = engine(capabilities::CLOUD);
        let of = |zone: &str, market| {
            let offering = Offering { market, ..offering(zone) };
            Candidate { offering, ..candidate(zone) }
        };
        let further = vec![of("dear", Market::Spot), of("b", Market::OnDemand)];
        let candidates = Some(vec![of("a", Market::OnDemand)]);
        let pool = Pool { candidates, further, ..pool("p", 1) };
        let effects = engine.set_pools(vec![pool], at(1));
        let refused = ["a"].iter().chain(refused);
        let refused = refused.map(|zone| of(zone, Market::OnDemand).offering).collect();
        let error = ProviderError::no_capacity("none left", refused);
        engine.handle(Event::Launched(launches(&effects).remove(0), Err(error)), at(1));
        assert_eq!(zones_of_launch(&engine.handle(Event::Tick, at(4))), expected);
    }
}

/// Verifies A21.
#[test]
fn pool_is_filled_with_further_offerings_while_its_offerings_are_refused() {
    let mut engine = engine(capabilities::CLOUD);
    let many: Vec<String> = (0..40).map(|number| format!("further-{number:02}")).collect();
    let further = many.iter().map(|zone| candidate(zone)).collect();
    let effects = engine.set_pools(vec![Pool { further, ..pool("small", 1) }], at(1));
    assert_eq!(zones_of_launch(&effects), ["a", "b"]);
    let refuse = |engine: &mut Engine, cell: CellId, refused: &[&str], now| {
        let refused = refused.iter().map(|zone| offering(zone)).collect();
        let error = ProviderError::no_capacity("none left", refused);
        engine.handle(Event::Launched(cell, Err(error)), at(now));
    };
    refuse(&mut engine, launches(&effects).remove(0), &["a"], 1);
    let effects = engine.handle(Event::Tick, at(4));
    assert_eq!(zones_of_launch(&effects), ["b"]);
    refuse(&mut engine, launches(&effects).remove(0), &["b"], 4);
    let effects = engine.handle(Event::Tick, at(10));
    assert_eq!(zones_of_launch(&effects), many[..MAX_CANDIDATES]);
    refuse(&mut engine, launches(&effects).remove(0), &["further-00"], 10);
    let effects = engine.handle(Event::Tick, at(22));
    assert_eq!(zones_of_launch(&effects), many[1..=MAX_CANDIDATES]);
    refuse(&mut engine, launches(&effects).remove(0), &["further-01"], 22);
    // The refusal of `a` has ended.
    let effects = engine.handle(Event::Tick, at(181));
    assert_eq!(zones_of_launch(&effects), ["a"]);
}

/// Verifies A13, A21.
#[test]
fn pool_over_a_quota_gets_no_further_offerings_until_the_quota_may_have_room() {
    let mut engine = engine(capabilities::CLOUD);
    let further = vec![candidate("further")];
    let effects = engine.set_pools(vec![Pool { further, ..pool("small", 1) }], at(1));
    let cell = launches(&effects).remove(0);
    let tried = offering("a");
    let types = [tried.instance_type.clone()].into();
    let quota = Arc::new(RefusedQuota { market: tried.market, types });
    let error = ProviderError {
        refusal: Some(LaunchRefusal::Quota { quota, offerings: vec![tried] }),
        ..ProviderError::without_cause(ErrorClass::Quota, "launch: refused")
    };
    engine.handle(Event::Launched(cell, Err(error)), at(2));
    for second in 3..182 {
        assert_eq!(launches(&engine.handle(Event::Tick, at(second))), vec![], "{second} s");
    }
    assert_eq!(zones_of_launch(&engine.handle(Event::Tick, at(182))), ["a", "b"]);
}

/// Verifies A21.
#[test]
fn old_cells_are_replaced_one_after_the_other() {
    let (mut engine, effects) = pooled(2);
    let cells = launches(&effects);
    for cell in &cells {
        warm(&mut engine, cell, 10);
    }
    engine.handle(Event::Tick, at(3609));
    assert!(engine.cells.values().all(is_idle));
    let effects = engine.handle(Event::Tick, at(3610));
    let next = launches(&effects);
    let ended = cells.iter().filter(|cell| !engine.cells[*cell].is_warm()).count();
    assert_eq!((next.len(), ended), (1, 1));
    engine.handle(Event::Tick, at(3620));
    assert_eq!(cells.iter().filter(|cell| !engine.cells[*cell].is_warm()).count(), 1);
    warm(&mut engine, &next[0], 3621);
    engine.handle(Event::Tick, at(3630));
    assert_eq!(cells.iter().filter(|cell| !engine.cells[*cell].is_warm()).count(), 2);
}

fn is_idle(cell: &Cell) -> bool {
    matches!(cell.state, State::Idle { .. })
}

/// Verifies A21.
#[test]
fn warm_cell_whose_agent_stays_away_ends() {
    let (mut engine, effects) = pooled(1);
    let cell = launches(&effects).remove(0);
    engine.handle(Event::Launched(cell.clone(), Ok(launched_as("i", &cell))), at(2));
    let limit = config().launch_timeout.as_secs();
    engine.handle(Event::Tick, at(limit));
    assert!(engine.cells[&cell].is_warm());
    engine.handle(Event::Tick, at(limit + 1));
    assert!(!engine.cells[&cell].is_warm());
    let effects = terminated(&mut engine, &cell, limit + 1);
    let failed = |effect: &Effect| matches!(effect, Effect::Log(Notice::PoolFailed { .. }));
    assert!(effects.iter().any(|(_, effect)| failed(effect)), "{effects:?}");
}

/// Verifies A22.
#[test]
fn warm_cells_survive_a_restart_and_others_end() {
    let record = |phase, pool: &str, sandbox: &str| store::Cell {
        pool: pool.into(),
        sandbox: sandbox.into(),
        offering: Some(launch::stored_candidate(&candidate("a"))),
        ..stored(phase)
    };
    for (phase, pool_name, sandbox, stays) in [
        (CellPhase::Idle, "small", "", true),
        (CellPhase::Booting, "small", "", true),
        // The cell was being bound, and the order of its pod was not recorded.
        (CellPhase::Enrolled, "small", "sandbox", false),
        (CellPhase::Idle, "", "", false),
        (CellPhase::Idle, "other", "", false),
    ] {
        let (mut engine, cell) = recovered(record(phase, pool_name, sandbox), false, at(1));
        engine.start(at(1));
        engine.set_pools(vec![Pool { candidates: None, ..pool("small", 1) }], at(1));
        assert_eq!(engine.cells[&cell].is_warm(), stays, "{phase:?} of {pool_name:?}");
        if stays {
            engine.handle(Event::Connected(cell.clone()), at(2));
            let began = at(2).boot;
            engine.handle(Event::Listed { provider: ONLY, began, instances: Vec::new() }, at(2));
            let (_, effects) = engine.order(taking("pod"), at(3));
            assert_eq!(attaches(&effects), [cell]);
        }
    }
}

/// Verifies A20.
#[test]
fn pod_whose_warm_cell_is_not_attached_gets_another() {
    let (mut engine, effects) = pooled(1);
    let cell = launches(&effects).remove(0);
    warm(&mut engine, &cell, 2);
    let (sandbox, _) = engine.order(taking("pod"), at(3));
    let error = ProviderError::without_cause(ErrorClass::Transient, "no address");
    engine.handle(Event::Attached(cell.clone(), Err(error)), at(4));
    let effects = terminated(&mut engine, &cell, 5);
    let next = engine.cell_of_order(&sandbox).unwrap();
    assert!(next != &cell && launches(&effects).contains(next), "{effects:?}");
}

/// Verifies A20.
#[test]
fn pod_without_any_offering_takes_a_warm_cell_or_gets_the_reason() {
    let (mut engine, effects) = pooled(1);
    let cell = launches(&effects).remove(0);
    warm(&mut engine, &cell, 2);
    let refused = || taking("pod").of(Err(CellError::Starting));
    assert!(engine.has_warm_cell(&refused()));
    let (_, effects) = engine.order(refused(), at(3));
    assert_eq!(attaches(&effects), [cell]);
    assert!(!engine.has_warm_cell(&refused()));
    let other = taking("other").of(Err(CellError::Starting));
    let (_, effects) = engine.order(other, at(4));
    assert_eq!(errors(&effects).len(), 1);
}

/// Verifies P21.
#[test]
fn silent_warm_cells_count_for_a_cut_off() {
    for (silent, is_cut_off) in [(2, false), (3, true)] {
        let (mut engine, effects) = pooled(2);
        let mut cells = launches(&effects);
        for cell in &cells {
            warm(&mut engine, cell, 2);
        }
        cells.push(bound(&mut engine, "pod", "i-pod"));
        for cell in cells.iter().rev().take(silent) {
            engine.handle(Event::Disconnected(cell.clone()), at(10));
        }
        let ticks = (10..200).step_by(5).map(|second| engine.handle(Event::Tick, at(second)));
        let effects: Effects = ticks.flatten().collect();
        let probes = |(_, effect): &&(_, Effect)| matches!(effect, Effect::Describe(_));
        let expected = if is_cut_off { 0 } else { silent };
        assert_eq!(effects.iter().filter(probes).count(), expected, "{silent} of 3");
    }
}

/// A cell that is too old when its agent connects ends in the same step: if its record fails then,
/// the daemon skips the termination.
#[test]
fn old_cell_whose_record_fails_is_terminated_later() {
    let (mut engine, effects) = pooled(1);
    let cell = launches(&effects).remove(0);
    let instance = launched_as("i", &cell);
    engine.handle(Event::Launched(cell.clone(), Ok(instance)), at(2));
    engine.cells.get_mut(&cell).unwrap().bill.ran_before = seconds(3600);
    let effects = engine.handle(Event::Connected(cell.clone()), at(3));
    records::fails(&mut engine, &cell, effects, 3);
    let effects = engine.handle(Event::Tick, at(60));
    let ends = |(id, effect): &(Option<CellId>, Effect)| {
        id.as_ref() == Some(&cell) && matches!(effect, Effect::Terminate { .. })
    };
    assert!(effects.iter().any(ends), "{effects:?}");
}

#[test]
fn order_with_a_suitable_pool_but_no_idle_cell_counts_as_a_miss() {
    let mut engine = engine(capabilities::CLOUD);
    let effects = engine.set_pools(vec![pool("one", 1), pool("other", 1)], at(1));
    warm(&mut engine, &launches(&effects)[0], 2);
    let mut other_size = taking("unsuited");
    if let Some(choice) = &mut other_size.offers[0].choice {
        choice.catalogue = Arc::new(Catalogue::any_size(offering("c")));
    }
    for (order, sums, pools) in [
        (taking("hit"), (1, 0), [(1, 0), (0, 0)]),
        (taking("miss"), (1, 1), [(1, 1), (0, 1)]),
        // No pool has its offering.
        (other_size, (1, 1), [(1, 1), (0, 1)]),
    ] {
        let name = order.wanted.key.name.clone();
        engine.order(order, at(10));
        let metrics = engine.metrics(at(10)).pools;
        assert_eq!((metrics.hits, metrics.misses), sums, "{name}");
        let views = engine.pool_views().into_iter().map(|pool| (pool.hits, pool.misses));
        assert_eq!(views.collect::<Vec<_>>(), pools, "{name}");
    }
}
