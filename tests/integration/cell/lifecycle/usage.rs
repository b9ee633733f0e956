//! Resource usage of pods in cells, as the kubelet reads it.

use std::{
    collections::{BTreeSet, HashMap},
    time::{SystemTime, UNIX_EPOCH},
};

use kiyot_testkit::{Container, Kiyot, KiyotOptions, Kubelet, LIMIT, Node, Pod, cri, wait_until};
use prost::Message;

use crate::cell::{
    WAIT, address,
    failures::faults::processes,
    lifecycle::stops::{freeze, thaw},
    operator::events::FakeNode,
    options, pod, remove_and_assert_clean,
};

/// Uses some processor time and memory, and writes a file of 3 MiB.
const BUSY_SCRIPT: &str = "head -c 3145728 /dev/zero > /written; sleep 1000 & trap 'exit 0' TERM; \
    while :; do i=0; while [ $i -lt 1000 ]; do i=$((i+1)); done; sleep 0.1; done";

async fn list(
    kubelet: &mut Kubelet,
    filter: Option<cri::ContainerStatsFilter>,
) -> Vec<cri::ContainerStats> {
    kubelet
        .runtime
        .list_container_stats(cri::ListContainerStatsRequest { filter })
        .await
        .unwrap()
        .into_inner()
        .stats
}

async fn list_sandboxes(
    kubelet: &mut Kubelet,
    filter: Option<cri::PodSandboxStatsFilter>,
) -> Vec<cri::PodSandboxStats> {
    kubelet
        .runtime
        .list_pod_sandbox_stats(cri::ListPodSandboxStatsRequest { filter })
        .await
        .unwrap()
        .into_inner()
        .stats
}

fn ids(stats: &[cri::ContainerStats]) -> BTreeSet<&str> {
    stats.iter().map(|stats| stats.attributes.as_ref().unwrap().id.as_str()).collect()
}

fn value(value: Option<cri::UInt64Value>) -> u64 {
    value.map_or(0, |value| value.value)
}

/// Verifies U1.
#[tokio::test]
async fn usage_names_its_pod_and_container() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("busy", BUSY_SCRIPT).label("app", "demo")).await.unwrap();
    let main = running.container("main");

    let stats = wait_until("a container's usage is complete", LIMIT, async || {
        let stats = list(&mut kubelet, None).await.into_iter().next()?;
        let written = value(stats.writable_layer.as_ref()?.used_bytes) >= 3 << 20;
        let used = value(stats.cpu.as_ref()?.usage_core_nano_seconds) > 0
            && value(stats.memory.as_ref()?.working_set_bytes) > 0;
        (written && used).then_some(stats)
    })
    .await;
    let attributes = stats.attributes.unwrap();
    assert_eq!(
        (&attributes.id, &attributes.labels, &attributes.annotations),
        (&main.id, &main.config.labels, &main.config.annotations)
    );
    assert_eq!(attributes.metadata, main.config.metadata);
    assert_eq!(
        stats.writable_layer.unwrap().fs_id,
        None,
        "the node does not know the cell's file system"
    );

    let used = value(stats.cpu.unwrap().usage_core_nano_seconds);
    wait_until("a container's usage grows", LIMIT, async || {
        let request = cri::ContainerStatsRequest { container_id: main.id.clone() };
        let stats =
            kubelet.runtime.container_stats(request).await.unwrap().into_inner().stats.unwrap();
        assert_eq!(stats.attributes.unwrap().id, main.id);
        (value(stats.cpu?.usage_core_nano_seconds) > used).then_some(())
    })
    .await;

    // The requests make traffic for the network counters.
    let ip = address(&mut kubelet, &running.sandbox).await;
    let _ = kiyot_testkit::output("busybox", &["ping", "-c", "1", "-W", "5", &ip]);
    let stats = wait_until("a pod's usage is complete", LIMIT, async || {
        let request = cri::PodSandboxStatsRequest { pod_sandbox_id: running.sandbox.clone() };
        let stats =
            kubelet.runtime.pod_sandbox_stats(request).await.unwrap().into_inner().stats.unwrap();
        let linux = stats.linux.clone()?;
        let network = linux.network?.default_interface?;
        let has_network =
            value(network.rx_bytes) > 0 && value(network.tx_bytes) > 0 && network.name == "eth0";
        let counted = value(linux.process?.process_count) >= 2;
        let used = value(linux.cpu?.usage_core_nano_seconds) > 0
            && value(linux.memory?.working_set_bytes) > 0;
        (has_network && counted && used && linux.containers.len() == 1).then_some(stats)
    })
    .await;
    let attributes = stats.attributes.unwrap();
    assert_eq!((&attributes.id, &attributes.labels), (&running.sandbox, &running.config.labels));
    assert_eq!(
        (&attributes.metadata, &attributes.annotations),
        (&running.config.metadata, &running.config.annotations)
    );
    let containers = stats.linux.unwrap().containers;
    assert_eq!(containers[0].attributes.as_ref().unwrap().id, main.id);
    assert_eq!(list_sandboxes(&mut kubelet, None).await.len(), 1);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    assert_eq!(
        (list(&mut kubelet, None).await, list_sandboxes(&mut kubelet, None).await),
        (Vec::new(), Vec::new())
    );
}

/// Verifies U3.
#[tokio::test]
async fn usage_is_listed_as_soon_as_a_start_is_answered() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("soon", WAIT)).await.unwrap();
    for number in 0..5 {
        let more = Container::script(&format!("more-{number}"), WAIT);
        let id = kubelet.create_container(&running, &more, 0).await.unwrap().id;
        kubelet.start_container(&id).await.unwrap();
        let filter = cri::ContainerStatsFilter { id: id.clone(), ..Default::default() };
        let stats =
            list(&mut kubelet, Some(filter)).await.pop().expect("the container is listed at once");
        assert_eq!(stats.attributes.unwrap().id, id);
        assert!(stats.cpu.unwrap().timestamp > 0 && stats.memory.unwrap().timestamp > 0);
        assert!(ids(&list(&mut kubelet, None).await).contains(id.as_str()));
    }
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Descriptors equal the node's. With containerd 1.6 cells have no metrics, because the node has no
/// metrics.
///
/// Verifies U9, U25.
#[tokio::test]
async fn metrics_of_cells_match_the_nodes_descriptors() {
    let node = Node::start().await;
    let keys = |keys: &[&str]| keys.iter().map(|&key| key.to_owned()).collect();
    let descriptors = vec![
        cri::MetricDescriptor {
            name: "container_memory_working_set_bytes".to_owned(),
            label_keys: keys(&["pod", "id", "image"]),
            ..Default::default()
        },
        cri::MetricDescriptor {
            name: "container_network_receive_bytes_total".to_owned(),
            label_keys: keys(&["id", "interface"]),
            ..Default::default()
        },
        // CRI's statistics do not have this metric. The agent reports it while a subscription to
        // metrics lasts.
        cri::MetricDescriptor {
            name: "container_network_receive_packets_total".to_owned(),
            label_keys: keys(&["interface", "id"]),
            ..Default::default()
        },
    ];
    let node_metrics =
        cri::PodSandboxMetrics { pod_sandbox_id: "of the node".to_owned(), ..Default::default() };
    let answers = HashMap::from([
        (
            "/runtime.v1.RuntimeService/ListMetricDescriptors",
            cri::ListMetricDescriptorsResponse { descriptors }.encode_to_vec(),
        ),
        (
            "/runtime.v1.RuntimeService/ListPodSandboxMetrics",
            cri::ListPodSandboxMetricsResponse { pod_metrics: vec![node_metrics.clone()] }
                .encode_to_vec(),
        ),
    ]);
    let fake_node = FakeNode::before(&node, answers);
    let mut kiyot = Kiyot::start(
        &node,
        KiyotOptions { containerd: Some(fake_node.socket.clone()), ..options() },
    )
    .await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("measured", WAIT)).await.unwrap();
    let main = running.container("main");
    let metrics = async |kubelet: &mut Kubelet| {
        kubelet.runtime.list_pod_sandbox_metrics(cri::ListPodSandboxMetricsRequest {}).await
    };
    let (of_pod, container_metrics) =
        wait_until("the metrics of a cell's pod are listed", LIMIT, async || {
            let metrics_list = metrics(&mut kubelet).await.unwrap().into_inner().pod_metrics;
            assert_eq!(metrics_list[0], node_metrics);
            let cell_metrics = metrics_list.into_iter().nth(1)?;
            assert_eq!(cell_metrics.pod_sandbox_id, running.sandbox);
            let container_metrics = cell_metrics.container_metrics.into_iter().next()?;
            assert_eq!(container_metrics.container_id, main.id);
            let [bytes, packets] = cell_metrics.metrics.try_into().ok()?;
            assert_eq!(
                (&*packets.name, packets.label_values),
                (
                    "container_network_receive_packets_total",
                    vec!["eth0".to_owned(), running.sandbox.clone()]
                )
            );
            assert!(value(packets.value) > 0 && packets.timestamp > 0);
            Some((bytes, container_metrics.metrics.into_iter().next()?))
        })
        .await;
    let image = main.config.image.clone().unwrap().user_specified_image;
    assert_eq!(
        (&*container_metrics.name, container_metrics.metric_type()),
        ("container_memory_working_set_bytes", cri::MetricType::Gauge)
    );
    assert_eq!(container_metrics.label_values, ["measured", &main.id, &image]);
    assert!(value(container_metrics.value) > 0 && container_metrics.timestamp > 0);
    assert_eq!(
        (&*of_pod.name, of_pod.metric_type()),
        ("container_network_receive_bytes_total", cri::MetricType::Counter)
    );
    assert_eq!(of_pod.label_values, [running.sandbox.as_str(), "eth0"]);
    // The first list after a restart has the metrics too. Otherwise all counters would end.
    kiyot.restart().await;
    let mut kubelet = kiyot.kubelet().await;
    let metrics_list = metrics(&mut kubelet).await.unwrap().into_inner().pod_metrics;
    assert_eq!(
        metrics_list
            .iter()
            .map(|pod| (&*pod.pod_sandbox_id, pod.container_metrics.len()))
            .collect::<Vec<_>>(),
        [(&*node_metrics.pod_sandbox_id, 0), (&running.sandbox, 1)]
    );
    assert_eq!(
        metrics_list[1].container_metrics[0].metrics[0].label_values,
        container_metrics.label_values
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    kiyot.stop().await;
    drop(kiyot);

    let kiyot = Kiyot::start(&node, options()).await;
    let direct = metrics(&mut node.kubelet(&node.socket()).await.unwrap())
        .await
        .map(tonic::Response::into_inner)
        .map_err(|status| status.code());
    let through_kiyot = metrics(&mut kiyot.kubelet().await)
        .await
        .map(tonic::Response::into_inner)
        .map_err(|status| status.code());
    assert_eq!(direct, through_kiyot);
}

/// Verifies U2.
#[tokio::test]
async fn usage_lists_have_pods_in_cells_and_on_the_node() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let local = kubelet
        .run_pod(&Pod::new("local").label("tier", "one").container(Container::script("main", WAIT)))
        .await
        .unwrap();
    let spec = pod("remote", WAIT).label("tier", "two").container(Container::script("other", WAIT));
    let remote = kubelet.run_pod(&spec).await.unwrap();
    let (here, there, other) =
        (&local.container("main").id, &remote.container("main").id, &remote.container("other").id);

    let all = BTreeSet::from([here.as_str(), there, other]);
    wait_until("the usage of all containers is listed", LIMIT, async || {
        (ids(&list(&mut kubelet, None).await) == all).then_some(())
    })
    .await;
    let by_pod = |id: &str| cri::ContainerStatsFilter {
        pod_sandbox_id: id.to_owned(),
        ..Default::default()
    };
    let by_id = |id: &str| cri::ContainerStatsFilter { id: id.to_owned(), ..Default::default() };
    let by_name = |name: &str| cri::ContainerStatsFilter {
        label_selector: [("io.kubernetes.container.name".to_owned(), name.to_owned())].into(),
        ..Default::default()
    };
    for (filter, expected) in [
        (by_pod(&remote.sandbox), vec![there, other]),
        (by_pod(&local.sandbox), vec![here]),
        (by_id(other), vec![other]),
        (by_id(here), vec![here]),
        (by_name("other"), vec![other]),
        (by_name("main"), vec![here, there]),
        (by_name("none"), vec![]),
    ] {
        let expected: BTreeSet<_> = expected.into_iter().map(String::as_str).collect();
        wait_until(format!("the filter {filter:?} matches {expected:?}"), LIMIT, async || {
            (ids(&list(&mut kubelet, Some(filter.clone())).await) == expected).then_some(())
        })
        .await;
    }

    let pods = async |kubelet: &mut Kubelet, filter: Option<cri::PodSandboxStatsFilter>| {
        list_sandboxes(kubelet, filter)
            .await
            .into_iter()
            .map(|stats| stats.attributes.unwrap().id)
            .collect::<BTreeSet<_>>()
    };
    let both = BTreeSet::from([local.sandbox.clone(), remote.sandbox.clone()]);
    wait_until("the usage of both pods is listed", LIMIT, async || {
        (pods(&mut kubelet, None).await == both).then_some(())
    })
    .await;
    let tier = |value: &str| cri::PodSandboxStatsFilter {
        label_selector: [("tier".to_owned(), value.to_owned())].into(),
        ..Default::default()
    };
    wait_until("the usage of a cell's pod is found by its label", LIMIT, async || {
        (pods(&mut kubelet, Some(tier("two"))).await == BTreeSet::from([remote.sandbox.clone()]))
            .then_some(())
    })
    .await;

    // Exited containers have no usage.
    kubelet.stop_container(other, 5).await.unwrap();
    assert!(!ids(&list(&mut kubelet, None).await).contains(other.as_str()));
    kubelet.stop_and_remove(&local).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &remote).await;
}

/// Verifies U3, U22.
#[tokio::test]
async fn usage_of_a_pod_is_listed_from_its_sandbox_on_and_after_a_restart() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("early").in_cell();
    let config = kubelet.prepare(&spec);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let [stats] = list_sandboxes(&mut kubelet, None).await.try_into().unwrap();
    let (attributes, linux) = (stats.attributes.unwrap(), stats.linux.unwrap());
    assert_eq!((attributes.id, attributes.metadata), (sandbox.clone(), config.metadata.clone()));
    assert!(
        linux.cpu.is_some_and(|cpu| cpu.usage_core_nano_seconds.is_some())
            && linux.memory.is_some_and(|memory| memory.working_set_bytes.is_some())
    );
    let mut running = kubelet.running(&spec, config, sandbox);
    let created = kubelet
        .create_container(&running, &Container::script("main", BUSY_SCRIPT), 0)
        .await
        .unwrap();
    kubelet.start_container(&created.id).await.unwrap();
    let used = |stats: Vec<cri::PodSandboxStats>| -> Option<u64> {
        let linux = stats.into_iter().next()?.linux?;
        let container_metrics = value(linux.containers.first()?.cpu?.usage_core_nano_seconds);
        Some(value(linux.cpu?.usage_core_nano_seconds).min(container_metrics))
            .filter(|used| *used > 0)
    };
    let before = wait_until("pod and container have usage", LIMIT, async || {
        used(list_sandboxes(&mut kubelet, None).await)
    })
    .await;
    running.containers.insert("main".to_owned(), created);
    // The first list after a restart has the usage too: an absent or smaller value would be a reset
    // of the counter.
    let mut last = before;
    for killed in [false, true] {
        if killed {
            kiyot.kill9();
            kiyot.start_again().await;
        } else {
            kiyot.restart().await;
        }
        let (mut kubelet, mut other, mut third) =
            (kiyot.kubelet().await, kiyot.kubelet().await, kiyot.kubelet().await);
        let container_metrics =
            cri::ContainerStatsRequest { container_id: running.container("main").id.clone() };
        let (pods, containers, container) = tokio::join!(
            list_sandboxes(&mut kubelet, None),
            list(&mut other, None),
            third.runtime.container_stats(container_metrics)
        );
        let of_pod = pods[0].attributes.clone().unwrap();
        assert_eq!(
            (&of_pod.id, &of_pod.metadata, &of_pod.labels),
            (&running.sandbox, &running.config.metadata, &running.config.labels)
        );
        let (config, container) =
            (&running.container("main").config, container.unwrap().into_inner().stats.unwrap());
        for stats in [&containers[0], &container, &pods[0].linux.as_ref().unwrap().containers[0]] {
            let attributes = stats.attributes.as_ref().unwrap();
            assert_eq!(
                (&attributes.id, &attributes.metadata),
                (&running.container("main").id, &config.metadata)
            );
            assert_eq!(
                (&attributes.labels, &attributes.annotations),
                (&config.labels, &config.annotations)
            );
            assert!(
                value(stats.memory.unwrap().working_set_bytes) > 0
                    && value(stats.cpu.unwrap().usage_core_nano_seconds) >= last,
                "{stats:?}"
            );
        }
        let after = used(pods).unwrap();
        assert!(after >= last, "{last} before the restart, {after} after it");
        last = after;
    }
    let mut kubelet = kiyot.kubelet().await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies U3, U22.
#[tokio::test]
async fn silent_cell_keeps_its_last_usage_and_delays_no_list() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let silent = kubelet.run_pod(&pod("silent", WAIT)).await.unwrap();
    let agents = processes(&["kiyot-cell agent", &kiyot.cells()[0]]);
    let other = kubelet.run_pod(&pod("other", WAIT)).await.unwrap();
    // Returns the times and CPU counters of the silent pod and its container. Panics if a pod is
    // absent.
    let last = async |kubelet: &mut Kubelet| {
        let (pods, containers) = (list_sandboxes(kubelet, None).await, list(kubelet, None).await);
        assert_eq!((pods.len(), containers.len()), (2, 2));
        let is_its = |attributes: &cri::PodSandboxAttributes| attributes.id == silent.sandbox;
        let pod = pods.into_iter().find(|stats| stats.attributes.as_ref().is_some_and(is_its));
        let main = silent.container("main").id.as_str();
        let container = containers
            .into_iter()
            .find(|stats| stats.attributes.as_ref().is_some_and(|of| of.id == main));
        [pod.unwrap().linux.unwrap().cpu.unwrap(), container.unwrap().cpu.unwrap()]
    };
    freeze(&agents);
    // A kubelet that is short of memory would evict a pod without usage first. An old value with a
    // new time would make the pod look idle.
    let stale = wait_until("the usage of the silent pod is old", LIMIT, async || {
        let (stale, now) = (last(&mut kubelet).await, SystemTime::now());
        let now = i64::try_from(now.duration_since(UNIX_EPOCH).unwrap().as_nanos()).unwrap();
        stale.iter().all(|cpu| now - cpu.timestamp > 16_000_000_000).then_some(stale)
    })
    .await;
    assert!(stale.iter().all(|cpu| cpu.usage_core_nano_seconds.is_some()));
    // The silent cell delays the lists of a restarted daemon at most until cells have had time to
    // reconnect. The usage has no numbers then, so that counters do not decrease.
    kiyot.restart().await;
    let mut kubelet = kiyot.kubelet().await;
    let unknown = tokio::time::timeout(LIMIT, last(&mut kubelet)).await.unwrap();
    assert!(unknown.iter().all(|cpu| cpu.timestamp > 0 && cpu.usage_core_nano_seconds.is_none()));
    thaw(&agents);
    wait_until("the silent pod has usage again", LIMIT, async || {
        let used = |[pod, container]: [cri::CpuUsage; 2]| {
            Some([pod.usage_core_nano_seconds?.value, container.usage_core_nano_seconds?.value])
        };
        let (now, before) = (used(last(&mut kubelet).await)?, used(stale).unwrap());
        assert!(now.iter().zip(before).all(|(now, before)| *now >= before), "{now:?} {before:?}");
        Some(())
    })
    .await;
    kubelet.stop_and_remove(&other).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &silent).await;
}
