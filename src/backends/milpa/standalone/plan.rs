//! The next step of a standalone pod, a pure function of its spec and of what runs. It decides as
//! `computePodActions` of pkg/kubelet/kuberuntime/kuberuntime_manager.go does.

use std::time::Duration;

use crate::{backoff::doubled, manifest::RestartPolicy};

/// The pause before the second restart, which doubles (`containerBackOffPeriod` of the kubelet).
const FIRST_PAUSE: Duration = Duration::from_secs(10);
/// The longest pause (`MaxContainerBackOff`).
const MAX_PAUSE: Duration = Duration::from_secs(300);

/// A container of the pod's spec with its latest run in the current sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unit {
    /// When it restarts: `Always` for a sidecar.
    pub(super) restarts: RestartPolicy,
    /// True for an init container, sidecars included.
    pub(super) is_init: bool,
    /// True for a sidecar: an init container that does not have to exit.
    pub(super) is_sidecar: bool,
    /// Its latest run; `None` before the first in the sandbox.
    pub(super) latest: Option<Run>,
    /// The restarts since a run that lasted.
    pub(super) restarts_in_a_row: u32,
    /// The rest of the pause after a step of it that failed.
    pub(super) retry_in: Duration,
}

/// The run of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Run {
    /// Created, and not started.
    Created,
    /// Started, and not ended.
    Running,
    /// Ended.
    Exited {
        /// The exit code.
        code: i32,
        /// The time since its end.
        since: Duration,
    },
}

/// The current sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SandboxState {
    /// Its `metadata.attempt`.
    pub(super) attempt: u32,
    /// False after its end.
    pub(super) is_ready: bool,
}

/// A step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Run a sandbox with this attempt.
    RunSandbox(u32),
    /// Create a container, by its index.
    Create(usize),
    /// Start a container that was created.
    Start(usize),
    /// Wait for a change, or for this time.
    Wait(Option<Duration>),
    /// All containers have ended for good: stop the sandbox.
    Complete,
}

/// Returns the next step.
pub(super) fn next(sandbox: Option<SandboxState>, policy: RestartPolicy, units: &[Unit]) -> Step {
    let Some(sandbox) = sandbox else { return Step::RunSandbox(0) };
    let main = || units.iter().filter(|unit| !unit.is_init);
    let has_ended = main().all(Unit::has_ended) || units.iter().any(Unit::has_failed_init);
    if !sandbox.is_ready {
        // Without restarts a pod whose containers were lost has failed.
        let has_begun = units.iter().any(|unit| unit.latest.is_some());
        return if has_ended || policy == RestartPolicy::Never && has_begun {
            Step::Complete
        } else {
            Step::RunSandbox(sandbox.attempt.saturating_add(1))
        };
    }
    if has_ended {
        return Step::Complete;
    }
    let is_initialized = main().any(|unit| unit.latest.is_some());
    let mut pause: Option<Duration> = None;
    for (index, unit) in units.iter().enumerate() {
        let must_exit = unit.is_init && !unit.is_sidecar;
        let (step, left) = match unit.latest {
            // Init containers of a pod whose containers were created are done.
            _ if must_exit && is_initialized => continue,
            None => (Step::Create(index), Duration::ZERO),
            Some(Run::Created) => (Step::Start(index), Duration::ZERO),
            Some(Run::Running) if must_exit => return Step::Wait(pause),
            Some(Run::Running) => continue,
            Some(Run::Exited { .. }) if unit.has_ended() => continue,
            Some(Run::Exited { since, .. }) => {
                (Step::Create(index), unit.pause().saturating_sub(since))
            }
        };
        let left = left.max(unit.retry_in);
        if left.is_zero() {
            return step;
        }
        pause = Some(pause.map_or(left, |pause| pause.min(left)));
        // The next containers wait for an init container, but not for each other.
        if unit.is_init && !is_initialized {
            return Step::Wait(pause);
        }
    }
    Step::Wait(pause)
}

impl Unit {
    /// Returns true if it has exited and does not restart.
    fn has_ended(&self) -> bool {
        match self.latest {
            Some(Run::Exited { code, .. }) => match self.restarts {
                RestartPolicy::Always => self.is_init && !self.is_sidecar && code == 0,
                RestartPolicy::OnFailure => code == 0,
                RestartPolicy::Never => true,
            },
            _ => false,
        }
    }

    /// Returns true for an init container that has failed for good.
    fn has_failed_init(&self) -> bool {
        let failed = matches!(self.latest, Some(Run::Exited { code, .. }) if code != 0);
        self.is_init && failed && self.has_ended()
    }

    /// Returns the pause between its end and its restart.
    fn pause(&self) -> Duration {
        match self.restarts_in_a_row {
            0 => Duration::ZERO,
            restarts => doubled(FIRST_PAUSE, restarts - 1, MAX_PAUSE),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const READY: Option<SandboxState> = Some(SandboxState { attempt: 0, is_ready: true });
    const ENDED: Option<SandboxState> = Some(SandboxState { attempt: 3, is_ready: false });

    fn exited(code: i32, seconds: u64) -> Option<Run> {
        Some(Run::Exited { code, since: Duration::from_secs(seconds) })
    }

    fn main_unit(restarts: RestartPolicy, latest: Option<Run>) -> Unit {
        let (is_init, is_sidecar) = (false, false);
        let (restarts_in_a_row, retry_in) = (0, Duration::ZERO);
        Unit { restarts, is_init, is_sidecar, latest, restarts_in_a_row, retry_in }
    }

    fn init(restarts: RestartPolicy, latest: Option<Run>) -> Unit {
        Unit { is_init: true, ..main_unit(restarts, latest) }
    }

    fn sidecar(latest: Option<Run>) -> Unit {
        Unit { is_sidecar: true, ..init(RestartPolicy::Always, latest) }
    }

    #[test]
    fn pod_without_restarts_runs_its_containers_in_order_and_completes() {
        use RestartPolicy::Never;
        assert_eq!(next(None, Never, &[main_unit(Never, None)]), Step::RunSandbox(0));
        for (units, step) in [
            ([init(Never, None), main_unit(Never, None)], Step::Create(0)),
            ([init(Never, Some(Run::Created)), main_unit(Never, None)], Step::Start(0)),
            ([init(Never, Some(Run::Running)), main_unit(Never, None)], Step::Wait(None)),
            ([init(Never, exited(0, 0)), main_unit(Never, None)], Step::Create(1)),
            ([init(Never, exited(1, 0)), main_unit(Never, None)], Step::Complete),
            ([init(Never, exited(0, 0)), main_unit(Never, Some(Run::Running))], Step::Wait(None)),
            ([init(Never, exited(0, 0)), main_unit(Never, exited(1, 0))], Step::Complete),
        ] {
            assert_eq!(next(READY, Never, &units), step, "{units:?}");
        }
    }

    #[test]
    fn sidecar_starts_before_the_next_container_and_does_not_keep_the_pod() {
        use RestartPolicy::Never;
        for (units, step) in [
            ([sidecar(Some(Run::Created)), main_unit(Never, None)], Step::Start(0)),
            ([sidecar(Some(Run::Running)), main_unit(Never, None)], Step::Create(1)),
            ([sidecar(exited(1, 0)), main_unit(Never, Some(Run::Running))], Step::Create(0)),
            // The pod is complete though its sidecar runs.
            ([sidecar(Some(Run::Running)), main_unit(Never, exited(0, 0))], Step::Complete),
        ] {
            assert_eq!(next(READY, Never, &units), step, "{units:?}");
        }
    }

    #[test]
    fn restarts_wait_longer_after_each_failure() {
        use RestartPolicy::{Always, OnFailure};
        for (restarts, seconds) in [(1, 10), (2, 20), (5, 160), (6, 300), (40, 300)] {
            let unit =
                |since| Unit { restarts_in_a_row: restarts, ..main_unit(Always, exited(0, since)) };
            let left = Duration::from_secs(1);
            assert_eq!(next(READY, Always, &[unit(seconds - 1)]), Step::Wait(Some(left)));
            assert_eq!(next(READY, Always, &[unit(seconds)]), Step::Create(0));
        }
        assert_eq!(next(READY, Always, &[main_unit(Always, exited(0, 0))]), Step::Create(0));
        assert_eq!(next(READY, OnFailure, &[main_unit(OnFailure, exited(0, 0))]), Step::Complete);
    }

    #[test]
    fn container_that_fails_keeps_no_other_from_its_start_or_restart() {
        use RestartPolicy::Always;
        let pause = Duration::from_secs(30);
        let failed = |unit| Unit { retry_in: pause, ..unit };
        let bad = failed(main_unit(Always, None));
        let running = main_unit(Always, Some(Run::Running));
        for (units, step) in [
            (vec![bad.clone(), main_unit(Always, None)], Step::Create(1)),
            (vec![bad.clone(), main_unit(Always, Some(Run::Created))], Step::Start(1)),
            (vec![bad.clone(), main_unit(Always, exited(1, 0))], Step::Create(1)),
            (vec![bad.clone(), running.clone()], Step::Wait(Some(pause))),
            (vec![failed(main_unit(Always, Some(Run::Created))), running], Step::Wait(Some(pause))),
            // An init container is waited for.
            (vec![failed(init(Always, None)), main_unit(Always, None)], Step::Wait(Some(pause))),
        ] {
            assert_eq!(next(READY, Always, &units), step, "{units:?}");
        }
    }

    #[test]
    fn lost_sandbox_is_replaced_unless_the_pod_is_complete_or_never_restarts() {
        use RestartPolicy::{Always, Never, OnFailure};
        for (policy, latest, step) in [
            (Always, exited(137, 0), Step::RunSandbox(4)),
            (OnFailure, exited(137, 0), Step::RunSandbox(4)),
            (OnFailure, exited(0, 0), Step::Complete),
            (Never, exited(137, 0), Step::Complete),
            (Never, None, Step::RunSandbox(4)),
        ] {
            assert_eq!(next(ENDED, policy, &[main_unit(policy, latest)]), step, "{policy:?}");
        }
    }

    fn any_unit() -> impl Strategy<Value = Unit> {
        let policy = prop_oneof![
            Just(RestartPolicy::Always),
            Just(RestartPolicy::OnFailure),
            Just(RestartPolicy::Never)
        ];
        let run = prop_oneof![
            Just(None),
            Just(Some(Run::Created)),
            Just(Some(Run::Running)),
            (0..3_i32, 0..400_u64).prop_map(|(code, seconds)| exited(code, seconds)),
        ];
        (policy, any::<bool>(), any::<bool>(), run, 0..12_u32).prop_map(
            |(restarts, is_init, is_sidecar, latest, restarts_in_a_row)| {
                let is_sidecar = is_init && is_sidecar;
                let restarts = if is_sidecar { RestartPolicy::Always } else { restarts };
                let retry_in = Duration::ZERO;
                Unit { restarts, is_init, is_sidecar, latest, restarts_in_a_row, retry_in }
            },
        )
    }

    proptest! {
        /// A running container is neither created nor started again, and a wait with containers
        /// that have exited has an end.
        #[test]
        fn step_of_any_pod_is_possible(units in prop::collection::vec(any_unit(), 1..6)) {
            match next(READY, RestartPolicy::Always, &units) {
                Step::Create(index) => prop_assert!(!matches!(
                    units[index].latest,
                    Some(Run::Running | Run::Created)
                )),
                Step::Start(index) => prop_assert_eq!(units[index].latest, Some(Run::Created)),
                Step::Wait(None) => prop_assert!(
                    units.iter().any(|unit| unit.latest == Some(Run::Running)),
                    "waits for a change that can't come"
                ),
                Step::Wait(Some(pause)) => prop_assert!(pause <= MAX_PAUSE),
                Step::RunSandbox(_) => prop_assert!(false, "the sandbox is ready"),
                Step::Complete => {}
            }
        }
    }
}
