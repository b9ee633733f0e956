//! Usage and metrics.

use super::*;

/// Returns a cell's sample of its container `n`.
fn used(n: u32, timestamp: i64, value: u64) -> cri::ContainerStats {
    let value = Some(cri::UInt64Value { value });
    cri::ContainerStats {
        attributes: Some(cri::ContainerAttributes {
            id: format!("c{n:063x}"),
            ..Default::default()
        }),
        cpu: Some(cri::CpuUsage {
            timestamp,
            usage_core_nano_seconds: value,
            ..Default::default()
        }),
        memory: Some(cri::MemoryUsage {
            timestamp,
            working_set_bytes: value,
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// Returns id, timestamp, CPU and memory of the listed containers.
fn listed_containers(pods: &Pods) -> Vec<(String, i64, Option<u64>, Option<u64>)> {
    let list = pods.list_container_stats(&filter::Containers::default());
    let of = |stats: cri::ContainerStats| {
        let (cpu, memory) = (stats.cpu.unwrap(), stats.memory.unwrap());
        assert_eq!(cpu.timestamp, memory.timestamp);
        (
            stats.attributes.unwrap().id,
            cpu.timestamp,
            cpu.usage_core_nano_seconds.map(|used| used.value),
            memory.working_set_bytes.map(|used| used.value),
        )
    };
    cri::ListContainerStatsResponse::decode(list).unwrap().stats.into_iter().map(of).collect()
}

/// Verifies U3.
#[test]
fn container_is_in_statistics_from_its_creation_to_its_end() {
    let (pods, one, _, container) = example();
    let (cell, now) = (CellId::parse("cell-000000000001").unwrap(), Instant::now());
    let state = |state: cri::ContainerState| {
        let started_unix_nanos = 7;
        pods.set_status(
            &container,
            store::ContainerStatus { state: state.into(), started_unix_nanos, ..running() },
        );
    };
    let only = |pods: &Pods| {
        let [(id, timestamp, cpu, memory)] = listed_containers(pods).try_into().unwrap();
        assert_eq!((id.as_str(), timestamp > 0), (container.as_str(), true));
        let by_id = pods.usage_of_container(&pods.container(container.as_str()).unwrap());
        assert_eq!(by_id.cpu.unwrap().usage_core_nano_seconds.map(|used| used.value), cpu);
        let of_pod = pods.usage_of_sandbox(&pods.sandbox(one.as_str()).unwrap());
        assert_eq!(of_pod.linux.unwrap().containers, [by_id]);
        (timestamp, cpu, memory)
    };
    state(cri::ContainerState::ContainerCreated);
    assert_eq!(only(&pods), (5, Some(0), Some(0)), "since its creation");
    // The read model of a restarted daemon: a zero would be a counter that decreases.
    state(cri::ContainerState::ContainerRunning);
    assert_eq!(only(&pods), (5, None, None), "no report yet");
    pods.set_first_usage(&container, None, now);
    let (started, cpu, memory) = only(&pods);
    assert_eq!((cpu, memory), (Some(0), Some(0)));
    let beat = |stats| {
        pods.heartbeat(&cell, Heartbeat { containers: vec![stats], ..Default::default() }, now)
    };
    beat(used(1, 20, 2));
    pods.set_first_usage(&container, Some(used(1, 10, 1)), now);
    assert_eq!(only(&pods).1, Some(2), "a heartbeat was faster");
    assert!(only(&pods).0 >= started);
    // containerd reports a container without its usage while it can't read the usage.
    let last = only(&pods);
    beat(cri::ContainerStats { cpu: None, memory: None, ..used(1, 0, 0) });
    assert_eq!(only(&pods), last);
    state(cri::ContainerState::ContainerExited);
    pods.set_first_usage(&container, None, now);
    assert_eq!(listed_containers(&pods), []);
    let by_id = pods.usage_of_container(&pods.container(container.as_str()).unwrap());
    assert_eq!((by_id.attributes.unwrap().id.as_str(), by_id.cpu), (container.as_str(), None));
}

/// Verifies U3.
#[test]
fn usage_of_a_silent_cell_stays_at_its_last_sample() {
    let (pods, one, two, _) = example();
    let now = Instant::now();
    let listed = || {
        let list = pods.list_sandbox_stats(&filter::Sandboxes::default());
        let of = |stats: cri::PodSandboxStats| {
            let linux = stats.linux.unwrap();
            let (cpu, memory) = (linux.cpu.unwrap(), linux.memory.unwrap());
            assert!(cpu.timestamp > 0 && memory.timestamp > 0);
            (stats.attributes.unwrap().id, cpu.usage_core_nano_seconds.map(|used| used.value))
        };
        let stats = cri::ListPodSandboxStatsResponse::decode(list).unwrap().stats;
        stats.into_iter().map(of).collect::<Vec<_>>()
    };
    let (first, second) = (one.to_string(), two.to_string());
    assert_eq!(listed(), [(first.clone(), None), (second.clone(), None)], "no report yet");
    let cpu = used(1, 20, 9).cpu;
    let sandbox = cri::PodSandboxStats {
        linux: Some(cri::LinuxPodSandboxStats { cpu, ..Default::default() }),
        ..Default::default()
    };
    let beat = Heartbeat {
        containers: vec![used(1, 20, 8)],
        sandbox: Some(sandbox),
        ..Default::default()
    };
    // Received so long ago that it is not recent now.
    let then = now.checked_sub(usage::USAGE_TTL).unwrap();
    pods.heartbeat(&CellId::parse("cell-000000000001").unwrap(), beat, then);
    assert_eq!(listed(), [(first.clone(), Some(9)), (second.clone(), None)]);
    let containers = listed_containers(&pods);
    assert_eq!((containers[0].2, containers.clone()), (Some(8), listed_containers(&pods)));
    assert!(pods.usage_of(&one, now).is_none(), "metrics have only recent usage");
    pods.set_first_sandbox_usage(&one, None, now);
    pods.set_first_sandbox_usage(&two, None, now);
    assert_eq!(listed(), [(first, Some(9)), (second.clone(), Some(0))]);
    pods.set_ready(&one, false);
    assert_eq!(listed(), [(second, Some(0))]);
    let ended = pods.usage_of_sandbox(&pods.sandbox(one.as_str()).unwrap());
    assert_eq!(ended.linux, Some(cri::LinuxPodSandboxStats::default()));
}

#[test]
fn usage_has_the_records_attributes_and_ends_with_the_container() {
    let (pods, one, _, container) = example();
    let (cell, other) =
        (CellId::parse("cell-000000000001").unwrap(), CellId::parse("cell-000000000002").unwrap());
    let stats = cri::ContainerStats {
        attributes: Some(cri::ContainerAttributes {
            id: format!("c{:063x}", 1),
            ..Default::default()
        }),
        memory: Some(cri::MemoryUsage {
            working_set_bytes: Some(cri::UInt64Value { value: 42 }),
            ..Default::default()
        }),
        writable_layer: Some(cri::FilesystemUsage {
            fs_id: Some(cri::FilesystemIdentifier::default()),
            ..Default::default()
        }),
        ..Default::default()
    };
    let beat = Heartbeat {
        containers: vec![stats],
        sandbox: Some(cri::PodSandboxStats::default()),
        metrics: None,
        ..Default::default()
    };
    let now = Instant::now();
    let listed = |pods: &Pods| {
        cri::ListContainerStatsResponse::decode(
            pods.list_container_stats(&filter::Containers::default()),
        )
        .unwrap()
        .stats
    };
    let before = listed(&pods);
    pods.heartbeat(&other, beat.clone(), now);
    assert_eq!(listed(&pods), before, "a cell reports only on its own pod");
    pods.heartbeat(&cell, beat.clone(), now);
    let stats = listed(&pods).pop().unwrap();
    let attributes = stats.attributes.unwrap();
    assert_eq!((&*attributes.id, &*attributes.metadata.unwrap().name), (container.as_str(), "c-1"));
    assert_eq!(
        (
            stats.memory.unwrap().working_set_bytes.unwrap().value,
            stats.writable_layer.unwrap().fs_id
        ),
        (42, None)
    );
    let of_sandbox = pods.usage_of(&one, now).unwrap();
    assert_eq!(
        (&*of_sandbox.attributes.unwrap().id, of_sandbox.linux.unwrap().containers.len()),
        (one.as_str(), 1)
    );
    pods.set_status(&container, store::ContainerStatus { state: 2, ..running() });
    assert!(listed(&pods).is_empty());
    assert!(pods.usage_of(&one, now).unwrap().linux.unwrap().containers.is_empty());
    pods.heartbeat(&cell, beat, now);
    assert!(listed(&pods).is_empty());
}

#[test]
fn metrics_are_listed_while_usage_is_recent() {
    let (pods, one, _, container) = example();
    let now = Instant::now();
    let attributes =
        Some(cri::ContainerAttributes { id: format!("c{:063x}", 1), ..Default::default() });
    let cpu = Some(cri::CpuUsage {
        timestamp: 3,
        usage_core_nano_seconds: Some(cri::UInt64Value { value: 5_000_000_000 }),
        ..Default::default()
    });
    let sandbox = Some(cri::PodSandboxStats::default());
    let beat = Heartbeat {
        containers: vec![cri::ContainerStats { attributes, cpu, ..Default::default() }],
        sandbox,
        metrics: None,
        ..Default::default()
    };
    pods.heartbeat(&CellId::parse("cell-000000000001").unwrap(), beat, now);
    let name = "container_cpu_usage_seconds_total".to_owned();
    let label_keys = ["container", "image", "id", "namespace"].map(str::to_owned).into();
    let descriptors = vec![cri::MetricDescriptor { name, label_keys, ..Default::default() }];
    let descriptors = cri::ListMetricDescriptorsResponse { descriptors }.encode_to_vec();
    let told = |descriptors: &[u8], now| {
        cri::ListPodSandboxMetricsResponse::decode(pods.list_metrics(descriptors, now))
            .unwrap()
            .pod_metrics
    };
    let [pod] = told(&descriptors, now).try_into().unwrap();
    assert_eq!(pod.pod_sandbox_id, one.as_str());
    let metric = &pod.container_metrics[0].metrics[0];
    assert_eq!(
        (metric.label_values.clone(), metric.value),
        (
            ["c-1", "busybox", container.as_str(), "shop"].map(str::to_owned).into(),
            Some(cri::UInt64Value { value: 5 })
        )
    );
    assert!(told(&descriptors, now + usage::USAGE_TTL).is_empty());
    assert!(
        told(b"\xff", now)[0].container_metrics[0].metrics.is_empty(),
        "an invalid response describes nothing"
    );
}

#[test]
fn usage_is_listed_by_all_filters() {
    let (pods, one, _, container) = example();
    let listed = |filter: &filter::Containers, sandboxes: &filter::Sandboxes| {
        (
            !pods.list_container_stats(filter).is_empty(),
            !pods.list_sandbox_stats(sandboxes).is_empty(),
        )
    };
    let (all, pods) = (filter::Containers::default(), filter::Sandboxes::default());
    let (by_id, by_pod) = (
        filter::Containers { id: container.as_str().to_owned(), ..Default::default() },
        filter::Containers { sandbox: one.as_str().to_owned(), ..Default::default() },
    );
    let pod = filter::Sandboxes { id: one.as_str().to_owned(), ..Default::default() };
    for (filter, pods) in [(&all, &pods), (&by_id, &pod), (&by_pod, &pod)] {
        assert_eq!(listed(filter, pods), (true, true));
    }
    let other = filter::Containers { sandbox: id("elsewhere"), ..Default::default() };
    let none = filter::Sandboxes { labels: labels(&[("app", "none")]), ..Default::default() };
    assert_eq!(listed(&other, &none), (false, false));
}

fn described(name: &str, keys: &[&str]) -> cri::MetricDescriptor {
    cri::MetricDescriptor {
        name: name.to_owned(),
        label_keys: keys.iter().map(|&key| key.to_owned()).collect(),
        ..Default::default()
    }
}

/// Verifies U25.
#[test]
fn metrics_of_a_cell_are_listed_while_it_sends_them() {
    let (pods, one, _, container) = example();
    let (own, other) =
        (CellId::parse("cell-000000000001").unwrap(), CellId::parse("cell-000000000002").unwrap());
    let now = Instant::now();
    let beat = |container: u64, metrics: Option<cell::Metrics>| {
        let attributes = Some(cri::ContainerAttributes {
            id: format!("c{container:063x}"),
            ..Default::default()
        });
        let containers = vec![cri::ContainerStats { attributes, ..Default::default() }];
        Heartbeat {
            containers,
            sandbox: Some(cri::PodSandboxStats::default()),
            metrics,
            ..Default::default()
        }
    };
    let measured = |value| {
        let of = cell::ContainerSamples {
            container: format!("c{:063x}", 1),
            timestamp: 5,
            samples: vec![sample("container_sockets", &[], value)],
        };
        let pod = vec![sample(
            "container_network_receive_packets_total",
            &[("interface", "eth0")],
            value,
        )];
        cell::Metrics { pod, timestamp: 4, containers: vec![of] }
    };
    let descriptors = vec![
        described("container_sockets", &["id"]),
        described("container_network_receive_packets_total", &["id", "interface"]),
    ];
    let descriptors = cri::ListMetricDescriptorsResponse { descriptors }.encode_to_vec();
    let told = |now| {
        let pods = cri::ListPodSandboxMetricsResponse::decode(pods.list_metrics(&descriptors, now))
            .unwrap()
            .pod_metrics;
        let value =
            |metric: &cri::Metric| (metric.label_values.join(" "), metric.value.unwrap().value);
        let of = |pod: cri::PodSandboxMetrics| {
            let containers = pod.container_metrics.iter().flat_map(|of| &of.metrics);
            pod.metrics.iter().chain(containers).map(value).collect::<Vec<_>>()
        };
        pods.into_iter().flat_map(of).collect::<Vec<_>>()
    };
    assert!(!pods.awaits_metrics(now), "no cell has connected");
    pods.heartbeat(&own, beat(1, None), now);
    assert!(
        pods.awaits_metrics(now) && !pods.awaits_metrics(now + usage::USAGE_TTL),
        "a silent cell is not waited for"
    );
    // Metrics of another cell's container.
    pods.heartbeat(&other, Heartbeat { metrics: Some(measured(1)), ..Heartbeat::default() }, now);
    assert_eq!((told(now), pods.awaits_metrics(now)), (vec![], true));
    let values = |value| {
        vec![(format!("{} eth0", one.as_str()), value), (container.as_str().to_owned(), value)]
    };
    pods.heartbeat(&own, beat(1, Some(measured(2))), now);
    assert_eq!((told(now), pods.awaits_metrics(now)), (values(2), false));
    // Without metrics in time, the previous metrics stay until they are too old.
    let later = now + usage::USAGE_TTL;
    pods.heartbeat(&own, beat(1, Some(cell::Metrics::default())), later - Duration::from_millis(1));
    assert_eq!((told(later - Duration::from_millis(1)), told(later)), (values(2), vec![]));
    pods.heartbeat(&own, beat(1, Some(measured(3))), later);
    assert_eq!(told(later), values(3));
    // After the subscription.
    pods.heartbeat(&own, beat(1, None), later);
    assert_eq!((told(later), pods.awaits_metrics(later)), (vec![], true));
    pods.heartbeat(&own, beat(1, Some(measured(4))), later);
    pods.set_status(&container, store::ContainerStatus { state: 2, ..running() });
    pods.heartbeat(&own, beat(1, Some(measured(4))), later);
    assert_eq!(told(later), values(4)[..1]);
}

/// Verifies U9.
#[test]
fn list_of_metrics_is_bounded_and_has_all_pods() {
    const PODS: usize = 200;
    let (pods, now) = (Pods::new(), Instant::now());
    for n in 0..PODS {
        let pod = pods
            .insert_sandbox(&sandbox_meta(&id(&format!("{n:03}")), u32::try_from(n).unwrap()), true)
            .unwrap();
        let cell = pods.sandbox(pod.as_str()).unwrap().cell;
        let device = |disk| format!("{disk:0>100}");
        let pod = (0..256)
            .map(|disk| sample("container_fs_reads_total", &[("device", &device(disk))], 1))
            .collect();
        let process = Some(cri::ProcessUsage {
            process_count: Some(cri::UInt64Value { value: 1 }),
            ..Default::default()
        });
        let sandbox = Some(cri::PodSandboxStats {
            linux: Some(cri::LinuxPodSandboxStats { process, ..Default::default() }),
            ..Default::default()
        });
        pods.heartbeat(
            &cell,
            Heartbeat {
                sandbox,
                metrics: Some(cell::Metrics { pod, ..Default::default() }),
                ..Default::default()
            },
            now,
        );
    }
    let descriptors = vec![
        described("container_fs_reads_total", &["id", "device"]),
        described("container_processes", &["id"]),
    ];
    let list =
        pods.list_metrics(&cri::ListMetricDescriptorsResponse { descriptors }.encode_to_vec(), now);
    assert!((4 << 20..5 << 20).contains(&list.len()), "{}", list.len());
    let told: Vec<_> = cri::ListPodSandboxMetricsResponse::decode(list)
        .unwrap()
        .pod_metrics
        .iter()
        .map(|pod| pod.metrics.len())
        .collect();
    // The first pods have all metrics, the others only the metrics of their statistics.
    let whole = told.iter().take_while(|count| **count > 1).count();
    assert!(
        whole > 10
            && told[..whole].iter().all(|count| *count > 200)
            && told[whole..].iter().all(|count| *count == 1),
        "{told:?}"
    );
    assert_eq!(told.len(), PODS);
}
