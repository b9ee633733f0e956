//! The sandboxes and containers of a standalone pod, by the read model.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use kiyot_proto::cri::ContainerState;

use super::{
    failures::Failures,
    plan::{Run, SandboxState, Unit},
};
use crate::{
    backends::milpa::{
        clock,
        pods::{Container, Pods, Sandbox},
    },
    manifest::{Pod, RestartPolicy},
};

/// Annotation of a container: its restarts since a run that lasted. A restarted daemon reads it.
const RESTARTS_IN_A_ROW: &str = "kiyot.elotl.co/restarts-in-a-row";
/// The time after which a container that ends has no failures before (the kubelet's `backOff`).
const LASTED: Duration = Duration::from_secs(600);

/// The sandboxes and containers of a pod.
#[derive(Debug, Clone, Default)]
pub(super) struct Observed {
    /// Its sandboxes, the latest last.
    pub(super) sandboxes: Vec<Sandbox>,
    /// The containers of all sandboxes.
    pub(super) containers: Vec<Container>,
}

impl Observed {
    /// Reads the pod with a uid.
    pub(super) fn of(pods: &Pods, uid: &str) -> Self {
        let sandboxes = pods.sandboxes_of_pod(uid);
        let of_sandbox = |sandbox: &Sandbox| pods.containers_of(&sandbox.id);
        let containers = sandboxes.iter().flat_map(of_sandbox).collect();
        Self { sandboxes, containers }
    }

    /// Returns true if nothing has changed that matters to the plan.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let sandbox = |sandbox: &Sandbox| (sandbox.id.clone(), sandbox.ready);
        let container = |container: &Container| (container.id.clone(), container.state());
        self.sandboxes.iter().map(sandbox).eq(other.sandboxes.iter().map(sandbox))
            && self.containers.iter().map(container).eq(other.containers.iter().map(container))
    }

    /// Returns the current sandbox.
    pub(super) fn sandbox(&self) -> Option<(&Sandbox, SandboxState)> {
        let latest = self.sandboxes.last()?;
        let attempt = latest.item().metadata.unwrap_or_default().attempt;
        Some((latest, SandboxState { attempt, is_ready: latest.ready }))
    }

    /// Returns the latest container of a name in the current sandbox.
    pub(super) fn latest(&self, name: &str) -> Option<&Container> {
        let sandbox = &self.sandboxes.last()?.id;
        let is_of = |container: &&Container| container.sandbox == *sandbox && is(container, name);
        self.containers.iter().filter(is_of).max_by_key(|container| container.sequence)
    }

    /// Returns the annotation of the next container of a name, by which its pauses go on. A new
    /// sandbox is no restart of its containers.
    pub(super) fn next_annotation(&self, name: &str) -> (String, String) {
        let of_earlier = || {
            let all = self.containers.iter().filter(|container| is(container, name));
            all.max_by_key(|container| container.sequence).map_or(0, restarts_in_a_row)
        };
        let restarts = match self.latest(name) {
            Some(latest) => restarts_in_a_row(latest).saturating_add(1),
            None => of_earlier(),
        };
        (RESTARTS_IN_A_ROW.to_owned(), restarts.to_string())
    }

    /// Returns the attempt of the next container of a name, also after those of earlier sandboxes:
    /// the name of its log has it.
    pub(super) fn next_attempt(&self, name: &str) -> u32 {
        let attempt = |container: &Container| {
            container.item().metadata.map_or(0, |metadata| metadata.attempt.saturating_add(1))
        };
        self.containers
            .iter()
            .filter(|container| is(container, name))
            .map(attempt)
            .max()
            .unwrap_or(0)
    }

    /// Returns the containers that have ended but for the latest of each name, whose log an
    /// operator wants to read, as the kubelet keeps it (`MaxPerPodContainer`).
    pub(super) fn dead(&self) -> Vec<&Container> {
        let mut kept: HashMap<String, &Container> = HashMap::new();
        let mut dead = Vec::new();
        for container in self.containers.iter().filter(|container| container.exited()) {
            let name = container.item().metadata.unwrap_or_default().name;
            match kept.get(&name) {
                Some(latest) if container.sequence < latest.sequence => dead.push(container),
                _ => dead.extend(kept.insert(name, container)),
            }
        }
        dead
    }

    /// Returns true if a container runs, or has ended at a time or later, in nanoseconds since
    /// 1970.
    pub(super) fn has_run_at(&self, time: i64) -> bool {
        let has_run = |container: &Container| {
            !container.exited() || container.status.finished_unix_nanos >= time
        };
        self.containers.iter().any(has_run)
    }

    /// Returns the containers of a pod's spec with their latest runs.
    pub(super) fn units(&self, pod: &Pod, failures: &Failures) -> Vec<Unit> {
        let now = Instant::now();
        let first_main = pod.init_containers.len();
        let unit = |(index, container): (usize, &crate::manifest::Container)| {
            let latest = self.latest(&container.name);
            Unit {
                restarts: match container.always_restarts {
                    true => RestartPolicy::Always,
                    false => pod.restart_policy,
                },
                is_init: index < first_main,
                is_sidecar: index < first_main && container.always_restarts,
                latest: latest.map(run),
                restarts_in_a_row: latest.map_or(0, restarts_in_a_row),
                retry_in: failures.left(Some(&container.name), now),
            }
        };
        pod.all_containers().enumerate().map(unit).collect()
    }
}

/// Returns the restarts of a container since a run that lasted.
fn restarts_in_a_row(container: &Container) -> u32 {
    let status = &container.status;
    let ran = status.finished_unix_nanos.saturating_sub(status.started_unix_nanos);
    if container.exited() && nanos(ran) >= LASTED {
        return 0;
    }
    let config = container.meta().config.unwrap_or_default();
    let recorded = config.annotations.get(RESTARTS_IN_A_ROW);
    recorded.and_then(|restarts| restarts.parse().ok()).unwrap_or(0)
}

/// Returns true for a container of a name.
fn is(container: &Container, name: &str) -> bool {
    container.item().metadata.is_some_and(|metadata| metadata.name == name)
}

fn run(container: &Container) -> Run {
    match container.state() {
        ContainerState::ContainerRunning => Run::Running,
        ContainerState::ContainerExited => Run::Exited {
            code: container.status.exit_code,
            since: nanos(clock::now().saturating_sub(container.status.finished_unix_nanos)),
        },
        // A container whose state is unknown is started: it may have been already, which is an
        // error that names it.
        ContainerState::ContainerCreated | ContainerState::ContainerUnknown => Run::Created,
    }
}

fn nanos(nanos: i64) -> Duration {
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(0))
}
