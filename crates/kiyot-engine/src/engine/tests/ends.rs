//! Ends of instances: by the provider, with its reasons, and by callers.

use super::*;
use crate::engine::cell::known;

const SPOT: &str = "Server.SpotInstanceTermination: Spot instance terminated";

/// Returns the provider's description of a cell's ended instance.
fn ended(id: &str, cell: &CellId, reason: &str) -> Instance {
    Instance {
        state: InstanceState::Terminated,
        end_reason: known(reason),
        lacks_capacity: reason.starts_with("Server."),
        ..instance(id, cell, "ours")
    }
}

/// The ways by which the daemon learns of an end.
#[derive(Debug, Clone, Copy)]
enum By {
    List,
    Description,
}

/// Shows the ended instance of a cell to the engine.
fn shown(engine: &mut Engine, by: By, instance: &Instance, now: Now) -> Effects {
    let event = match by {
        By::List => {
            Event::Listed { provider: ONLY, began: now.boot, instances: vec![instance.clone()] }
        }
        By::Description => Event::Described(instance.cell.clone(), Ok(instance.clone())),
    };
    engine.handle(event, now)
}

/// Confirms the termination of an ended instance.
fn terminated(engine: &mut Engine, cell: &CellId, now: Now) -> Effects {
    let (cell, console) = (cell.clone(), String::new());
    let outcome = Ok(Termination::Confirmed);
    engine.handle(Event::Terminated { cell, outcome, console }, now)
}

/// Verifies X3, Y25.
#[test]
fn stop_of_a_remote_cell_succeeds_once_its_agent_has_confirmed_the_end() {
    let is_answered = |effects: &Effects| {
        effects.iter().any(|(_, effect)| matches!(effect, Effect::AnswerEnd(Ok(()))))
    };
    for is_confirmed in [true, false] {
        let mut engine = engine(capabilities::EC2);
        let cell = bound(&mut engine, "pod", "i");
        let stop = Event::Terminate { cell: cell.clone(), reason: "stopped".into() };
        assert!(!is_answered(&engine.handle(stop, at(10))), "the containers may run");
        let mut effects = engine.handle(Event::ShutDown(cell.clone(), is_confirmed), at(11));
        if is_confirmed {
            assert!(!is_answered(&effects), "the node still shares parts with the cell");
            effects = engine.handle(Event::Detached(cell.clone(), Ok(())), at(12));
        }
        assert_eq!(is_answered(&effects), is_confirmed);
        // The instance costs until its termination is permitted.
        let mut seconds = 13;
        for _ in 0..3 {
            let denied = ProviderError::without_cause(ErrorClass::Auth, "terminate");
            let (of, console) = (cell.clone(), String::new());
            let refused = Event::Terminated { cell: of, outcome: Err(denied), console };
            assert!(!is_answered(&engine.handle(refused, at(seconds))));
            seconds += config().retry_pause.as_secs() * 100;
            let effects = engine.handle(Event::Tick, at(seconds));
            let ends = |(_, effect): &(_, Effect)| matches!(effect, Effect::Terminate { .. });
            assert!(effects.iter().any(ends), "{effects:?}");
        }
        let effects = terminated(&mut engine, &cell, at(seconds));
        assert!(is_answered(&effects), "all waiting callers are answered");
        assert!(!engine.contains(&cell));
    }
}

/// Verifies X13.
#[test]
fn ended_cell_leaves_nothing_in_memory_but_its_reason() {
    for is_silent in [false, true] {
        let mut engine = engine(capabilities::LOCAL);
        let cell = bound(&mut engine, "pod", "i");
        if is_silent {
            engine.handle(Event::Disconnected(cell.clone()), at(2));
        }
        engine.handle(Event::Terminate { cell: cell.clone(), reason: "stopped".into() }, at(3));
        terminated(&mut engine, &cell, at(4));
        engine.handle(Event::Tick, at(100));
        assert!(!engine.contains(&cell) && engine.gone_reason(&cell) == Some("stopped"));
        assert!(!engine.health.is_connected(&cell) && !engine.is_silent(&cell), "{is_silent}");
        assert_eq!(engine.next_timer(), None, "{is_silent}");
    }
}

/// Verifies V25.
#[test]
fn end_of_an_instance_has_the_reason_of_the_provider() {
    for by in [By::List, By::Description] {
        for (reason, expected) in
            [(SPOT, format!("its instance ended: {SPOT}")), ("", "its instance ended".to_owned())]
        {
            let mut engine = engine(capabilities::CLOUD);
            let cell = bound(&mut engine, "pod", "i");
            let effects = shown(&mut engine, by, &ended("i", &cell, reason), at(10));
            let notice = Notice::InstanceEnded(known(reason));
            let is_logged = |effect: &Effect| matches!(effect, Effect::Log(it) if *it == notice);
            assert!(effects.iter().any(|(_, effect)| is_logged(effect)), "{by:?}: {effects:?}");
            assert_eq!(engine.cells[&cell].stored().reason, expected, "{by:?}");
            terminated(&mut engine, &cell, at(11));
            assert_eq!(engine.gone_reason(&cell), Some(expected.as_str()), "{by:?}");
        }
    }
}

/// Verifies V64.
#[test]
fn offering_without_capacity_after_the_answer_is_refused_for_a_while() {
    for by in [By::List, By::Description] {
        let mut engine = engine(capabilities::CLOUD);
        let (first, _) = launched(&mut engine, "pod", at(1));
        engine.handle(Event::Launched(first.clone(), Ok(launched_as("i", &first))), at(2));
        let effects = shown(&mut engine, by, &ended("i", &first, SPOT), at(10));
        let again = effects.iter().find_map(|(_, effect)| match effect {
            Effect::Launch(launch) => Some(Arc::clone(launch)),
            _ => None,
        });
        assert_eq!(again.unwrap().spec.candidates, [candidate("b")], "{by:?}");
        let until = at(10).boot + config().refusal_pause;
        let reason = engine.refusals(ONLY).reason(&offering("a"), until - Duration::from_secs(1));
        let reason = reason.unwrap();
        assert!(reason.ends_with(&format!(": its instance ended: {SPOT}")), "{reason}");
        assert_eq!(engine.refusals(ONLY).reason(&offering("a"), until), None);
        assert_eq!(engine.refusals(ONLY).reason(&offering("b"), at(12).boot), None);
    }
}

/// Verifies V64.
#[test]
fn error_of_a_pod_names_the_reason_if_no_offering_is_left() {
    let mut engine = engine(capabilities::CLOUD);
    let order = spec("pod").of(Ok(vec![candidate("a")]));
    let (launches, _) = outcome(&engine.order(order, at(1)).1);
    let cell = &launches[0];
    engine.handle(Event::Launched(cell.clone(), Ok(launched_as("i", cell))), at(2));
    let effects = shown(&mut engine, By::List, &ended("i", cell, SPOT), at(10));
    let (launches, error) = outcome(&effects);
    let expected =
        format!("the provider of cells: launch {}: its instance ended: {SPOT}", offering("a"));
    assert_eq!((launches.len(), error), (0, Some(expected)));
}

/// Verifies V64.
#[test]
fn interrupted_instance_of_a_pod_refuses_its_offering_for_a_while() {
    for by in [By::List, By::Description] {
        let mut engine = engine(capabilities::CLOUD);
        let cell = bound(&mut engine, "pod", "i");
        shown(&mut engine, by, &ended("i", &cell, SPOT), at(10));
        terminated(&mut engine, &cell, at(11));
        let until = at(10).boot + config().refusal_pause;
        let reason = |now| engine.refusals(ONLY).reason(&offering("a"), now);
        let last = reason(until - Duration::from_secs(1)).expect("a refusal");
        assert!(last.ends_with(&format!(": its instance ended: {SPOT}")), "{last}");
        assert_eq!(reason(until), None);
        assert_eq!(engine.refusals(ONLY).reason(&offering("b"), at(11).boot), None);
    }
}

/// Verifies V64.
#[test]
fn order_of_an_interrupted_unbound_cell_takes_another_offering_at_once() {
    let mut engine = engine(capabilities::CLOUD);
    let (first, launch) = launched(&mut engine, "pod", at(1));
    engine.handle(Event::Launched(first.clone(), Ok(launched_as("i", &first))), at(2));
    redeem(&mut engine, &first, &launch, at(3)).unwrap();
    let ending = Instance { state: InstanceState::Stopped, ..ended("i", &first, SPOT) };
    let effects = shown(&mut engine, By::List, &ending, at(10));
    let again = effects.iter().find_map(|(_, effect)| match effect {
        Effect::Launch(launch) => Some(launch.spec.candidates.clone()),
        _ => None,
    });
    assert_eq!(again, Some(vec![candidate("b")]));
    // The end of the first cell changes neither the order nor its record.
    let effects = terminated(&mut engine, &first, at(100));
    assert!(!engine.contains(&first));
    assert_eq!(outcome(&effects), (vec![], None));
    let is_of_order = |change: &Change| matches!(change, Change::Order(..));
    let writes_order = |(_, effect): &(_, Effect)| match effect {
        Effect::Commit { changes, .. } => changes.iter().any(is_of_order),
        _ => false,
    };
    assert!(!effects.iter().any(writes_order), "{effects:?}");
    assert_eq!(engine.orders.len(), 1);
}

/// Verifies V64.
#[test]
fn other_reasons_refuse_no_offering() {
    for reason in ["Client.VolumeLimitExceeded: Volume limit exceeded", ""] {
        let mut engine = engine(capabilities::CLOUD);
        let (cell, _) = launched(&mut engine, "pod", at(1));
        engine.handle(Event::Launched(cell.clone(), Ok(launched_as("i", &cell))), at(2));
        shown(&mut engine, By::List, &ended("i", &cell, reason), at(10));
        assert_eq!(engine.refusals(ONLY).reason(&offering("a"), at(11).boot), None, "{reason}");
    }
}

/// Verifies V38.
#[test]
fn end_reason_of_a_refused_launch_is_the_refusal() {
    for class in [ErrorClass::Auth, ErrorClass::Capacity, ErrorClass::Quota] {
        let mut engine = engine(capabilities::CLOUD);
        let (cell, _) = launched(&mut engine, "pod", at(1));
        let error = ProviderError::without_cause(class, "launch: Refused");
        let effects = engine.handle(Event::Launched(cell.clone(), Err(error)), at(2));
        let reason = effects.iter().find_map(|(_, effect)| match effect {
            Effect::PublishEnded(reason) => Some(&**reason),
            _ => None,
        });
        assert_eq!(reason, Some(REFUSED), "{class:?}");
    }
}

/// Verifies V38.
#[test]
fn error_of_an_instance_that_ends_while_it_boots_has_the_end_of_its_console() {
    let mut engine = engine(capabilities::CLOUD);
    engine.providers.get_mut(ONLY).unwrap().max_launches = 1;
    let (cell, _) = launched(&mut engine, "pod", at(1));
    engine.handle(Event::Launched(cell.clone(), Ok(launched_as("i", &cell))), at(2));
    shown(&mut engine, By::List, &ended("i", &cell, ""), at(10));
    let (confirmed, console) = (Ok(Termination::Confirmed), "user data failed".to_owned());
    let event = Event::Terminated { cell: cell.clone(), outcome: confirmed, console };
    let error = outcome(&engine.handle(event, at(11))).1.unwrap();
    assert!(error.ends_with("its instance ended; its console ends: user data failed"), "{error}");
}

/// Returns an engine with a booting cell that an operator ends, and the effects.
fn ended_by_an_operator() -> (Engine, CellId, Effects) {
    let mut engine = engine(capabilities::CLOUD);
    let (cell, _) = launched(&mut engine, "pod", at(1));
    engine.handle(Event::Launched(cell.clone(), Ok(launched_as("i", &cell))), at(2));
    let reason = "an operator ended it".into();
    let effects = engine.handle(Event::Terminate { cell: cell.clone(), reason }, at(3));
    (engine, cell, effects)
}

/// Verifies O22.
#[test]
fn pod_of_a_booting_cell_that_an_operator_ends_gets_no_other_cell() {
    let (mut engine, cell, mut effects) = ended_by_an_operator();
    effects.extend(terminated(&mut engine, &cell, at(4)));
    let (launches, error) = outcome(&effects);
    assert_eq!(launches, []);
    let error = error.unwrap();
    assert!(error.contains("an operator ended it"), "{error}");
}

/// Verifies V35.
#[test]
fn accepted_termination_is_checked_again_after_each_answer() {
    for class in [ErrorClass::Throttled, ErrorClass::Transient, ErrorClass::NotFound] {
        let (mut engine, cell, _) = ended_by_an_operator();
        let (outcome, console) = (Ok(Termination::Accepted), String::new());
        engine.handle(Event::Terminated { cell: cell.clone(), outcome, console }, at(4));
        let asks = |engine: &mut Engine, seconds| {
            let effects = engine.handle(Event::Tick, at(seconds));
            effects.iter().any(|(_, effect)| matches!(effect, Effect::Describe(_)))
        };
        let period = capabilities::CLOUD.listing_period.as_secs();
        assert!(asks(&mut engine, 4 + period), "{class:?}");
        let error = ProviderError::without_cause(class, "describe");
        engine.handle(Event::Described(cell.clone(), Err(error)), at(5 + period));
        assert!(!asks(&mut engine, 4 + 2 * period), "{class:?}");
        assert!(asks(&mut engine, 5 + 2 * period), "{class:?}");
    }
}
