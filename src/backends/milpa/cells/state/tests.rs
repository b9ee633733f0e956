use proptest::prelude::*;

use super::*;

fn events() -> impl Strategy<Value = Event> {
    prop_oneof![
        Just(Event::Ordered),
        Just(Event::RecordFailed),
        Just(Event::Launched(InstanceId("i".into()))),
        Just(Event::LaunchFailed("launch failed".into())),
        Just(Event::Connected),
        Just(Event::Attached(vec![IpAddr::from([10, 0, 0, 1])])),
        Just(Event::AttachFailed("attach failed".into())),
        Just(Event::End("ended".into())),
        Just(Event::Terminated),
        Just(Event::TerminationFailed),
        Just(Event::RetryDue),
    ]
}

/// Returns the rank of a state: no event leads to a lower rank.
fn rank(state: &State) -> u8 {
    match state {
        State::Requested => 0,
        State::Launching { .. } => 1,
        State::Booting { .. } => 2,
        State::Enrolled { .. } => 3,
        State::Bound { .. } => 4,
        State::Terminating { .. } => 5,
        State::Ended { .. } => 6,
    }
}

/// Returns true for a state with a pending provider call.
fn running(state: &State) -> bool {
    match state {
        State::Launching { .. } | State::Enrolled { .. } => true,
        State::Terminating { step, .. } => *step != Step::Backoff,
        _ => false,
    }
}

proptest! {
    #[test]
    fn only_a_confirmed_termination_leads_to_ended(
        events in prop::collection::vec(events(), 0..40)
    ) {
        let mut state = State::Requested;
        for event in events {
            let before = state.clone();
            let (after, effects) = before.clone().on(event.clone());
            prop_assert!(rank(&after) >= rank(&before), "{before:?} -{event:?}-> {after:?}");
            if matches!(after, State::Ended { .. }) && before != after {
                let confirmed = matches!(before, State::Terminating { step: Step::Pending, .. })
                    && event == Event::Terminated;
                prop_assert!(confirmed, "{before:?} -{event:?}-> {after:?}");
            }
            // Provider calls are recorded immediately before.
            for (at, effect) in effects.iter().enumerate() {
                if matches!(effect, Effect::Launch | Effect::Attach(_)) {
                    prop_assert_eq!(effects.get(at.wrapping_sub(1)), Some(&Effect::Record));
                }
                if matches!(effect, Effect::Terminate(_)) {
                    let before = effects.get(at.wrapping_sub(1));
                    prop_assert_eq!(before, Some(&Effect::RecordIfPossible));
                }
            }
            let is_call = |effect: &&Effect| {
                matches!(effect, Effect::Launch | Effect::Attach(_) | Effect::Terminate(_))
            };
            let calls = effects.iter().filter(is_call).count();
            prop_assert!(calls <= 1);
            // A call starts only if no other is pending.
            let ends_call = matches!(
                event,
                Event::Launched(_)
                    | Event::LaunchFailed(_)
                    | Event::Attached(_)
                    | Event::AttachFailed(_)
                    | Event::Terminated
                    | Event::TerminationFailed
                    | Event::RecordFailed
            );
            if calls == 1 {
                prop_assert!(!running(&before) || ends_call, "{before:?} -{event:?}-> {after:?}");
            }
            if let (Some(first), Some(then)) = (before.reason(), after.reason()) {
                prop_assert_eq!(first, then, "the first reason stays");
            }
            state = after;
        }
    }

    #[test]
    fn repeated_event_changes_no_state(events in prop::collection::vec(events(), 0..40)) {
        let mut state = State::Requested;
        for event in events {
            let (once, _) = state.clone().on(event.clone());
            let (twice, effects) = once.clone().on(event.clone());
            // The outcome of a provider call comes once; a second `End` may cut a pause short.
            let once_per_call = matches!(
                event,
                Event::TerminationFailed | Event::RecordFailed | Event::Terminated
            );
            if !once_per_call && event != Event::End("ended".into()) && event != Event::RetryDue {
                prop_assert_eq!(&once, &twice);
                prop_assert!(effects.iter().all(|effect| *effect == Effect::PublishConnected));
            }
            state = once;
        }
    }

    #[test]
    fn cell_can_end_from_every_state(events in prop::collection::vec(events(), 0..40)) {
        let mut state = State::Requested;
        for event in events {
            state = state.on(event).0;
        }
        for event in [
            Event::End("at last".into()),
            Event::LaunchFailed("x".into()),
            Event::AttachFailed("x".into()),
            Event::Terminated,
        ] {
            state = state.on(event).0;
        }
        prop_assert!(matches!(state, State::Ended { .. }), "{state:?}");
    }
}

#[test]
fn cell_without_failures_goes_from_ordered_to_ended() {
    let instance = InstanceId("i".into());
    let (state, effects) = State::Requested.on(Event::Ordered);
    assert_eq!(effects, [Effect::Record, Effect::Launch]);
    let (state, effects) = state.on(Event::Launched(instance.clone()));
    assert_eq!(effects, [Effect::Record]);
    let (state, effects) = state.on(Event::Connected);
    assert_eq!(
        effects,
        [Effect::PublishConnected, Effect::Record, Effect::Attach(instance.clone())]
    );
    let (state, effects) = state.on(Event::Attached(Vec::new()));
    assert_eq!(effects, [Effect::Record, Effect::AnswerBound]);
    let (state, effects) = state.on(Event::End("stopped".into()));
    assert_eq!(effects, [Effect::RecordIfPossible, Effect::Terminate(Some(instance))]);
    let (state, effects) = state.on(Event::Terminated);
    assert_eq!(effects, [Effect::RecordIfPossible, Effect::PublishEnded]);
    assert_eq!(state, State::Ended { reason: "stopped".into() });
}

#[test]
fn agent_connected_before_the_launch_returns_enrols_the_cell() {
    let (state, _) = State::Requested.on(Event::Ordered);
    let (state, effects) = state.on(Event::Connected);
    assert_eq!(effects, [Effect::PublishConnected]);
    let (state, effects) = state.on(Event::Launched(InstanceId("i".into())));
    assert_eq!(effects, [Effect::Record, Effect::Attach(InstanceId("i".into()))]);
    assert_eq!(state.phase(), CellPhase::Enrolled);
}

#[test]
fn end_waits_for_the_pending_launch() {
    let (state, _) = State::Requested.on(Event::Ordered);
    let (state, effects) = state.on(Event::End("stopped".into()));
    assert_eq!(effects, [Effect::RecordIfPossible]);
    let (_, effects) = state.on(Event::Launched(InstanceId("i".into())));
    assert_eq!(
        effects,
        [Effect::RecordIfPossible, Effect::Terminate(Some(InstanceId("i".into())))]
    );
}
