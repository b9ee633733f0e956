//! The room for further pods.

use super::{
    pools::{launches, pool, taking, warm},
    *,
};

fn room(engine: &Engine, seconds: u64) -> Room {
    engine.room(&taking("any").offers, at(seconds))
}

fn refusal(engine: &Engine, seconds: u64) -> Option<String> {
    room(engine, seconds).refusal.map(|error| error_chain(&error))
}

/// Fails the launch of a pod.
fn refuse(engine: &mut Engine, pod: &str, error: ProviderError, now: Now) {
    let (cell, _) = launched(engine, pod, now);
    engine.handle(Event::Launched(cell, Err(error)), now);
}

/// Verifies K15.
#[test]
fn room_is_refused_if_launches_of_all_pods_are_refused() {
    let mut engine = engine(capabilities::CLOUD);
    assert_eq!((refusal(&engine, 1), room(&engine, 1).limits.max_cells), (None, 10));
    let of_request = ProviderError {
        is_of_request: true,
        ..ProviderError::without_cause(ErrorClass::Auth, "launch: not with this role")
    };
    refuse(&mut engine, "pod", of_request, at(1));
    assert_eq!(refusal(&engine, 2), None, "the request of a single pod refuses no other pod");
    let denied = ProviderError::without_cause(ErrorClass::Auth, "launch: no credentials");
    refuse(&mut engine, "other", denied, at(200));
    let reason = refusal(&engine, 201).unwrap();
    assert!(reason.contains("no credentials"), "{reason}");
    assert_eq!(refusal(&engine, 400), None, "launches are tried again");
    engine.set_cordoned(true, at(400));
    assert!(refusal(&engine, 400).unwrap().contains("uncordoned"));
    engine.set_cordoned(false, at(400));
    let none = engine.room(&[Offers::none(ONLY, CellError::Starting)], at(400));
    assert!(none.refusal.is_some());
}

/// Verifies K15.
#[test]
fn room_is_limited_only_by_the_price_limit_of_the_node() {
    let mut engine = engine(capabilities::CLOUD);
    let limits =
        Limits { price: Some(PRICE), namespace_price: Some(Price::FREE), ..Limits::default() };
    engine.set_limits(Limits { namespace_price: None, ..limits }, at(1));
    launched(&mut engine, "pod", at(1));
    engine.set_limits(limits, at(2));
    let reason = refusal(&engine, 2).unwrap();
    assert!(reason.starts_with("the cells of the node may cost $3.6000 an hour"), "{reason}");
    engine.set_limits(Limits { price: Some(PRICE + PRICE), ..limits }, at(3));
    assert_eq!(refusal(&engine, 3), None);
    // Pods wait at the bounds on cells and on boots, and the bound on cells is declared.
    engine.set_limits(Limits { max_cells: 1, boots: Some(1), ..Limits::default() }, at(4));
    assert_eq!((refusal(&engine, 4), room(&engine, 4).limits.max_cells), (None, 1));
}

/// Verifies K15.
#[test]
fn idle_cells_are_room_unless_launches_are_stopped() {
    let mut engine = engine(capabilities::CLOUD);
    let effects = engine.set_pools(vec![pool("small", 3)], at(1));
    for cell in &launches(&effects)[..2] {
        warm(&mut engine, cell, 2);
    }
    assert_eq!((room(&engine, 3).idle, refusal(&engine, 3)), (2, None));
    // Cells of pools give way to pods.
    engine.set_limits(Limits { price: Some(PRICE), ..Limits::default() }, at(4));
    assert_eq!(refusal(&engine, 4), None);
    engine.set_cordoned(true, at(5));
    assert_eq!(room(&engine, 5).idle, 0);
}
