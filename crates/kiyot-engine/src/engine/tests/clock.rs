//! Jumps of the wall clock: only the times in records depend on it.

use proptest::{collection::vec, prelude::*};

use super::*;

/// A step of the engine, with the time since the last step, and the jump of the wall clock in
/// years.
type Step = (u8, usize, u64, i8);

/// The kinds of steps.
const KINDS: u8 = 14;

/// Returns an error of a call.
fn failed<T>(class: ErrorClass) -> Result<T, ProviderError> {
    Err(ProviderError::without_cause(class, "call"))
}

/// Handles the event of a step. A step of a cell chooses among the cells that are left.
fn take(engine: &mut Engine, (kind, which, ..): Step, order: &OrderSpec, now: Now) -> Effects {
    if kind == 0 {
        return engine.order(order.clone(), now).1;
    }
    let ids: Vec<CellId> = engine.ids().cloned().collect();
    let Some(cell) = ids.get(which % ids.len().max(1)).cloned() else {
        return engine.handle(Event::Tick, now);
    };
    let id = InstanceId(format!("i-{cell}"));
    let event = match kind {
        1 | 2 => Event::Launched(cell.clone(), Ok(launched_as(&id.0, &cell))),
        3 => Event::Launched(cell, failed(ErrorClass::Unanswered)),
        4 => Event::Launched(cell, failed(ErrorClass::Capacity)),
        5 => Event::Connected(cell),
        6 => {
            let token = engine.cells[&cell].stored().token_sha256;
            Event::Redeem { cell, token_sha256: token, key_sha256: "key".into(), redemption: 1 }
        }
        7 => Event::Attached(cell, Ok(Attached::default())),
        8 => Event::Terminate { cell, reason: "stopped".into() },
        9 => Event::ShutDown(cell, which % 2 == 0),
        10 => Event::Terminated {
            cell,
            outcome: Ok(if which % 2 == 0 {
                Termination::Accepted
            } else {
                Termination::Confirmed
            }),
            console: String::new(),
        },
        11 => Event::Described(cell, failed(ErrorClass::NotFound)),
        12 => Event::Listed {
            provider: ONLY,
            began: now.boot,
            instances: vec![instance(&id.0, &cell, "ours")],
        },
        _ => Event::Tick,
    };
    engine.handle(event, now)
}

/// Returns effects as text, without the times and the tags of records. The order of tags is random.
fn without_times(mut effects: Effects) -> String {
    for (_, effect) in &mut effects {
        let Effect::Commit { changes, .. } = effect else { continue };
        for change in changes {
            match change {
                Change::Cell(_, Some(record)) => {
                    (record.created_unix_nanos, record.token_expires_unix) = (0, 0);
                    record.timeline = None;
                    record.launch.iter_mut().for_each(|launch| launch.tags.clear());
                }
                // The date of a cost comes from the wall clock.
                Change::Cost(_, record) => {
                    let micros = record.micros;
                    *record = store::NamespaceCost { micros, ..Default::default() };
                }
                _ => {}
            }
        }
    }
    format!("{effects:?}")
}

proptest! {
    /// Verifies X16, Y60.
    #[test]
    fn clock_jumps_of_years_change_no_decision(
        steps in vec((0..KINDS, 0_usize..4, 0_u64..400, -1_i8..=1), 1..80),
        is_local: bool,
    ) {
        let capabilities = if is_local { capabilities::LOCAL } else { capabilities::CLOUD };
        let (mut steady, mut jumping) = (engine(capabilities), engine(capabilities));
        let mut seconds = 0;
        for step in steps {
            let (_, which, passed, years) = step;
            seconds += passed;
            let now = at(seconds);
            let unix = match years {
                0 => now.unix,
                1 => now.unix + YEAR,
                _ => now.unix - YEAR,
            };
            let order = spec(&format!("pod-{which}"));
            let expected = take(&mut steady, step, &order, now);
            let effects = take(&mut jumping, step, &order, Now { unix, ..now });
            prop_assert_eq!(without_times(effects), without_times(expected));
            prop_assert_eq!(jumping.next_timer(), steady.next_timer());
        }
    }
}
