use proptest::prelude::*;

use super::*;

fn events() -> impl Strategy<Value = Event> {
    prop_oneof![
        Just(Event::Ordered),
        Just(Event::NotRecorded),
        Just(Event::Launched(InstanceId("i".into()))),
        Just(Event::LaunchFailed("launch failed".into())),
        Just(Event::Linked),
        Just(Event::Attached(vec![IpAddr::from([10, 0, 0, 1])])),
        Just(Event::AttachFailed("attach failed".into())),
        Just(Event::End("ended".into())),
        Just(Event::Terminated),
        Just(Event::NotTerminated),
        Just(Event::Again),
    ]
}

/// How far a life has come: no event leads back.
fn rank(state: &State) -> u8 {
    match state {
        State::Requested => 0,
        State::Launching { .. } => 1,
        State::Booting { .. } => 2,
        State::Enrolled { .. } => 3,
        State::Bound { .. } => 4,
        State::Terminating { .. } => 5,
        State::Gone { .. } => 6,
    }
}

/// Which call of the provider a state has running.
fn running(state: &State) -> bool {
    match state {
        State::Launching { .. } | State::Enrolled { .. } => true,
        State::Terminating { step, .. } => *step != Step::Pause,
        _ => false,
    }
}

proptest! {
    /// Whatever happens in whatever order.
    #[test]
    fn no_way_to_gone_but_through_terminating(events in prop::collection::vec(events(), 0..40)) {
        let mut state = State::Requested;
        for event in events {
            let before = state.clone();
            let (after, effects) = before.clone().on(event.clone());
            prop_assert!(rank(&after) >= rank(&before), "{before:?} -{event:?}-> {after:?}");
            if matches!(after, State::Gone { .. }) && before != after {
                prop_assert!(matches!(before, State::Terminating { step: Step::Asked, .. }) && event == Event::Terminated, "{before:?} -{event:?}-> {after:?}");
            }
            // Who makes or ends something at the provider has had it written down just before.
            for (at, effect) in effects.iter().enumerate() {
                if matches!(effect, Effect::Launch | Effect::Attach(_)) {
                    prop_assert_eq!(effects.get(at.wrapping_sub(1)), Some(&Effect::Record));
                }
                if matches!(effect, Effect::Terminate(_)) {
                    prop_assert_eq!(effects.get(at.wrapping_sub(1)), Some(&Effect::Note));
                }
            }
            let calls = effects.iter().filter(|effect| matches!(effect, Effect::Launch | Effect::Attach(_) | Effect::Terminate(_))).count();
            prop_assert!(calls <= 1);
            // A new call begins only where none runs: the event was the end of the one before, or
            // there was none.
            let ends_call = matches!(event, Event::Launched(_) | Event::LaunchFailed(_) | Event::Attached(_) | Event::AttachFailed(_) | Event::Terminated | Event::NotTerminated | Event::NotRecorded);
            if calls == 1 {
                prop_assert!(!running(&before) || ends_call, "{before:?} -{event:?}-> {after:?}");
            }
            if let (Some(first), Some(then)) = (before.reason(), after.reason()) {
                prop_assert_eq!(first, then, "the first reason stays");
            }
            state = after;
        }
    }

    /// The same news twice is as good as once, as far as the state goes.
    #[test]
    fn events_may_come_twice(events in prop::collection::vec(events(), 0..40)) {
        let mut state = State::Requested;
        for event in events {
            let (once, _) = state.clone().on(event.clone());
            let (twice, effects) = once.clone().on(event.clone());
            // What ends a call of the provider comes once for each call; a second "end" may cut a
            // pause short.
            let once_per_call = matches!(event, Event::NotTerminated | Event::NotRecorded | Event::Terminated);
            if !once_per_call && event != Event::End("ended".into()) && event != Event::Again {
                prop_assert_eq!(&once, &twice);
                prop_assert!(effects.iter().all(|effect| *effect == Effect::TellConnected));
            }
            state = once;
        }
    }

    /// From everywhere there is an end.
    #[test]
    fn every_cell_can_end(events in prop::collection::vec(events(), 0..40)) {
        let mut state = State::Requested;
        for event in events {
            state = state.on(event).0;
        }
        for event in [Event::End("at last".into()), Event::LaunchFailed("x".into()), Event::AttachFailed("x".into()), Event::Terminated] {
            state = state.on(event).0;
        }
        prop_assert!(matches!(state, State::Gone { .. }), "{state:?}");
    }
}

#[test]
fn the_way_of_a_cell_without_trouble() {
    let instance = InstanceId("i".into());
    let (state, effects) = State::Requested.on(Event::Ordered);
    assert_eq!(effects, [Effect::Record, Effect::Launch]);
    let (state, effects) = state.on(Event::Launched(instance.clone()));
    assert_eq!(effects, [Effect::Record]);
    let (state, effects) = state.on(Event::Linked);
    assert_eq!(effects, [Effect::TellConnected, Effect::Record, Effect::Attach(instance.clone())]);
    let (state, effects) = state.on(Event::Attached(Vec::new()));
    assert_eq!(effects, [Effect::Record, Effect::TellBound]);
    let (state, effects) = state.on(Event::End("stopped".into()));
    assert_eq!(effects, [Effect::Note, Effect::Terminate(Some(instance))]);
    let (state, effects) = state.on(Event::Terminated);
    assert_eq!(effects, [Effect::Note, Effect::TellGone]);
    assert_eq!(state, State::Gone { reason: "stopped".into() });
}

#[test]
fn a_cell_that_calls_home_before_the_provider_says_so() {
    let (state, _) = State::Requested.on(Event::Ordered);
    let (state, effects) = state.on(Event::Linked);
    assert_eq!(effects, [Effect::TellConnected]);
    let (state, effects) = state.on(Event::Launched(InstanceId("i".into())));
    assert_eq!(effects, [Effect::Record, Effect::Attach(InstanceId("i".into()))]);
    assert_eq!(state.phase(), CellPhase::Enrolled);
}

#[test]
fn an_end_waits_for_a_launch_that_runs() {
    let (state, _) = State::Requested.on(Event::Ordered);
    let (state, effects) = state.on(Event::End("stopped".into()));
    assert_eq!(effects, [Effect::Note]);
    let (_, effects) = state.on(Event::Launched(InstanceId("i".into())));
    assert_eq!(effects, [Effect::Note, Effect::Terminate(Some(InstanceId("i".into())))]);
}
