//! The state machine of a container. Pure.

use kiyot_link::channel::is_unsafe_control;
use kiyot_proto::{cri, store};

/// Longest reason or message that is kept, in bytes.
const MAX_TEXT_BYTES: usize = 16 << 10;

/// The termination of a container whose cell has reported no exit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Termination {
    /// Exit code: 137 for a killed process, 255 for an unknown end.
    pub(crate) exit_code: i32,
    /// Reason in the pod's status, a single word.
    pub(crate) reason: &'static str,
    /// Message in the pod's status.
    pub(crate) message: String,
}

impl Termination {
    pub(crate) fn cell_lost(why: &str) -> Self {
        Self {
            exit_code: 137,
            reason: "CellLost",
            message: format!("the cell that it ran in has ended: {why}"),
        }
    }

    /// Returns the termination of a container that is absent from its cell. Without a recorded
    /// start the container has failed to start, as containerd reports it.
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

    /// Returns the termination of a container that was removed for its next attempt. A start that
    /// ended meanwhile may have made it read RUNNING.
    pub(crate) fn replaced(current: &store::ContainerStatus) -> Self {
        match state(current) {
            cri::ContainerState::ContainerCreated => Self::absent(current),
            _ => Self {
                exit_code: 137,
                reason: "Error",
                message: "it was removed for its next attempt, which was created before its start \
                          was reported"
                    .to_owned(),
            },
        }
    }

    pub(crate) fn sandbox_stopped() -> Self {
        Self { exit_code: 137, reason: "Error", message: "its sandbox was stopped".to_owned() }
    }
}

pub(crate) fn state(status: &store::ContainerStatus) -> cri::ContainerState {
    cri::ContainerState::try_from(status.state).unwrap_or(cri::ContainerState::ContainerUnknown)
}

/// Returns the rank of a state. A container never goes to a lower rank.
const fn progress(state: cri::ContainerState) -> u8 {
    match state {
        cri::ContainerState::ContainerUnknown => 0,
        cri::ContainerState::ContainerCreated => 1,
        cri::ContainerState::ContainerRunning => 2,
        cri::ContainerState::ContainerExited => 3,
    }
}

/// Longest accepted lag of a cell's clock behind the node's, in nanoseconds.
const MAX_CLOCK_SKEW_NANOS: i64 = 60 * 1_000_000_000;

/// Times of a container by the node's clock. They bound the times that its cell reports: after an
/// exit in the future a kubelet never restarts the container, and after an exit long ago it
/// restarts the container without a wait.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    /// Its creation, in nanoseconds since 1970.
    pub(crate) created: i64,
    /// The receipt of the report.
    pub(crate) now: i64,
}

impl Times {
    /// Returns a start that is neither before the creation nor in the future; 0 for a container
    /// that was never started.
    fn start(self, current: i64, reported: i64, to: cri::ContainerState) -> i64 {
        let until = self.now.max(self.created);
        match reported {
            // Reported and published before.
            _ if current > 0 => current,
            ..=0 if to == cri::ContainerState::ContainerExited => 0,
            ..=0 => until,
            _ => reported.clamp(self.created, until),
        }
    }

    /// Returns an end that is neither before the start nor in the future.
    fn end(self, started: i64, reported: i64) -> i64 {
        let from = started.max(self.created).max(1);
        let until = self.now.max(from);
        if reported >= from.saturating_sub(MAX_CLOCK_SKEW_NANOS) {
            reported.clamp(from, until)
        } else {
            until
        }
    }
}

/// Returns the next status after a report of the cell; `None` without a change.
///
/// In any order of reports, an exited container stays exited, with the first exit code.
pub(crate) fn next(
    current: &store::ContainerStatus,
    reported: &cri::ContainerStatus,
    times: Times,
) -> Option<store::ContainerStatus> {
    let to = reported.state();
    if progress(to) <= progress(state(current)) {
        return None;
    }
    if to == cri::ContainerState::ContainerExited {
        return exited(current, &report(current, reported, times));
    }
    let started_unix_nanos = times.start(current.started_unix_nanos, reported.started_at, to);
    Some(store::ContainerStatus { state: to.into(), started_unix_nanos, ..current.clone() })
}

/// Returns the record of an exit that a cell reports.
pub(crate) fn report(
    current: &store::ContainerStatus,
    reported: &cri::ContainerStatus,
    times: Times,
) -> store::ReportedExit {
    let started = times.start(current.started_unix_nanos, reported.started_at, reported.state());
    store::ReportedExit {
        started_unix_nanos: started,
        finished_unix_nanos: times.end(started, reported.finished_at),
        exit_code: reported.exit_code,
        reason: bounded(&reported.reason),
        message: bounded(&reported.message),
    }
}

/// Returns the status with a reported exit, for the time until the container reads EXITED; `None`
/// if it reads EXITED already, or if an exit was reported before.
pub(crate) fn reported(
    current: &store::ContainerStatus,
    exit: &store::ReportedExit,
) -> Option<store::ContainerStatus> {
    let is_first =
        current.reported.is_none() && state(current) != cri::ContainerState::ContainerExited;
    is_first.then(|| store::ContainerStatus { reported: Some(exit.clone()), ..current.clone() })
}

/// Returns the status of an exited container, with the first exit that its cell has reported;
/// `None` if it had exited before.
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

/// Truncates a cell's text and replaces its control characters. The kubelet's own limit is lower
/// (`MaxContainerTerminationMessageLength`).
fn bounded(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_TEXT_BYTES)].replace(is_unsafe_control, " ")
}

/// Returns the status of a container that can't run on; `None` if it had exited before. An exit
/// that its cell has reported counts, even if the cell has ended.
pub(crate) fn ended(
    current: &store::ContainerStatus,
    termination: &Termination,
    times: Times,
) -> Option<store::ContainerStatus> {
    let finished = times.end(current.started_unix_nanos, times.now);
    let exit = store::ReportedExit {
        started_unix_nanos: current.started_unix_nanos,
        finished_unix_nanos: finished,
        exit_code: termination.exit_code,
        reason: termination.reason.to_owned(),
        message: termination.message.clone(),
    };
    exited(current, &exit)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Created at 5, with a report at 100.
    const TIMES: Times = Times { created: 5, now: 100 };

    fn time() -> impl Strategy<Value = i64> {
        prop_oneof![0..120_i64, any::<i64>()]
    }

    fn any_report() -> impl Strategy<Value = cri::ContainerStatus> {
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
        fn state_never_goes_back(
            reports in prop::collection::vec(any_report(), 0..20), lost_at in 0..20_usize,
        ) {
            let mut current = store::ContainerStatus { log_base: 7, ..Default::default() };
            let mut exited: Option<store::ContainerStatus> = None;
            for (n, reported) in reports.iter().enumerate() {
                let before = progress(state(&current));
                let after = if n == lost_at {
                    ended(&current, &Termination::absent(&current), TIMES)
                } else {
                    next(&current, reported, TIMES)
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
    fn reason_and_message_are_truncated() {
        let reported = cri::ContainerStatus {
            state: 2,
            message: "ü".repeat(MAX_TEXT_BYTES),
            reason: "r".repeat(1 << 20),
            ..Default::default()
        };
        let kept = next(&store::ContainerStatus::default(), &reported, TIMES).unwrap();
        assert_eq!(
            (kept.message, kept.reason.len()),
            ("ü".repeat(MAX_TEXT_BYTES / 2), MAX_TEXT_BYTES)
        );
    }

    #[test]
    fn exited_container_keeps_its_exit_code_and_times() {
        let running = next(
            &store::ContainerStatus::default(),
            &cri::ContainerStatus { state: 1, started_at: 10, ..Default::default() },
            TIMES,
        )
        .unwrap();
        let reported = cri::ContainerStatus {
            state: 2,
            started_at: 10,
            finished_at: 20,
            exit_code: 3,
            reason: "Error".to_owned(),
            ..Default::default()
        };
        let exited = next(&running, &reported, TIMES).unwrap();
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
        let exited_with = |exit_code| cri::ContainerStatus {
            state: 2,
            started_at: 10,
            finished_at: 20,
            exit_code,
            ..Default::default()
        };
        let created = store::ContainerStatus { log_base: 7, ..Default::default() };
        let kept = reported(&created, &report(&created, &exited_with(3), TIMES)).unwrap();
        assert_eq!(state(&kept), cri::ContainerState::ContainerCreated, "not EXITED yet");
        assert_eq!(
            reported(&kept, &report(&kept, &exited_with(4), TIMES)),
            None,
            "the first exit counts"
        );
        let lost = ended(&kept, &Termination::cell_lost("power"), TIMES).unwrap();
        let again = next(&kept, &exited_with(4), TIMES).unwrap();
        assert_eq!(lost, again);
        assert_eq!(
            (lost.exit_code, lost.started_unix_nanos, lost.finished_unix_nanos, lost.log_base),
            (3, 10, 20, 7)
        );
        assert_eq!((lost.reported.clone(), &*lost.reason), (None, ""));
        assert_eq!(reported(&lost, &report(&lost, &exited_with(5), TIMES)), None);
    }

    /// Verifies P14.
    #[test]
    fn reported_times_are_within_the_times_of_the_node() {
        const SECOND: i64 = 1_000_000_000;
        const HOUR: i64 = 3600 * SECOND;
        /// The last year of an i64 in nanoseconds.
        const YEAR_2262: i64 = 9_223_286_400 * SECOND;
        let created = 1_000 * HOUR;
        let at = |now| Times { created, now };
        let started = |reported, now| {
            let reported =
                cri::ContainerStatus { state: 1, started_at: reported, ..Default::default() };
            next(&store::ContainerStatus::default(), &reported, at(now)).unwrap().started_unix_nanos
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
        let finished = |reported, now| {
            let reported = cri::ContainerStatus {
                state: 2,
                started_at: reported,
                finished_at: reported,
                ..Default::default()
            };
            let exited = next(&running, &reported, at(now)).unwrap();
            assert_eq!(exited.started_unix_nanos, soon, "the published start");
            exited.finished_unix_nanos
        };
        assert_eq!(finished(soon + 5, end), soon + 5);
        assert_eq!(finished(end + 3 * SECOND, end), end);
        assert_eq!(finished(soon - 3 * SECOND, end), soon, "it exited at once");
        for wild in [i64::MIN, -1, 0, 1, HOUR, YEAR_2262, i64::MAX] {
            assert_eq!(finished(wild, end), end, "{wild}: the receipt");
        }
        // After the node's own clock was set back.
        assert_eq!(finished(HOUR, HOUR), soon);
        let never = store::ContainerStatus::default();
        let reported = cri::ContainerStatus { state: 2, finished_at: -7, ..Default::default() };
        let failed = next(&never, &reported, at(soon)).unwrap();
        assert_eq!((failed.started_unix_nanos, failed.finished_unix_nanos), (0, soon));
    }
}
