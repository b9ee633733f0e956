//! Abandoned orders: no call waits for their launches.

use crate::engine::tests::{
    pools::{attaches, errors, launches, pool, seconds, taking, warm},
    *,
};

/// Returns an engine with a launch of a pod, and with a pool that lacks a cell.
fn launching() -> (Engine, CellId, SandboxId) {
    let mut engine = engine(capabilities::CLOUD);
    engine.set_limits(Limits { boots: Some(1), ..Limits::default() }, at(0));
    let (sandbox, effects) = engine.order(spec("pod"), at(1));
    let cell = launches(&effects).remove(0);
    assert_eq!(launches(&engine.set_pools(vec![pool("small", 1)], at(1))), []);
    (engine, cell, sandbox)
}

fn leave(engine: &mut Engine, now: u64) -> Effects {
    engine.handle(Event::Abandoned(key("pod")), at(now))
}

/// Verifies A23.
#[test]
fn abandoned_cell_joins_a_pool_that_lacks_a_cell_and_another_pod_takes_it() {
    let (mut engine, cell, sandbox) = launching();
    assert_eq!(errors(&leave(&mut engine, 2)), Vec::<String>::new());
    let effects = warm(&mut engine, &cell, 12);
    assert!(effects.iter().any(|(_, effect)| matches!(
        effect, Effect::AnswerOrder(order, Err(_)) if *order == sandbox
    )));
    let records = effects.iter().filter_map(|(_, effect)| match effect {
        Effect::Commit { changes, .. } => Some(changes),
        _ => None,
    });
    let removed = Change::Order(sandbox.clone(), None);
    let record = records.filter(|changes| changes.contains(&removed)).find_map(|changes| {
        changes.iter().find_map(|change| match change {
            Change::Cell(_, Some(record)) => Some((**record).clone()),
            _ => None,
        })
    });
    let record = record.unwrap();
    assert_eq!((record.pool.as_str(), record.pod_uid.as_str()), ("small", ""));
    assert_eq!((record.sandbox.as_str(), record.namespace.as_str()), ("", ""));
    assert_eq!((launches(&effects), attaches(&effects)), (vec![], vec![]));
    // Until it joined the pool, its cost belongs to its first pod's namespace.
    let counted = engine.account(&cell, at(22)).unwrap();
    assert_eq!(counted.cost, PRICE.over(seconds(10)));
    let (_, effects) = engine.order(taking("other"), at(30));
    assert_eq!(attaches(&effects), [cell]);
}

/// Verifies O22.
#[test]
fn abandoned_cell_joins_no_pool_under_a_cordon() {
    let (mut engine, cell, _) = launching();
    engine.set_cordoned(true, at(2));
    leave(&mut engine, 2);
    assert_eq!(attaches(&warm(&mut engine, &cell, 3)), [cell]);
}

/// Verifies A23.
#[test]
fn cell_is_bound_if_a_call_waits_again() {
    let (mut engine, cell, _) = launching();
    leave(&mut engine, 2);
    engine.handle(Event::Joined(key("pod")), at(3));
    assert_eq!(attaches(&warm(&mut engine, &cell, 4)), std::slice::from_ref(&cell));
    engine.handle(Event::Tick, at(200));
    assert!(matches!(engine.cells[&cell].state, State::Binding { .. }));
}

/// Verifies A23.
#[test]
fn abandoned_cell_that_no_pool_lacks_is_bound_or_ends_after_three_minutes() {
    let (mut engine, cell, _) = launching();
    engine.set_pools(Vec::new(), at(1));
    leave(&mut engine, 2);
    let effects = warm(&mut engine, &cell, 3);
    assert_eq!(attaches(&effects), [cell]);

    let (mut engine, cell, _) = launching();
    engine.set_pools(Vec::new(), at(1));
    leave(&mut engine, 2);
    assert_eq!(errors(&engine.handle(Event::Tick, at(181))), Vec::<String>::new());
    assert_eq!(engine.next_timer(), Some(at(182).boot));
    let effects = engine.handle(Event::Tick, at(182));
    assert!(errors(&effects)[0].contains("no call of the kubelet"), "{effects:?}");
    assert!(matches!(engine.cells[&cell].state, State::Terminating { .. }));
}

/// Verifies A23.
#[test]
fn abandoned_order_that_waits_for_a_boot_ends_after_three_minutes() {
    let (mut engine, _, _) = launching();
    let (sandbox, _) = engine.order(spec("other"), at(2));
    engine.handle(Event::Abandoned(key("other")), at(3));
    let effects = engine.handle(Event::Tick, at(183));
    assert!(errors(&effects)[0].contains("no call of the kubelet"), "{effects:?}");
    assert!(!engine.orders.contains_key(&sandbox));
}

/// Verifies A23.
#[test]
fn cell_of_a_changed_pod_joins_a_pool_in_each_state_before_its_attachment() {
    for state in ["launching", "booting", "binding"] {
        let (mut engine, cell, _) = launching();
        if state != "launching" {
            let instance = launched_as("i", &cell);
            engine.handle(Event::Launched(cell.clone(), Ok(instance)), at(2));
        }
        if state == "binding" {
            engine.handle(Event::Connected(cell.clone()), at(2));
        }
        let changed = with(spec("pod"), |wanted| wanted.identity = "changed".into());
        let (_, effects) = engine.order(changed, at(3));
        let joins = state != "binding";
        assert_eq!(engine.cells[&cell].is_warm(), joins, "{state}");
        assert!(errors(&effects)[0].contains("changed"), "{effects:?}");
        if joins {
            // The pod waits for the boot of the joined cell. Then its launch comes before the
            // pool's.
            assert_eq!(launches(&effects), []);
            assert_eq!(launches(&warm(&mut engine, &cell, 4)).len(), 1);
        }
    }
}

/// Verifies A23.
#[test]
fn cell_of_another_offering_or_with_a_failure_joins_no_pool() {
    let other = Pool { candidates: Some(vec![candidate("c")]), ..pool("small", 1) };
    let (mut engine, cell, _) = launching();
    engine.set_pools(vec![other], at(1));
    leave(&mut engine, 2);
    assert_eq!(attaches(&warm(&mut engine, &cell, 3)), [cell]);

    let (mut engine, cell, _) = launching();
    leave(&mut engine, 2);
    engine.fail(&cell, CellError::Starting);
    engine.handle(Event::Tick, at(182));
    assert!(!engine.cells[&cell].is_warm());
}

/// Verifies A23.
#[test]
fn cell_with_parameters_of_its_pod_joins_no_pool() {
    let parameters = BTreeMap::from([("instance-profile".into(), "admin".into())]);
    let (mut engine, usual, _) = launching();
    let admin = spec("admin").with_parameters(parameters);
    engine.set_limits(Limits { boots: Some(2), ..Limits::default() }, at(1));
    engine.set_pools(vec![pool("small", 5)], at(1));
    engine.set_limits(Limits { boots: Some(9), ..Limits::default() }, at(2));
    let (sandbox, _) = engine.order(admin.clone(), at(2));
    let cell = engine.cell_of_order(&sandbox).unwrap().clone();
    for pod in [&spec("pod"), &admin] {
        let changed = with(pod.clone(), |wanted| wanted.identity = "changed".into());
        engine.order(changed, at(3));
    }
    assert!(engine.cells[&usual].is_warm());
    assert!(!engine.cells[&cell].is_warm(), "{:?}", engine.cells[&cell]);
}

/// Verifies A23.
#[test]
fn abandoned_launch_of_a_previous_daemon_joins_a_pool() {
    let record = store::Cell {
        offering: Some(launch::stored_candidate(&candidate("a"))),
        pod_uid: "pod".into(),
        sandbox: "sandbox".into(),
        ..stored(CellPhase::Booting)
    };
    let cell = CellId::parse(&record.id).unwrap();
    let sandbox = SandboxId::mint().unwrap();
    let order = store::Order {
        sandbox: sandbox.to_string(),
        pod_uid: "pod".into(),
        cell: record.id.clone(),
        launches: 1,
        ..store::Order::default()
    };
    let journal = Journal {
        cells: vec![(record.id.clone(), record)],
        orders: vec![(sandbox.to_string(), order)],
        ..Journal::default()
    };
    let seams = Box::new(Counting::default());
    let (mut engine, ..) =
        Engine::recover(config(), only(capabilities::CLOUD), seams, journal, at(1));
    engine.start(at(1));
    engine.set_limits(Limits { boots: Some(1), ..Limits::default() }, at(1));
    engine.set_pools(vec![pool("small", 1)], at(1));
    engine.handle(Event::Connected(cell.clone()), at(2));
    // The kubelet's retry has time to join the launch.
    assert!(!engine.cells[&cell].is_warm());
    engine.handle(Event::Tick, at(61));
    assert!(engine.cells[&cell].is_warm());
}
