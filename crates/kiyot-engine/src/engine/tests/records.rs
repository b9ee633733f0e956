//! Records that can't be written.

use std::collections::BTreeSet;

use crate::{
    StoreError,
    engine::tests::{
        pools::{launches, warm},
        *,
    },
};

/// Fails the first commit of a cell's state among effects of an event.
pub(super) fn fails(engine: &mut Engine, id: &CellId, effects: Effects, now: u64) -> Effects {
    let of_cell = effects.into_iter().filter(|(cell, _)| cell.as_ref() == Some(id));
    let mut of_cell = of_cell.map(|(_, effect)| effect);
    let changes = of_cell.find_map(|effect| match effect {
        Effect::Commit { changes, of: CommitOf::State } => Some(changes),
        _ => None,
    });
    let event = Event::CommitFailed {
        cell: id.clone(),
        of: CommitOf::State,
        changes: changes.unwrap(),
        error: Arc::new(StoreError::closed()),
        skipped: of_cell.collect(),
    };
    engine.handle(event, at(now))
}

fn stop(engine: &mut Engine, cell: &CellId, now: u64) {
    engine.handle(Event::Terminate { cell: cell.clone(), reason: "stopped".into() }, at(now));
}

fn terminates(effects: &Effects) -> bool {
    effects.iter().any(|(_, effect)| matches!(effect, Effect::Terminate { .. }))
}

/// Verifies X5.
#[test]
fn order_of_an_unrecorded_bound_cell_is_answered_with_the_error() {
    for capabilities in [capabilities::LOCAL, capabilities::CLOUD] {
        let mut engine = engine(capabilities);
        let (cell, _) = launched(&mut engine, "pod", at(1));
        warm(&mut engine, &cell, 2);
        let attached = Event::Attached(cell.clone(), Ok(Attached::default()));
        let effects = engine.handle(attached, at(3));
        let effects = fails(&mut engine, &cell, effects, 4);
        let error = outcome(&effects).1.unwrap();
        assert!(error.starts_with(&format!("the record of cell {cell}")), "{error}");
        assert!(terminates(&effects), "{effects:?}");
    }
}

/// Verifies X5.
#[test]
fn stopped_cell_with_an_unrecorded_launch_has_ended() {
    for capabilities in [capabilities::LOCAL, capabilities::CLOUD] {
        let mut engine = engine(capabilities);
        let (_, effects) = engine.order(spec("pod"), at(1));
        let cell = launches(&effects).remove(0);
        stop(&mut engine, &cell, 2);
        assert!(engine.contains(&cell));
        let effects = fails(&mut engine, &cell, effects, 3);
        assert!(!engine.contains(&cell), "{effects:?}");
        assert!(outcome(&effects).1.is_some(), "{effects:?}");
    }
}

/// Verifies X5.
#[test]
fn stopped_cell_with_an_unrecorded_attachment_is_terminated() {
    for capabilities in [capabilities::LOCAL, capabilities::CLOUD] {
        let mut engine = engine(capabilities);
        let (cell, _) = launched(&mut engine, "pod", at(1));
        engine.handle(Event::Launched(cell.clone(), Ok(launched_as("i", &cell))), at(2));
        let effects = engine.handle(Event::Connected(cell.clone()), at(3));
        stop(&mut engine, &cell, 4);
        assert!(terminates(&fails(&mut engine, &cell, effects, 5)));
    }
}

/// Verifies X5.
#[test]
fn attachment_that_follows_a_failed_record_ends_before_the_instance() {
    for capabilities in [capabilities::LOCAL, capabilities::CLOUD] {
        let mut engine = engine(capabilities);
        let (cell, _) = launched(&mut engine, "pod", at(1));
        let launched = Event::Launched(cell.clone(), Ok(launched_as("i", &cell)));
        let booting = engine.handle(launched, at(2));
        engine.handle(Event::Connected(cell.clone()), at(3));
        assert!(!terminates(&fails(&mut engine, &cell, booting, 4)));
        let attached = Event::Attached(cell.clone(), Ok(Attached::default()));
        assert!(terminates(&engine.handle(attached, at(5))));
    }
}

/// Verifies X5.
#[test]
fn last_changes_of_many_cells_are_retried_with_pauses_until_all_are_written() {
    const CELLS: usize = 100;
    let mut engine = engine(capabilities::CLOUD);
    let fail = |engine: &mut Engine, cell: &CellId, changes: &[Change], now: u64| {
        let failed = Event::CommitFailed {
            cell: cell.clone(),
            of: CommitOf::Information,
            changes: changes.to_vec(),
            error: Arc::new(StoreError::closed()),
            skipped: Vec::new(),
        };
        assert!(engine.handle(failed, at(now)).is_empty());
    };
    let mut unwritten: BTreeSet<CellId> = (0..CELLS).map(|_| CellId::mint().unwrap()).collect();
    for cell in &unwritten {
        fail(&mut engine, cell, &[Change::Cell(cell.clone(), None)], 1);
    }
    let mut commits = 0;
    for second in 2..600 {
        for (cell, effect) in engine.handle(Event::Tick, at(second)) {
            let (Some(cell), Effect::Commit { changes, .. }) = (cell, effect) else { continue };
            commits += 1;
            fail(&mut engine, &cell, &changes, second);
        }
    }
    assert!((100..=250).contains(&commits), "{commits}");
    for second in 600..700 {
        for (cell, _) in engine.handle(Event::Tick, at(second)) {
            assert!(unwritten.remove(&cell.unwrap()));
        }
    }
    assert_eq!(unwritten, BTreeSet::new());
}

/// Verifies P6.
#[test]
fn late_end_of_a_cell_does_not_remove_an_order_with_another_cell() {
    let mut engine = engine(capabilities::CLOUD);
    let (first, _) = launched(&mut engine, "pod", at(1));
    let error = ProviderError::no_capacity("none left", vec![offering("a")]);
    let effects = engine.handle(Event::Launched(first.clone(), Err(error)), at(2));
    assert_eq!(launches(&effects).len(), 1, "the order gets another cell");
    let ends_order =
        |changes: &[Change]| changes.iter().any(|change| matches!(change, Change::Order(_, None)));
    let end = effects.into_iter().find_map(|(_, effect)| match effect {
        Effect::Commit { changes, of } if ends_order(&changes) => Some((changes, of)),
        _ => None,
    });
    let (changes, of) = end.unwrap();
    let error = Arc::new(StoreError::closed());
    let skipped = Vec::new();
    engine.handle(Event::CommitFailed { cell: first.clone(), of, changes, error, skipped }, at(2));
    let later = engine.handle(Event::Tick, at(60));
    let written: Vec<_> = later
        .iter()
        .filter_map(|(cell, effect)| match effect {
            Effect::Commit { changes, .. } if cell.as_ref() == Some(&first) => Some(changes),
            _ => None,
        })
        .collect();
    assert!(written.len() == 1 && !ends_order(written[0]), "{later:?}");
}
