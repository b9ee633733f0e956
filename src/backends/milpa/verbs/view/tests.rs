use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use kiyot_proto::cell::{self, Heartbeat};
use proptest::prelude::*;
use tonic::Code;

use super::{super::filter, *};

fn labels(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn sandbox_meta(id: &str, n: u32) -> store::SandboxMeta {
    let uid = format!("uid-{n}");
    store::SandboxMeta {
        id: id.to_owned(),
        cell: format!("cell-{n:012}"),
        cell_sandbox: format!("{n:064x}"),
        config: Some(cri::PodSandboxConfig {
            metadata: Some(cri::PodSandboxMetadata { name: format!("pod-{n}"), namespace: "shop".to_owned(), uid: uid.clone(), attempt: 0 }),
            labels: labels(&[("io.kubernetes.pod.uid", &uid), ("app", "web")]),
            annotations: labels(&[("kubernetes.io/config.seen", &format!("2026-01-01T00:00:00.{n:09}Z")), ("a", "b")]),
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
    }
}

fn container_meta(id: &str, sandbox: &str, n: u32) -> store::ContainerMeta {
    store::ContainerMeta {
        id: id.to_owned(),
        sandbox: sandbox.to_owned(),
        cell_container: format!("c{n:063x}"),
        config: Some(cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: format!("c-{n}"), attempt: 1 }),
            image: Some(cri::ImageSpec { image: "sha256:1".to_owned(), user_specified_image: "busybox".to_owned(), ..Default::default() }),
            mounts: vec![cri::Mount { container_path: "/etc/hosts".to_owned(), host_path: "/node/etc-hosts".to_owned(), ..Default::default() }],
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
    store::ContainerStatus { state: cri::ContainerState::ContainerRunning.into(), started_unix_nanos: 7, ..Default::default() }
}

/// Two sandboxes whose ids differ late, a container in the first.
fn view() -> (View, SandboxId, SandboxId, ContainerId) {
    let view = View::new();
    let one = view.insert_sandbox(&sandbox_meta(&id("xyz1"), 1), true).unwrap();
    let two = view.insert_sandbox(&sandbox_meta(&id("xyz2"), 2), true).unwrap();
    assert!(view.insert_container(&container_meta(&id("ctr"), one.as_str(), 1), running(), None).unwrap());
    (view, one, two, ContainerId::parse(&id("ctr")).unwrap())
}

fn listed(view: &View, filter: &filter::Sandboxes) -> Vec<String> {
    cri::ListPodSandboxResponse::decode(view.list_sandboxes(filter)).unwrap().items.into_iter().map(|item| item.id).collect()
}

#[test]
fn an_id_or_a_unique_prefix_finds() {
    let (view, one, _, _) = view();
    assert_eq!(view.sandbox(one.as_str()).unwrap().id, one);
    assert_eq!(view.sandbox("milpaxyz1").unwrap().id, one);
    let ambiguous = view.sandbox("milpaxyz").unwrap_err();
    assert_eq!(ambiguous.code(), Code::Unknown);
    assert!(ambiguous.message().contains("multiple IDs found with provided prefix"));
    for unknown in ["", "milpaq", "deadbeef"] {
        let status = view.sandbox(unknown).unwrap_err();
        assert_eq!(status.code(), Code::NotFound);
        assert!(status.message().contains("an error occurred when try to find sandbox"), "{status}");
    }
    assert_eq!(view.container("milpac").unwrap().sandbox, one);
}

#[test]
fn a_list_is_encoded_once_until_something_changes() {
    let (view, one, two, _) = view();
    let all = filter::Sandboxes::default();
    let first = view.list_sandboxes(&all);
    assert_eq!(first.as_ptr(), view.list_sandboxes(&all).as_ptr());
    view.set_ready(&two, false);
    assert_ne!(first, view.list_sandboxes(&all));
    assert_eq!(listed(&view, &all), [one.as_str(), two.as_str()]);
    view.remove_sandbox(&one);
    assert_eq!(listed(&view, &all), [two.as_str()]);
    assert!(view.list_containers(&filter::Containers::default()).is_empty());
    assert!(view.sandboxes_of_pod("uid-1").is_empty() && view.sandbox_of_cell(&CellId::parse("cell-000000000001").unwrap()).is_none());
}

#[test]
fn filters_must_all_hold() {
    let (view, one, two, _) = view();
    view.set_ready(&two, false);
    let by = |id: &str, ready, pairs: &[(&str, &str)]| listed(&view, &filter::Sandboxes { id: id.to_owned(), ready, labels: labels(pairs) });
    assert_eq!(by("", Some(true), &[]), [one.as_str()]);
    assert_eq!(by("milpaxyz2", None, &[]), [two.as_str()]);
    assert_eq!(by("milpaxyz2", Some(true), &[]), Vec::<String>::new());
    assert_eq!(by("milpaxyz", None, &[]), Vec::<String>::new());
    assert_eq!(by("", None, &[("io.kubernetes.pod.uid", "uid-2")]), [two.as_str()]);
    assert_eq!(by("", None, &[("app", "web")]), [one.as_str(), two.as_str()]);
    assert_eq!(by("", None, &[("app", "")]), Vec::<String>::new());
    let containers = |filter: &filter::Containers| cri::ListContainersResponse::decode(view.list_containers(filter)).unwrap().containers.len();
    assert_eq!(containers(&filter::Containers { sandbox: "milpaxyz1".to_owned(), ..Default::default() }), 1);
    assert_eq!(containers(&filter::Containers { sandbox: two.as_str().to_owned(), ..Default::default() }), 0);
    assert_eq!(containers(&filter::Containers { state: Some(cri::ContainerState::ContainerExited), ..Default::default() }), 0);
    assert_eq!(containers(&filter::Containers { state: Some(cri::ContainerState::ContainerRunning), ..Default::default() }), 1);
}

#[test]
fn answers_are_what_the_kubelet_sent() {
    let (view, one, _, container) = view();
    let sandbox = view.sandbox(one.as_str()).unwrap();
    let status = super::super::restored::sandbox_status(&sandbox.meta(), true);
    let config = sandbox.config();
    assert_eq!((status.metadata, &status.labels, &status.annotations), (config.metadata.clone(), &config.labels, &config.annotations));
    assert_eq!(status.runtime_handler, "kiyot");
    let network = status.network.unwrap();
    assert_eq!((&*network.ip, &*network.additional_ips[0].ip), ("10.200.0.7", "fd00::7"));
    let options = status.linux.unwrap().namespaces.unwrap().options.unwrap();
    assert_eq!((options.network(), options.pid()), (cri::NamespaceMode::Pod, cri::NamespaceMode::Container));
    assert_eq!(super::super::restored::sandbox_status(&sandbox.meta(), false).network.unwrap().ip, "");

    let told = cri::ContainerStatus {
        id: "of the cell".to_owned(),
        log_path: "/cell/log".to_owned(),
        resources: Some(cri::ContainerResources::default()),
        mounts: vec![cri::Mount { host_path: "/cell/etc-hosts".to_owned(), ..Default::default() }],
        ..Default::default()
    };
    view.tell(&container, &told);
    let answer = view.container(container.as_str()).unwrap().answer();
    assert_eq!((&*answer.id, &*answer.log_path, &*answer.mounts[0].host_path), (container.as_str(), "/var/log/pods/x/c/0.log", "/node/etc-hosts"));
    assert_eq!((&*answer.image.unwrap().image, &*answer.image_ref, &*answer.image_id), ("busybox", "busybox@sha256:2", "sha256:1"));
    assert!(answer.resources.is_some());
}

#[test]
fn a_cell_that_names_its_container_as_another_does_harms_nobody() {
    let (view, _, two, container) = view();
    let (cell, other) = (CellId::parse("cell-000000000001").unwrap(), CellId::parse("cell-000000000002").unwrap());
    let theirs = format!("c{:063x}", 1);
    let found = |cell: &CellId| view.container_of_cell(cell, &theirs).map(|found| found.id);
    assert!(view.insert_container(&container_meta(&id("evil"), two.as_str(), 1), running(), None).unwrap());
    let evil = ContainerId::parse(&id("evil")).unwrap();
    assert_eq!((found(&cell), found(&other)), (Some(container.clone()), Some(evil.clone())));
    view.remove_container(&evil);
    assert_eq!((found(&cell), found(&other)), (Some(container), None));
}

#[test]
fn usage_has_our_attributes_and_ends_with_the_container() {
    let (view, one, _, container) = view();
    let (cell, other) = (CellId::parse("cell-000000000001").unwrap(), CellId::parse("cell-000000000002").unwrap());
    let stats = cri::ContainerStats {
        attributes: Some(cri::ContainerAttributes { id: format!("c{:063x}", 1), ..Default::default() }),
        memory: Some(cri::MemoryUsage { working_set_bytes: Some(cri::UInt64Value { value: 42 }), ..Default::default() }),
        writable_layer: Some(cri::FilesystemUsage { fs_id: Some(cri::FilesystemIdentifier::default()), ..Default::default() }),
        ..Default::default()
    };
    let beat = Heartbeat { containers: vec![stats], sandbox: Some(cri::PodSandboxStats::default()), metrics: None };
    let now = Instant::now();
    let listed = |view: &View| cri::ListContainerStatsResponse::decode(view.list_container_stats(&filter::Containers::default(), now)).unwrap().stats;
    view.heartbeat(&other, beat.clone(), now);
    assert!(listed(&view).is_empty(), "a cell speaks of its own pod only");
    view.heartbeat(&cell, beat.clone(), now);
    let stats = listed(&view).pop().unwrap();
    let attributes = stats.attributes.unwrap();
    assert_eq!((&*attributes.id, &*attributes.metadata.unwrap().name), (container.as_str(), "c-1"));
    assert_eq!((stats.memory.unwrap().working_set_bytes.unwrap().value, stats.writable_layer.unwrap().fs_id), (42, None));
    let of_sandbox = view.usage_of(&one, now).unwrap();
    assert_eq!((&*of_sandbox.attributes.unwrap().id, of_sandbox.linux.unwrap().containers.len()), (one.as_str(), 1));
    view.set_status(&container, store::ContainerStatus { state: 2, ..running() });
    assert!(listed(&view).is_empty());
    assert!(view.usage_of(&one, now).unwrap().linux.unwrap().containers.is_empty());
    view.heartbeat(&cell, beat, now);
    assert!(listed(&view).is_empty());
}

#[test]
fn metrics_are_told_while_the_usage_is_fresh() {
    let (view, one, _, container) = view();
    let now = Instant::now();
    let attributes = Some(cri::ContainerAttributes { id: format!("c{:063x}", 1), ..Default::default() });
    let cpu = Some(cri::CpuUsage { timestamp: 3, usage_core_nano_seconds: Some(cri::UInt64Value { value: 5_000_000_000 }), ..Default::default() });
    let sandbox = Some(cri::PodSandboxStats::default());
    let beat = Heartbeat { containers: vec![cri::ContainerStats { attributes, cpu, ..Default::default() }], sandbox, metrics: None };
    view.heartbeat(&CellId::parse("cell-000000000001").unwrap(), beat, now);
    let name = "container_cpu_usage_seconds_total".to_owned();
    let label_keys = ["container", "image", "id", "namespace"].map(str::to_owned).into();
    let descriptors = vec![cri::MetricDescriptor { name, label_keys, ..Default::default() }];
    let descriptors = cri::ListMetricDescriptorsResponse { descriptors }.encode_to_vec();
    let told = |descriptors: &[u8], now| cri::ListPodSandboxMetricsResponse::decode(view.list_metrics(descriptors, now)).unwrap().pod_metrics;
    let [pod] = told(&descriptors, now).try_into().unwrap();
    assert_eq!(pod.pod_sandbox_id, one.as_str());
    let metric = &pod.container_metrics[0].metrics[0];
    assert_eq!(
        (metric.label_values.clone(), metric.value),
        (["c-1", "busybox", container.as_str(), "shop"].map(str::to_owned).into(), Some(cri::UInt64Value { value: 5 }))
    );
    assert!(told(&descriptors, now + kept_usage::FRESH).is_empty());
    assert!(told(b"\xff", now)[0].container_metrics[0].metrics.is_empty(), "what can't be read describes nothing");
}

#[test]
fn usage_is_told_while_it_is_fresh() {
    let (view, one, _, container) = view();
    let attributes = |n: u32| Some(cri::ContainerAttributes { id: format!("c{n:063x}"), ..Default::default() });
    let beat = Heartbeat {
        containers: vec![cri::ContainerStats { attributes: attributes(1), ..Default::default() }],
        sandbox: Some(cri::PodSandboxStats::default()),
        metrics: None,
    };
    let (then, last) = (Instant::now(), Instant::now() + kept_usage::FRESH);
    view.heartbeat(&CellId::parse("cell-000000000001").unwrap(), beat, then);
    let told = |filter: &filter::Containers, sandboxes: &filter::Sandboxes, now| {
        (!view.list_container_stats(filter, now).is_empty(), !view.list_sandbox_stats(sandboxes, now).is_empty())
    };
    let (all, pods) = (filter::Containers::default(), filter::Sandboxes::default());
    let (by_id, by_pod) = (
        filter::Containers { id: container.as_str().to_owned(), ..Default::default() },
        filter::Containers { sandbox: one.as_str().to_owned(), ..Default::default() },
    );
    let pod = filter::Sandboxes { id: one.as_str().to_owned(), ..Default::default() };
    for (filter, pods) in [(&all, &pods), (&by_id, &pod), (&by_pod, &pod)] {
        assert_eq!(told(filter, pods, then), (true, true));
        assert_eq!(told(filter, pods, last), (false, false));
    }
    let other = filter::Containers { sandbox: id("elsewhere"), ..Default::default() };
    assert_eq!(told(&other, &filter::Sandboxes { labels: labels(&[("app", "none")]), ..Default::default() }, then), (false, false));
}

fn described(name: &str, keys: &[&str]) -> cri::MetricDescriptor {
    cri::MetricDescriptor { name: name.to_owned(), label_keys: keys.iter().map(|&key| key.to_owned()).collect(), ..Default::default() }
}

fn sample(name: &str, labels: &[(&str, &str)], value: u64) -> cell::Sample {
    let labels = labels.iter().map(|&(key, value)| cell::Label { key: key.to_owned(), value: value.to_owned() }).collect();
    cell::Sample { name: name.to_owned(), value, labels }
}

#[test]
fn what_a_cell_measures_is_told_while_it_tells_it() {
    let (view, one, _, container) = view();
    let (own, other) = (CellId::parse("cell-000000000001").unwrap(), CellId::parse("cell-000000000002").unwrap());
    let now = Instant::now();
    let beat = |container: u64, metrics: Option<cell::Metrics>| {
        let attributes = Some(cri::ContainerAttributes { id: format!("c{container:063x}"), ..Default::default() });
        let containers = vec![cri::ContainerStats { attributes, ..Default::default() }];
        Heartbeat { containers, sandbox: Some(cri::PodSandboxStats::default()), metrics }
    };
    let measured = |value| {
        let of = cell::ContainerSamples { container: format!("c{:063x}", 1), timestamp: 5, samples: vec![sample("container_sockets", &[], value)] };
        let pod = vec![sample("container_network_receive_packets_total", &[("interface", "eth0")], value)];
        cell::Metrics { pod, timestamp: 4, containers: vec![of] }
    };
    let descriptors = vec![described("container_sockets", &["id"]), described("container_network_receive_packets_total", &["id", "interface"])];
    let descriptors = cri::ListMetricDescriptorsResponse { descriptors }.encode_to_vec();
    let told = |now| {
        let pods = cri::ListPodSandboxMetricsResponse::decode(view.list_metrics(&descriptors, now)).unwrap().pod_metrics;
        let value = |metric: &cri::Metric| (metric.label_values.join(" "), metric.value.unwrap().value);
        let of = |pod: cri::PodSandboxMetrics| {
            let containers = pod.container_metrics.iter().flat_map(|of| &of.metrics);
            pod.metrics.iter().chain(containers).map(value).collect::<Vec<_>>()
        };
        pods.into_iter().flat_map(of).collect::<Vec<_>>()
    };
    assert!(!view.awaits_metrics(now), "no cell is there to tell any");
    view.heartbeat(&own, beat(1, None), now);
    assert!(view.awaits_metrics(now) && !view.awaits_metrics(now + kept_usage::FRESH), "one that is silent is not waited for");
    // Not of a cell's to say.
    view.heartbeat(&other, Heartbeat { metrics: Some(measured(1)), ..Heartbeat::default() }, now);
    assert_eq!((told(now), view.awaits_metrics(now)), (vec![], true));
    let values = |value| vec![(format!("{} eth0", one.as_str()), value), (container.as_str().to_owned(), value)];
    view.heartbeat(&own, beat(1, Some(measured(2))), now);
    assert_eq!((told(now), view.awaits_metrics(now)), (values(2), false));
    // Those that containerd did not have in time are those of before, until they are too old: a gap, whatever its usage is.
    let later = now + kept_usage::FRESH;
    view.heartbeat(&own, beat(1, Some(cell::Metrics::default())), later - Duration::from_millis(1));
    assert_eq!((told(later - Duration::from_millis(1)), told(later)), (values(2), vec![]));
    view.heartbeat(&own, beat(1, Some(measured(3))), later);
    assert_eq!(told(later), values(3));
    // They are not wanted any more.
    view.heartbeat(&own, beat(1, None), later);
    assert_eq!((told(later), view.awaits_metrics(later)), (vec![], true));
    view.heartbeat(&own, beat(1, Some(measured(4))), later);
    view.set_status(&container, store::ContainerStatus { state: 2, ..running() });
    view.heartbeat(&own, beat(1, Some(measured(4))), later);
    assert_eq!(told(later), values(4)[..1]);
}

#[test]
fn no_list_of_metrics_is_longer_than_a_kubelet_takes_and_each_pod_is_in_it() {
    const PODS: usize = 200;
    let (view, now) = (View::new(), Instant::now());
    for n in 0..PODS {
        let pod = view.insert_sandbox(&sandbox_meta(&id(&format!("{n:03}")), u32::try_from(n).unwrap()), true).unwrap();
        let cell = view.sandbox(pod.as_str()).unwrap().cell;
        let device = |disk| format!("{disk:0>100}");
        let pod = (0..256).map(|disk| sample("container_fs_reads_total", &[("device", &device(disk))], 1)).collect();
        let process = Some(cri::ProcessUsage { process_count: Some(cri::UInt64Value { value: 1 }), ..Default::default() });
        let sandbox = Some(cri::PodSandboxStats { linux: Some(cri::LinuxPodSandboxStats { process, ..Default::default() }), ..Default::default() });
        view.heartbeat(&cell, Heartbeat { sandbox, metrics: Some(cell::Metrics { pod, ..Default::default() }), ..Default::default() }, now);
    }
    let descriptors = vec![described("container_fs_reads_total", &["id", "device"]), described("container_processes", &["id"])];
    let list = view.list_metrics(&cri::ListMetricDescriptorsResponse { descriptors }.encode_to_vec(), now);
    assert!((4 << 20..5 << 20).contains(&list.len()), "{}", list.len());
    let told: Vec<_> = cri::ListPodSandboxMetricsResponse::decode(list).unwrap().pod_metrics.iter().map(|pod| pod.metrics.len()).collect();
    // All that there is of the first ones, and what is always known of all.
    let whole = told.iter().take_while(|count| **count > 1).count();
    assert!(whole > 10 && told[..whole].iter().all(|count| *count > 200) && told[whole..].iter().all(|count| *count == 1), "{told:?}");
    assert_eq!(told.len(), PODS);
}

#[test]
fn a_container_is_listed_from_its_start() {
    let (view, _, _, container) = view();
    let now = Instant::now();
    let listed = || cri::ListContainerStatsResponse::decode(view.list_container_stats(&filter::Containers::default(), now)).unwrap().stats;
    let used = |stats: &[cri::ContainerStats]| {
        let [stats] = stats else { panic!("{stats:?}") };
        assert_eq!(stats.attributes.as_ref().unwrap().id, container.as_str());
        (stats.cpu.unwrap().timestamp, stats.cpu.unwrap().usage_core_nano_seconds.unwrap().value)
    };
    assert!(listed().is_empty());
    view.first_usage(&container, None, now);
    assert_eq!(used(&listed()), (7, 0), "nothing, at the time of its start");
    assert_eq!(listed()[0].memory.unwrap().working_set_bytes, Some(cri::UInt64Value { value: 0 }));

    let sample = |timestamp: i64, value: u64| cri::ContainerStats {
        attributes: Some(cri::ContainerAttributes { id: format!("c{:063x}", 1), ..Default::default() }),
        cpu: Some(cri::CpuUsage { timestamp, usage_core_nano_seconds: Some(cri::UInt64Value { value }), ..Default::default() }),
        ..Default::default()
    };
    view.heartbeat(&CellId::parse("cell-000000000001").unwrap(), Heartbeat { containers: vec![sample(20, 2)], ..Default::default() }, now);
    view.first_usage(&container, Some(sample(10, 1)), now);
    assert_eq!(used(&listed()), (20, 2), "a heartbeat was faster");
    let later = now + kept_usage::FRESH;
    assert!(view.list_container_stats(&filter::Containers::default(), later).is_empty());
    view.first_usage(&container, Some(sample(30, 3)), later);
    let list = cri::ListContainerStatsResponse::decode(view.list_container_stats(&filter::Containers::default(), later)).unwrap().stats;
    assert_eq!(used(&list), (30, 3));
    view.set_status(&container, store::ContainerStatus { state: 2, ..running() });
    view.first_usage(&container, None, later);
    assert!(view.list_container_stats(&filter::Containers::default(), later).is_empty(), "it had ended by then");
}

/// What has come so far: kind, id, and the states of the pod and of its containers.
async fn events(reader: &mut events::Events, count: usize) -> Vec<(cri::ContainerEventType, String, bool, Vec<(String, cri::ContainerState)>)> {
    let mut came = Vec::new();
    for _ in 0..count {
        let event = cri::ContainerEventResponse::decode(reader.next().await.unwrap()).unwrap();
        let pod = event.pod_sandbox_status.clone().unwrap();
        assert!(event.created_at > 0 && pod.metadata.as_ref().unwrap().uid.starts_with("uid-"));
        let containers = event.containers_statuses.iter().map(|status| (status.id.clone(), status.state())).collect();
        came.push((event.container_event_type(), event.container_id, pod.state() == cri::PodSandboxState::SandboxReady, containers));
    }
    came
}

#[tokio::test]
async fn every_change_of_state_is_one_event() {
    use cri::{
        ContainerEventType::{
            ContainerCreatedEvent as Created, ContainerDeletedEvent as Deleted, ContainerStartedEvent as Started, ContainerStoppedEvent as Stopped,
        },
        ContainerState::{ContainerCreated, ContainerExited, ContainerRunning},
    };
    let view = View::new();
    let (mut reader, mut other) = (view.events(), view.events());
    let pod = view.insert_sandbox(&sandbox_meta(&id("pod"), 1), true).unwrap();
    let status =
        |state: cri::ContainerState, started_unix_nanos| store::ContainerStatus { state: state.into(), started_unix_nanos, ..Default::default() };
    let ids: Vec<_> = ["one", "two", "six"].map(|name| ContainerId::parse(&id(name)).unwrap()).into();
    for (n, container) in ids.iter().enumerate() {
        let told = cri::ContainerStatus { resources: Some(cri::ContainerResources::default()), ..Default::default() };
        let meta = container_meta(container.as_str(), pod.as_str(), n as u32);
        assert!(view.insert_container(&meta, store::ContainerStatus::default(), Some(&told)).unwrap());
    }
    let (one, two, six) = (&ids[0], &ids[1], &ids[2]);
    view.set_status(one, status(ContainerRunning, 5));
    // Its log was moved: its state is the same.
    view.set_status(one, store::ContainerStatus { log_base: 7, ..status(ContainerRunning, 5) });
    view.set_status(one, status(ContainerExited, 5));
    view.set_status(one, status(ContainerExited, 5));
    // Nobody heard of its start; and one that failed to start.
    view.set_status(two, status(ContainerExited, 6));
    view.set_status(six, status(ContainerExited, 0));
    view.remove_container(one);
    view.remove_container(one);
    view.set_ready(&pod, false);
    view.set_ready(&pod, false);
    view.remove_sandbox(&pod);
    view.remove_sandbox(&pod);

    let all = |states: &[(&ContainerId, cri::ContainerState)]| states.iter().map(|(id, state)| (id.as_str().to_owned(), *state)).collect::<Vec<_>>();
    let exited = all(&[(two, ContainerExited), (six, ContainerExited)]);
    let expected = [
        (Created, pod.as_str(), true, vec![]),
        (Started, pod.as_str(), true, vec![]),
        (Created, one.as_str(), true, all(&[(one, ContainerCreated)])),
        (Created, two.as_str(), true, all(&[(one, ContainerCreated), (two, ContainerCreated)])),
        (Created, six.as_str(), true, all(&[(one, ContainerCreated), (two, ContainerCreated), (six, ContainerCreated)])),
        (Started, one.as_str(), true, all(&[(one, ContainerRunning), (two, ContainerCreated), (six, ContainerCreated)])),
        (Stopped, one.as_str(), true, all(&[(one, ContainerExited), (two, ContainerCreated), (six, ContainerCreated)])),
        (Started, two.as_str(), true, all(&[(one, ContainerExited), (two, ContainerExited), (six, ContainerCreated)])),
        (Stopped, two.as_str(), true, all(&[(one, ContainerExited), (two, ContainerExited), (six, ContainerCreated)])),
        (Stopped, six.as_str(), true, all(&[(one, ContainerExited), (two, ContainerExited), (six, ContainerExited)])),
        (Deleted, one.as_str(), true, exited.clone()),
        (Stopped, pod.as_str(), false, exited),
        (Deleted, two.as_str(), false, all(&[(six, ContainerExited)])),
        (Deleted, six.as_str(), false, vec![]),
        (Deleted, pod.as_str(), false, vec![]),
    ];
    let expected: Vec<_> = expected.into_iter().map(|(kind, id, ready, containers)| (kind, id.to_owned(), ready, containers)).collect();
    assert_eq!(events(&mut reader, expected.len()).await, expected);
    assert_eq!(events(&mut other, expected.len()).await, expected);
    assert!(tokio::time::timeout(Duration::ZERO, reader.next()).await.is_err(), "no more");
}

#[tokio::test]
async fn an_event_says_what_a_status_asked_after_it_says() {
    let (view, one, _, container) = view();
    let mut reader = view.events();
    view.set_status(&container, store::ContainerStatus { state: 2, exit_code: 3, finished_unix_nanos: 9, ..running() });
    let event = cri::ContainerEventResponse::decode(reader.next().await.unwrap()).unwrap();
    assert_eq!(event.containers_statuses, [view.container(container.as_str()).unwrap().answer()]);
    let sandbox = view.sandbox(one.as_str()).unwrap();
    assert_eq!(event.pod_sandbox_status, Some(super::super::restored::sandbox_status(&sandbox.meta(), true)));
}

#[tokio::test]
async fn a_reader_that_is_too_far_behind_is_told_so() {
    // By their number, and by their size: a pod whose annotations are long.
    for (long, changes) in [(false, events::WAITING + 10), (true, 20)] {
        let view = View::new();
        let mut meta = sandbox_meta(&id("pod"), 1);
        if long {
            meta.config.as_mut().unwrap().annotations.insert("long".to_owned(), "x".repeat(events::WAITING_BYTES / 10));
        }
        let pod = view.insert_sandbox(&meta, true).unwrap();
        let (mut slow, mut quick, gone) = (view.events(), view.events(), view.events());
        drop(gone);
        for _ in 0..changes {
            view.set_ready(&pod, false);
            view.set_ready(&pod, true);
            assert_eq!(events(&mut quick, 1).await.len(), 1, "who reads is told all");
        }
        let (mut read, mut bytes) = (0, 0);
        let status = loop {
            match slow.next().await {
                Ok(event) => (read, bytes) = (read + 1, bytes + event.len()),
                Err(status) => break status,
            }
        };
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert!(status.message().contains("1024") && status.message().contains("8388608"), "{status}");
        assert_eq!(read, if long { 9 } else { events::WAITING });
        assert!(bytes <= events::WAITING_BYTES);
        assert!(slow.next().await.is_err(), "no more come");
    }
}

#[test]
fn annotations_find_the_running_pod_that_has_exactly_them() {
    let (view, one, _, _) = view();
    let mut image = cri::ImageSpec { annotations: view.sandbox(one.as_str()).unwrap().config().annotations, ..Default::default() };
    assert_eq!(view.sandbox_of_annotations(&image).unwrap().id, one);
    image.annotations.insert("more".to_owned(), String::new());
    assert!(view.sandbox_of_annotations(&image).is_none());
    image.annotations.clear();
    assert!(view.sandbox_of_annotations(&image).is_none());
    let image = cri::ImageSpec { annotations: view.sandbox(one.as_str()).unwrap().config().annotations, ..Default::default() };
    view.set_ready(&one, false);
    assert!(view.sandbox_of_annotations(&image).is_none());
}

#[test]
fn a_container_of_a_stopped_sandbox_is_not_published() {
    let (view, one, _, _) = view();
    view.set_ready(&one, false);
    assert!(!view.insert_container(&container_meta(&id("late"), one.as_str(), 2), store::ContainerStatus::default(), None).unwrap());
    assert!(!view.insert_container(&container_meta(&id("lost"), &id("nowhere"), 3), running(), None).unwrap());
    assert!(view.container(&id("late")).is_err());
}

#[test]
fn a_cell_names_only_containers_of_its_own() {
    let (view, _, _, container) = view();
    let cell_container = view.container(container.as_str()).unwrap().cell_container;
    assert!(view.container_of_cell(&CellId::parse("cell-000000000001").unwrap(), &cell_container).is_some());
    assert!(view.container_of_cell(&CellId::parse("cell-000000000002").unwrap(), &cell_container).is_none());
}

#[tokio::test]
async fn a_wait_ends_when_it_holds() {
    let (view, one, _, _) = view();
    let view = Arc::new(view);
    let waiting = tokio::spawn({
        let (view, one) = (Arc::clone(&view), one.clone());
        async move { view.wait(Duration::from_secs(60), |view| (!view.sandbox(one.as_str()).ok()?.ready).then_some(())).await }
    });
    view.set_ready(&one, false);
    assert_eq!(waiting.await.unwrap(), Some(()));
    assert_eq!(view.wait(Duration::ZERO, |_| None::<()>).await, None);
}

proptest! {
    /// Whatever is inserted, stopped and removed: the whole list is what the sandboxes are.
    #[test]
    fn the_kept_list_is_never_old(steps in prop::collection::vec((0..6_u32, 0..3_u8), 0..40)) {
        let view = View::new();
        let mut there: std::collections::BTreeMap<u32, bool> = Default::default();
        let name = |n: u32| id(&format!("p{n}"));
        for (n, step) in steps {
            let id = SandboxId::parse(&name(n)).unwrap();
            match step {
                0 if !there.contains_key(&n) => {
                    view.insert_sandbox(&sandbox_meta(&name(n), n), true).unwrap();
                    there.insert(n, true);
                }
                1 => {
                    view.set_ready(&id, false);
                    there.entry(n).and_modify(|ready| *ready = false);
                }
                2 => {
                    view.remove_sandbox(&id);
                    there.remove(&n);
                }
                _ => {}
            }
            let list = cri::ListPodSandboxResponse::decode(view.list_sandboxes(&filter::Sandboxes::default())).unwrap().items;
            let list: Vec<_> = list.into_iter().map(|item| (item.id.clone(), item.state() == cri::PodSandboxState::SandboxReady)).collect();
            let expected: Vec<_> = there.iter().map(|(n, ready)| (name(*n), *ready)).collect();
            prop_assert_eq!(list, expected);
        }
    }
}

#[test]
fn what_a_cell_says_of_a_container_is_kept_to_a_bound() {
    let user = cri::ContainerUser { linux: Some(cri::LinuxContainerUser { supplemental_groups: vec![i64::MAX; 1 << 20], ..Default::default() }) };
    let told = cri::ContainerStatus { user: Some(user), stop_signal: cri::Signal::Sigusr1.into(), ..Default::default() };
    let kept: cri::ContainerStatus = Message::decode(super::kept(&told)).unwrap();
    assert_eq!((kept.user.is_none(), kept.stop_signal()), (true, cri::Signal::Sigusr1));
}
