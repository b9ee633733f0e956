//! Heartbeats with the pod's statistics: from containerd, and from the cell's network interfaces.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kiyot_link::rehearsal;
use kiyot_proto::{
    cell::Heartbeat,
    cri::{
        ContainerStats, CpuUsage, LinuxPodSandboxStats, ListContainerStatsRequest,
        ListPodSandboxStatsRequest, MemoryUsage, NetworkInterfaceUsage, NetworkUsage,
        PodSandboxStats, UInt64Value,
    },
};

use super::{
    metrics::{self, MetricsSubscription},
    network::{self, Interface},
    runtime::{Runtime, with_timeout},
};

/// Deadline for statistics, after which a heartbeat is sent without them.
const STATS_TIMEOUT: Duration = Duration::from_millis(900);
/// Returns a heartbeat with the statistics that containerd returns in time.
pub async fn heartbeat(
    runtime: &Runtime,
    metrics_subscription: &MetricsSubscription,
    own_network: bool,
) -> Heartbeat {
    let (mut containers, mut sandboxes) = (runtime.runtime(), runtime.runtime());
    let containers = containers
        .list_container_stats(with_timeout(STATS_TIMEOUT, ListContainerStatsRequest::default()));
    let sandboxes = sandboxes
        .list_pod_sandbox_stats(with_timeout(STATS_TIMEOUT, ListPodSandboxStatsRequest::default()));
    let both = tokio::time::timeout(STATS_TIMEOUT, futures::future::join(containers, sandboxes));
    let (both, metrics) =
        futures::future::join(both, metrics_subscription.collect(runtime, STATS_TIMEOUT)).await;
    let (containers, sandboxes) =
        both.map_or((None, None), |(containers, sandboxes)| (containers.ok(), sandboxes.ok()));
    let (now, network) = (now(), if own_network { network::interfaces() } else { Vec::new() });
    let metrics = metrics.map(|metrics| metrics::with_network(metrics, &network, now));
    let beat = assemble(
        containers.map(|answer| answer.into_inner().stats),
        sandboxes.map(|answer| answer.into_inner().stats),
        &network,
        now,
    );
    Heartbeat { metrics, ..beat }
}

/// Builds a heartbeat. The pod's statistics are left out unless containerd returned all of them:
/// the daemon keeps the last complete ones, and missing numbers would read as zero.
fn assemble(
    containers: Option<Vec<ContainerStats>>,
    sandboxes: Option<Vec<PodSandboxStats>>,
    network: &[Interface],
    now: i64,
) -> Heartbeat {
    let sandbox = match (&containers, sandboxes) {
        (Some(containers), Some(sandboxes)) => Some(fill_sandbox_stats(
            // A rehearsal that could not be removed stands beside the pod.
            sandboxes.into_iter().find(|it| !is_rehearsal(it)).unwrap_or_default(),
            containers,
            network,
            now,
        )),
        _ => None,
    };
    let containers = containers.unwrap_or_default();
    Heartbeat { containers, sandbox, metrics: None, ephemeral_storage: 0 }
}

fn is_rehearsal(sandbox: &PodSandboxStats) -> bool {
    let metadata = sandbox.attributes.as_ref().and_then(|it| it.metadata.as_ref());
    metadata.is_some_and(|metadata| metadata.namespace == rehearsal::NAMESPACE)
}

/// Fills in what containerd leaves out: the network, which it counts only for sandboxes with a
/// network namespace of their own; and CPU and memory of a sandbox whose cgroup it can't read, as
/// the sums over the containers.
fn fill_sandbox_stats(
    mut sandbox: PodSandboxStats,
    containers: &[ContainerStats],
    network: &[Interface],
    now: i64,
) -> PodSandboxStats {
    let linux = sandbox.linux.get_or_insert_default();
    if linux.network.is_none() {
        linux.network = network_usage(network, now);
    }
    if linux.cpu.is_none() && !containers.is_empty() {
        sum(linux, containers, now);
    }
    sandbox
}

fn sum(linux: &mut LinuxPodSandboxStats, containers: &[ContainerStats], timestamp: i64) {
    let cpu = |of: fn(&CpuUsage) -> Option<UInt64Value>| {
        total(containers.iter().filter_map(|stats| of(stats.cpu.as_ref()?)))
    };
    let memory = |of: fn(&MemoryUsage) -> Option<UInt64Value>| {
        total(containers.iter().filter_map(|stats| of(stats.memory.as_ref()?)))
    };
    linux.cpu = Some(CpuUsage {
        timestamp,
        usage_core_nano_seconds: cpu(|cpu| cpu.usage_core_nano_seconds),
        usage_nano_cores: cpu(|cpu| cpu.usage_nano_cores),
        ..Default::default()
    });
    linux.memory = Some(MemoryUsage {
        timestamp,
        working_set_bytes: memory(|memory| memory.working_set_bytes),
        usage_bytes: memory(|memory| memory.usage_bytes),
        rss_bytes: memory(|memory| memory.rss_bytes),
        ..Default::default()
    });
}

fn total(values: impl Iterator<Item = UInt64Value>) -> Option<UInt64Value> {
    values.reduce(|sum, value| UInt64Value { value: sum.value.saturating_add(value.value) })
}

/// Converts counters to CRI's type; `None` without interfaces.
fn network_usage(network: &[Interface], timestamp: i64) -> Option<NetworkUsage> {
    let counters = |value| Some(UInt64Value { value });
    let mut interfaces =
        network.iter().map(|Interface { name, received, sent }| NetworkInterfaceUsage {
            name: name.clone(),
            rx_bytes: counters(received.bytes),
            rx_errors: counters(received.errors),
            tx_bytes: counters(sent.bytes),
            tx_errors: counters(sent.errors),
        });
    let default_interface = Some(interfaces.next()?);
    Some(NetworkUsage { timestamp, default_interface, interfaces: interfaces.collect() })
}

fn now() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| i64::try_from(since.as_nanos()).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use kiyot_proto::cri::{PodSandboxAttributes, PodSandboxMetadata};

    use super::*;
    use crate::agent::network::Counters;

    fn network() -> Vec<Interface> {
        let counters = |bytes| Counters { bytes, packets: 1, errors: bytes + 1, dropped: 1 };
        ["eth0", "net1"]
            .map(|name| Interface {
                name: name.to_owned(),
                received: counters(3),
                sent: counters(5),
            })
            .into()
    }

    fn value(value: u64) -> Option<UInt64Value> {
        Some(UInt64Value { value })
    }

    #[test]
    fn network_usage_has_eth0_as_default_interface() {
        let usage = network_usage(&network(), 9).unwrap();
        let eth0 = usage.default_interface.unwrap();
        assert_eq!((eth0.name.as_str(), usage.timestamp), ("eth0", 9));
        assert_eq!(
            (eth0.rx_bytes, eth0.rx_errors, eth0.tx_bytes, eth0.tx_errors),
            (value(3), value(4), value(5), value(6))
        );
        assert_eq!(
            usage.interfaces.iter().map(|interface| interface.name.as_str()).collect::<Vec<_>>(),
            ["net1"]
        );
        assert_eq!(network_usage(&[], 9), None);
    }

    /// Verifies U1.
    #[test]
    fn sandbox_stats_are_filled_in_only_where_missing() {
        let of_container = ContainerStats {
            cpu: Some(CpuUsage { usage_core_nano_seconds: value(5), ..Default::default() }),
            memory: Some(MemoryUsage { working_set_bytes: value(7), ..Default::default() }),
            ..Default::default()
        };
        let linux = fill_sandbox_stats(
            PodSandboxStats::default(),
            &[of_container.clone(), of_container.clone()],
            &network(),
            9,
        )
        .linux
        .unwrap();
        assert_eq!(linux.cpu.unwrap().usage_core_nano_seconds, value(10));
        assert_eq!(linux.memory.unwrap().working_set_bytes, value(14));
        let theirs = LinuxPodSandboxStats {
            cpu: Some(CpuUsage { usage_core_nano_seconds: value(1), ..Default::default() }),
            network: Some(NetworkUsage { timestamp: 1, ..Default::default() }),
            ..Default::default()
        };
        let sandbox = PodSandboxStats { linux: Some(theirs.clone()), ..Default::default() };
        assert_eq!(
            fill_sandbox_stats(sandbox, &[of_container], &network(), 9).linux.unwrap(),
            theirs
        );
        assert_eq!(
            fill_sandbox_stats(PodSandboxStats::default(), &[], &[], 9).linux.unwrap(),
            LinuxPodSandboxStats::default()
        );
    }

    /// Verifies U1.
    #[test]
    fn sandbox_of_a_rehearsal_is_not_the_pod() {
        let sandbox = |namespace: &str| PodSandboxStats {
            attributes: Some(PodSandboxAttributes {
                id: namespace.to_owned(),
                metadata: Some(PodSandboxMetadata {
                    namespace: namespace.to_owned(),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        };
        let sandboxes = vec![sandbox(rehearsal::NAMESPACE), sandbox("rehearsal")];
        let beat = assemble(Some(Vec::new()), Some(sandboxes), &[], 9);
        assert_eq!(beat.sandbox.unwrap().attributes.unwrap().id, "rehearsal");
    }

    /// Verifies U3.
    #[test]
    fn incomplete_statistics_are_left_out() {
        let (containers, sandboxes) =
            (Some(vec![ContainerStats::default()]), Some(vec![PodSandboxStats::default()]));
        for (containers, sandboxes) in
            [(None, None), (containers.clone(), None), (None, sandboxes.clone())]
        {
            assert_eq!(assemble(containers, sandboxes, &network(), 9).sandbox, None);
        }
        let beat = assemble(containers, sandboxes, &network(), 9);
        assert!(
            beat.containers.len() == 1 && beat.sandbox.unwrap().linux.unwrap().network.is_some()
        );
    }
}
