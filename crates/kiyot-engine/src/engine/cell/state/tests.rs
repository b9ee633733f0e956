use proptest::prelude::*;

use crate::engine::{self, cell::state::*};

/// Returns the event of a new cell.
fn created() -> CellEvent {
    CellEvent::Created(engine::tests::request())
}

fn events() -> impl Strategy<Value = CellEvent> {
    use CellEvent as E;
    prop_oneof![
        Just(created()),
        Just(E::Resumed),
        Just(E::RecordFailed),
        Just(E::Launched(InstanceId("i".into()))),
        Just(E::LaunchFailed("launch failed".into())),
        Just(E::LaunchUnanswered),
        Just(E::TokenExpired),
        Just(E::NothingLaunched("nothing launched".into())),
        Just(E::Connected),
        Just(E::Bind),
        Just(E::Attached(Attached::already_made(vec![IpAddr::from([10, 0, 0, 1])]))),
        Just(E::AttachFailed("attach failed".into())),
        Just(E::Stop("stopped".into())),
        Just(E::Shutdown),
        Just(E::ShutdownFailed),
        Just(E::Detached),
        Just(E::DetachFailed),
        Just(E::OrphanTimeout),
        Just(E::End("ended".into())),
        Just(E::Terminated),
        Just(E::TerminationAccepted),
        Just(E::TerminationFailed),
        Just(E::InstanceTerminated),
        Just(E::RetryDue),
    ]
}

/// Returns the rank of a state. No event leads to a lower rank.
fn rank(state: &State) -> u8 {
    match state {
        State::Requested => 0,
        State::Launching { .. } => 1,
        State::Booting { .. } => 2,
        State::Idle { .. } => 3,
        State::Binding { .. } => 4,
        State::Bound { .. } => 5,
        State::Stopping(_, _, StopStep::Shutdown) => 6,
        State::Stopping(_, _, StopStep::Detach | StopStep::Backoff) => 7,
        State::Terminating { .. } => 8,
        State::Ended { .. } => 9,
    }
}

fn is_call(effect: &CellEffect) -> bool {
    use CellEffect as F;
    matches!(effect, F::Launch | F::Attach | F::ShutDown | F::Detach | F::Terminate)
}

proptest! {
    #[test]
    fn only_proof_leads_to_ended(events in prop::collection::vec(events(), 0..60)) {
        let mut state = State::Requested;
        for event in events {
            let before = state.clone();
            let (after, effects) = before.clone().on(event.clone());
            prop_assert!(rank(&after) >= rank(&before), "{before:?} -{event:?}-> {after:?}");
            if after.is_ended() && !before.is_ended() {
                let is_proof = match event {
                    CellEvent::Terminated => matches!(before, State::Terminating { .. }),
                    CellEvent::NothingLaunched(_) => before.has_open_launch(),
                    // The end of its instance is proven.
                    CellEvent::Detached => matches!(before, State::Terminating { .. }),
                    CellEvent::End(_) | CellEvent::Stop(_) => {
                        matches!(before, State::Requested)
                    }
                    _ => false,
                };
                prop_assert!(is_proof, "{before:?} -{event:?}-> {after:?}");
                prop_assert!(after.containers_ended(), "{before:?} -{event:?}-> {after:?}");
            }
            // A record precedes each call. A launch is recorded once: its replays repeat the
            // recorded call.
            let replays = matches!(event, CellEvent::RetryDue | CellEvent::Resumed);
            for (at, effect) in effects.iter().enumerate() {
                let before = effects.get(at.wrapping_sub(1));
                match effect {
                    CellEffect::Launch if replays => {}
                    CellEffect::Launch | CellEffect::Attach | CellEffect::Detach => {
                        prop_assert_eq!(before, Some(&CellEffect::Record));
                    }
                    CellEffect::Terminate => {
                        prop_assert_eq!(before, Some(&CellEffect::RecordIfPossible));
                    }
                    _ => {}
                }
            }
            prop_assert!(effects.iter().filter(|effect| is_call(effect)).count() <= 1);
            if let (Some(first), Some(then)) = (before.reason(), after.reason()) {
                prop_assert_eq!(first, then, "the first reason stays");
            }
            // A released pod does not return.
            prop_assert!(!before.is_released() || after.is_released());
            state = after;
        }
    }

    /// Verifies X3.
    #[test]
    fn bound_cell_is_released_by_proof_alone(events in prop::collection::vec(events(), 0..60)) {
        let instance = InstanceId("i".into());
        let mut state = State::Bound { instance, addresses: Vec::new() };
        let mut has_proof = false;
        for event in events {
            let before = state.clone();
            state = state.on(event.clone()).0;
            has_proof |= match event {
                CellEvent::Shutdown => matches!(before, State::Stopping { .. }),
                CellEvent::Terminated
                | CellEvent::InstanceTerminated
                | CellEvent::OrphanTimeout => {
                    matches!(before, State::Terminating { .. })
                }
                _ => false,
            };
            prop_assert!(has_proof || !state.is_released(), "{before:?} -{event:?}-> {state:?}");
        }
    }

    #[test]
    fn cell_can_end_from_every_state(events in prop::collection::vec(events(), 0..60)) {
        let mut state = State::Requested;
        for event in events {
            state = state.on(event).0;
        }
        for event in [
            CellEvent::End("at last".into()),
            CellEvent::TokenExpired,
            CellEvent::NothingLaunched("x".into()),
            CellEvent::LaunchFailed("x".into()),
            CellEvent::AttachFailed("x".into()),
            CellEvent::Terminated,
            CellEvent::Detached,
        ] {
            state = state.on(event).0;
        }
        prop_assert!(matches!(state, State::Ended { .. }), "{state:?}");
    }
}

#[test]
fn cell_without_failures_goes_from_created_to_ended() {
    use CellEffect as F;
    let (state, effects) = State::Requested.on(created());
    assert_eq!(effects, [F::Record, F::Launch]);
    let (state, effects) = state.on(CellEvent::Launched(InstanceId("i".into())));
    assert_eq!(effects, [F::Record]);
    let (state, effects) = state.on(CellEvent::Connected);
    assert_eq!(effects, [F::PublishConnected, F::ReportIdle]);
    let (state, effects) = state.on(CellEvent::Bind);
    assert_eq!(effects, [F::Record, F::Attach]);
    let (state, effects) = state.on(CellEvent::Attached(Attached::default()));
    assert_eq!(effects, [F::Record, F::AnswerBound(None)]);
    let (state, effects) = state.on(CellEvent::End("stopped".into()));
    assert_eq!(effects, [F::RecordIfPossible, F::Terminate]);
    let (state, effects) = state.on(CellEvent::Terminated);
    assert_eq!(effects, [F::RecordIfPossible, F::PublishEnded]);
    assert!(state.is_ended() && state.reason().is_some_and(|reason| &**reason == "stopped"));
}

#[test]
fn agent_connected_before_the_launch_returns_makes_the_cell_idle() {
    let (state, _) = State::Requested.on(created());
    let (state, effects) = state.on(CellEvent::Connected);
    assert_eq!(effects, [CellEffect::PublishConnected]);
    let (state, effects) = state.on(CellEvent::Launched(InstanceId("i".into())));
    assert_eq!(effects, [CellEffect::ReportIdle]);
    assert_eq!(state.phase(), CellPhase::Idle);
}

#[test]
fn end_waits_for_the_answer_of_the_launch() {
    let (state, _) = State::Requested.on(created());
    let (state, effects) = state.on(CellEvent::End("stopped".into()));
    assert_eq!(effects, [CellEffect::RecordIfPossible]);
    let (state, effects) = state.on(CellEvent::LaunchUnanswered);
    assert_eq!(effects, [CellEffect::AnswerNotTerminated, CellEffect::StartRetryTimer]);
    let (state, effects) = state.on(CellEvent::RetryDue);
    assert_eq!(effects, [CellEffect::Launch], "only the answer names the instance");
    let (state, effects) = state.on(CellEvent::Launched(InstanceId("i".into())));
    assert_eq!(effects, [CellEffect::RecordIfPossible, CellEffect::Terminate]);
    assert_eq!(state.instance(), Some(&InstanceId("i".into())));
}

#[test]
fn failed_record_waits_for_the_answer_of_an_attachment() {
    let instance = InstanceId("i".into());
    let (state, effects) = State::Binding { instance }.on(CellEvent::RecordFailed);
    assert_eq!(effects, [CellEffect::RecordIfPossible]);
    let (state, effects) = state.on(CellEvent::RecordFailed);
    assert_eq!(effects, [], "the attachment may still be called");
    let (state, effects) = state.on(CellEvent::AttachFailed("not called".into()));
    assert_eq!(effects, [CellEffect::RecordIfPossible, CellEffect::Terminate]);
    assert!(state.is_released());
}

#[test]
fn pod_ends_before_its_instance() {
    use CellEffect as F;
    let state = State::Bound { instance: InstanceId("i".into()), addresses: Vec::new() };
    let (state, effects) = state.on(CellEvent::Stop("stopped".into()));
    assert_eq!(effects, [F::RecordIfPossible, F::ShutDown]);
    let (state, effects) = state.on(CellEvent::Shutdown);
    assert_eq!((effects, state.is_released()), (vec![F::Record, F::Detach], false));
    let (state, effects) = state.on(CellEvent::Detached);
    assert_eq!((effects, state.is_released()), (vec![F::RecordIfPossible, F::Terminate], true));
    let (state, _) = state.on(CellEvent::TerminationAccepted);
    let (state, effects) = state.on(CellEvent::Terminated);
    assert_eq!(effects, [F::RecordIfPossible, F::PublishEnded]);
    assert!(state.is_released());
}

/// Returns the name of a state with its step, as in the drawing.
fn name(state: &State) -> String {
    match state {
        State::Launching { call, .. } => format!("Launching_{call:?}"),
        State::Stopping(_, _, step) => format!("Stopping_{step:?}"),
        State::Terminating(_, EndStep::Launching(call, _)) => {
            format!("Terminating_Launching_{call:?}")
        }
        State::Terminating(_, step) => format!("Terminating_{}", variant(step)),
        other => variant(other),
    }
}

/// Returns the name of an enum's variant.
fn variant(value: &impl std::fmt::Debug) -> String {
    let text = format!("{value:?}");
    text.split([' ', '{', '(']).next().unwrap().to_owned()
}

/// Returns all transitions, as a Mermaid diagram.
fn drawing() -> String {
    use CellEvent as E;
    use std::collections::{BTreeMap, BTreeSet, VecDeque};
    let all = [
        created(),
        E::Resumed,
        E::RecordFailed,
        E::Launched(InstanceId("i".into())),
        E::LaunchFailed("".into()),
        E::LaunchUnanswered,
        E::TokenExpired,
        E::NothingLaunched("".into()),
        E::Connected,
        E::Bind,
        E::Attached(Attached::default()),
        E::AttachFailed("".into()),
        E::Stop("".into()),
        E::Shutdown,
        E::ShutdownFailed,
        E::Detached,
        E::DetachFailed,
        E::OrphanTimeout,
        E::End("".into()),
        E::Terminated,
        E::TerminationAccepted,
        E::TerminationFailed,
        E::InstanceTerminated,
        E::RetryDue,
    ];
    let mut edges: BTreeMap<(String, String), BTreeSet<String>> = BTreeMap::new();
    let (mut queue, mut seen) = (VecDeque::from([State::Requested]), BTreeSet::new());
    while let Some(state) = queue.pop_front() {
        if !seen.insert(format!("{state:?}")) {
            continue;
        }
        for event in &all {
            let (next, _) = state.clone().on(event.clone());
            if name(&next) != name(&state) {
                let edge = edges.entry((name(&state), name(&next))).or_default();
                edge.insert(variant(event));
            }
            queue.push_back(next);
        }
    }
    let mut text = String::from("```mermaid\nstateDiagram-v2\n    [*] --> Requested\n");
    for ((from, to), events) in edges {
        let events: Vec<String> = events.into_iter().collect();
        text.push_str(&format!("    {from} --> {to}: {}\n", events.join(", ")));
    }
    text.push_str("    Ended --> [*]\n```\n");
    text
}

#[test]
fn drawing_of_the_state_machine_is_current() {
    let page = include_str!("transitions.md");
    let drawing = drawing();
    assert!(page.contains(&drawing), "the drawing in transitions.md must be:\n{drawing}");
}
