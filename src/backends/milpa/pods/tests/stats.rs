//! Usage and metrics.

use super::*;

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
            pods.list_container_stats(&filter::Containers::default(), now),
        )
        .unwrap()
        .stats
    };
    pods.heartbeat(&other, beat.clone(), now);
    assert!(listed(&pods).is_empty(), "a cell speaks of its own pod only");
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
        "what can't be read describes nothing"
    );
}

/// Verifies U3.
#[test]
fn usage_is_listed_while_it_is_recent() {
    let (pods, one, _, container) = example();
    let attributes =
        |n: u32| Some(cri::ContainerAttributes { id: format!("c{n:063x}"), ..Default::default() });
    let beat = Heartbeat {
        containers: vec![cri::ContainerStats { attributes: attributes(1), ..Default::default() }],
        sandbox: Some(cri::PodSandboxStats::default()),
        metrics: None,
        ..Default::default()
    };
    let (then, last) = (Instant::now(), Instant::now() + usage::USAGE_TTL);
    pods.heartbeat(&CellId::parse("cell-000000000001").unwrap(), beat, then);
    let told = |filter: &filter::Containers, sandboxes: &filter::Sandboxes, now| {
        (
            !pods.list_container_stats(filter, now).is_empty(),
            !pods.list_sandbox_stats(sandboxes, now).is_empty(),
        )
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
    assert_eq!(
        told(
            &other,
            &filter::Sandboxes { labels: labels(&[("app", "none")]), ..Default::default() },
            then
        ),
        (false, false)
    );
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
    assert!(!pods.awaits_metrics(now), "no cell is there to tell any");
    pods.heartbeat(&own, beat(1, None), now);
    assert!(
        pods.awaits_metrics(now) && !pods.awaits_metrics(now + usage::USAGE_TTL),
        "one that is silent is not waited for"
    );
    // Metrics of another cell's container.
    pods.heartbeat(&other, Heartbeat { metrics: Some(measured(1)), ..Heartbeat::default() }, now);
    assert_eq!((told(now), pods.awaits_metrics(now)), (vec![], true));
    let values = |value| {
        vec![(format!("{} eth0", one.as_str()), value), (container.as_str().to_owned(), value)]
    };
    pods.heartbeat(&own, beat(1, Some(measured(2))), now);
    assert_eq!((told(now), pods.awaits_metrics(now)), (values(2), false));
    // Metrics that containerd did not have in time are the previous ones, until they are too old.
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
    // All metrics of the first pods, and those of their statistics for the others.
    let whole = told.iter().take_while(|count| **count > 1).count();
    assert!(
        whole > 10
            && told[..whole].iter().all(|count| *count > 200)
            && told[whole..].iter().all(|count| *count == 1),
        "{told:?}"
    );
    assert_eq!(told.len(), PODS);
}
