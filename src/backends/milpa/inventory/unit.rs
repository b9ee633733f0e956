//! Units: the containers of a pod by name.

use std::collections::{BTreeMap, HashMap};

use kiyot_proto::{admin, cri, store};

use crate::backends::milpa::{
    cri::{ImageFailures, is_same_image},
    pods::Container,
    standalone::{ContainerShape, Shape},
};

/// Annotation with the container that kubectl takes without a name.
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";

/// Returns the annotations of a pod, which may have changed since its sandbox was made.
pub(super) fn annotations(
    first: HashMap<String, String>,
    current: HashMap<String, String>,
) -> HashMap<String, String> {
    if current.is_empty() { first } else { current }
}

/// The reasons of units without a container (`pkg/kubelet/images` and `kuberuntime` of the
/// kubelet).
const CREATING: &str = "ContainerCreating";
const CREATE_ERROR: &str = "CreateContainerError";
const PULL_ERROR: &str = "ErrImagePull";

/// The failures of units that have no container, or none since.
#[derive(Debug, Clone, Default)]
pub(super) struct Failures {
    /// Those of the containers of a standalone pod, by name.
    pub(super) containers: BTreeMap<String, String>,
    /// Those of pulls, by image.
    pub(super) pulls: ImageFailures,
}

impl Failures {
    /// Returns the messages of a pod's units: those with containers, and those that wait for one.
    /// They are those of the spec of a standalone pod; of a kubelet's pod only the image of a
    /// failed pull is known.
    pub(super) fn units(&self, known: &[Unit], shape: Option<&Shape>) -> Vec<admin::Unit> {
        let Some(shape) = shape else {
            let waiting =
                self.pulls_since(known).map(|(image, error)| waiting(image, image, error));
            return known.iter().map(Unit::message).chain(waiting).collect();
        };
        let unit = |(place, container): (usize, &ContainerShape)| match known
            .iter()
            .find(|unit| unit.name == container.name)
        {
            Some(unit) => unit.message(),
            None => self.waiting(container, place < shape.init_containers),
        };
        shape.containers.iter().enumerate().map(unit).collect()
    }

    /// Returns the error of the last failed pull of a kubelet's pod; empty without one.
    pub(super) fn last_pull(&self, known: &[Unit]) -> String {
        let last = self.pulls_since(known).max_by_key(|(image, _)| self.pulls[*image].unix_nanos);
        last.map(|(image, error)| error_of_pull(&format!("image {image}"), error))
            .unwrap_or_default()
    }

    /// Returns the images of failed pulls, of which no container was created since, with the
    /// errors.
    fn pulls_since<'a>(&'a self, known: &'a [Unit]) -> impl Iterator<Item = (&'a str, &'a str)> {
        let is_over = |image: &str, failed: i64| {
            known.iter().any(|unit| unit.created() > failed && is_same_image(&unit.image(), image))
        };
        let pulls = self.pulls.iter().filter(move |(image, it)| !is_over(image, it.unix_nanos));
        pulls.map(|(image, it)| (image.as_str(), it.error.as_str()))
    }

    /// Returns the message of a container of a spec that was not created yet.
    fn waiting(&self, container: &ContainerShape, is_init: bool) -> admin::Unit {
        let ContainerShape { name, image } = container;
        let unit = match (self.containers.get(name), self.pulls.get(image)) {
            (Some(_), Some(pull)) => waiting(name, image, &pull.error),
            (Some(error), None) => admin::Unit {
                reason: CREATE_ERROR.to_owned(),
                message: error.clone(),
                start_failure: true,
                ..admin::Unit::default()
            },
            (None, _) => admin::Unit { reason: CREATING.to_owned(), ..admin::Unit::default() },
        };
        admin::Unit {
            name: name.clone(),
            image: image.clone(),
            state: admin::UnitState::UnitWaiting.into(),
            is_init,
            ..unit
        }
    }
}

/// Returns the message of a unit whose image was not pulled.
fn waiting(name: &str, image: &str, error: &str) -> admin::Unit {
    admin::Unit {
        name: name.to_owned(),
        image: image.to_owned(),
        state: admin::UnitState::UnitWaiting.into(),
        reason: PULL_ERROR.to_owned(),
        message: error_of_pull(&format!("image for unit {name}"), error),
        start_failure: true,
        ..admin::Unit::default()
    }
}

/// Returns the error of a pull, as the original had it.
fn error_of_pull(of: &str, error: &str) -> String {
    format!("Error pulling {of}: {error}")
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
    /// Returns the units that have containers. The order is that of the spec for a standalone pod,
    /// whose shape is known, and else that of the earliest containers that are left.
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
            let place = |unit: &Self| shape.containers.iter().position(|it| it.name == unit.name);
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

    /// Returns the time at which its latest container was created, in nanoseconds since 1970.
    fn created(&self) -> i64 {
        self.latest.meta().created_unix_nanos
    }

    /// Returns its image, as the user names it.
    fn image(&self) -> String {
        image_of(&self.latest.meta().config.unwrap_or_default())
    }

    /// Returns the message of the unit.
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
            is_init: self.is_init,
        }
    }
}

/// Returns the image of a container, as the user names it.
fn image_of(config: &cri::ContainerConfig) -> String {
    let cri::ImageSpec { image, user_specified_image, .. } =
        config.image.clone().unwrap_or_default();
    if user_specified_image.is_empty() { image } else { user_specified_image }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::milpa::{
        cri::PullFailure,
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

    fn container(name: &str) -> ContainerShape {
        ContainerShape { name: name.to_owned(), image: format!("image-{name}") }
    }

    /// Returns failures with a pull of an image that failed at a time in seconds.
    fn failed_pull(image: &str, at: i64) -> Failures {
        let failure = PullFailure { error: "no host".to_owned(), unix_nanos: at * SECOND };
        Failures { pulls: [(image.to_owned(), failure)].into(), ..Failures::default() }
    }

    #[test]
    fn container_of_a_spec_that_is_not_created_waits_for_a_reason() {
        let shape = Shape {
            init_containers: 1,
            containers: ["setup", "main", "bad", "side"].map(container).to_vec(),
            ..Shape::default()
        };
        let known = Unit::all(containers(&[("main", 0, 1, 0, 0)]), Some(&shape));
        let errors = [("bad", "no host"), ("side", "no room")];
        let errors = errors.map(|(name, error)| (name.to_owned(), error.to_owned()));
        let failures = Failures { containers: errors.into(), ..failed_pull("image-bad", 2) };
        let units = failures.units(&known, Some(&shape));
        let shown = |unit: &admin::Unit| {
            let texts = format!("{} {}: {}", unit.name, unit.reason, unit.message);
            (texts, unit.state(), unit.start_failure)
        };
        let waits = admin::UnitState::UnitWaiting;
        let expected = [
            ("setup ContainerCreating: ", waits, false),
            ("main : ", admin::UnitState::UnitRunning, false),
            ("bad ErrImagePull: Error pulling image for unit bad: no host", waits, true),
            ("side CreateContainerError: no room", waits, true),
        ];
        let expected = expected.map(|(texts, state, failed)| (texts.to_owned(), state, failed));
        assert_eq!(units.iter().map(shown).collect::<Vec<_>>(), expected);
        assert_eq!([0, 1, 2, 3].map(|at: usize| units[at].is_init), [true, false, false, false]);
        assert_eq!(units[2].image, "image-bad");
    }

    #[test]
    fn failed_pull_of_a_kubelets_pod_is_a_unit_until_its_container_is_created() {
        let known = Unit::all(containers(&[("main", 0, 5, 0, 0)]), None);
        let names = |units: &[admin::Unit]| -> Vec<String> {
            units.iter().map(|unit| unit.name.clone()).collect()
        };
        let failures = failed_pull("absent:1", 9);
        let units = failures.units(&known, None);
        assert_eq!(names(&units), ["main", "absent:1"]);
        assert!(units[1].start_failure && units[1].message.ends_with("no host"), "{units:?}");
        assert_eq!(failures.last_pull(&known), "Error pulling image absent:1: no host");
        // The containers above have no image.
        for (failed, expected) in [(4, &["main"][..]), (6, &["main", ""])] {
            assert_eq!(names(&failed_pull("", failed).units(&known, None)), expected, "{failed}");
        }
        assert_eq!(failed_pull("", 4).last_pull(&known), "");
    }

    #[test]
    fn units_of_a_known_shape_are_in_the_order_of_the_spec() {
        let shape = Shape {
            init_containers: 1,
            containers: ["setup", "main", "side"].map(container).to_vec(),
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
