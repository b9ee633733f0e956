//! Records of cells that resume in their phase.

use crate::engine::{launch, tests::*};

/// A cell of a pod: its id, its record with all fields, and its order.
struct Recorded {
    cell: CellId,
    record: store::Cell,
    order: (String, store::Order),
}

fn local_in(place: &str) -> Vec<ProviderSetup> {
    vec![provider_in(capabilities::LOCAL, Some(place).filter(|place| !place.is_empty()))]
}

fn recorded(place: &str) -> Recorded {
    let seams = Box::new(Counting::default());
    let mut engine = Engine::new(config(), local_in(place), seams);
    engine.handle(
        Event::Listed { provider: ONLY, began: Duration::ZERO, instances: Vec::new() },
        at(0),
    );
    let healthy_timeout = Some(crate::request::HealthyTimeout::of_secs(60));
    let parameters = BTreeMap::from([("group".to_owned(), "sg-1".to_owned())]);
    let spec = with(spec("pod"), |wanted| wanted.request.healthy_timeout = healthy_timeout);
    let (sandbox, _) = engine.order(spec.with_parameters(parameters), at(1));
    let cell = engine.cell_of_order(&sandbox).unwrap().clone();
    let order = (sandbox.to_string(), engine.orders[&sandbox].stored(&sandbox));
    let record = store::Cell {
        key_sha256: "key".into(),
        offering: Some(launch::stored_candidate(&candidate("a"))),
        offering_reason: "the only candidate".into(),
        timeline: Some(store::Timeline { launched: 3, enrolled: 4, ..Default::default() }),
        start_failures: 1,
        spot_failed: true,
        last_failures: vec!["refused".into()],
        lost_unix_nanos: 7,
        ..engine.cells[&cell].stored()
    };
    Recorded { cell, record, order }
}

/// Returns the records of a cell in each phase in which a start resumes it.
fn in_each_phase(record: &store::Cell) -> Vec<store::Cell> {
    let of = |phase: CellPhase| {
        let record = store::Cell { phase: phase.into(), ..record.clone() };
        store::Cell { instance: "i".into(), launch: None, ..record }
    };
    let unlaunched = |phase: CellPhase| store::Cell { phase: phase.into(), ..record.clone() };
    let ending = |phase, containers_ended| store::Cell {
        reason: "stopped".into(),
        containers_ended,
        ..of(phase)
    };
    vec![
        unlaunched(CellPhase::Launching),
        of(CellPhase::Booting),
        store::Cell { addresses: vec!["10.0.0.7".into()], ..of(CellPhase::Bound) },
        ending(CellPhase::Stopping, false),
        ending(CellPhase::Stopping, true),
        store::Cell { reason: "stopped".into(), ..unlaunched(CellPhase::Terminating) },
        ending(CellPhase::Terminating, false),
        ending(CellPhase::Terminating, true),
    ]
}

/// Verifies A22.
#[test]
fn record_that_resumes_in_its_phase_is_stored_unchanged() {
    for place in ["", "ec2 eu-central-1"] {
        let Recorded { cell, record, order } = recorded(place);
        let of_pool = store::Cell {
            pool: "small".into(),
            sandbox: String::new(),
            pod_uid: String::new(),
            namespace: String::new(),
            healthy_timeout_secs: None,
            ..record.clone()
        };
        // The record as older daemons wrote it, with fewer fields.
        let earlier = store::Cell {
            id: record.id.clone(),
            sandbox: record.sandbox.clone(),
            boot_id: record.boot_id.clone(),
            launch: record.launch.clone(),
            timeline: Some(store::Timeline::default()),
            ..store::Cell::default()
        };
        for record in [record, of_pool, earlier].iter().flat_map(in_each_phase) {
            let sandbox = sandbox_of(&record);
            let is_unbound = matches!(record.phase(), CellPhase::Launching | CellPhase::Booting);
            let is_ordered = is_unbound && !record.sandbox.is_empty();
            let journal = Journal {
                cells: vec![(cell.to_string(), record.clone())],
                orders: is_ordered.then(|| order.clone()).into_iter().collect(),
                sandboxes: (!is_unbound).then_some(sandbox).into_iter().collect(),
                ..Journal::default()
            };
            let seams = Box::new(Counting::default());
            let (engine, changes, unusable) =
                Engine::recover(config(), local_in(place), seams, journal, at(2));
            assert_eq!((changes, unusable), (Vec::new(), Vec::new()), "{record:?}");
            let stored = engine.cells[&cell].stored();
            assert_eq!(stored, record);
        }
    }
}
