//! How a container's state changes by what its cell says. Pure.

use kiyot_link::channel::is_no_word;
use kiyot_proto::{cri, store};

/// The longest reason or message that is kept, in bytes.
const TEXT: usize = 16 << 10;

/// Why a container is said to have ended, and with what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct End {
    /// As a process that was killed: 137; of something unknown: 255.
    pub(super) exit_code: i32,
    /// One word, in the pod's status.
    pub(super) reason: &'static str,
    /// What happened, for a human.
    pub(super) message: String,
}

impl End {
    /// Its cell has ended by itself.
    pub(super) fn cell_lost(why: &str) -> Self {
        Self {
            exit_code: 137,
            reason: "CellLost",
            message: format!("the cell that it ran in is gone: {why}"),
        }
    }

    /// Its cell does not know it any more. One that was not known to run is said to have failed to
    /// start, as containerd says it.
    pub(super) fn gone(current: &store::ContainerStatus) -> Self {
        match state(current) {
            cri::ContainerState::ContainerCreated => Self {
                exit_code: 128,
                reason: "StartError",
                message: "it was removed from its cell before it was started".to_owned(),
            },
            _ => Self {
                exit_code: 255,
                reason: "ContainerGone",
                message: "its cell does not know it any more".to_owned(),
            },
        }
    }

    /// Its sandbox was stopped, and it had not ended before.
    pub(super) fn sandbox_stopped() -> Self {
        Self { exit_code: 137, reason: "Error", message: "its sandbox was stopped".to_owned() }
    }
}

/// The state of a status.
pub(super) fn state(status: &store::ContainerStatus) -> cri::ContainerState {
    cri::ContainerState::try_from(status.state).unwrap_or(cri::ContainerState::ContainerUnknown)
}

/// How far a container has come: it never goes back.
const fn progress(state: cri::ContainerState) -> u8 {
    match state {
        cri::ContainerState::ContainerUnknown => 0,
        cri::ContainerState::ContainerCreated => 1,
        cri::ContainerState::ContainerRunning => 2,
        cri::ContainerState::ContainerExited => 3,
    }
}

/// What becomes of a status when the cell says this of the container; `None` if nothing.
///
/// Whatever the order in which news come, a container that has exited stays so, with the exit code
/// that came first.
pub(super) fn seen(
    current: &store::ContainerStatus,
    told: &cri::ContainerStatus,
) -> Option<store::ContainerStatus> {
    let to = told.state();
    if progress(to) <= progress(state(current)) {
        return None;
    }
    let started = if told.started_at > 0 { told.started_at } else { current.started_unix_nanos };
    let mut next =
        store::ContainerStatus { state: to.into(), started_unix_nanos: started, ..current.clone() };
    if to == cri::ContainerState::ContainerExited {
        next.finished_unix_nanos = told.finished_at.max(started).max(1);
        next.exit_code = told.exit_code;
        next.reason = bounded(&told.reason);
        next.message = bounded(&told.message);
    }
    Some(next)
}

/// Returns as much of what a cell says as is kept, without control characters. The kubelet takes
/// less of it (`MaxContainerTerminationMessageLength`).
fn bounded(text: &str) -> String {
    text[..text.floor_char_boundary(TEXT)].replace(is_no_word, " ")
}

/// What becomes of a status when the container can't have gone on; `None` if it had ended before.
pub(super) fn ended(
    current: &store::ContainerStatus,
    end: &End,
    now: i64,
) -> Option<store::ContainerStatus> {
    if state(current) == cri::ContainerState::ContainerExited {
        return None;
    }
    Some(store::ContainerStatus {
        state: cri::ContainerState::ContainerExited.into(),
        finished_unix_nanos: now.max(current.started_unix_nanos),
        exit_code: end.exit_code,
        reason: end.reason.to_owned(),
        message: end.message.clone(),
        ..current.clone()
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn told() -> impl Strategy<Value = cri::ContainerStatus> {
        (0..5_i32, 0..100_i64, 0..100_i64, 0..3_i32).prop_map(
            |(state, started_at, finished_at, exit_code)| cri::ContainerStatus {
                state,
                started_at,
                finished_at,
                exit_code,
                reason: format!("reason {exit_code}"),
                ..Default::default()
            },
        )
    }

    proptest! {
        #[test]
        fn a_container_never_goes_back(news in prop::collection::vec(told(), 0..20), lost_at in 0..20_usize) {
            let mut current = store::ContainerStatus { log_base: 7, ..Default::default() };
            let mut exited: Option<store::ContainerStatus> = None;
            for (n, told) in news.iter().enumerate() {
                let before = progress(state(&current));
                let next = if n == lost_at { ended(&current, &End::gone(&current), 50) } else { seen(&current, told) };
                if let Some(next) = next {
                    prop_assert!(progress(state(&next)) > before);
                    prop_assert!(next.finished_unix_nanos == 0 || next.finished_unix_nanos >= next.started_unix_nanos);
                    prop_assert_eq!(next.log_base, 7);
                    current = next;
                }
                if let Some(exited) = &exited {
                    prop_assert_eq!(exited, &current);
                }
                if state(&current) == cri::ContainerState::ContainerExited {
                    exited = Some(current.clone());
                }
            }
        }
    }

    #[test]
    fn what_a_cell_says_is_kept_to_a_bound() {
        let told = cri::ContainerStatus {
            state: 2,
            message: "ü".repeat(TEXT),
            reason: "r".repeat(1 << 20),
            ..Default::default()
        };
        let kept = seen(&store::ContainerStatus::default(), &told).unwrap();
        assert_eq!((kept.message, kept.reason.len()), ("ü".repeat(TEXT / 2), TEXT));
    }

    #[test]
    fn one_that_exits_has_its_exit_code_and_an_end() {
        let running = seen(
            &store::ContainerStatus::default(),
            &cri::ContainerStatus { state: 1, started_at: 10, ..Default::default() },
        )
        .unwrap();
        let told = cri::ContainerStatus {
            state: 2,
            started_at: 10,
            finished_at: 20,
            exit_code: 3,
            reason: "Error".to_owned(),
            ..Default::default()
        };
        let exited = seen(&running, &told).unwrap();
        assert_eq!(
            (
                exited.started_unix_nanos,
                exited.finished_unix_nanos,
                exited.exit_code,
                &*exited.reason
            ),
            (10, 20, 3, "Error")
        );
        assert_eq!(ended(&exited, &End::cell_lost("power"), 30), None);
        assert_eq!(ended(&running, &End::cell_lost("power"), 30).unwrap().exit_code, 137);
        assert_eq!(ended(&running, &End::gone(&running), 30).unwrap().reason, "ContainerGone");
        let created = store::ContainerStatus::default();
        assert_eq!(ended(&created, &End::gone(&created), 30).unwrap().reason, "StartError");
    }
}
