//! Units: the containers of a pod by name.

use std::collections::HashMap;

use kiyot_proto::{admin, cri, store};

use crate::backends::milpa::{pods::Container, standalone::Shape};

/// Annotation with the container that kubectl takes without a name.
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";

/// Returns the annotations of a pod, which may have changed since its sandbox was made.
pub(super) fn annotations(
    first: HashMap<String, String>,
    current: HashMap<String, String>,
) -> HashMap<String, String> {
    if current.is_empty() { first } else { current }
}

/// A unit of a pod.
#[derive(Debug, Clone)]
pub(super) struct Unit {
    pub(super) name: String,
    /// Its latest container.
    pub(super) latest: Container,
    /// True for an init container; false if it is not known.
    pub(super) is_init: bool,
    first_sequence: u64,
    first_created: i64,
}

impl Unit {
    /// Returns the units of containers. The order is that of the spec for a standalone pod, whose
    /// shape is known, and else that of the earliest containers that are left.
    pub(super) fn all(containers: Vec<Container>, shape: Option<&Shape>) -> Vec<Self> {
        let mut by_name: HashMap<String, Self> = HashMap::new();
        for container in containers {
            let name = container.item().metadata.unwrap_or_default().name;
            let (sequence, created) = (container.sequence, container.meta().created_unix_nanos);
            let Some(unit) = by_name.get_mut(&name) else {
                let unit = Self {
                    name: name.clone(),
                    latest: container,
                    is_init: false,
                    first_sequence: sequence,
                    first_created: created,
                };
                by_name.insert(name, unit);
                continue;
            };
            if sequence < unit.first_sequence {
                (unit.first_sequence, unit.first_created) = (sequence, created);
            }
            if sequence > unit.latest.sequence {
                unit.latest = container;
            }
        }
        let mut units: Vec<Self> = by_name.into_values().collect();
        units.sort_by_key(|unit| unit.first_sequence);
        if let Some(shape) = shape {
            let place = |unit: &Self| shape.containers.iter().position(|name| *name == unit.name);
            units.sort_by_key(|unit| place(unit).unwrap_or(usize::MAX));
            for unit in &mut units {
                unit.is_init = place(unit).is_some_and(|place| place < shape.init_containers);
            }
        }
        units
    }

    /// Returns the unit that a request without a name means: that of kubectl's annotation, or the
    /// first that is no init container. A kubelet does not say which are: those that have succeeded
    /// before the next unit was created, as it creates no container beside an init container.
    pub(super) fn default_of<'a>(
        units: &'a [Self],
        annotations: &HashMap<String, String>,
        shape: Option<&Shape>,
    ) -> Option<&'a Self> {
        let by_annotation = annotations
            .get(DEFAULT_CONTAINER)
            .and_then(|name| units.iter().find(|unit| unit.name == *name));
        let is_init = |at: usize| match (shape, units.get(at + 1)) {
            (Some(_), _) => units[at].is_init,
            (None, Some(next)) => units[at].has_succeeded_before(next.first_created),
            (None, None) => false,
        };
        let first = (0..units.len()).find(|at| !is_init(*at));
        by_annotation.or(first.and_then(|at| units.get(at))).or(units.first())
    }

    fn has_succeeded_before(&self, time: i64) -> bool {
        let status = &self.latest.status;
        self.latest.exited() && status.exit_code == 0 && status.finished_unix_nanos <= time
    }

    /// Returns the message of the unit.
    pub(super) fn message(&self) -> admin::Unit {
        let store::ContainerMeta { id, config, created_unix_nanos, .. } = self.latest.meta();
        let config = config.unwrap_or_default();
        let metadata = config.metadata.unwrap_or_default();
        let status = &self.latest.status;
        let state = match self.latest.state() {
            cri::ContainerState::ContainerRunning => admin::UnitState::UnitRunning,
            cri::ContainerState::ContainerExited => admin::UnitState::UnitTerminated,
            _ => admin::UnitState::UnitWaiting,
        };
        let image = config.image.unwrap_or_default();
        let by_user = image.user_specified_image;
        admin::Unit {
            name: metadata.name,
            container: id,
            image: if by_user.is_empty() { image.image } else { by_user },
            command: config.command,
            args: config.args,
            env: config.envs.into_iter().map(|variable| variable.key).collect(),
            state: state.into(),
            created_unix_nanos,
            started_unix_nanos: status.started_unix_nanos,
            finished_unix_nanos: status.finished_unix_nanos,
            exit_code: status.exit_code,
            reason: status.reason.clone(),
            message: status.message.clone(),
            restarts: metadata.attempt,
            working_dir: config.working_dir,
            start_failure: status.reason == "StartError",
            stdin: config.stdin,
            tty: config.tty,
            is_init: self.is_init,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::milpa::{
        id::{ContainerId, SandboxId},
        pods::Pods,
    };

    const SECOND: i64 = 1_000_000_000;

    /// Returns the containers of a pod: each with its name, attempt, creation, end and exit code in
    /// seconds; an end of 0 stands for one that runs.
    fn containers(of: &[(&str, u32, i64, i64, i32)]) -> Vec<Container> {
        let pods = Pods::new();
        let sandbox = store::SandboxMeta {
            id: SandboxId::from_random(&[1; SandboxId::RANDOM_BYTES]).to_string(),
            cell: "cell-000000000001".to_owned(),
            ..Default::default()
        };
        let id = pods.insert_sandbox(&sandbox, true).unwrap();
        for (number, &(name, attempt, created, finished, exit_code)) in (0_u8..).zip(of) {
            let state = match finished {
                0 => cri::ContainerState::ContainerRunning,
                _ => cri::ContainerState::ContainerExited,
            };
            let status = store::ContainerStatus {
                state: state.into(),
                started_unix_nanos: created * SECOND,
                finished_unix_nanos: finished * SECOND,
                exit_code,
                ..Default::default()
            };
            let metadata = Some(cri::ContainerMetadata { name: name.to_owned(), attempt });
            let meta = store::ContainerMeta {
                id: ContainerId::from_random(&[number; ContainerId::RANDOM_BYTES]).to_string(),
                sandbox: id.to_string(),
                cell_container: format!("c{number:063x}"),
                config: Some(cri::ContainerConfig { metadata, ..Default::default() }),
                created_unix_nanos: created * SECOND,
                ..Default::default()
            };
            assert!(pods.insert_container(&meta, status, None).unwrap());
        }
        pods.containers_of(&id)
    }

    fn names(units: &[Unit]) -> Vec<&str> {
        units.iter().map(|unit| unit.name.as_str()).collect()
    }

    #[test]
    fn default_unit_is_the_first_that_is_no_init_container() {
        let none = HashMap::new();
        let default = |units: &[Unit], annotations: &_| {
            Unit::default_of(units, annotations, None).map(|unit| unit.name.clone()).unwrap()
        };
        let setup = [("first", 0, 1, 2, 0), ("second", 0, 3, 4, 0), ("main", 0, 5, 0, 0)];
        let units = Unit::all(containers(&setup), None);
        assert_eq!(
            (names(&units), default(&units, &none).as_str()),
            (vec!["first", "second", "main"], "main")
        );
        // While they run, and after one has failed, there is no other.
        assert_eq!(default(&Unit::all(containers(&setup[..1]), None), &none), "first");
        let failed = [("first", 0, 1, 2, 1)];
        assert_eq!(default(&Unit::all(containers(&failed), None), &none), "first");
        // Restarts and the end of the first container change nothing.
        let restarted = [("main", 0, 1, 9, 1), ("side", 0, 2, 0, 0), ("main", 1, 10, 0, 0)];
        let units = Unit::all(containers(&restarted), None);
        assert_eq!(
            (names(&units), default(&units, &none).as_str()),
            (vec!["main", "side"], "main")
        );
        assert_eq!(units[0].latest.item().metadata.unwrap().attempt, 1);
        let by_annotation = HashMap::from([(DEFAULT_CONTAINER.to_owned(), "side".to_owned())]);
        assert_eq!(default(&units, &by_annotation), "side");
        assert!(Unit::default_of(&[], &none, None).is_none());
    }

    #[test]
    fn units_of_a_known_shape_are_in_the_order_of_the_spec() {
        let shape = Shape {
            init_containers: 1,
            containers: ["setup", "main", "side"].map(str::to_owned).to_vec(),
            ..Shape::default()
        };
        // The records of earlier runs are gone.
        let left = [("side", 0, 1, 0, 0), ("setup", 1, 2, 3, 0), ("main", 1, 4, 0, 0)];
        let units = Unit::all(containers(&left), Some(&shape));
        assert_eq!(names(&units), ["setup", "main", "side"]);
        assert_eq!([0, 1, 2].map(|at: usize| units[at].is_init), [true, false, false]);
        let default = Unit::default_of(&units, &HashMap::new(), Some(&shape)).unwrap();
        assert_eq!(default.name, "main");
    }
}
