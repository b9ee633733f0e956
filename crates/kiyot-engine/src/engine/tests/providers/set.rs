//! Providers that are added and removed while cells run.

use super::*;
use crate::engine::tests::pools::warm;

fn released(effects: &Effects) -> Vec<ProviderKey> {
    let released = effects.iter().filter_map(|(_, effect)| match effect {
        Effect::ReleaseProvider(key) => Some(*key),
        _ => None,
    });
    released.collect()
}

/// Returns an engine with both providers and a bound cell away.
fn with_bound() -> (Engine, CellId) {
    let mut engine = with(node());
    let (cell, provider) = launch(&mut engine, offered("pod", &[], &[1]), 1);
    assert_eq!(provider, AWAY);
    engine.handle(Event::Launched(cell.clone(), Ok(launched_as("i-1", &cell))), at(1));
    engine.handle(Event::Connected(cell.clone()), at(1));
    engine.handle(Event::Attached(cell.clone(), Ok(Attached::default())), at(1));
    assert!(matches!(engine.cells[&cell].state, State::Bound { .. }));
    (engine, cell)
}

fn states(engine: &Engine) -> Vec<(String, &'static str, usize)> {
    let views = engine.provider_views().into_iter();
    views.map(|view| (view.key.to_string(), view.state.name(), view.cells)).collect()
}

fn state(key: &str, state: &'static str, cells: usize) -> (String, &'static str, usize) {
    (key.to_owned(), state, cells)
}

/// Ends a cell by the list of its provider.
fn end(engine: &mut Engine, cell: &CellId, seconds: u64) -> Effects {
    engine.handle(Event::Terminate { cell: cell.clone(), reason: "stopped".into() }, at(seconds));
    let terminated = Instance { state: InstanceState::Terminated, ..launched_as("i-1", cell) };
    let mut effects = engine.handle(Event::ShutDown(cell.clone(), true), at(seconds));
    effects.extend(engine.handle(Event::Detached(cell.clone(), Ok(())), at(seconds)));
    let accepted = Ok(Termination::Accepted);
    let accepted =
        Event::Terminated { cell: cell.clone(), outcome: accepted, console: String::new() };
    effects.extend(engine.handle(accepted, at(seconds)));
    effects.extend(shown(engine, AWAY, seconds + 100, &[terminated]));
    effects
}

/// Verifies A41.
#[test]
fn removed_provider_launches_nothing_and_is_released_with_its_last_cell() {
    let (mut engine, cell) = with_bound();
    let effects = engine.set_providers(vec![node()], at(2));
    assert_eq!(released(&effects), [""; 0]);
    assert_eq!(states(&engine), [state(NODE, "configured", 0), state(AWAY, "draining", 1)]);
    // The cheaper offering is not launched, and alone it is refused.
    assert_eq!(launch(&mut engine, offered("both", &[9], &[2]), 3).1, NODE);
    let (_, effects) = engine.order(offered("away", &[], &[2]), at(4));
    let removed = "provider \"away\" was removed from the configuration, and launches no further \
                   cell; allowed: one of providers";
    assert_eq!((launches(&effects), errors(&effects)), (vec![], vec![removed.to_owned()]));
    // Its lists are evidence, and the cell ends as usual.
    let running = launched_as("i-1", &cell);
    for seconds in (10..=3000).step_by(10) {
        assert_eq!(
            released(&shown(&mut engine, AWAY, seconds, std::slice::from_ref(&running))),
            [""; 0]
        );
    }
    assert!(matches!(engine.cells[&cell].state, State::Bound { .. }));
    let effects = end(&mut engine, &cell, 3001);
    assert!(!engine.contains(&cell));
    assert_eq!(released(&effects), [AWAY]);
    assert_eq!(states(&engine), [state(NODE, "configured", 1)]);
    let (_, effects) = engine.order(offered("late", &[], &[2]), at(3200));
    assert_eq!(errors(&effects), [removed]);
}

/// Verifies A41.
#[test]
fn removed_provider_without_cells_is_released_once_its_strays_have_ended() {
    let mut engine = with(node());
    let stray = launched_as("stray", &CellId::mint().unwrap());
    shown(&mut engine, AWAY, 10, std::slice::from_ref(&stray));
    assert_eq!(released(&engine.set_providers(vec![node()], at(11))), [""; 0]);
    let effects = shown(&mut engine, AWAY, 100, std::slice::from_ref(&stray));
    assert!(ends_strays(&effects) && released(&effects).is_empty(), "{effects:?}");
    let ended = Instance { state: InstanceState::Terminated, ..stray };
    assert_eq!(released(&shown(&mut engine, AWAY, 200, &[ended])), [AWAY]);
    assert_eq!(released(&engine.set_providers(Vec::new(), at(201))), [NODE]);
}

/// Verifies A41.
#[test]
fn launch_that_has_begun_goes_on_and_warm_cells_of_a_removed_provider_end() {
    let mut engine = with(node());
    let mut away = pool("away", 1);
    away.provider = AWAY;
    let idle = launches(&engine.set_pools(vec![away], at(1))).remove(0);
    warm(&mut engine, &idle, 2);
    let (begun, _) = launch(&mut engine, offered("pod", &[], &[1]), 3);
    let effects = engine.set_providers(vec![node()], at(4));
    assert_eq!(launches(&effects), []);
    assert!(engine.is_ending(&idle) && !engine.is_ending(&begun));
    // No other cell fills the pool, whatever time passes.
    for seconds in (10..=4000).step_by(10) {
        assert_eq!(launches(&engine.handle(Event::Tick, at(seconds))), []);
    }
}

/// Verifies A41.
#[test]
fn added_provider_launches_once_its_instances_are_listed() {
    let seams = Box::new(Counting::default());
    let mut engine = Engine::new(config(), vec![node()], seams);
    shown(&mut engine, NODE, 0, &[]);
    engine.set_providers(vec![away(), node()], at(1));
    assert_eq!(states(&engine), [state(AWAY, "configured", 0), state(NODE, "configured", 0)]);
    assert_eq!(launch(&mut engine, offered("first", &[9], &[2]), 2).1, NODE);
    let (_, effects) = engine.order(offered("alone", &[], &[2]), at(3));
    let not_listed = "no cell is launched by provider \"away\" until its instances are listed";
    assert_eq!(errors(&effects), [not_listed]);
    let mut pool = pool("away", 1);
    pool.provider = AWAY;
    assert_eq!(launches(&engine.set_pools(vec![pool], at(4))), []);
    let effects = shown(&mut engine, AWAY, 5, &[]);
    assert_eq!(launched_by(&engine, &effects).len(), 1, "the pool is filled");
    assert_eq!(launch(&mut engine, offered("second", &[9], &[2]), 6).1, AWAY);
    // A reload may bound the cells on the node.
    let machine = Some(NodeShare { milli_cpus: 4000, memory_mib: 1000 });
    assert_eq!(engine.free_on_node(), None);
    engine.set_providers(vec![away(), ProviderSetup { machine, ..node() }], at(7));
    assert_eq!(engine.free_on_node().map(|(free, _)| free), machine);
}

/// Verifies A41.
#[test]
fn provider_added_again_while_it_drains_goes_on_at_once() {
    let (mut engine, cell) = with_bound();
    for seconds in 2..22 {
        engine.set_providers(vec![node()], at(seconds));
        let effects = engine.set_providers(vec![node(), away()], at(seconds));
        assert_eq!(released(&effects), [""; 0]);
    }
    assert_eq!(states(&engine), [state(NODE, "configured", 0), state(AWAY, "configured", 1)]);
    assert_eq!(launch(&mut engine, offered("pod 2", &[], &[2]), 30).1, AWAY);
    assert!(matches!(engine.cells[&cell].state, State::Bound { .. }));
}

/// Verifies A34, A41.
#[test]
fn cell_of_an_absent_provider_goes_on_once_the_provider_is_added() {
    let (engine, cell) = with_bound();
    let record = engine.cells[&cell].stored();
    let journal = Journal {
        sandboxes: vec![sandbox_of(&record)],
        cells: vec![(record.id.clone(), record.clone())],
        ..Journal::default()
    };
    let seams = Box::new(Counting(1000));
    let (mut engine, ..) = Engine::recover(config(), vec![node()], seams, journal, at(2));
    engine.start(at(2));
    assert_eq!(states(&engine), [state(NODE, "configured", 0), state(AWAY, "not configured", 1)]);
    engine.set_providers(vec![node(), away()], at(3));
    assert_eq!(states(&engine), [state(NODE, "configured", 0), state(AWAY, "configured", 1)]);
    assert_eq!((engine.other_places().len(), engine.provider_of(&cell)), (0, Some(AWAY)));
    assert_eq!(engine.cells[&cell].stored(), record);
    end(&mut engine, &cell, 1000);
    assert!(!engine.contains(&cell));
}
