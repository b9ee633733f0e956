//! A provider that does not answer for half an hour, on a simulated clock.

use std::collections::VecDeque;

use super::*;

/// The start of the outage, in seconds.
const BEGIN: u64 = 100;
/// The end of the outage, in seconds.
const END: u64 = BEGIN + 30 * 60;
/// The number of running cells.
const BOUND: usize = 20;
/// Bounds the calls for a launch: they end with its token, and the pauses between them grow.
const MAX_LAUNCHES: usize = 20;
/// Bounds the probes of a silent cell: a probe each half minute.
const MAX_PROBES: usize = 61;
/// Bounds the terminations of a cell: the pauses between them grow to a minute.
const MAX_TERMINATIONS: usize = 40;

/// The calls of the provider, each with its cell and its time in seconds.
type Calls = Vec<(&'static str, CellId, u64)>;

/// A provider that answers at once, or with an error.
struct Played {
    engine: Engine,
    is_down: bool,
    calls: Calls,
    lost: usize,
    /// The answers of orders.
    answers: Vec<Result<(), String>>,
}

impl Played {
    /// Carries out effects, and the effects of their answers.
    fn carry_out(&mut self, effects: Effects, now: Now) {
        let mut queue = VecDeque::from(effects);
        while let Some((cell, effect)) = queue.pop_front() {
            let is_lost = matches!(effect, Effect::Log(Notice::Lost { .. }));
            self.lost += usize::from(is_lost);
            if let Effect::AnswerOrder(_, answer) = &effect {
                self.answers.push(answer.as_ref().map(drop).map_err(|error| error_chain(error)));
            }
            let Some(cell) = cell else { continue };
            if let Some(event) = self.answer(cell, effect, now) {
                queue.extend(self.engine.handle(event, now));
            }
        }
    }

    fn answer(&mut self, cell: CellId, effect: Effect, now: Now) -> Option<Event> {
        let name = match effect {
            Effect::Launch(_) => "launch",
            Effect::Terminate { .. } => "terminate",
            Effect::Describe(_) => "describe",
            Effect::ShutDown => return Some(Event::ShutDown(cell, true)),
            Effect::Detach(_) => return Some(Event::Detached(cell, Ok(()))),
            _ => return None,
        };
        self.calls.push((name, cell.clone(), now.boot.as_secs()));
        let down = || ProviderError::without_cause(ErrorClass::Unanswered, "no answer");
        let answered = |event: Instance| if self.is_down { Err(down()) } else { Ok(event) };
        let running = || instance(&format!("i-{cell}"), &cell, "ours");
        Some(match name {
            "launch" => Event::Launched(cell.clone(), answered(running())),
            "describe" => Event::Described(cell.clone(), answered(running())),
            _ => Event::Terminated {
                cell: cell.clone(),
                outcome: if self.is_down { Err(down()) } else { Ok(Termination::Confirmed) },
                console: String::new(),
            },
        })
    }

    /// Handles an event at a time.
    fn happens(&mut self, event: Event, seconds: u64) {
        let effects = self.engine.handle(event, at(seconds));
        self.carry_out(effects, at(seconds));
    }

    /// Passes time with all timers on the way.
    fn pass(&mut self, until: u64) {
        while let Some(next) = self.engine.next_timer().filter(|next| next.as_secs() < until) {
            let now = Now { boot: next, unix: NOON + next };
            let effects = self.engine.handle(Event::Tick, now);
            self.carry_out(effects, now);
        }
    }

    fn calls_of(&self, cell: &CellId) -> Vec<u64> {
        let of_cell = self.calls.iter().filter(|(_, own, _)| own == cell);
        of_cell.map(|(.., seconds)| *seconds).collect()
    }
}

/// Verifies V32, V33.
#[test]
fn outage_of_half_an_hour_loses_no_cell_and_calls_go_on_with_pauses() {
    let mut first = Engine::new(
        EngineConfig {
            limits: Limits { max_cells: 100, ..Limits::default() },
            launch_timeout: TTL,
            ..config()
        },
        only(capabilities::EC2),
        Box::new(Counting::default()),
    );
    first.handle(
        Event::Listed { provider: ONLY, began: Duration::ZERO, instances: Vec::new() },
        at(0),
    );
    let bound: Vec<CellId> = (0..BOUND)
        .map(|pod| bound(&mut first, &format!("pod-{pod}"), &format!("i-{pod}")))
        .collect();
    let mut played =
        Played { engine: first, is_down: true, calls: Vec::new(), lost: 0, answers: Vec::new() };
    let (kept, others) = bound.split_at(BOUND - 2);
    let [ending, silent] = others else { panic!("{others:?}") };

    played.happens(Event::Disconnected(silent.clone()), BEGIN);
    played.happens(Event::Terminate { cell: ending.clone(), reason: "stopped".into() }, BEGIN);
    let (_, effects) = played.engine.order(spec("new"), at(BEGIN));
    played.carry_out(effects, at(BEGIN));
    let new = played.engine.ids().find(|id| !bound.contains(id)).unwrap().clone();
    played.pass(END);

    // No cell is lost, not even the silent cell. The provider is called only for the silent, the
    // ending and the launching cell.
    assert_eq!(played.lost, 0);
    for cell in kept.iter().chain([silent]) {
        assert!(matches!(played.engine.cells[cell].state, State::Bound { .. }), "{cell}");
    }
    for cell in kept {
        assert_eq!(played.calls_of(cell), Vec::<u64>::new());
    }
    assert!(played.engine.contains(ending) && played.engine.contains(&new));
    let limits = [(ending, MAX_TERMINATIONS), (silent, MAX_PROBES), (&new, MAX_LAUNCHES)];
    for (cell, most) in limits {
        let times = played.calls_of(cell);
        assert!((1..=most).contains(&times.len()), "{} calls: {times:?}", times.len());
        let mut pauses: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        pauses.sort_unstable();
        assert!(pauses.first().is_none_or(|shortest| *shortest >= 3), "{pauses:?}");
    }
    // The waiting pod has its answer, and its launch makes no instance afterwards.
    let [Err(answer)] = &*played.answers else { panic!("{:?}", played.answers) };
    assert!(answer.contains("was not launched within 600 s"), "{answer}");

    // The agent ran all the time; only its link was down.
    played.happens(Event::Connected(silent.clone()), END);
    played.is_down = false;
    let before = played.calls.len();
    for period in 0..60 {
        let seconds = END + 30 * period;
        let shown = kept.iter().chain([silent]).zip(0..);
        let shown = shown.map(|(cell, pod)| {
            let pod = if cell == silent { BOUND - 1 } else { pod };
            instance(&format!("i-{pod}"), cell, "ours")
        });
        let instances: Vec<Instance> = shown.collect();
        let listed = Event::Listed { provider: ONLY, began: at(seconds).boot, instances };
        played.happens(listed, seconds);
        played.pass(seconds + 30);
    }
    assert_eq!(played.lost, 0);
    assert!(!played.engine.contains(ending) && !played.engine.contains(&new));
    for cell in kept.iter().chain([silent]) {
        assert!(matches!(played.engine.cells[cell].state, State::Bound { .. }), "{cell}");
    }
    let after = &played.calls[before..];
    assert!(after.len() <= 4, "{after:?}");
    let (_, effects) = played.engine.order(spec("new"), at(END + 2000));
    assert_eq!(outcome(&effects).0.len(), 1, "the pod's next attempt is launched");
}
