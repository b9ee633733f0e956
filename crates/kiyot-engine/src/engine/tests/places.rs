//! Changes of the provider, the region or the endpoint while cells run, on a simulated clock.

use super::*;
use crate::provider::THIS_NODE;

/// The place in which the cells are launched.
const HOME: &str = "region us-east-1";
/// The place in which the provider looks later.
const OTHER: &str = "region eu-west-1";
/// The time for which the provider looks there: longer than the age from which "not found" counts.
const HOUR: u64 = 3600;
/// The time between two listings.
const PERIOD: usize = 30;

/// The state of a cell's agent while the provider looks in another place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Agent {
    Connected,
    Silent,
}

fn engine_in(place: &str) -> Engine {
    let seams = Box::new(Counting::default());
    let mut engine =
        Engine::new(config(), vec![provider_in(capabilities::EC2, Some(place))], seams);
    listed(&mut engine, 0, &[]);
    engine
}

/// Returns the engine of a daemon that starts with a cell's record, with or without a sandbox.
fn restarted(place: &str, record: &store::Cell, has_sandbox: bool, now: Now) -> Engine {
    restarted_with(capabilities::EC2, place, record, has_sandbox, now)
}

/// Returns the engine of a daemon that starts with another provider, after a reboot of the node.
fn rebooted_with(capabilities: Capabilities, record: &store::Cell, now: Now) -> Engine {
    let record = store::Cell { boot_id: "earlier".to_owned(), ..record.clone() };
    let place = if capabilities.remote { OTHER } else { THIS_NODE };
    restarted_with(capabilities, place, &record, true, now)
}

fn restarted_with(
    capabilities: Capabilities,
    place: &str,
    record: &store::Cell,
    has_sandbox: bool,
    now: Now,
) -> Engine {
    let sandbox = sandbox_of(record);
    let journal = Journal {
        cells: vec![(record.id.clone(), record.clone())],
        sandboxes: has_sandbox.then_some(sandbox).into_iter().collect(),
        ..Journal::default()
    };
    // The random ids must differ from the first daemon's.
    let seams = Box::new(Counting(1000));
    let providers = vec![provider_in(capabilities, Some(place))];
    let (engine, _, _) = Engine::recover(config(), providers, seams, journal, now);
    engine
}

/// The calls and the losses while the provider found no instance.
#[derive(Debug, Default)]
struct Seen {
    launches: usize,
    terminations: usize,
    lost: usize,
}

/// Passes time with a provider that finds no instance, by list or by id.
fn pass_without_instances(engine: &mut Engine, begin: u64, effects: Effects) -> Seen {
    let mut seen = Seen::default();
    carry_out(engine, effects, at(begin), &mut seen);
    for seconds in (begin..begin + HOUR).step_by(PERIOD) {
        let effects = listed(engine, seconds, &[]);
        carry_out(engine, effects, at(seconds), &mut seen);
        let next = Duration::from_secs(seconds) + Duration::from_secs(30);
        while let Some(boot) = engine.next_timer().filter(|timer| *timer < next) {
            let now = Now { boot, unix: NOON + boot };
            let effects = engine.handle(Event::Tick, now);
            carry_out(engine, effects, now, &mut seen);
        }
    }
    seen
}

fn carry_out(engine: &mut Engine, effects: Effects, now: Now, seen: &mut Seen) {
    let not_found = || ProviderError::without_cause(ErrorClass::NotFound, "not found");
    for (cell, effect) in effects {
        let event = match (effect, cell) {
            (Effect::Log(Notice::Lost { .. }), _) => {
                seen.lost += 1;
                continue;
            }
            (Effect::Launch(_), Some(_)) => {
                seen.launches += 1;
                continue;
            }
            (Effect::Describe(_), Some(cell)) => Event::Described(cell, Err(not_found())),
            (Effect::Terminate { .. }, Some(cell)) => {
                seen.terminations += 1;
                let (outcome, console) = (Err(not_found()), String::new());
                Event::Terminated { cell, outcome, console }
            }
            (Effect::ShutDown, Some(cell)) => Event::ShutDown(cell, false),
            (Effect::Detach(_), Some(cell)) => Event::Detached(cell, Ok(())),
            _ => continue,
        };
        let effects = engine.handle(event, now);
        carry_out(engine, effects, now, seen);
    }
}

/// Verifies V80.
#[test]
fn cell_of_another_place_is_neither_lost_nor_ended_within_an_hour() {
    for agent in [Agent::Connected, Agent::Silent] {
        let mut first = engine_in(HOME);
        let cell = bound(&mut first, "pod", "i");
        let record = first.cells[&cell].stored();
        assert_eq!(record.place, HOME);
        let mut engine = restarted(OTHER, &record, true, at(10));
        let expected = BTreeMap::from([(HOME.into(), vec![cell.clone()])]);
        assert_eq!(engine.other_places(), expected, "{agent:?}");
        let effects = engine.start(at(10));
        if agent == Agent::Connected {
            engine.handle(Event::Connected(cell.clone()), at(10));
        }
        let seen = pass_without_instances(&mut engine, 10, effects);
        assert_eq!((seen.lost, seen.terminations), (0, 0), "{agent:?}");
        assert!(matches!(engine.cells[&cell].state, State::Bound { .. }), "{agent:?}");

        // The earlier configuration is back: absence is evidence again.
        let now = 10 + HOUR;
        let record = engine.cells[&cell].stored();
        let mut engine = restarted(HOME, &record, true, at(now));
        assert_eq!(engine.other_places(), BTreeMap::new());
        let effects = engine.start(at(now));
        let seen = pass_without_instances(&mut engine, now, effects);
        assert_eq!((seen.lost, engine.contains(&cell)), (1, false), "{agent:?}");
    }
}

/// Verifies V80.
#[test]
fn pod_whose_cell_ends_in_another_place_is_not_released_by_not_found() {
    let mut first = engine_in(HOME);
    let cell = bound(&mut first, "pod", "i");
    let mut engine = restarted(OTHER, &first.cells[&cell].stored(), true, at(10));
    engine.start(at(10));
    let stop = Event::Terminate { cell: cell.clone(), reason: "stopped".into() };
    let effects = engine.handle(stop, at(10));
    let seen = pass_without_instances(&mut engine, 10, effects);
    // The calls go on, because the place may be the same under another name.
    assert!((1..=2 * 60).contains(&seen.terminations), "{seen:?}");
    assert_eq!(engine.blocking_cell("pod"), Some(&cell));
    let order = with(spec("pod"), |wanted| wanted.key.attempt = 1);
    let (_, effects) = engine.order(OrderSpec { timeout: Some(TTL), ..order }, at(10 + HOUR));
    assert_eq!(outcome(&effects).0, [], "the pod has another cell");

    let now = 10 + 2 * HOUR;
    let mut engine = restarted(HOME, &engine.cells[&cell].stored(), true, at(now));
    let effects = engine.start(at(now));
    pass_without_instances(&mut engine, now, effects);
    assert!(!engine.contains(&cell));
}

/// Verifies V80.
#[test]
fn cell_of_another_provider_is_neither_lost_nor_ended_by_a_reboot() {
    for (made_in, capabilities) in [(HOME, capabilities::LOCAL), (THIS_NODE, capabilities::EC2)] {
        let mut first = engine_in(made_in);
        let cell = bound(&mut first, "pod", "i");
        let mut engine = rebooted_with(capabilities, &first.cells[&cell].stored(), at(10));
        let expected = BTreeMap::from([(made_in.into(), vec![cell.clone()])]);
        assert_eq!(engine.other_places(), expected);
        let effects = engine.start(at(10));
        let seen = pass_without_instances(&mut engine, 10, effects);
        assert_eq!((seen.lost, seen.terminations), (0, 0), "{made_in}");
        assert!(matches!(engine.cells[&cell].state, State::Bound { .. }), "{made_in}");
    }
}

/// Verifies V80.
#[test]
fn end_confirmed_by_a_provider_of_the_node_does_not_release_pods_of_other_providers() {
    for agent in [Agent::Connected, Agent::Silent] {
        let mut first = engine_in(HOME);
        let cell = bound(&mut first, "pod", "i");
        let mut engine = rebooted_with(capabilities::LOCAL, &first.cells[&cell].stored(), at(10));
        engine.start(at(10));
        let stop = Event::Terminate { cell: cell.clone(), reason: "stopped".into() };
        let mut effects = engine.handle(stop, at(10));
        // The agent is asked first, as the provider can't end the pod.
        assert!(
            effects.iter().any(|(_, effect)| matches!(effect, Effect::ShutDown)),
            "{effects:?}"
        );
        let has_ended = agent == Agent::Connected;
        let mut answers = Vec::new();
        for seconds in 11..11 + HOUR {
            let mut next = Effects::new();
            for (_, effect) in std::mem::take(&mut effects) {
                let event = match effect {
                    Effect::ShutDown => Event::ShutDown(cell.clone(), has_ended),
                    Effect::Detach(_) => Event::Detached(cell.clone(), Ok(())),
                    Effect::Terminate { .. } => {
                        let (outcome, console) = (Ok(Termination::Confirmed), String::new());
                        Event::Terminated { cell: cell.clone(), outcome, console }
                    }
                    Effect::AnswerEnd(outcome) => {
                        answers.push(outcome.map_err(|error| error.text()));
                        continue;
                    }
                    _ => continue,
                };
                next.extend(engine.handle(event, at(seconds)));
            }
            next.extend(engine.handle(Event::Tick, at(seconds)));
            effects = next;
        }
        assert!(engine.contains(&cell), "{agent:?}");
        let blocks = engine.blocking_cell("pod").is_some();
        assert_eq!(blocks, agent == Agent::Silent, "{agent:?}");
        match agent {
            Agent::Connected => assert_eq!(answers[0], Ok(())),
            Agent::Silent => {
                let error = answers[0].as_ref().unwrap_err();
                assert!(error.contains(HOME) && error.contains(THIS_NODE), "{error}");
            }
        }
    }
}

/// Verifies V80.
#[test]
fn launch_in_another_place_is_not_repeated_and_its_instance_ends_there() {
    let mut first = engine_in(HOME);
    let (cell, launch) = launched(&mut first, "pod", at(1));
    let mut engine = restarted(OTHER, &first.cells[&cell].stored(), false, at(10));
    let effects = engine.start(at(10));
    let seen = pass_without_instances(&mut engine, 10, effects);
    assert_eq!((seen.launches, engine.contains(&cell)), (0, true));
    // No container of the pod has run in the cell.
    let (_, effects) = engine.order(spec("pod"), at(10 + HOUR));
    assert_eq!(outcome(&effects).0.len(), 1);

    let now = 10 + 2 * HOUR;
    let mut engine = restarted(HOME, &engine.cells[&cell].stored(), false, at(now));
    engine.start(at(now));
    let made = Instance { token: Some(launch.token.clone()), ..launched_as("i", &cell) };
    let effects = listed(&mut engine, now + 1, &[made]);
    let ends = |effect: &Effect| matches!(effect, Effect::Terminate { instance: Some(_), .. });
    assert!(effects.iter().any(|(_, effect)| ends(effect)), "{effects:?}");
}

/// Verifies V80.
#[test]
fn listed_instance_is_in_the_place_of_the_provider() {
    let mut first = engine_in(HOME);
    let cell = bound(&mut first, "pod", "i");
    let record = first.cells[&cell].stored();
    // A record from before places were recorded has an empty place.
    for place in [HOME, ""] {
        let record = store::Cell { place: place.to_owned(), ..record.clone() };
        let mut engine = restarted(OTHER, &record, true, at(10));
        assert_eq!(engine.other_places().len(), usize::from(place == HOME));
        engine.start(at(10));
        let effects = listed(&mut engine, 20, &[launched_as("i", &cell)]);
        let records = effects.iter().filter_map(|(_, effect)| match effect {
            Effect::Commit { changes, .. } => Some(changes),
            _ => None,
        });
        let places: Vec<_> = records
            .flatten()
            .filter_map(|change| match change {
                Change::Cell(_, Some(record)) => Some(record.place.as_str()),
                _ => None,
            })
            .collect();
        assert_eq!(places, [OTHER], "from {place:?}");
        assert_eq!(engine.other_places(), BTreeMap::new());
    }
}
