//! Usage and metrics of pods whose cells report late or never.

use std::collections::BTreeMap;

use kiyot::backends::Method;
use kiyot_proto::{cell, cri};
use kiyot_testkit::wait_for;
use prost::Message;

use crate::kit::Fixture;

/// Verifies U3.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn container_has_usage_from_its_creation_to_its_end() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let list = || {
        kiyot.cached::<cri::ListContainerStatsResponse>(
            Method::ListContainerStats,
            cri::ListContainerStatsRequest::default(),
        )
    };
    // The fake containerd has no statistics, and there are no heartbeats.
    let container = kiyot.create(&sandbox, "main").await;
    let unused = || {
        let [only] = list().unwrap().stats.try_into().unwrap();
        assert_eq!(only.attributes.unwrap().id, container);
        let cpu = only.cpu.unwrap();
        assert_eq!(cpu.usage_core_nano_seconds, Some(cri::UInt64Value { value: 0 }));
        cpu.timestamp
    };
    assert_eq!(unused(), kiyot.status(&container).unwrap().created_at);
    kiyot.start_container(&container).await;
    assert!(unused() >= kiyot.status(&container).unwrap().started_at);
    // A report is listed at once.
    kiyot.provider.only().with(|state| state.cpu_nanos = Some(42));
    let other = kiyot.create(&sandbox, "other").await;
    kiyot.start_container(&other).await;
    let request = cri::ContainerStatsRequest { container_id: other.clone() };
    let stats = || {
        kiyot
            .cached::<cri::ContainerStatsResponse>(Method::ContainerStats, request.clone())
            .unwrap()
            .stats
            .unwrap()
    };
    assert_eq!(stats().cpu.unwrap().usage_core_nano_seconds, Some(cri::UInt64Value { value: 42 }));
    // An exited container is in no list. A query by its id returns attributes without usage.
    kiyot.provider.only().exit("c1", 0);
    wait_for("the usage ends with the container", || list().unwrap().stats.len() == 1).await;
    assert_eq!((stats().attributes.unwrap().id, stats().cpu, stats().memory), (other, None, None));
}

/// Verifies U3.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_has_usage_from_its_sandbox_and_containers_from_their_creation() {
    let kiyot = Fixture::start().await;
    let list = || {
        kiyot
            .cached::<cri::ListPodSandboxStatsResponse>(
                Method::ListPodSandboxStats,
                cri::ListPodSandboxStatsRequest::default(),
            )
            .unwrap()
            .stats
    };
    assert!(list().is_empty());
    let sandbox = kiyot.run("web").await;
    let [stats] = list().try_into().unwrap();
    let (attributes, linux) = (stats.attributes.unwrap(), stats.linux.unwrap());
    assert_eq!(
        (attributes.id.as_str(), attributes.metadata.unwrap().name.as_str()),
        (sandbox.as_str(), "web")
    );
    // The fake containerd has no statistics, and there are no heartbeats.
    assert_eq!(linux.cpu.unwrap().usage_core_nano_seconds, Some(cri::UInt64Value { value: 0 }));
    assert_eq!(linux.memory.unwrap().working_set_bytes, Some(cri::UInt64Value { value: 0 }));
    assert!(linux.cpu.unwrap().timestamp > 0 && linux.containers.is_empty());
    let container = kiyot.create(&sandbox, "main").await;
    let containers = || list().remove(0).linux.unwrap().containers;
    let is_listed = || {
        let [only] = containers().try_into().unwrap();
        assert_eq!(only.attributes.unwrap().id, container);
    };
    is_listed();
    kiyot.start_container(&container).await;
    is_listed();
    kiyot.provider.only().exit("c0", 0);
    wait_for("the usage ends with the container", || containers().is_empty()).await;
}

/// Returns a heartbeat of a cell with a single container.
fn beat(container: &str, used: u64, metrics: Option<cell::Metrics>) -> cell::event::Event {
    let cpu = || {
        Some(cri::CpuUsage {
            timestamp: 1,
            usage_core_nano_seconds: Some(cri::UInt64Value { value: used }),
            ..Default::default()
        })
    };
    let attributes =
        Some(cri::ContainerAttributes { id: container.to_owned(), ..Default::default() });
    let containers = vec![cri::ContainerStats { attributes, cpu: cpu(), ..Default::default() }];
    let linux = Some(cri::LinuxPodSandboxStats { cpu: cpu(), ..Default::default() });
    cell::event::Event::Heartbeat(cell::Heartbeat {
        containers,
        sandbox: Some(cri::PodSandboxStats { linux, ..Default::default() }),
        metrics,
        ..Default::default()
    })
}

/// Returns metrics with this number of sockets and packets.
fn metrics(value: u64) -> cell::Metrics {
    let sample = |name: &str| cell::Sample { name: name.to_owned(), value, labels: Vec::new() };
    let of_container = cell::ContainerSamples {
        container: "c0".to_owned(),
        timestamp: 5,
        samples: vec![sample("container_sockets")],
    };
    cell::Metrics {
        pod: vec![sample("container_network_receive_packets_total")],
        timestamp: 4,
        containers: vec![of_container],
    }
}

/// Verifies U25.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cells_send_metrics_while_they_are_scraped() {
    let kiyot = Fixture::start().await;
    let mut pods = Vec::new();
    for name in ["one", "other"] {
        let pod = kiyot.run(name).await;
        let container = kiyot.create(&pod, "main").await;
        kiyot.start_container(&container).await;
        pods.push((pod, container));
    }
    let cell = |n| kiyot.provider.nth(n);
    for n in 0..2 {
        assert_eq!(cell(n).with(|state| state.subscription_secs), None, "no scrape yet");
        cell(n).with(|state| {
            state.metrics = Some(metrics(n as u64 + 7));
            state.tell(beat("c0", 5_000_000_000, None));
        });
    }
    let described = [
        "container_sockets",
        "container_network_receive_packets_total",
        "container_cpu_usage_seconds_total",
    ]
    .map(|name| cri::MetricDescriptor {
        name: name.to_owned(),
        label_keys: ["id", "container"].map(str::to_owned).into(),
        ..Default::default()
    });
    let described = cri::ListMetricDescriptorsResponse { descriptors: described.into() };
    // The pod's own metrics, and the metrics of its containers.
    let list = async || {
        let list = kiyot.list_metrics(&described).await;
        let told = |metric: cri::Metric| {
            assert!(metric.timestamp > 0);
            (metric.name, metric.label_values, metric.value.unwrap().value)
        };
        let of = |pod: cri::PodSandboxMetrics| {
            let own: Vec<_> = pod.metrics.into_iter().map(told).collect();
            (
                pod.pod_sandbox_id,
                (
                    own,
                    pod.container_metrics
                        .into_iter()
                        .flat_map(|of| of.metrics)
                        .map(told)
                        .collect::<Vec<_>>(),
                ),
            )
        };
        list.pod_metrics.into_iter().map(of).collect::<BTreeMap<_, _>>()
    };
    // The first scrape waits for all cells.
    let first = list().await;
    assert_eq!(first.len(), 2);
    for (n, (pod, container)) in pods.iter().enumerate() {
        let [packets, sockets, used] = [
            "container_network_receive_packets_total",
            "container_sockets",
            "container_cpu_usage_seconds_total",
        ]
        .map(str::to_owned);
        let own = vec![(packets, vec![pod.clone(), String::new()], n as u64 + 7)];
        let of_container = vec![
            (sockets, vec![container.clone(), "main".to_owned()], n as u64 + 7),
            (used, vec![container.clone(), "main".to_owned()], 5),
        ];
        assert_eq!(first[pod], (own, of_container));
        assert_eq!(cell(n).with(|state| state.subscription_secs), Some(80));
    }
    // A later cell is subscribed too.
    kiyot.run("third").await;
    wait_for("the third cell is asked", || {
        cell(2).with(|state| state.subscription_secs) == Some(80)
    })
    .await;
}

/// Verifies U22.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarted_daemon_waits_for_usage_of_recovered_cells() {
    let kiyot = Fixture::start().await;
    let (one, other) = (kiyot.run("one").await, kiyot.run("other").await);
    let (of_one, of_other) = (kiyot.create(&one, "main").await, kiyot.create(&other, "main").await);
    kiyot.start_container(&of_one).await;
    kiyot.start_container(&of_other).await;
    let cells = [kiyot.provider.nth(0), kiyot.provider.nth(1)];
    cells.iter().for_each(|cell| cell.with(|state| state.unanswered.push("Watch")));

    let kiyot = kiyot.restart().await;
    let at_once = |method, message: Vec<u8>| kiyot.daemon.cri.snapshot(method, &message);
    let of_pod = |id: &str| {
        let filter =
            Some(cri::ContainerStatsFilter { pod_sandbox_id: id.to_owned(), ..Default::default() });
        cri::ListContainerStatsRequest { filter }.encode_to_vec()
    };
    for (method, message) in [
        (Method::ListContainerStats, vec![]),
        (Method::ListContainerStats, of_pod(&one)),
        (Method::ListPodSandboxStats, vec![]),
        (
            Method::ContainerStats,
            cri::ContainerStatsRequest { container_id: of_one.clone() }.encode_to_vec(),
        ),
        (
            Method::PodSandboxStats,
            cri::PodSandboxStatsRequest { pod_sandbox_id: one.clone() }.encode_to_vec(),
        ),
    ] {
        assert!(at_once(method, message).is_none(), "{method} waits");
    }
    // Other calls are answered at once.
    assert!(
        at_once(
            Method::ContainerStats,
            cri::ContainerStatsRequest { container_id: "nobody's".to_owned() }.encode_to_vec()
        )
        .unwrap()
        .is_err()
    );
    assert_eq!((kiyot.containers().len(), kiyot.sandboxes().len()), (2, 2));

    let all = kiyot.call::<cri::ListPodSandboxStatsResponse>(
        Method::ListPodSandboxStats,
        cri::ListPodSandboxStatsRequest::default(),
    );
    // A list of metrics without the pod would end its counters.
    let label_keys = vec!["id".to_owned()];
    let described = cri::MetricDescriptor {
        name: "container_cpu_usage_seconds_total".to_owned(),
        label_keys,
        ..Default::default()
    };
    let described = cri::ListMetricDescriptorsResponse { descriptors: vec![described] };
    let metrics = kiyot.list_metrics(&described);
    let cells_come_back = async {
        for (cell, pod, container, used) in
            [(&cells[0], &one, &of_one, 7), (&cells[1], &other, &of_other, 8)]
        {
            assert!(at_once(Method::ListContainerStats, of_pod(pod)).is_none());
            cell.with(|state| state.unanswered.clear());
            wait_for("its usage is listed", || {
                // The watch may not have begun.
                cell.with(|state| state.tell(beat("c0", used, Some(cell::Metrics::default()))));
                at_once(Method::ListContainerStats, of_pod(pod)).is_some()
            })
            .await;
            let stats = cri::ListContainerStatsResponse::decode(
                at_once(Method::ListContainerStats, of_pod(pod)).unwrap().unwrap(),
            )
            .unwrap()
            .stats;
            assert_eq!(stats.len(), 1);
            assert_eq!(stats[0].attributes.as_ref().unwrap().id, *container);
            assert_eq!(
                stats[0].cpu.unwrap().usage_core_nano_seconds,
                Some(cri::UInt64Value { value: used })
            );
        }
    };
    let (all, metrics, ()) = tokio::join!(all, metrics, cells_come_back);
    let told = |stats: &cri::PodSandboxStats| {
        let linux = stats.linux.as_ref().unwrap();
        let used = linux.containers.iter().map(|container| {
            (container.attributes.as_ref().unwrap().id.clone(), container.cpu.unwrap())
        });
        (
            stats.attributes.as_ref().unwrap().id.clone(),
            linux.cpu.unwrap().usage_core_nano_seconds.unwrap().value,
            used.collect::<Vec<_>>().len(),
        )
    };
    let mut told: Vec<_> = all.unwrap().stats.iter().map(told).collect();
    told.sort();
    let mut expected = vec![(one, 7, 1), (other, 8, 1)];
    expected.sort();
    assert_eq!(told, expected);
    let metrics = metrics.pod_metrics;
    let told = metrics
        .iter()
        .flat_map(|pod| &pod.container_metrics)
        .map(|container| (container.container_id.as_str(), container.metrics.len()));
    assert_eq!(
        told.collect::<BTreeMap<_, _>>(),
        BTreeMap::from([(of_one.as_str(), 1), (of_other.as_str(), 1)])
    );
}
