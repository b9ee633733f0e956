//! How a container's state changes by what its cell says. Pure.

use kiyot_link::channel::is_unsafe_control;
use kiyot_proto::{cri, store};

/// The longest reason or message that is kept, in bytes.
const TEXT: usize = 16 << 10;

/// Why a container is said to have ended, and with what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Termination {
    /// As a process that was killed: 137; of something unknown: 255.
    pub(crate) exit_code: i32,
    /// One word, in the pod's status.
    pub(crate) reason: &'static str,
    /// What happened, for a human.
    pub(crate) message: String,
}

impl Termination {
    /// Its cell has ended by itself.
    pub(crate) fn cell_lost(why: &str) -> Self {
        Self {
            exit_code: 137,
            reason: "CellLost",
            message: format!("the cell that it ran in is gone: {why}"),
        }
    }

    /// Its cell does not know it any more. One that was not known to run is said to have failed to
    /// start, as containerd says it.
    pub(crate) fn absent(current: &store::ContainerStatus) -> Self {
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
    pub(crate) fn sandbox_stopped() -> Self {
        Self { exit_code: 137, reason: "Error", message: "its sandbox was stopped".to_owned() }
    }
}

/// The state of a status.
pub(crate) fn state(status: &store::ContainerStatus) -> cri::ContainerState {
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

/// Nanoseconds that a cell's clock may be behind the node's for the times that it tells to be taken
/// for times of now.
const SKEW: i64 = 60 * 1_000_000_000;

/// Times of a container by the node's clock. Times that a cell tells are kept where they fit into
/// them: a kubelet that finds an end in the future waits for ever before it starts a container
/// again, and with one long ago it does not wait at all.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    /// When it was created, in nanoseconds since 1970.
    pub(crate) created: i64,
    /// When the cell says it.
    pub(crate) now: i64,
}

impl Times {
    /// Returns a start that is neither before the creation nor in the future; 0 for a container
    /// that was never started.
    fn start(self, current: i64, told: i64, to: cri::ContainerState) -> i64 {
        let until = self.now.max(self.created);
        match told {
            // Told before, and answered since.
            _ if current > 0 => current,
            ..=0 if to == cri::ContainerState::ContainerExited => 0,
            ..=0 => until,
            _ => told.clamp(self.created, until),
        }
    }

    /// Returns an end that is neither before the start nor in the future.
    fn end(self, started: i64, told: i64) -> i64 {
        let from = started.max(self.created).max(1);
        let until = self.now.max(from);
        if told >= from.saturating_sub(SKEW) { told.clamp(from, until) } else { until }
    }
}

/// What becomes of a status when the cell says this of the container; `None` if nothing.
///
/// Whatever the order in which news come, a container that has exited stays so, with the exit code
/// that came first.
pub(crate) fn next(
    current: &store::ContainerStatus,
    told: &cri::ContainerStatus,
    times: Times,
) -> Option<store::ContainerStatus> {
    let to = told.state();
    if progress(to) <= progress(state(current)) {
        return None;
    }
    if to == cri::ContainerState::ContainerExited {
        return exited(current, &report(current, told, times));
    }
    let started_unix_nanos = times.start(current.started_unix_nanos, told.started_at, to);
    Some(store::ContainerStatus { state: to.into(), started_unix_nanos, ..current.clone() })
}

/// Returns what is kept of an exit that a cell tells.
pub(crate) fn report(
    current: &store::ContainerStatus,
    told: &cri::ContainerStatus,
    times: Times,
) -> store::ReportedExit {
    let started = times.start(current.started_unix_nanos, told.started_at, told.state());
    store::ReportedExit {
        started_unix_nanos: started,
        finished_unix_nanos: times.end(started, told.finished_at),
        exit_code: told.exit_code,
        reason: bounded(&told.reason),
        message: bounded(&told.message),
    }
}

/// Returns a status that keeps a reported exit until the container reads EXITED; `None` if it does,
/// or if another one was reported before.
pub(crate) fn reported(
    current: &store::ContainerStatus,
    exit: &store::ReportedExit,
) -> Option<store::ContainerStatus> {
    let is_first =
        current.reported.is_none() && state(current) != cri::ContainerState::ContainerExited;
    is_first.then(|| store::ContainerStatus { reported: Some(exit.clone()), ..current.clone() })
}

/// Returns the status of a container that has exited as its cell said, the first time it did;
/// `None` if it had ended before.
pub(crate) fn exited(
    current: &store::ContainerStatus,
    exit: &store::ReportedExit,
) -> Option<store::ContainerStatus> {
    if state(current) == cri::ContainerState::ContainerExited {
        return None;
    }
    let exit = current.reported.as_ref().unwrap_or(exit);
    let started = match current.started_unix_nanos {
        0 => exit.started_unix_nanos,
        started => started,
    };
    Some(store::ContainerStatus {
        state: cri::ContainerState::ContainerExited.into(),
        started_unix_nanos: started,
        finished_unix_nanos: exit.finished_unix_nanos.max(started),
        exit_code: exit.exit_code,
        reason: exit.reason.clone(),
        message: exit.message.clone(),
        reported: None,
        ..current.clone()
    })
}

/// Returns as much of what a cell says as is kept, without control characters. The kubelet takes
/// less of it (`MaxContainerTerminationMessageLength`).
fn bounded(text: &str) -> String {
    text[..text.floor_char_boundary(TEXT)].replace(is_unsafe_control, " ")
}

/// Returns the status of a container that can't have gone on; `None` if it had ended before. An
/// exit that its cell has reported is how it ended, whatever has become of the cell.
pub(crate) fn ended(
    current: &store::ContainerStatus,
    end: &Termination,
    times: Times,
) -> Option<store::ContainerStatus> {
    let finished = times.end(current.started_unix_nanos, times.now);
    let exit = store::ReportedExit {
        started_unix_nanos: current.started_unix_nanos,
        finished_unix_nanos: finished,
        exit_code: end.exit_code,
        reason: end.reason.to_owned(),
        message: end.message.clone(),
    };
    exited(current, &exit)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Created at 5, and told of at 100.
    const TIMES: Times = Times { created: 5, now: 100 };

    fn time() -> impl Strategy<Value = i64> {
        prop_oneof![0..120_i64, any::<i64>()]
    }

    fn told() -> impl Strategy<Value = cri::ContainerStatus> {
        (0..5_i32, time(), time(), 0..3_i32).prop_map(
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
        /// Verifies Y86.
        #[test]
        fn a_container_never_goes_back(news in prop::collection::vec(told(), 0..20), lost_at in 0..20_usize) {
            let mut current = store::ContainerStatus { log_base: 7, ..Default::default() };
            let mut exited: Option<store::ContainerStatus> = None;
            for (n, told) in news.iter().enumerate() {
                let before = progress(state(&current));
                let after = if n == lost_at {
                    ended(&current, &Termination::absent(&current), TIMES)
                } else {
                    next(&current, told, TIMES)
                };
                if let Some(next) = after {
                    prop_assert!(progress(state(&next)) > before);
                    let (started, finished) = (next.started_unix_nanos, next.finished_unix_nanos);
                    prop_assert!(started == 0 || (5..=100).contains(&started));
                    prop_assert!(finished == 0 || (started.max(5)..=100).contains(&finished));
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
        let kept = next(&store::ContainerStatus::default(), &told, TIMES).unwrap();
        assert_eq!((kept.message, kept.reason.len()), ("ü".repeat(TEXT / 2), TEXT));
    }

    #[test]
    fn one_that_exits_has_its_exit_code_and_an_end() {
        let running = next(
            &store::ContainerStatus::default(),
            &cri::ContainerStatus { state: 1, started_at: 10, ..Default::default() },
            TIMES,
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
        let exited = next(&running, &told, TIMES).unwrap();
        assert_eq!(
            (
                exited.started_unix_nanos,
                exited.finished_unix_nanos,
                exited.exit_code,
                &*exited.reason
            ),
            (10, 20, 3, "Error")
        );
        assert_eq!(ended(&exited, &Termination::cell_lost("power"), TIMES), None);
        assert_eq!(
            ended(&running, &Termination::cell_lost("power"), TIMES).unwrap().exit_code,
            137
        );
        assert_eq!(
            ended(&running, &Termination::absent(&running), TIMES).unwrap().reason,
            "ContainerGone"
        );
        let created = store::ContainerStatus::default();
        assert_eq!(
            ended(&created, &Termination::absent(&created), TIMES).unwrap().reason,
            "StartError"
        );
    }

    /// Verifies P13.
    #[test]
    fn reported_exit_is_kept_whatever_ends_the_container() {
        let told = |exit_code| cri::ContainerStatus {
            state: 2,
            started_at: 10,
            finished_at: 20,
            exit_code,
            ..Default::default()
        };
        let created = store::ContainerStatus { log_base: 7, ..Default::default() };
        let kept = reported(&created, &report(&created, &told(3), TIMES)).unwrap();
        assert_eq!(state(&kept), cri::ContainerState::ContainerCreated, "it does not read so yet");
        assert_eq!(reported(&kept, &report(&kept, &told(4), TIMES)), None, "the first counts");
        let lost = ended(&kept, &Termination::cell_lost("power"), TIMES).unwrap();
        let again = next(&kept, &told(4), TIMES).unwrap();
        assert_eq!(lost, again);
        assert_eq!(
            (lost.exit_code, lost.started_unix_nanos, lost.finished_unix_nanos, lost.log_base),
            (3, 10, 20, 7)
        );
        assert_eq!((lost.reported.clone(), &*lost.reason), (None, ""));
        assert_eq!(reported(&lost, &report(&lost, &told(5), TIMES)), None);
    }

    /// Verifies P14.
    #[test]
    fn times_of_a_cell_are_within_what_the_node_saw() {
        const SECOND: i64 = 1_000_000_000;
        const HOUR: i64 = 3600 * SECOND;
        /// The last year of i64, which ends before 9999 does.
        const YEAR_2262: i64 = 9_223_286_400 * SECOND;
        let created = 1_000 * HOUR;
        let at = |now| Times { created, now };
        let started = |told, now| {
            let told = cri::ContainerStatus { state: 1, started_at: told, ..Default::default() };
            next(&store::ContainerStatus::default(), &told, at(now)).unwrap().started_unix_nanos
        };
        let (soon, end) = (created + SECOND, created + HOUR);
        // A clock that is right, or a few seconds off.
        assert_eq!(started(created + 7, soon), created + 7);
        assert_eq!(started(soon + 3 * SECOND, soon), soon);
        assert_eq!(started(created - 3 * SECOND, soon), created);
        for wild in [i64::MIN, -1, 0, 1, HOUR, YEAR_2262, i64::MAX] {
            assert!((created..=soon).contains(&started(wild, soon)), "{wild}");
        }
        let running = store::ContainerStatus {
            state: cri::ContainerState::ContainerRunning.into(),
            started_unix_nanos: soon,
            ..Default::default()
        };
        let finished = |told, now| {
            let told = cri::ContainerStatus {
                state: 2,
                started_at: told,
                finished_at: told,
                ..Default::default()
            };
            let exited = next(&running, &told, at(now)).unwrap();
            assert_eq!(exited.started_unix_nanos, soon, "as it was answered");
            exited.finished_unix_nanos
        };
        assert_eq!(finished(soon + 5, end), soon + 5);
        assert_eq!(finished(end + 3 * SECOND, end), end);
        assert_eq!(finished(soon - 3 * SECOND, end), soon, "it ended at once");
        for wild in [i64::MIN, -1, 0, 1, HOUR, YEAR_2262, i64::MAX] {
            assert_eq!(finished(wild, end), end, "{wild}: when it was told");
        }
        // The node's own clock was set back.
        assert_eq!(finished(HOUR, HOUR), soon);
        let never = store::ContainerStatus::default();
        let told = cri::ContainerStatus { state: 2, finished_at: -7, ..Default::default() };
        let failed = next(&never, &told, at(soon)).unwrap();
        assert_eq!((failed.started_unix_nanos, failed.finished_unix_nanos), (0, soon));
    }
}
