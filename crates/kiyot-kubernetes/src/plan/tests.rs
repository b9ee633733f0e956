//! Tests of the plan of writes.

use kiyot_proto::admin;

use super::*;
use crate::{
    object::{OwnerReference, render},
    pace::{MAX_WRITES_PER_SECOND, Pace},
    source::ShownCell,
};

const NOW: i64 = 1_795_661_275_000_000_000;

fn cell(number: usize, phase: admin::CellPhase, cost: u64) -> Cell {
    let cell = admin::Cell {
        id: format!("cell-{number:012}"),
        node: "worker-1".to_owned(),
        backend: "milpa".to_owned(),
        phase: phase.into(),
        offering: Some(admin::Offering::default()),
        cost_micros: cost,
        created_unix_nanos: NOW,
        ..admin::Cell::default()
    };
    let owner = OwnerReference::node("worker-1", "uid of the node".to_owned());
    render(&ShownCell { cell, ..ShownCell::default() }, &owner)
}

fn cells(number: usize, phase: admin::CellPhase, cost: u64) -> Vec<Cell> {
    (0..number).map(|number| cell(number, phase, cost)).collect()
}

/// Returns a bound cell with a label.
fn labelled(value: &str) -> Vec<Cell> {
    let mut cell = cell(0, admin::CellPhase::CellBound, 0);
    cell.metadata.labels.insert("label".to_owned(), value.to_owned());
    vec![cell]
}

/// Makes all due writes with successful responses. Returns their number.
fn write_all(plan: &mut Plan, now: Instant) -> usize {
    let mut writes = 0;
    while let Some(write) = plan.next(now) {
        writes += 1;
        let response = match &write {
            Write::Delete { .. } => None,
            Write::Apply(cell) | Write::ApplyStatus(cell) => {
                let mut response = (**cell).clone();
                response.metadata.uid = format!("uid of {}", cell.metadata.name);
                response.metadata.resource_version = format!("{writes}");
                Some(response)
            }
        };
        plan.written(write, response.as_ref(), now);
    }
    writes
}

/// Verifies K5.
#[test]
fn thousand_cells_are_written_at_the_pace_and_rest_when_nothing_changes() {
    let (mut now, mut plan) = (Instant::now(), Plan::default());
    let mut pace = Pace::per_second(MAX_WRITES_PER_SECOND);
    plan.want(cells(1000, admin::CellPhase::CellBooting, 0), now);
    let mut times = Vec::new();
    while let Some(write) = plan.next(now) {
        now = pace.next().map_or(now, |next| next.max(now));
        times.push(now);
        // Every cell changes all the time, and is still written once in each turn.
        if times.len() == 500 {
            plan.want(cells(1000, admin::CellPhase::CellBound, 0), now);
        }
        let response = match &write {
            Write::Apply(cell) | Write::ApplyStatus(cell) => (**cell).clone(),
            Write::Delete { .. } => panic!("{write:?}"),
        };
        plan.written(write, Some(&response), now);
        pace.wrote(now);
    }
    // Each cell has a write of its object and of its status. Cells written before the change have a
    // second status.
    assert!((2000..=2250).contains(&times.len()), "{}", times.len());
    assert!(times.windows(6).all(|window| window[5] - window[0] > Duration::from_secs(1)));
    // The growing cost is written only once an hour.
    let later = now + Duration::from_secs(1800);
    plan.want(cells(1000, admin::CellPhase::CellBound, 5000), later);
    assert_eq!(plan.next(later), None);
    let hour = now + Duration::from_secs(3601);
    plan.want(cells(1000, admin::CellPhase::CellBound, 9000), hour);
    assert_eq!(write_all(&mut plan, hour), 1000);
}

/// Verifies K2.
#[test]
fn objects_without_a_cell_are_deleted_by_their_uid() {
    let (now, mut plan) = (Instant::now(), Plan::default());
    let mut stale = cell(7, admin::CellPhase::CellBound, 0);
    stale.metadata.uid = "uid of an earlier run".to_owned();
    plan.want(cells(1, admin::CellPhase::CellBound, 0), now);
    plan.listed(vec![stale], now);
    let mut seen = Vec::new();
    while let Some(write) = plan.next(now) {
        if let Write::Delete { name, uid } = &write {
            seen.push((name.clone(), uid.clone()));
        }
        let response = match &write {
            Write::Apply(cell) | Write::ApplyStatus(cell) => Some((**cell).clone()),
            Write::Delete { .. } => None,
        };
        plan.written(write, response.as_ref(), now);
    }
    assert_eq!(
        seen,
        [("cell-000000000007.worker-1".to_owned(), "uid of an earlier run".to_owned())]
    );
    // A cell that ended before its object was made needs no write.
    let mut plan = Plan::default();
    plan.want(cells(3, admin::CellPhase::CellBooting, 0), now);
    plan.want(Vec::new(), now);
    assert_eq!(plan.next(now), None);
    assert_eq!(plan.waiting(), 0);
}

/// Verifies K6.
#[test]
fn refused_object_is_not_written_again_until_it_changes() {
    let (now, mut plan) = (Instant::now(), Plan::default());
    plan.want(cells(1, admin::CellPhase::CellBooting, 0), now);
    let write = plan.next(now).unwrap();
    plan.refused(write);
    plan.want(cells(1, admin::CellPhase::CellBooting, 1), now);
    plan.listed(Vec::new(), now);
    assert_eq!(plan.next(now), None);
    plan.want(cells(1, admin::CellPhase::CellBound, 1), now);
    let write = plan.next(now).unwrap();
    assert!(matches!(write, Write::Apply(_)));
    plan.refused(write);
    plan.want(labelled("another"), now);
    assert!(matches!(plan.next(now), Some(Write::Apply(_))));
}

/// Verifies K2.
#[test]
fn status_of_an_applied_object_is_written_again_under_another_uid() {
    let (now, mut plan) = (Instant::now(), Plan::default());
    plan.want(labelled("first"), now);
    assert_eq!(write_all(&mut plan, now), 2);
    plan.want(labelled("second"), now);
    assert_eq!(write_all(&mut plan, now), 1, "its status stays");
    // Another client deleted the object, and this write made it again.
    plan.want(labelled("third"), now);
    let write = plan.next(now).unwrap();
    let mut response = labelled("third").remove(0);
    response.metadata.uid = "another uid".to_owned();
    plan.written(write, Some(&response), now);
    assert!(matches!(plan.next(now), Some(Write::ApplyStatus(_))));
}

/// Verifies K5.
#[test]
fn fields_that_an_older_schema_drops_are_not_written_again() {
    let (now, mut plan) = (Instant::now(), Plan::default());
    plan.want(cells(1, admin::CellPhase::CellBound, 0), now);
    assert_eq!(write_all(&mut plan, now), 2);
    let mut listed = cell(0, admin::CellPhase::CellBound, 0);
    listed.status.conditions.clear();
    listed.metadata.uid = format!("uid of {}", listed.metadata.name);
    listed.metadata.resource_version = "2".to_owned();
    plan.listed(vec![listed.clone()], now);
    assert_eq!(plan.next(now), None);
    // Another version means that another client wrote.
    listed.metadata.resource_version = "3".to_owned();
    plan.listed(vec![listed], now);
    assert!(matches!(plan.next(now), Some(Write::ApplyStatus(_))));
}

/// Verifies K5.
#[test]
fn object_that_differs_waits_once_in_the_queue() {
    let (now, mut plan) = (Instant::now(), Plan::default());
    for _ in 0..2 {
        plan.want(cells(3, admin::CellPhase::CellBound, 0), now);
        assert_eq!(plan.waiting(), 3);
    }
    write_all(&mut plan, now);
    plan.want(cells(3, admin::CellPhase::CellBound, 0), now);
    assert_eq!(plan.waiting(), 0);
}

#[test]
fn failing_object_does_not_hold_up_others() {
    let (now, mut plan) = (Instant::now(), Plan::default());
    plan.want(cells(2, admin::CellPhase::CellBound, 0), now);
    let first = plan.next(now).unwrap();
    plan.postpone();
    let second = plan.next(now).unwrap();
    assert_ne!(first.name(), second.name());
    assert_eq!(plan.waiting(), 2);
}

/// Verifies K2.
#[test]
fn absent_object_is_made_again_with_its_status() {
    let (now, mut plan) = (Instant::now(), Plan::default());
    plan.want(cells(1, admin::CellPhase::CellBooting, 0), now);
    assert_eq!(write_all(&mut plan, now), 2);
    plan.want(cells(1, admin::CellPhase::CellBound, 0), now);
    let status = plan.next(now).unwrap();
    assert!(!plan.absent(&status));
    assert_eq!(write_all(&mut plan, now), 2);
    // Deleted again later.
    plan.want(cells(1, admin::CellPhase::CellBooting, 0), now);
    let status = plan.next(now).unwrap();
    assert!(!plan.absent(&status));
}

/// Verifies K6.
#[test]
fn denied_object_waits_alone_for_pauses_that_grow() {
    let (mut now, mut plan) = (Instant::now(), Plan::default());
    let (first, failure) = (Duration::from_secs(1), Failure::Denied(String::new()));
    let wanted = || cells(2, admin::CellPhase::CellBound, 0);
    plan.want(wanted(), now);
    let denied = plan.next(now).unwrap();
    plan.denied(&denied, &failure, first, now, 0.0);
    assert_eq!(write_all(&mut plan, now), 2, "the object and the status of the other cell");
    let mut pauses = Vec::new();
    for _ in 0..8 {
        let begin = now;
        while plan.next(now).is_none() {
            now += first;
            plan.want(wanted(), now);
        }
        pauses.push((now - begin).as_secs());
        let again = plan.next(now).unwrap();
        assert_eq!(again.name(), denied.name());
        plan.denied(&again, &failure, first, now, 0.0);
    }
    assert_eq!(pauses, [30, 30, 30, 30, 30, 32, 64, 120]);
    assert!(plan.has_denied());
    plan.want(Vec::new(), now);
    assert!(!plan.has_denied(), "its cell has ended");
    assert!(matches!(plan.next(now), Some(Write::Delete { .. })));
}

/// Verifies K6.
#[test]
fn denied_objects_beyond_the_bound_do_not_wait_alone() {
    let (now, mut plan) = (Instant::now(), Plan::default());
    let (first, failure) = (Duration::from_secs(1), Failure::Denied(String::new()));
    let wanted = || cells(MAX_DENIED + 1, admin::CellPhase::CellBound, 0);
    plan.want(wanted(), now);
    for _ in 0..MAX_DENIED {
        let write = plan.next(now).unwrap();
        assert!(plan.may_wait(write.name()));
        plan.denied(&write, &failure, first, now, 0.0);
        assert!(plan.may_wait(write.name()), "denied again");
    }
    let last = plan.next(now).unwrap();
    assert!(!plan.may_wait(last.name()));
    let later = now + first * 30;
    plan.want(wanted(), later);
    assert_eq!(write_all(&mut plan, later), 2 * (MAX_DENIED + 1));
    assert!(!plan.has_denied());
}

/// Verifies K6.
#[test]
fn denied_status_does_not_hold_up_the_end_of_its_object() {
    let (now, mut plan) = (Instant::now(), Plan::default());
    plan.want(cells(1, admin::CellPhase::CellBooting, 0), now);
    assert_eq!(write_all(&mut plan, now), 2);
    plan.want(cells(1, admin::CellPhase::CellBound, 0), now);
    let status = plan.next(now).unwrap();
    let failure = Failure::Denied(String::new());
    plan.denied(&status, &failure, Duration::from_secs(1), now, 0.0);
    assert_eq!(plan.next(now), None);
    plan.want(Vec::new(), now);
    assert!(matches!(plan.next(now), Some(Write::Delete { .. })));
}

/// Verifies K6.
#[test]
fn operation_is_needed_while_an_object_waits_for_it() {
    let (now, mut plan) = (Instant::now(), Plan::default());
    let needed = |plan: &Plan| {
        ["delete cells", "patch cells", "patch cells/status"].map(|own| plan.needs(own, now))
    };
    plan.listed(cells(1, admin::CellPhase::CellBound, 0), now);
    assert_eq!(needed(&plan), [true, false, false]);
    // Another client deleted the object, and a cell is launched.
    plan.listed(Vec::new(), now);
    plan.want(cells(1, admin::CellPhase::CellBooting, 0), now);
    assert_eq!(needed(&plan), [false, true, true]);
    let write = plan.next(now).unwrap();
    plan.written(write, Some(&cell(0, admin::CellPhase::CellBooting, 0)), now);
    assert_eq!(needed(&plan), [false, false, true]);
    assert_eq!(write_all(&mut plan, now), 1);
    assert_eq!(needed(&plan), [false; 3]);
}
