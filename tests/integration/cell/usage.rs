//! What pods in cells use, as the kubelet reads it.

use std::collections::BTreeSet;

use kiyot_testkit::{Container, Kiyot, Kubelet, LIMIT, Node, Pod, cri, wait_until};

use super::{WAIT, address, ends_without_a_trace, options, pod};

/// Keeps a processor busy now and then, has some memory, writes a file of 3 MiB.
const BUSY: &str = "head -c 3145728 /dev/zero > /written; sleep 1000 & trap 'exit 0' TERM; while :; do i=0; while [ $i -lt 1000 ]; do i=$((i+1)); done; sleep 0.1; done";

async fn list(kubelet: &mut Kubelet, filter: Option<cri::ContainerStatsFilter>) -> Vec<cri::ContainerStats> {
    kubelet.runtime.list_container_stats(cri::ListContainerStatsRequest { filter }).await.unwrap().into_inner().stats
}

async fn list_sandboxes(kubelet: &mut Kubelet, filter: Option<cri::PodSandboxStatsFilter>) -> Vec<cri::PodSandboxStats> {
    kubelet.runtime.list_pod_sandbox_stats(cri::ListPodSandboxStatsRequest { filter }).await.unwrap().into_inner().stats
}

fn ids(stats: &[cri::ContainerStats]) -> BTreeSet<&str> {
    stats.iter().map(|stats| stats.attributes.as_ref().unwrap().id.as_str()).collect()
}

fn value(value: Option<cri::UInt64Value>) -> u64 {
    value.map_or(0, |value| value.value)
}

#[tokio::test]
async fn usage_is_told_with_whose_it_is() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("busy", BUSY).label("app", "demo")).await.unwrap();
    let main = running.container("main");

    let stats = wait_until("all of a container's usage is told", LIMIT, async || {
        let stats = list(&mut kubelet, None).await.into_iter().next()?;
        let written = value(stats.writable_layer.as_ref()?.used_bytes) >= 3 << 20;
        let used = value(stats.cpu.as_ref()?.usage_core_nano_seconds) > 0 && value(stats.memory.as_ref()?.working_set_bytes) > 0;
        (written && used).then_some(stats)
    })
    .await;
    let attributes = stats.attributes.unwrap();
    assert_eq!((&attributes.id, &attributes.labels, &attributes.annotations), (&main.id, &main.config.labels, &main.config.annotations));
    assert_eq!(attributes.metadata, main.config.metadata);
    assert_eq!(stats.writable_layer.unwrap().fs_id, None, "the node does not know the cell's file system");

    let used = value(stats.cpu.unwrap().usage_core_nano_seconds);
    wait_until("a container's usage grows", LIMIT, async || {
        let request = cri::ContainerStatsRequest { container_id: main.id.clone() };
        let stats = kubelet.runtime.container_stats(request).await.unwrap().into_inner().stats.unwrap();
        assert_eq!(stats.attributes.unwrap().id, main.id);
        (value(stats.cpu?.usage_core_nano_seconds) > used).then_some(())
    })
    .await;

    // Something for the counters of its network.
    let ip = address(&mut kubelet, &running.sandbox).await;
    let _ = kiyot_testkit::output("busybox", &["ping", "-c", "1", "-W", "5", &ip]);
    let stats = wait_until("all of a pod's usage is told", LIMIT, async || {
        let request = cri::PodSandboxStatsRequest { pod_sandbox_id: running.sandbox.clone() };
        let stats = kubelet.runtime.pod_sandbox_stats(request).await.unwrap().into_inner().stats.unwrap();
        let linux = stats.linux.clone()?;
        let network = linux.network?.default_interface?;
        let told = value(network.rx_bytes) > 0 && value(network.tx_bytes) > 0 && network.name == "eth0";
        let counted = value(linux.process?.process_count) >= 2;
        let used = value(linux.cpu?.usage_core_nano_seconds) > 0 && value(linux.memory?.working_set_bytes) > 0;
        (told && counted && used && linux.containers.len() == 1).then_some(stats)
    })
    .await;
    let attributes = stats.attributes.unwrap();
    assert_eq!((&attributes.id, &attributes.labels), (&running.sandbox, &running.config.labels));
    assert_eq!((&attributes.metadata, &attributes.annotations), (&running.config.metadata, &running.config.annotations));
    let containers = stats.linux.unwrap().containers;
    assert_eq!(containers[0].attributes.as_ref().unwrap().id, main.id);
    assert_eq!(list_sandboxes(&mut kubelet, None).await.len(), 1);
    ends_without_a_trace(&mut kubelet, &kiyot, &running).await;
    assert_eq!((list(&mut kubelet, None).await, list_sandboxes(&mut kubelet, None).await), (Vec::new(), Vec::new()));
}
