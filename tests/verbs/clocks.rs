//! Cells whose clocks jump: reported times are within the times of the node.

use std::time::{SystemTime, UNIX_EPOCH};

use kiyot::backends::Method;
use kiyot_proto::{cell, cri};
use kiyot_testkit::wait_for;

use crate::kit::Fixture;

const SECOND: i64 = 1_000_000_000;
const YEAR: i64 = 365 * 24 * 3600 * SECOND;

fn now() -> i64 {
    i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos()).unwrap()
}

/// Verifies P14.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn container_times_are_within_the_times_of_the_node() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let cell = kiyot.provider.only();
    // CRI can't express the year 9999.
    let wild = [i64::MIN, -1, 0, 1, now() - YEAR, now() + YEAR, i64::MAX];
    for (n, clock) in wild.into_iter().enumerate() {
        let before = now();
        let container = kiyot.create(&sandbox, &format!("main{n}")).await;
        cell.with(|state| state.clock = Some(clock));
        kiyot.start_container(&container).await;
        let started = kiyot.status(&container).unwrap();
        assert!((before..=now()).contains(&started.created_at), "{clock}: {started:?}");
        assert!((started.created_at..=now()).contains(&started.started_at), "{clock}: {started:?}");
        // The clock jumps in the other direction.
        cell.with(|state| state.clock = Some(wild[wild.len() - 1 - n]));
        cell.exit(&format!("c{n}"), 3);
        let ended = kiyot.exited(&container).await;
        assert_eq!((ended.exit_code, ended.started_at), (3, started.started_at), "{clock}");
        assert!((ended.started_at..=now()).contains(&ended.finished_at), "{clock}: {ended:?}");
    }
}

/// Verifies P14.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn times_of_a_cell_with_a_correct_clock_are_kept() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let container = kiyot.create(&sandbox, "main").await;
    let cell = kiyot.provider.only();
    let clock = now();
    cell.with(|state| state.clock = Some(clock));
    kiyot.start_container(&container).await;
    cell.with(|state| state.clock = Some(clock + 1));
    cell.exit("c0", 0);
    let ended = kiyot.exited(&container).await;
    assert_eq!((ended.started_at, ended.finished_at), (clock, clock + 1));
}

/// Verifies P14.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_and_metrics_times_are_recent_and_not_in_the_future() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let container = kiyot.create(&sandbox, "main").await;
    kiyot.start_container(&container).await;
    let cell = kiyot.provider.only();
    let wild = [i64::MIN, -1, 0, now() - YEAR, now() + YEAR, i64::MAX, now() + SECOND * 3600];
    let mut last = 0;
    for (n, timestamp) in wild.into_iter().enumerate() {
        let before = now();
        let value = 1000 + n as u64;
        let cpu = Some(cri::CpuUsage {
            timestamp,
            usage_core_nano_seconds: Some(cri::UInt64Value { value }),
            ..Default::default()
        });
        let memory = Some(cri::MemoryUsage { timestamp, ..Default::default() });
        let attributes =
            Some(cri::ContainerAttributes { id: "c0".to_owned(), ..Default::default() });
        let network = Some(cri::NetworkUsage { timestamp, ..Default::default() });
        let linux = Some(cri::LinuxPodSandboxStats { cpu, network, ..Default::default() });
        let sample =
            cell::Sample { name: "container_sockets".to_owned(), value, labels: Vec::new() };
        let of_container = cell::ContainerSamples {
            container: "c0".to_owned(),
            timestamp,
            samples: vec![sample.clone()],
        };
        let metrics =
            cell::Metrics { pod: vec![sample], timestamp, containers: vec![of_container] };
        cell.with(|state| {
            state.metrics = Some(metrics.clone());
            state.tell(cell::event::Event::Heartbeat(cell::Heartbeat {
                ephemeral_storage: 0,
                containers: vec![cri::ContainerStats {
                    attributes,
                    cpu,
                    memory,
                    ..Default::default()
                }],
                sandbox: Some(cri::PodSandboxStats { linux, ..Default::default() }),
                metrics: Some(metrics),
            }));
        });
        let pod = || {
            let list: cri::ListPodSandboxStatsResponse = kiyot
                .cached(Method::ListPodSandboxStats, cri::ListPodSandboxStatsRequest::default())
                .unwrap();
            list.stats.into_iter().next().unwrap().linux.unwrap()
        };
        let used = |cpu: Option<cri::CpuUsage>| {
            cpu.and_then(|cpu| cpu.usage_core_nano_seconds).map(|used| used.value)
        };
        wait_for("the usage is reported", || used(pod().cpu) == Some(value)).await;
        let pod = pod();
        let described = cri::MetricDescriptor {
            name: "container_sockets".to_owned(),
            label_keys: vec!["id".to_owned()],
            ..Default::default()
        };
        let described = cri::ListMetricDescriptorsResponse { descriptors: vec![described] };
        let metrics = kiyot.list_metrics(&described).await;
        let metrics = metrics.pod_metrics.into_iter().flat_map(|pod| {
            let of_containers = pod.container_metrics.into_iter().flat_map(|of| of.metrics);
            pod.metrics.into_iter().chain(of_containers)
        });
        let mut times: Vec<_> = metrics.map(|metric| metric.timestamp).collect();
        assert!(!times.is_empty());
        times.extend([pod.cpu.unwrap().timestamp, pod.network.unwrap().timestamp]);
        times.push(pod.containers[0].cpu.unwrap().timestamp);
        times.push(pod.containers[0].memory.as_ref().unwrap().timestamp);
        for time in &times {
            assert!((before.max(last)..=now()).contains(time), "{timestamp}: {times:?}");
        }
        last = times[times.len() - 1];
    }
}
