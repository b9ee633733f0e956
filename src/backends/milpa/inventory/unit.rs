//! Units: the containers of a pod by name.

use std::collections::HashMap;

use kiyot_proto::{admin, cri, store};

use crate::backends::milpa::{
    cri::{ImageFailures, is_same_image},
    pods::Container,
};

/// Annotation with the default container of kubectl.
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";

/// Returns the annotations of a pod, which may have changed since the creation of its sandbox.
pub(super) fn annotations(
    first: HashMap<String, String>,
    current: HashMap<String, String>,
) -> HashMap<String, String> {
    if current.is_empty() { first } else { current }
}

/// The reason of a unit without a container (`pkg/kubelet/images` of the kubelet).
const PULL_ERROR: &str = "ErrImagePull";

/// The failed pulls of a pod, by image.
#[derive(Debug, Clone, Default)]
pub(super) struct Failures(pub(super) ImageFailures);

impl Failures {
    /// Returns the messages of a pod's units: a unit for each container name, and for each image
    /// with a failed pull, because CRI names no container for a pull.
    pub(super) fn units(&self, known: &[Unit]) -> Vec<admin::Unit> {
        let waiting = self.pulls_since(known).map(|(image, error)| waiting(image, error));
        known.iter().map(Unit::message).chain(waiting).collect()
    }

    /// Returns the error of the last failed pull.
    pub(super) fn last_pull(&self, known: &[Unit]) -> Option<String> {
        let last = self.pulls_since(known).max_by_key(|(image, _)| self.0[*image].unix_nanos);
        last.map(|(image, error)| error_of_pull(&format!("image {image}"), error))
    }

    /// Returns the images and errors of failed pulls without a later container of that image.
    fn pulls_since<'a>(&'a self, known: &'a [Unit]) -> impl Iterator<Item = (&'a str, &'a str)> {
        let is_over = |image: &str, failed: i64| {
            known.iter().any(|unit| unit.created() > failed && is_same_image(&unit.image(), image))
        };
        let pulls = self.0.iter().filter(move |(image, it)| !is_over(image, it.unix_nanos));
        pulls.map(|(image, it)| (image.as_str(), it.error.as_str()))
    }
}

/// Returns the message of a unit whose image was not pulled.
fn waiting(image: &str, error: &str) -> admin::Unit {
    admin::Unit {
        name: image.to_owned(),
        image: image.to_owned(),
        state: admin::UnitState::UnitWaiting.into(),
        reason: PULL_ERROR.to_owned(),
        message: error_of_pull(&format!("image for unit {image}"), error),
        start_failure: true,
        ..admin::Unit::default()
    }
}

/// Returns the error of a failed pull, in the original wording.
fn error_of_pull(of: &str, error: &str) -> String {
    format!("Error pulling {of}: {error}")
}

#[derive(Debug, Clone)]
pub(super) struct Unit {
    pub(super) name: String,
    pub(super) latest: Container,
    first_sequence: u64,
    first_created: i64,
}

impl Unit {
    /// Returns the units with containers, in the order of each unit's earliest remaining container.
    pub(super) fn all(containers: Vec<Container>) -> Vec<Self> {
        let mut by_name: HashMap<String, Self> = HashMap::new();
        for container in containers {
            let name = container.item().metadata.unwrap_or_default().name;
            let (sequence, created) = (container.sequence, container.meta().created_unix_nanos);
            let Some(unit) = by_name.get_mut(&name) else {
                let unit = Self {
                    name: name.clone(),
                    latest: container,
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
        units
    }

    /// Returns the default unit: the unit in kubectl's annotation, or the first that is not an init
    /// container. A kubelet does not mark init containers. A container that succeeded before the
    /// next unit was created counts as an init container, because a kubelet creates no container
    /// beside an init container.
    pub(super) fn default_of<'a>(
        units: &'a [Self],
        annotations: &HashMap<String, String>,
    ) -> Option<&'a Self> {
        let by_annotation = annotations
            .get(DEFAULT_CONTAINER)
            .and_then(|name| units.iter().find(|unit| unit.name == *name));
        let is_init = |at: usize| {
            let next = units.get(at + 1);
            next.is_some_and(|next| units[at].has_succeeded_before(next.first_created))
        };
        let first = (0..units.len()).find(|at| !is_init(*at));
        by_annotation.or(first.and_then(|at| units.get(at))).or(units.first())
    }

    fn has_succeeded_before(&self, time: i64) -> bool {
        let status = &self.latest.status;
        self.latest.exited() && status.exit_code == 0 && status.finished_unix_nanos <= time
    }

    /// Returns the creation time of the latest container, in nanoseconds since 1970.
    fn created(&self) -> i64 {
        self.latest.meta().created_unix_nanos
    }

    /// Returns the image as the user names it.
    fn image(&self) -> String {
        image_of(&self.latest.meta().config.unwrap_or_default())
    }

    pub(super) fn message(&self) -> admin::Unit {
        let store::ContainerMeta { id, config, created_unix_nanos, .. } = self.latest.meta();
        let config = config.unwrap_or_default();
        let image = image_of(&config);
        let metadata = config.metadata.unwrap_or_default();
        let status = &self.latest.status;
        let state = match self.latest.state() {
            cri::ContainerState::ContainerRunning => admin::UnitState::UnitRunning,
            cri::ContainerState::ContainerExited => admin::UnitState::UnitTerminated,
            _ => admin::UnitState::UnitWaiting,
        };
        admin::Unit {
            name: metadata.name,
            container: id,
            image,
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
        }
    }
}

/// Returns the image of a container as the user names it.
fn image_of(config: &cri::ContainerConfig) -> String {
    let cri::ImageSpec { image, user_specified_image, .. } =
        config.image.clone().unwrap_or_default();
    if user_specified_image.is_empty() { image } else { user_specified_image }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::milpa::{cri::PullFailure, pods::Pods};
    use kiyot_engine::id::{ContainerId, SandboxId};

    const SECOND: i64 = 1_000_000_000;

    /// Returns the containers of a pod, from name, attempt, creation, end and exit code, with times
    /// in seconds. An end of 0 means that the container runs.
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
    fn default_unit_is_the_first_that_is_not_an_init_container() {
        let none = HashMap::new();
        let default = |units: &[Unit], annotations: &_| {
            Unit::default_of(units, annotations).map(|unit| unit.name.clone()).unwrap()
        };
        let setup = [("first", 0, 1, 2, 0), ("second", 0, 3, 4, 0), ("main", 0, 5, 0, 0)];
        let units = Unit::all(containers(&setup));
        assert_eq!(
            (names(&units), default(&units, &none).as_str()),
            (vec!["first", "second", "main"], "main")
        );
        // While init containers run, and after a failed init container, there is no other unit.
        assert_eq!(default(&Unit::all(containers(&setup[..1])), &none), "first");
        let failed = [("first", 0, 1, 2, 1)];
        assert_eq!(default(&Unit::all(containers(&failed)), &none), "first");
        // Restarts and the end of the first container change nothing.
        let restarted = [("main", 0, 1, 9, 1), ("side", 0, 2, 0, 0), ("main", 1, 10, 0, 0)];
        let units = Unit::all(containers(&restarted));
        assert_eq!(
            (names(&units), default(&units, &none).as_str()),
            (vec!["main", "side"], "main")
        );
        assert_eq!(units[0].latest.item().metadata.unwrap().attempt, 1);
        let by_annotation = HashMap::from([(DEFAULT_CONTAINER.to_owned(), "side".to_owned())]);
        assert_eq!(default(&units, &by_annotation), "side");
        assert!(Unit::default_of(&[], &none).is_none());
    }

    /// Returns the failed pull of an image at a time in seconds.
    fn failed_pull(image: &str, at: i64) -> Failures {
        let failure = PullFailure { error: "no host".to_owned(), unix_nanos: at * SECOND };
        Failures([(image.to_owned(), failure)].into())
    }

    #[test]
    fn failed_pull_is_a_unit_until_its_container_is_created() {
        let known = Unit::all(containers(&[("main", 0, 5, 0, 0)]));
        let names = |units: &[admin::Unit]| -> Vec<String> {
            units.iter().map(|unit| unit.name.clone()).collect()
        };
        let failures = failed_pull("absent:1", 9);
        let units = failures.units(&known);
        assert_eq!(names(&units), ["main", "absent:1"]);
        assert!(units[1].start_failure && units[1].message.ends_with("no host"), "{units:?}");
        let error = "Error pulling image absent:1: no host";
        assert_eq!(failures.last_pull(&known).as_deref(), Some(error));
        // The containers above have an empty image reference.
        for (failed, expected) in [(4, &["main"][..]), (6, &["main", ""])] {
            assert_eq!(names(&failed_pull("", failed).units(&known)), expected, "{failed}");
        }
        assert_eq!(failed_pull("", 4).last_pull(&known), None);
    }
}
