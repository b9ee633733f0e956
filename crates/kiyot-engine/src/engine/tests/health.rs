//! Health: silent cells are lost, connected cells never.

use proptest::prelude::*;

use crate::{engine::tests::*, request::HealthyTimeout};

const LIMIT: Duration = Duration::from_secs(90);

/// Passes time up to `until` with all timers on the way. Returns the effects.
fn pass(engine: &mut Engine, until: Duration) -> Effects {
    let mut effects = Effects::new();
    while let Some(next) = engine.next_timer().filter(|next| *next <= until) {
        effects.extend(engine.handle(Event::Tick, Now { boot: next, unix: NOON + next }));
    }
    effects
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Returns the cells that are probed.
fn probed(effects: &Effects) -> Vec<CellId> {
    let of = effects.iter().filter(|(_, effect)| matches!(effect, Effect::Describe(_)));
    of.filter_map(|(cell, _)| cell.clone()).collect()
}

/// Answers the probe of a cell with a running instance. Returns whether the cell is lost.
fn answer(engine: &mut Engine, cell: &CellId, now: Now) -> bool {
    let running = instance("i", cell, "ours");
    is_lost(&engine.handle(Event::Described(cell.clone(), Ok(running)), now))
}

fn is_lost(effects: &Effects) -> bool {
    effects.iter().any(|(_, effect)| matches!(effect, Effect::Log(Notice::Lost { .. })))
}

fn notices(effects: &Effects) -> Vec<Notice> {
    let notices = effects.iter().filter_map(|(_, effect)| match effect {
        Effect::Log(notice) => Some(notice.clone()),
        _ => None,
    });
    notices.collect()
}

fn bound_cells(engine: &mut Engine, number: usize) -> Vec<CellId> {
    (0..number).map(|pod| bound(engine, &format!("pod-{pod}"), &format!("i-{pod}"))).collect()
}

/// Verifies P19.
#[test]
fn silent_cell_is_lost_after_its_limit_and_a_probe() {
    let mut engine = engine(capabilities::LOCAL);
    let cell = bound(&mut engine, "pod", "i");
    engine.handle(Event::Disconnected(cell.clone()), at(10));
    assert_eq!(probed(&pass(&mut engine, seconds(10) + LIMIT - seconds(1))), []);
    assert_eq!(probed(&pass(&mut engine, seconds(10) + LIMIT)), std::slice::from_ref(&cell));
    assert!(
        !answer(&mut engine, &CellId::mint().unwrap(), at(100)),
        "the probe of another cell ends no cell"
    );
    assert!(answer(&mut engine, &cell, at(101)));
    let record = engine.cells[&cell].stored();
    assert_eq!(record.phase(), CellPhase::Terminating);
    assert_eq!(
        record.reason,
        "its agent has been silent for 91 s, longer than its healthy timeout of 90 s"
    );
}

/// Verifies P19, K2.
#[test]
fn lost_cell_stays_lost_after_a_restart() {
    let mut first = engine(capabilities::LOCAL);
    let cell = bound(&mut first, "pod", "i");
    first.handle(Event::Disconnected(cell.clone()), at(10));
    pass(&mut first, seconds(10) + LIMIT);
    let lost_at = |engine: &Engine, cell| engine.cell_view(cell, at(101)).unwrap().lost_unix_nanos;
    assert_eq!(lost_at(&first, &cell), None);
    assert!(answer(&mut first, &cell, at(101)));
    let expected = Some(crate::engine::cell::timeline::nanos(at(101).unix));
    assert_eq!(lost_at(&first, &cell), expected);
    let record = first.cells[&cell].stored();
    let (second, cell) = recovered(record, true, at(200));
    assert_eq!(lost_at(&second, &cell), expected);
    // A cell that ends for another reason is not lost.
    let (other, cell) = recovered(stored(CellPhase::Terminating), true, at(200));
    assert_eq!(lost_at(&other, &cell), None);
}

/// Verifies P19.
#[test]
fn cell_that_connects_again_is_not_lost() {
    for reconnects in [50, 99, 100] {
        let mut engine = engine(capabilities::LOCAL);
        let cell = bound(&mut engine, "pod", "i");
        engine.handle(Event::Disconnected(cell.clone()), at(10));
        let probes = pass(&mut engine, seconds(reconnects));
        assert_eq!(probed(&probes).len(), usize::from(reconnects == 100));
        engine.handle(Event::Connected(cell.clone()), at(reconnects));
        assert_eq!(probed(&pass(&mut engine, seconds(1000))), []);
        assert!(!answer(&mut engine, &cell, at(1000)), "connected at {reconnects} s");
        assert!(matches!(engine.cells[&cell].state, State::Bound { .. }));
    }
}

/// Verifies P19.
#[test]
fn unanswered_probe_is_repeated() {
    let mut engine = engine(capabilities::CLOUD);
    let cell = bound(&mut engine, "pod", "i");
    engine.handle(Event::Disconnected(cell.clone()), at(10));
    assert_eq!(probed(&pass(&mut engine, seconds(100))), std::slice::from_ref(&cell));
    assert_eq!(probed(&pass(&mut engine, seconds(200))), [], "one probe at a time");
    let unanswered = ProviderError::without_cause(ErrorClass::Unanswered, "no answer");
    let effects = engine.handle(Event::Described(cell.clone(), Err(unanswered)), at(200));
    assert!(!is_lost(&effects));
    assert_eq!(probed(&pass(&mut engine, seconds(229))), []);
    assert_eq!(probed(&pass(&mut engine, seconds(230))), std::slice::from_ref(&cell));
    assert!(answer(&mut engine, &cell, at(231)));
}

/// Verifies P19, V33.
#[test]
fn refused_probe_is_no_answer() {
    for class in [ErrorClass::Auth, ErrorClass::Throttled, ErrorClass::Transient] {
        let mut engine = engine(capabilities::CLOUD);
        let cell = bound(&mut engine, "pod", "i");
        engine.handle(Event::Disconnected(cell.clone()), at(10));
        pass(&mut engine, seconds(100));
        let refused = ProviderError::without_cause(class, "describe");
        let effects = engine.handle(Event::Described(cell.clone(), Err(refused)), at(100));
        assert!(!is_lost(&effects), "{class:?}");
        assert!(matches!(engine.cells[&cell].state, State::Bound { .. }), "{class:?}");
    }
}

#[test]
fn ended_instance_found_by_a_probe_is_reported_as_ended() {
    let mut engine = engine(capabilities::LOCAL);
    let cell = bound(&mut engine, "pod", "i");
    engine.handle(Event::Disconnected(cell.clone()), at(10));
    pass(&mut engine, seconds(100));
    let ended = Instance { state: InstanceState::Terminated, ..instance("i", &cell, "ours") };
    let effects = engine.handle(Event::Described(cell.clone(), Ok(ended)), at(100));
    assert_eq!(notices(&effects), [Notice::InstanceEnded(None)]);
}

/// Verifies P20.
#[test]
fn limit_of_the_pod_counts_after_a_restart() {
    for (own, lost_at) in [
        (None, Some(90)),
        (Some(HealthyTimeout::Never), None),
        (Some(HealthyTimeout::of_secs(200)), Some(200)),
    ] {
        let mut first = engine(capabilities::LOCAL);
        let cell = {
            let spec = with(spec("pod"), |wanted| wanted.request.healthy_timeout = own);
            let (_, effects) = first.order(spec, at(1));
            effects.into_iter().find_map(|(cell, _)| cell).unwrap()
        };
        let record = store::Cell {
            healthy_timeout_secs: first.cells[&cell].stored().healthy_timeout_secs,
            ..stored(CellPhase::Bound)
        };
        let (mut engine, cell) = recovered(record, true, at(1000));
        let begin = seconds(1005);
        engine.start(Now { boot: begin, unix: NOON + begin });
        match lost_at {
            Some(limit) => {
                let before = pass(&mut engine, begin + seconds(limit - 1));
                assert_eq!(probed(&before), [], "{own:?}");
                assert_eq!(probed(&pass(&mut engine, begin + seconds(limit))), [cell], "{own:?}");
            }
            None => assert_eq!(probed(&pass(&mut engine, begin + YEAR)), []),
        }
    }
}

/// Verifies P20.
#[test]
fn limit_of_the_pod_counts_for_the_next_cell_of_a_resumed_order() {
    let mut first = engine(capabilities::CLOUD);
    let own = || {
        let healthy_timeout = Some(HealthyTimeout::of_secs(200));
        with(spec("pod"), |wanted| wanted.request.healthy_timeout = healthy_timeout)
    };
    let (sandbox, effects) = first.order(own(), at(1));
    let cell = outcome(&effects).0.remove(0);
    let journal = Journal {
        cells: vec![(cell.to_string(), first.cells[&cell].stored())],
        orders: vec![(sandbox.to_string(), first.orders[&sandbox].stored(&sandbox))],
        ..Journal::default()
    };
    let seams = Box::new(Counting(100));
    let (mut second, ..) =
        Engine::recover(config(), only(capabilities::CLOUD), seams, journal, at(2));
    assert_eq!(second.order(own(), at(3)).0, sandbox);
    let ended = ProviderError::without_cause(ErrorClass::Ended, "launch");
    let next = outcome(&second.handle(Event::Launched(cell, Err(ended)), at(4))).0.remove(0);
    assert_eq!(second.cells[&next].stored().healthy_timeout_secs, Some(200));
}

/// Verifies P20.
#[test]
fn changed_limit_counts_for_silent_cells() {
    let mut engine = engine(capabilities::LOCAL);
    let cell = bound(&mut engine, "pod", "i");
    engine.set_healthy_timeout(None, at(5));
    engine.handle(Event::Disconnected(cell.clone()), at(10));
    assert_eq!(probed(&pass(&mut engine, seconds(500))), []);
    engine.set_healthy_timeout(Some(seconds(20)), at(500));
    assert_eq!(probed(&pass(&mut engine, seconds(540))), std::slice::from_ref(&cell));
    engine.set_healthy_timeout(None, at(541));
    assert!(!answer(&mut engine, &cell, at(542)));
}

/// Verifies P21.
#[test]
fn cells_are_kept_while_a_third_is_silent() {
    for (silent, all, may_be_lost) in [(2, 2, true), (3, 3, false), (3, 9, false), (3, 10, true)] {
        let mut engine = Engine::new(
            EngineConfig { limits: Limits { max_cells: 20, ..config().limits }, ..config() },
            only(capabilities::LOCAL),
            Box::new(Counting::default()),
        );
        engine.handle(
            Event::Listed { provider: ONLY, began: Duration::ZERO, instances: Vec::new() },
            at(0),
        );
        let cells = bound_cells(&mut engine, all);
        for cell in &cells[..silent] {
            engine.handle(Event::Disconnected(cell.clone()), at(10));
        }
        let effects = pass(&mut engine, seconds(1000));
        let expected = if may_be_lost { silent } else { 0 };
        assert_eq!(probed(&effects).len(), expected, "{silent} of {all}");
        let cut_off = Notice::CutOff { silent, all };
        let expected = if may_be_lost { vec![] } else { vec![cut_off] };
        assert_eq!(notices(&effects), expected, "the cut-off is logged once");
    }
}

/// Verifies P21.
#[test]
fn cells_that_fall_silent_one_after_the_other_are_lost() {
    let mut engine = engine(capabilities::LOCAL);
    let cells = bound_cells(&mut engine, 4);
    let mut lost = Vec::new();
    for (cell, second) in cells[..3].iter().zip([10, 75, 140]) {
        engine.handle(Event::Disconnected(cell.clone()), at(second));
        lost.extend(probed(&pass(&mut engine, seconds(second + 64))));
    }
    lost.extend(probed(&pass(&mut engine, seconds(300))));
    assert_eq!(lost, cells[..3]);
}

/// Verifies P21.
#[test]
fn cell_is_lost_while_another_connects_and_disconnects() {
    let mut engine = engine(capabilities::LOCAL);
    let cells = bound_cells(&mut engine, 4);
    for cell in &cells[..3] {
        engine.handle(Event::Disconnected(cell.clone()), at(10));
    }
    let mut lost = Vec::new();
    for second in (70..400).step_by(60) {
        lost.extend(probed(&pass(&mut engine, seconds(second))));
        engine.handle(Event::Connected(cells[0].clone()), at(second));
        engine.handle(Event::Disconnected(cells[0].clone()), at(second));
    }
    assert_eq!(lost, cells[1..3]);
}

/// Verifies P21.
#[test]
fn cell_is_lost_after_the_orphan_timeout_even_while_the_node_is_cut_off() {
    let mut engine = engine(capabilities::LOCAL);
    let cells = bound_cells(&mut engine, 3);
    for cell in &cells {
        engine.handle(Event::Disconnected(cell.clone()), at(10));
    }
    assert_eq!(probed(&pass(&mut engine, seconds(10) + config().orphan_timeout - seconds(1))), []);
    assert_eq!(probed(&pass(&mut engine, seconds(10) + config().orphan_timeout)), cells);
    assert!(answer(&mut engine, &cells[0], at(1010)));
}

/// Verifies P21.
#[test]
fn silence_is_counted_from_zero_after_a_cut_off() {
    let mut engine = engine(capabilities::LOCAL);
    let cells = bound_cells(&mut engine, 3);
    for cell in &cells {
        engine.handle(Event::Disconnected(cell.clone()), at(10));
    }
    pass(&mut engine, seconds(1000));
    let effects = engine.handle(Event::Connected(cells[0].clone()), at(1000));
    assert_eq!(notices(&effects), [Notice::CutOffOver]);
    assert_eq!(probed(&pass(&mut engine, seconds(1000) + LIMIT - seconds(1))), []);
    assert_eq!(probed(&pass(&mut engine, seconds(1000) + LIMIT)).len(), 2);
}

/// Verifies P21.
#[test]
fn time_of_a_stopped_daemon_does_not_count_as_silence() {
    let mut engine = engine(capabilities::LOCAL);
    let cell = bound(&mut engine, "pod", "i");
    engine.handle(Event::Disconnected(cell.clone()), at(10));
    pass(&mut engine, seconds(40));
    assert_eq!(probed(&engine.handle(Event::Tick, at(4000))), []);
    assert_eq!(probed(&pass(&mut engine, seconds(4040))), []);
    assert_eq!(probed(&pass(&mut engine, seconds(4060))), [cell]);
}

/// A step of a sequence.
#[derive(Debug, Clone)]
enum Step {
    Disconnect(usize),
    Connect(usize),
    Pass(u64),
    StandStill(u64),
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (0..6_usize).prop_map(Step::Disconnect),
        3 => (0..6_usize).prop_map(Step::Connect),
        6 => (1..80_u64).prop_map(Step::Pass),
        1 => (20..5000_u64).prop_map(Step::StandStill),
    ]
}

/// The test's model of a cell.
#[derive(Debug, Clone, Default)]
struct Model {
    limit: Option<Duration>,
    is_silent: bool,
    is_lost: bool,
    /// The time at which it fell silent.
    since: Duration,
    /// The silence while the daemon ran and the node was not cut off.
    counted: Duration,
    /// The silence while the daemon ran.
    total: Duration,
}

fn is_cut_off(models: &[Model]) -> bool {
    let left: Vec<_> = models.iter().filter(|model| !model.is_lost).collect();
    let silent = || left.iter().filter(|model| model.is_silent);
    silent().any(|first| {
        let window = first.since..=first.since + seconds(60);
        let together = silent().filter(|other| window.contains(&other.since)).count();
        together >= 3 && together * 3 >= left.len()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Verifies P19, P20, P21.
    #[test]
    fn cells_are_lost_only_by_their_own_silence(
        limits in prop::collection::vec(
            prop::sample::select(vec![None, Some(0), Some(20), Some(300)]), 1..7),
        steps in prop::collection::vec(steps(), 1..60),
    ) {
        const STEP: Duration = Duration::from_secs(1);
        // A check is at most this late.
        let mut slack = seconds(6);
        let mut engine = engine(capabilities::LOCAL);
        let (mut cells, mut models) = (Vec::new(), Vec::new());
        for (number, own) in limits.iter().enumerate() {
            let cell = bound(&mut engine, &format!("pod-{number}"), &format!("i-{number}"));
            let own = own.map(HealthyTimeout::of_secs);
            let pod = engine.cells.get_mut(&cell).unwrap().pod.as_mut();
            pod.unwrap().healthy_timeout = own;
            cells.push(cell);
            let limit = own.map_or(Some(LIMIT), HealthyTimeout::limit);
            models.push(Model { limit, ..Model::default() });
        }
        let mut now = at(10);
        let was_cut_off = |before: bool, models: &mut Vec<Model>| {
            if before && !is_cut_off(models) {
                models.iter_mut().for_each(|model| model.counted = Duration::ZERO);
            }
        };
        for step in steps {
            let mut before = is_cut_off(&models);
            match step {
                Step::Disconnect(index) | Step::Connect(index) if index >= cells.len() => {}
                Step::Disconnect(index) => {
                    engine.handle(Event::Disconnected(cells[index].clone()), now);
                    if !models[index].is_silent {
                        models[index].is_silent = true;
                        models[index].since = now.boot;
                        models[index].counted = Duration::ZERO;
                        models[index].total = Duration::ZERO;
                    }
                }
                Step::Connect(index) => {
                    engine.handle(Event::Connected(cells[index].clone()), now);
                    models[index].is_silent = false;
                }
                Step::Pass(length) => {
                    for _ in 0..length {
                        now.boot += STEP;
                        for model in &mut models {
                            model.counted += STEP;
                            model.total += STEP;
                        }
                        let probes = probed(&engine.handle(Event::Tick, now));
                        let indices = probes.iter().map(|cell| {
                            cells.iter().position(|of| of == cell).unwrap()
                        });
                        let indices: Vec<usize> = indices.collect();
                        for model in indices.iter().map(|index| &models[*index]) {
                            let is_over = model.total >= config().orphan_timeout;
                            prop_assert!(is_over || !is_cut_off(&models));
                            prop_assert!(model.is_silent && !model.is_lost);
                            prop_assert!(model.counted >= model.limit.unwrap(), "{model:?}");
                        }
                        for (cell, index) in probes.iter().zip(indices) {
                            let cut_off = is_cut_off(&models);
                            let is_lost = answer(&mut engine, cell, now);
                            let model = &mut models[index];
                            // The loss of another cell may have ended the cut-off just now.
                            let is_due = model.counted >= model.limit.unwrap();
                            prop_assert_eq!(is_lost, is_due, "{:?}", model);
                            model.is_lost = is_lost;
                            was_cut_off(cut_off, &mut models);
                        }
                        if is_cut_off(&models) {
                            continue;
                        }
                        for model in models.iter().filter(|model| model.is_silent) {
                            let is_overdue =
                                model.limit.is_some_and(|limit| model.counted > limit + slack);
                            prop_assert!(model.is_lost || !is_overdue, "{model:?}");
                        }
                    }
                    // Losses above may have ended the cut-off.
                    before = is_cut_off(&models);
                }
                Step::StandStill(length) => {
                    now.boot += seconds(length);
                    // At most 10 s of the time count.
                    let effects = engine.handle(Event::Tick, now);
                    for model in &mut models {
                        model.counted += seconds(10);
                        model.total += seconds(10);
                    }
                    for cell in probed(&effects) {
                        engine.handle(Event::Connected(cell.clone()), now);
                        let index = cells.iter().position(|of| *of == cell).unwrap();
                        models[index].is_silent = false;
                    }
                    // The time since the last check may not count.
                    slack += seconds(5);
                }
            }
            was_cut_off(before, &mut models);
        }
    }
}
