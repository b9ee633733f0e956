//! Ids of a cell are only used between the daemon and the cell: responses have the node's ids.

use futures::StreamExt;
use kiyot::backends::Method;
use kiyot_proto::{cell, cri};
use kiyot_testkit::wait_for;
use prost::Message;

use crate::kit::{Fixture, LIMIT};

/// Prefix of each id of the cell.
const CELL_PREFIX: &str = "of-the-cell-";

fn has_none(what: &str, answer: &[u8]) {
    let found = answer.windows(CELL_PREFIX.len()).any(|part| part == CELL_PREFIX.as_bytes());
    assert!(!found, "{what}: {}", String::from_utf8_lossy(answer));
}

/// Makes all calls for a pod and its container. Returns how often the responses have either id.
async fn answers(kiyot: &Fixture, sandbox: &str, container: &str) -> usize {
    let of_sandbox =
        cri::PodSandboxStatusRequest { pod_sandbox_id: sandbox.to_owned(), verbose: false }
            .encode_to_vec();
    let of_container =
        cri::ContainerStatusRequest { container_id: container.to_owned(), verbose: false }
            .encode_to_vec();
    let mut ours = 0;
    for (method, request) in [
        (Method::ListPodSandbox, &[][..]),
        (Method::ListContainers, &[]),
        (Method::ListContainerStats, &[]),
        (Method::ListPodSandboxStats, &[]),
        (Method::PodSandboxStatus, &of_sandbox),
        (Method::PodSandboxStats, &of_sandbox),
        (Method::ContainerStatus, &of_container),
        (Method::ContainerStats, &of_container),
    ] {
        let answer = kiyot.daemon.cri.snapshot(method, request).unwrap().unwrap();
        has_none(&method.to_string(), &answer);
        ours += [sandbox, container]
            .map(|id| answer.windows(id.len()).filter(|part| *part == id.as_bytes()).count())
            .iter()
            .sum::<usize>();
    }
    let label_keys = ["id", "container", "pod", "name", "image"].map(str::to_owned).to_vec();
    let descriptors = ["container_cpu_usage_seconds_total", "container_memory_working_set_bytes"]
        .map(|name| cri::MetricDescriptor {
            name: name.to_owned(),
            label_keys: label_keys.clone(),
            ..Default::default()
        });
    let descriptors =
        cri::ListMetricDescriptorsResponse { descriptors: descriptors.to_vec() }.encode_to_vec();
    has_none("ListPodSandboxMetrics", &kiyot.daemon.cri.list_metrics(&descriptors).await);
    for (method, cmd) in [
        (Method::ExecSync, "true"),
        (Method::ExecSync, "fail"),
        (Method::Exec, "true"),
        (Method::Attach, ""),
    ] {
        let request = cri::ExecSyncRequest {
            container_id: container.to_owned(),
            cmd: vec![cmd.to_owned()],
            timeout: 5,
        }
        .encode_to_vec();
        match kiyot
            .daemon
            .cri
            .call(method, request.into(), Some(std::time::Instant::now() + LIMIT))
            .await
        {
            Ok(answer) => has_none(&method.to_string(), &answer),
            Err(status) => has_none(&method.to_string(), format!("{status:?}").as_bytes()),
        }
    }
    ours
}

/// Verifies P12.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_have_no_id_of_the_cell() {
    let kiyot = Fixture::with_ids(CELL_PREFIX).await;
    let mut events = kiyot.daemon.cri.events();
    let sandbox = kiyot.run("web").await;
    let container = kiyot.create(&sandbox, "main").await;
    has_none("RunPodSandbox and CreateContainer", format!("{sandbox} {container}").as_bytes());
    assert!(answers(&kiyot, &sandbox, &container).await > 0);
    kiyot.start_container(&container).await;
    let (cell, own) = (kiyot.provider.only(), format!("{CELL_PREFIX}c0"));
    // The cell's own ids are in all of its reports, and in each of the attributes.
    let attributes = cri::ContainerAttributes { id: own.clone(), ..Default::default() };
    let cpu = cri::CpuUsage {
        timestamp: 7,
        usage_core_nano_seconds: Some(cri::UInt64Value { value: 7 }),
        ..Default::default()
    };
    let of_container =
        cri::ContainerStats { attributes: Some(attributes), cpu: Some(cpu), ..Default::default() };
    let words = |key: &str| cell::Label { key: key.to_owned(), value: own.clone() };
    let sample = |name: &str| cell::Sample {
        name: name.to_owned(),
        value: 7,
        labels: ["id", "container", "pod", "name", "image"].map(words).into(),
    };
    let attributes =
        cri::PodSandboxAttributes { id: format!("{CELL_PREFIX}5a"), ..Default::default() };
    let linux = cri::LinuxPodSandboxStats {
        cpu: Some(cpu),
        containers: vec![of_container.clone()],
        ..Default::default()
    };
    let of_sandbox = cri::PodSandboxStats {
        attributes: Some(attributes),
        linux: Some(linux),
        ..Default::default()
    };
    let of_container_too = cell::ContainerSamples {
        container: own.clone(),
        timestamp: 7,
        samples: vec![sample("container_cpu_usage_seconds_total")],
    };
    let metrics = Some(cell::Metrics {
        pod: vec![sample("container_processes")],
        timestamp: 7,
        containers: vec![of_container_too],
    });
    cell.with(|state| {
        state.tell(cell::event::Event::Heartbeat(cell::Heartbeat {
            containers: vec![of_container],
            sandbox: Some(of_sandbox),
            metrics,
            ..Default::default()
        }));
        let status = cri::PodSandboxStatus { id: format!("{CELL_PREFIX}5a"), ..Default::default() };
        state.tell(cell::event::Event::Sandbox(status));
    });
    let used = || {
        let stats: cri::ContainerStatsResponse = kiyot
            .cached(
                Method::ContainerStats,
                cri::ContainerStatsRequest { container_id: container.clone() },
            )
            .unwrap();
        let used = stats.stats.unwrap().cpu.and_then(|cpu| cpu.usage_core_nano_seconds);
        used.is_some_and(|used| used.value == 7)
    };
    wait_for("the heartbeat is processed", used).await;
    // Each id is in lists, statuses and statistics.
    assert!(answers(&kiyot, &sandbox, &container).await >= 10);
    cell.exit(&own, 3);
    kiyot.exited(&container).await;
    answers(&kiyot, &sandbox, &container).await;
    kiyot.stop_sandbox(&sandbox).await;
    answers(&kiyot, &sandbox, &container).await;
    let mut told = 0;
    while let Ok(Some(event)) = tokio::time::timeout(std::time::Duration::ZERO, events.next()).await
    {
        has_none("GetContainerEvents", &event.unwrap());
        told += 1;
    }
    // Created, started and stopped.
    assert!(told >= 5, "{told}");
}
