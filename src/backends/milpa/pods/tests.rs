use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use kiyot_proto::cell::{self, Heartbeat};
use proptest::prelude::*;

use super::*;

mod events;
mod stats;

fn labels(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

/// Returns a sample of a metric.
pub(super) fn sample(name: &str, labels: &[(&str, &str)], value: u64) -> cell::Sample {
    let labels = labels
        .iter()
        .map(|&(key, value)| cell::Label { key: key.to_owned(), value: value.to_owned() })
        .collect();
    cell::Sample { name: name.to_owned(), value, labels }
}

fn sandbox_meta(id: &str, n: u32) -> store::SandboxMeta {
    let uid = format!("uid-{n}");
    store::SandboxMeta {
        id: id.to_owned(),
        cell: format!("cell-{n:012}"),
        cell_sandbox: format!("{n:064x}"),
        config: Some(cri::PodSandboxConfig {
            metadata: Some(cri::PodSandboxMetadata {
                name: format!("pod-{n}"),
                namespace: "shop".to_owned(),
                uid: uid.clone(),
                attempt: 0,
            }),
            labels: labels(&[("io.kubernetes.pod.uid", &uid), ("app", "web")]),
            annotations: labels(&[
                ("kubernetes.io/config.seen", &format!("2026-01-01T00:00:00.{n:09}Z")),
                ("a", "b"),
            ]),
            linux: Some(cri::LinuxPodSandboxConfig {
                security_context: Some(cri::LinuxSandboxSecurityContext {
                    namespace_options: Some(cri::NamespaceOption { pid: 1, ..Default::default() }),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        }),
        runtime_handler: "kiyot".to_owned(),
        created_unix_nanos: 1000 + i64::from(n),
        addresses: vec!["10.200.0.7".to_owned(), "fd00::7".to_owned()],
        resolvers: Vec::new(),
        current_annotations: HashMap::new(),
        standalone: false,
        cgroup_parent: String::new(),
        replaced_files: Vec::new(),
    }
}

fn container_meta(id: &str, sandbox: &str, n: u32) -> store::ContainerMeta {
    store::ContainerMeta {
        id: id.to_owned(),
        sandbox: sandbox.to_owned(),
        cell_container: format!("c{n:063x}"),
        config: Some(cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: format!("c-{n}"), attempt: 1 }),
            image: Some(cri::ImageSpec {
                image: "sha256:1".to_owned(),
                user_specified_image: "busybox".to_owned(),
                ..Default::default()
            }),
            mounts: vec![cri::Mount {
                container_path: "/etc/hosts".to_owned(),
                host_path: "/node/etc-hosts".to_owned(),
                ..Default::default()
            }],
            labels: labels(&[("io.kubernetes.container.name", &format!("c-{n}"))]),
            ..Default::default()
        }),
        image_ref: "busybox@sha256:2".to_owned(),
        created_unix_nanos: 5,
        log_path: "/var/log/pods/x/c/0.log".to_owned(),
        cell_log: "logs/x/0.log".to_owned(),
        image_id: "sha256:1".to_owned(),
    }
}

fn id(letters: &str) -> String {
    format!("milpa{letters:a<59}")
}

fn running() -> store::ContainerStatus {
    store::ContainerStatus {
        state: cri::ContainerState::ContainerRunning.into(),
        started_unix_nanos: 7,
        ..Default::default()
    }
}

/// Returns two sandboxes whose ids differ in a late character, and a container in the first.
fn example() -> (Pods, SandboxId, SandboxId, ContainerId) {
    let pods = Pods::new();
    let one = pods.insert_sandbox(&sandbox_meta(&id("xyz1"), 1), true).unwrap();
    let two = pods.insert_sandbox(&sandbox_meta(&id("xyz2"), 2), true).unwrap();
    assert!(
        pods.insert_container(&container_meta(&id("ctr"), one.as_str(), 1), running(), None)
            .unwrap()
    );
    (pods, one, two, ContainerId::parse(&id("ctr")).unwrap())
}

fn listed(pods: &Pods, filter: &filter::Sandboxes) -> Vec<String> {
    cri::ListPodSandboxResponse::decode(pods.list_sandboxes(filter))
        .unwrap()
        .items
        .into_iter()
        .map(|item| item.id)
        .collect()
}

#[test]
fn id_or_unique_prefix_finds_the_entry() {
    let (pods, one, _, _) = example();
    assert_eq!(pods.sandbox(one.as_str()).unwrap().id, one);
    assert_eq!(pods.sandbox("milpaxyz1").unwrap().id, one);
    let ambiguous = pods.sandbox("milpaxyz").unwrap_err();
    assert!(matches!(ambiguous, LookupError::Ambiguous { .. }));
    assert!(ambiguous.to_string().contains("multiple IDs found with provided prefix"));
    for unknown in ["", "milpaq", "deadbeef"] {
        let error = pods.sandbox(unknown).unwrap_err();
        assert!(matches!(error, LookupError::NotFound { .. }));
        let message = error.to_string();
        assert!(message.contains("an error occurred when try to find sandbox"), "{message}");
    }
    assert_eq!(pods.container("milpac").unwrap().sandbox, one);
}

#[test]
fn list_is_encoded_once_after_a_change() {
    let (pods, one, two, _) = example();
    let all = filter::Sandboxes::default();
    let first = pods.list_sandboxes(&all);
    assert_eq!(first.as_ptr(), pods.list_sandboxes(&all).as_ptr());
    pods.set_ready(&two, false);
    assert_ne!(first, pods.list_sandboxes(&all));
    assert_eq!(listed(&pods, &all), [one.as_str(), two.as_str()]);
    pods.remove_sandbox(&one);
    assert_eq!(listed(&pods, &all), [two.as_str()]);
    assert!(pods.list_containers(&filter::Containers::default()).is_empty());
    assert!(
        pods.sandboxes_of_pod("uid-1").is_empty()
            && pods.sandbox_of_cell(&CellId::parse("cell-000000000001").unwrap()).is_none()
    );
}

#[test]
fn filter_matches_if_all_its_parts_match() {
    let (pods, one, two, _) = example();
    pods.set_ready(&two, false);
    let by = |id: &str, ready, pairs: &[(&str, &str)]| {
        listed(&pods, &filter::Sandboxes { id: id.to_owned(), ready, labels: labels(pairs) })
    };
    assert_eq!(by("", Some(true), &[]), [one.as_str()]);
    assert_eq!(by("milpaxyz2", None, &[]), [two.as_str()]);
    assert_eq!(by("milpaxyz2", Some(true), &[]), Vec::<String>::new());
    assert_eq!(by("milpaxyz", None, &[]), Vec::<String>::new());
    assert_eq!(by("", None, &[("io.kubernetes.pod.uid", "uid-2")]), [two.as_str()]);
    assert_eq!(by("", None, &[("app", "web")]), [one.as_str(), two.as_str()]);
    assert_eq!(by("", None, &[("app", "")]), Vec::<String>::new());
    let containers = |filter: &filter::Containers| {
        cri::ListContainersResponse::decode(pods.list_containers(filter)).unwrap().containers.len()
    };
    assert_eq!(
        containers(&filter::Containers { sandbox: "milpaxyz1".to_owned(), ..Default::default() }),
        1
    );
    assert_eq!(
        containers(&filter::Containers { sandbox: two.as_str().to_owned(), ..Default::default() }),
        0
    );
    assert_eq!(
        containers(&filter::Containers {
            state: Some(cri::ContainerState::ContainerExited),
            ..Default::default()
        }),
        0
    );
    assert_eq!(
        containers(&filter::Containers {
            state: Some(cri::ContainerState::ContainerRunning),
            ..Default::default()
        }),
        1
    );
}

#[test]
fn statuses_have_what_the_kubelet_sent() {
    let (pods, one, _, container) = example();
    let sandbox = pods.sandbox(one.as_str()).unwrap();
    let status = super::response::sandbox_status(&sandbox.meta(), true);
    let config = sandbox.meta().config.unwrap();
    assert_eq!(
        (status.metadata, &status.labels, &status.annotations),
        (config.metadata.clone(), &config.labels, &config.annotations)
    );
    assert_eq!(status.runtime_handler, "kiyot");
    let network = status.network.unwrap();
    assert_eq!((&*network.ip, &*network.additional_ips[0].ip), ("10.200.0.7", "fd00::7"));
    let options = status.linux.unwrap().namespaces.unwrap().options.unwrap();
    assert_eq!(
        (options.network(), options.pid()),
        (cri::NamespaceMode::Pod, cri::NamespaceMode::Container)
    );
    assert_eq!(super::response::sandbox_status(&sandbox.meta(), false).network.unwrap().ip, "");

    let told = cri::ContainerStatus {
        id: "of the cell".to_owned(),
        log_path: "/cell/log".to_owned(),
        resources: Some(cri::ContainerResources::default()),
        mounts: vec![cri::Mount { host_path: "/cell/etc-hosts".to_owned(), ..Default::default() }],
        ..Default::default()
    };
    pods.set_reported(&container, &told);
    let answer = pods.container(container.as_str()).unwrap().answer();
    assert_eq!(
        (&*answer.id, &*answer.log_path, &*answer.mounts[0].host_path),
        (container.as_str(), "/var/log/pods/x/c/0.log", "/node/etc-hosts")
    );
    assert_eq!(
        (&*answer.image.unwrap().image, &*answer.image_ref, &*answer.image_id),
        ("busybox", "busybox@sha256:2", "sha256:1")
    );
    assert!(answer.resources.is_some());
}

/// Verifies P11.
#[test]
fn container_id_of_two_cells_names_a_container_in_each() {
    let (pods, _, two, container) = example();
    let (cell, other) =
        (CellId::parse("cell-000000000001").unwrap(), CellId::parse("cell-000000000002").unwrap());
    let theirs = format!("c{:063x}", 1);
    let found = |cell: &CellId| pods.container_of_cell(cell, &theirs).map(|found| found.id);
    assert!(
        pods.insert_container(&container_meta(&id("evil"), two.as_str(), 1), running(), None)
            .unwrap()
    );
    let evil = ContainerId::parse(&id("evil")).unwrap();
    assert_eq!((found(&cell), found(&other)), (Some(container.clone()), Some(evil.clone())));
    pods.remove_container(&evil);
    assert_eq!((found(&cell), found(&other)), (Some(container), None));
}

/// Verifies I19.
#[test]
fn annotations_find_the_running_pod_after_a_change() {
    let (pods, one, two, _) = example();
    let first = pods.sandbox(one.as_str()).unwrap().meta().config.unwrap().annotations;
    let spec = |annotations: &HashMap<String, String>| cri::ImageSpec {
        annotations: annotations.clone(),
        ..Default::default()
    };
    let found = |annotations: &HashMap<String, String>| {
        pods.sandbox_of_annotations(&spec(annotations)).map(|sandbox| sandbox.id)
    };
    let alike = |annotations: &HashMap<String, String>| {
        pods.sandboxes_like(&spec(annotations))
            .into_iter()
            .map(|sandbox| sandbox.id)
            .collect::<Vec<_>>()
    };
    assert_eq!(found(&first), Some(one.clone()));
    assert_eq!(found(&HashMap::new()), None);
    assert_eq!(alike(&HashMap::new()), []);
    // After `kubectl annotate`: the kubelet's own annotations still identify the pod.
    let mut annotated = first.clone();
    annotated.insert("more".to_owned(), String::new());
    assert_eq!(found(&annotated), Some(one.clone()));
    assert_eq!(alike(&annotated), []);
    // After a restart of the kubelet: any pod with the same other annotations matches.
    let mut restarted = first.clone();
    restarted.insert("kubernetes.io/config.seen".to_owned(), "another time".to_owned());
    assert_eq!(found(&restarted), None);
    assert_eq!(alike(&restarted), vec![one.clone(), two.clone()]);
    // After both.
    let mut both = restarted.clone();
    both.insert("more".to_owned(), String::new());
    assert_eq!((found(&both), alike(&both)), (None, vec![]));
    // After a call that names the pod and has these annotations.
    let mut meta = pods.sandbox(one.as_str()).unwrap().meta();
    meta.current_annotations.clone_from(&both);
    pods.set_meta(&one, &meta);
    assert_eq!((found(&both), alike(&both)), (Some(one.clone()), vec![one.clone()]));
    assert_eq!(alike(&restarted), vec![two.clone()]);
    let answered = pods.sandbox(one.as_str()).unwrap();
    assert_eq!(answered.item().annotations, first, "lists have what RunPodSandbox sent");
    // In a model that is recovered from the records.
    let again = Pods::new();
    again.insert_sandbox(&answered.meta(), true).unwrap();
    assert_eq!(again.sandbox_of_annotations(&spec(&both)).unwrap().id, one);

    pods.set_ready(&one, false);
    assert_eq!((found(&both), alike(&both)), (None, vec![]));
    pods.remove_sandbox(&one);
    pods.remove_sandbox(&two);
    assert!(pods.read().by_annotations.is_empty());
}

#[test]
fn new_container_of_a_stopped_sandbox_is_not_published() {
    let (pods, one, _, _) = example();
    pods.set_ready(&one, false);
    assert!(
        !pods
            .insert_container(
                &container_meta(&id("late"), one.as_str(), 2),
                store::ContainerStatus::default(),
                None
            )
            .unwrap()
    );
    assert!(
        !pods
            .insert_container(&container_meta(&id("lost"), &id("nowhere"), 3), running(), None)
            .unwrap()
    );
    assert!(pods.container(&id("late")).is_err());
}

#[test]
fn cell_finds_only_its_own_containers() {
    let (pods, _, _, container) = example();
    let cell_container = pods.container(container.as_str()).unwrap().cell_container;
    assert!(
        pods.container_of_cell(&CellId::parse("cell-000000000001").unwrap(), &cell_container)
            .is_some()
    );
    assert!(
        pods.container_of_cell(&CellId::parse("cell-000000000002").unwrap(), &cell_container)
            .is_none()
    );
}

#[tokio::test]
async fn wait_ends_when_its_check_succeeds() {
    let (pods, one, _, _) = example();
    let pods = Arc::new(pods);
    let waiting = tokio::spawn({
        let (pods, one) = (Arc::clone(&pods), one.clone());
        async move {
            pods.wait(Duration::from_secs(60), |pods| {
                (!pods.sandbox(one.as_str()).ok()?.ready).then_some(())
            })
            .await
        }
    });
    pods.set_ready(&one, false);
    assert_eq!(waiting.await.unwrap(), Some(()));
    assert_eq!(pods.wait(Duration::ZERO, |_| None::<()>).await, None);
}

proptest! {
    /// In any order of insertions, stops and removals.
    #[test]
    fn list_has_the_current_sandboxes(steps in prop::collection::vec((0..6_u32, 0..3_u8), 0..40)) {
        let pods = Pods::new();
        let mut there: std::collections::BTreeMap<u32, bool> = Default::default();
        let name = |n: u32| id(&format!("p{n}"));
        for (n, step) in steps {
            let id = SandboxId::parse(&name(n)).unwrap();
            match step {
                0 if !there.contains_key(&n) => {
                    pods.insert_sandbox(&sandbox_meta(&name(n), n), true).unwrap();
                    there.insert(n, true);
                }
                1 => {
                    pods.set_ready(&id, false);
                    there.entry(n).and_modify(|ready| *ready = false);
                }
                2 => {
                    pods.remove_sandbox(&id);
                    there.remove(&n);
                }
                _ => {}
            }
            let list = pods.list_sandboxes(&filter::Sandboxes::default());
            let list = cri::ListPodSandboxResponse::decode(list).unwrap().items;
            let ready = cri::PodSandboxState::SandboxReady;
            let is_ready = |item: &cri::PodSandbox| item.state() == ready;
            let list: Vec<_> =
                list.into_iter().map(|item| (item.id.clone(), is_ready(&item))).collect();
            let expected: Vec<_> = there.iter().map(|(n, ready)| (name(*n), *ready)).collect();
            prop_assert_eq!(list, expected);
        }
    }
}

/// Verifies L8.
#[test]
fn reported_details_are_bounded() {
    let user = cri::ContainerUser {
        linux: Some(cri::LinuxContainerUser {
            supplemental_groups: vec![i64::MAX; 1 << 20],
            ..Default::default()
        }),
    };
    let told = cri::ContainerStatus {
        user: Some(user),
        stop_signal: cri::Signal::Sigusr1.into(),
        ..Default::default()
    };
    let kept: cri::ContainerStatus = Message::decode(super::reported_details(&told)).unwrap();
    assert_eq!((kept.user.is_none(), kept.stop_signal()), (true, cri::Signal::Sigusr1));
}
