//! Costs and timelines of cells.

use crate::engine::{cell::known, order::starts::Kind};

use super::*;
use crate::placement::{CatalogueFile, Needs, Rules};

/// Takes a step of a start, in seconds.
fn reached(engine: &mut Engine, cell: &CellId, step: Step, seconds: u64) -> Effects {
    engine.handle(Event::Reached(cell.clone(), step), at(seconds))
}

fn cost(engine: &Engine, cell: &CellId, seconds: u64) -> (u64, u64) {
    let account = engine.account(cell, at(seconds)).unwrap();
    (account.cost.micros(), account.namespace.cost.micros())
}

/// Returns the changes of each transaction among effects.
fn commits(effects: &Effects) -> Vec<&Vec<Change>> {
    let commits = effects.iter().filter_map(|(_, effect)| match effect {
        Effect::Commit { changes, .. } => Some(changes),
        _ => None,
    });
    commits.collect()
}

/// Verifies A16.
#[test]
fn cost_counts_from_the_launch_to_the_proven_end() {
    let mut engine = engine(capabilities::LOCAL);
    let cell = bound(&mut engine, "pod", "i-1");
    let account = engine.account(&cell, at(11)).unwrap();
    assert_eq!(account.offering, Some(candidate("a")));
    assert_eq!((account.instance.unwrap().0.as_str(), account.namespace.cells), ("i-1", 1));
    // The price is a thousandth of a dollar a second.
    assert_eq!(cost(&engine, &cell, 11), (10_000, 10_000));
    engine.handle(Event::Terminate { cell: cell.clone(), reason: "".into() }, at(20));
    assert_eq!(cost(&engine, &cell, 31), (30_000, 30_000));
    let ended = Event::Terminated {
        cell: cell.clone(),
        outcome: Ok(Termination::Confirmed),
        console: String::new(),
    };
    let effects = engine.handle(ended, at(41));
    let record = store::NamespaceCost {
        micros: 40_000,
        date: "2001-09-09".to_owned(),
        day_micros: 40_000,
        month_micros: 40_000,
    };
    let [changes] = commits(&effects)[..] else { panic!("{effects:?}") };
    assert!(changes.contains(&Change::Cost("default".into(), record)), "{changes:?}");
    assert!(changes.iter().any(|change| matches!(change, Change::Cell(..))), "{changes:?}");
    let next = bound(&mut engine, "next", "i-2");
    assert_eq!(cost(&engine, &next, 2), (1_000, 41_000));
}

/// Verifies A16.
#[test]
fn cost_survives_a_restart() {
    let mut first = engine(capabilities::LOCAL);
    let cell = bound(&mut first, "pod", "i-1");
    let record = first.cells[&cell].stored();
    assert_eq!(record.offering.as_ref().map(|offering| offering.price_micros), Some(3_600_000));
    let sandbox = sandbox_of(&record);
    let journal = Journal {
        cells: vec![(cell.to_string(), record)],
        sandboxes: vec![sandbox],
        costs: vec![("default".into(), store::NamespaceCost { micros: 7, ..Default::default() })],
        ..Journal::default()
    };
    let seams = Box::new(Counting::default());
    let (second, ..) =
        Engine::recover(config(), only(capabilities::LOCAL), seams, journal, at(100));
    assert_eq!(cost(&second, &cell, 101), (100_000, 100_007));
    assert_eq!(second.account(&cell, at(101)).unwrap().timeline, first.cells[&cell].timeline);
}

/// Returns the unrequested offerings in the notices of effects.
fn not_requested(effects: &Effects) -> Vec<&Candidate> {
    let noticed = effects.iter().filter_map(|(_, effect)| match effect {
        Effect::Log(Notice::NotRequested(candidate)) => Some(candidate),
        _ => None,
    });
    noticed.collect()
}

/// Verifies A40.
#[test]
fn unrequested_offering_without_a_price_is_estimated_at_the_dearest_price() {
    let mut engine = engine(capabilities::CLOUD);
    let (cell, _) = launched(&mut engine, "pod", at(1));
    let other = Instance { offering: offering("elsewhere"), ..launched_as("i", &cell) };
    let effects = engine.handle(Event::Launched(cell.clone(), Ok(other)), at(1));
    let expected =
        Candidate { offering: offering("elsewhere"), price: PRICE, accuracy: Accuracy::Estimate };
    assert_eq!(not_requested(&effects), [&expected]);
    assert_eq!(engine.account(&cell, at(1)).unwrap().offering, Some(expected));
}

/// Verifies A40.
#[test]
fn dearer_unrequested_offering_is_billed_and_counts_for_limits() {
    let dollars = |dollars: u64| Price::from_micros(dollars * 1_000_000);
    let offering =
        Offering { instance_type: "huge".into(), zone: "".into(), market: Market::OnDemand };
    let dear = Candidate { offering, price: dollars(50), accuracy: Accuracy::Exact };
    let file = "instance_type,vcpus,memory_mib,architectures,on_demand_usd_per_hour\n\
                huge,64,4096,x86_64,50\n";
    let catalogue = CatalogueFile::parse(file.as_bytes()).unwrap().catalogue;
    let choice = Choice {
        catalogue: Arc::new(catalogue),
        needs: Arc::new(Needs::default()),
        rules: Arc::new(Rules::default()),
    };
    for (price, namespace_price) in [(Some(dollars(10)), None), (None, Some(dollars(10)))] {
        let mut engine = engine(capabilities::CLOUD);
        engine.set_limits(Limits { price, namespace_price, ..Limits::default() }, at(1));
        let (_, effects) = engine.order(spec("pod").choosing(choice.clone()), at(1));
        let cell = pools::launches(&effects).remove(0);
        let lie = Instance { offering: dear.offering.clone(), ..launched_as("i", &cell) };
        let effects = engine.handle(Event::Launched(cell.clone(), Ok(lie.clone())), at(1));
        assert_eq!(not_requested(&effects), [&dear]);
        // The cell exceeds the limit, further launches do not, and the cell is billed at its price.
        let (_, effects) = engine.order(spec("next"), at(2));
        let errors = pools::errors(&effects);
        let held = format!("held by 1 cell: $50.0000 an hour (the most expensive: {cell}");
        assert!(errors.len() == 1 && errors[0].contains(&held), "{errors:?}");
        assert_eq!(cost(&engine, &cell, 3601), (50_000_000, 50_000_000));
        let record = engine.cells[&cell].stored().offering.unwrap();
        assert_eq!((record.price_micros, &*record.instance_type), (50_000_000, "huge"));
    }
}

/// Verifies A17.
#[test]
fn timeline_has_each_step_of_a_start_once() {
    let mut engine = engine(capabilities::LOCAL);
    let cell = bound(&mut engine, "pod", "i-1");
    reached(&mut engine, &cell, Step::ImageReady, 3);
    reached(&mut engine, &cell, Step::ImageReady, 4);
    let effects = reached(&mut engine, &cell, Step::FirstContainer, 5);
    let steps = [
        ("launched", 0),
        ("booted", 0),
        ("enrolled", 0),
        ("bound", 0),
        ("imageReady", 2000),
        ("firstContainer", 4000),
    ];
    let notices = effects.iter().filter_map(|(_, effect)| match effect {
        Effect::Log(Notice::Started(found)) => Some(found.as_slice()),
        _ => None,
    });
    assert_eq!(notices.collect::<Vec<_>>(), [steps]);
    assert_eq!(commits(&effects).len(), 1);
    for step in [Step::ImageReady, Step::FirstContainer] {
        assert!(reached(&mut engine, &cell, step, 9).is_empty());
    }
}

/// Verifies A17.
#[test]
fn boot_time_is_reported_by_the_agent_but_not_before_the_order() {
    let booted = |said: u64| {
        let mut engine = engine(capabilities::CLOUD);
        let (cell, _) = launched(&mut engine, "pod", at(10));
        let launched = Ok(launched_as("i", &cell));
        engine.handle(Event::Launched(cell.clone(), launched), at(12));
        engine.handle(Event::Running(cell.clone(), Duration::from_secs(said)), at(40));
        // A later connection, perhaps of a restarted agent, changes nothing.
        engine.handle(Event::Running(cell.clone(), Duration::from_secs(1)), at(50));
        let account = engine.account(&cell, at(60)).unwrap();
        let steps: Vec<_> = account.timeline.since(account.created_unix_nanos).collect();
        let counted = account.starts.1.steps().find(|(name, _)| *name == "booted").unwrap();
        (steps[1], counted.1.sum())
    };
    assert_eq!(booted(25), (("booted", 5_000), 5_000));
    assert_eq!(booted(0), (("booted", 30_000), 30_000));
    assert_eq!(booted(u64::MAX), (("booted", 0), 0));
}

#[test]
fn boot_report_of_a_bound_cell_is_ignored() {
    let (mut engine, cell) = recovered(stored(CellPhase::Bound), true, at(1));
    let before = engine.cells[&cell].timeline;
    engine.handle(Event::Running(cell.clone(), Duration::from_secs(1)), at(2));
    assert_eq!(engine.cells[&cell].timeline, before);
}

/// Verifies A24.
#[test]
fn launch_fills_the_histogram_of_each_step_and_of_the_cost() {
    let mut engine = engine(capabilities::LOCAL);
    let cell = bound(&mut engine, "pod", "i-1");
    reached(&mut engine, &cell, Step::ImageReady, 3);
    reached(&mut engine, &cell, Step::FirstContainer, 5);
    reached(&mut engine, &cell, Step::FirstContainer, 9);
    engine.handle(Event::Terminate { cell: cell.clone(), reason: "".into() }, at(20));
    let (kind, starts) = engine.account(&cell, at(20)).unwrap().starts;
    assert_eq!((kind.to_string().as_str(), starts.cost().count()), ("small (cold)", 0));
    let steps: Vec<_> = starts.steps().map(|(name, it)| (name, it.count(), it.sum())).collect();
    let expected = [
        ("launched", 1, 0),
        ("booted", 1, 0),
        ("enrolled", 1, 0),
        ("bound", 1, 0),
        ("imageReady", 1, 2000),
        ("firstContainer", 1, 4000),
    ];
    assert_eq!(steps, expected);
    let ended = Event::Terminated {
        cell: cell.clone(),
        outcome: Ok(Termination::Confirmed),
        console: String::new(),
    };
    engine.handle(ended, at(41));
    let cost = engine.starts_of(&kind).cost().clone();
    assert_eq!((cost.count(), cost.sum()), (1, 40_000));
}

/// Verifies A24.
#[test]
fn families_of_instance_types_are_bounded_in_the_histograms() {
    let mut engine = engine(capabilities::LOCAL);
    for number in 0..10_000 {
        let family = Some(number.to_string());
        engine.count_cost(Kind { family, is_warm: false }, kiyot_values::price::Cost::default());
    }
    let of = |family: &str| {
        let kind = Kind { family: known(family), is_warm: false };
        engine.starts_of(&kind).cost().count()
    };
    assert_eq!((of("0"), of("99"), of("100"), of("")), (1, 1, 0, 9_900));
}

#[test]
fn container_of_a_cell_without_a_timeline_adds_no_steps() {
    let record = store::Cell { timeline: None, ..stored(CellPhase::Bound) };
    let (mut engine, cell) = recovered(record, true, at(1));
    assert!(reached(&mut engine, &cell, Step::FirstContainer, 2).is_empty());
    assert_eq!(engine.cells[&cell].timeline, Timeline::default());
}
