//! What the pod uses: containerd's statistics, and the counters of the cell's network.

use std::{
    fs,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use kiyot_proto::{
    cell::Heartbeat,
    cri::{
        ContainerStats, CpuUsage, LinuxPodSandboxStats, ListContainerStatsRequest, ListPodSandboxStatsRequest, MemoryUsage, NetworkInterfaceUsage,
        NetworkUsage, PodSandboxStats, UInt64Value,
    },
};

use super::{
    resolver,
    runtime::{Runtime, within},
};

/// How long statistics may take; a heartbeat goes without them then.
const STATISTICS: Duration = Duration::from_millis(900);
/// The counters of this network namespace, which is the cell's.
const COUNTERS: &str = "/proc/self/net/dev";
/// The interface that is a pod's own by convention of the kubelet and CNI.
const DEFAULT_INTERFACE: &str = "eth0";
/// The most interfaces that are told of.
const INTERFACES: usize = 64;

/// A heartbeat with what containerd has soon.
pub async fn heartbeat(runtime: &Runtime, own_network: bool) -> Heartbeat {
    let (mut containers, mut sandboxes) = (runtime.runtime(), runtime.runtime());
    let containers = containers.list_container_stats(within(STATISTICS, ListContainerStatsRequest::default()));
    let sandboxes = sandboxes.list_pod_sandbox_stats(within(STATISTICS, ListPodSandboxStatsRequest::default()));
    let both = tokio::time::timeout(STATISTICS, futures::future::join(containers, sandboxes)).await;
    let (containers, sandboxes) = both.map_or((None, None), |(containers, sandboxes)| (containers.ok(), sandboxes.ok()));
    // The file is the kernel's own: reading it does not wait.
    let network = if own_network { fs::read_to_string(COUNTERS).ok() } else { None };
    told(containers.map(|answer| answer.into_inner().stats), sandboxes.map(|answer| answer.into_inner().stats), network.as_deref(), now())
}

/// What is told of what containerd has answered. Of a pod of which it has not answered all, nothing is told: the daemon has told what it was before, and numbers that miss
/// would be taken for zero.
fn told(containers: Option<Vec<ContainerStats>>, sandboxes: Option<Vec<PodSandboxStats>>, network: Option<&str>, now: i64) -> Heartbeat {
    let sandbox = match (&containers, sandboxes) {
        (Some(containers), Some(sandboxes)) => Some(completed(sandboxes.into_iter().next().unwrap_or_default(), containers, network, now)),
        _ => None,
    };
    Heartbeat { containers: containers.unwrap_or_default(), sandbox }
}

/// Adds what containerd leaves out. It counts the network only of sandboxes with one of their own, and in a cell they have the cell's; and it may not
/// know a sandbox's control group, whose usage then is that of its containers.
fn completed(mut sandbox: PodSandboxStats, containers: &[ContainerStats], network: Option<&str>, now: i64) -> PodSandboxStats {
    let linux = sandbox.linux.get_or_insert_default();
    if linux.network.is_none() {
        linux.network = network.and_then(|table| network_usage(table, now));
    }
    if linux.cpu.is_none() && !containers.is_empty() {
        sum(linux, containers, now);
    }
    sandbox
}

fn sum(linux: &mut LinuxPodSandboxStats, containers: &[ContainerStats], timestamp: i64) {
    let cpu = |of: fn(&CpuUsage) -> Option<UInt64Value>| total(containers.iter().filter_map(|stats| of(stats.cpu.as_ref()?)));
    let memory = |of: fn(&MemoryUsage) -> Option<UInt64Value>| total(containers.iter().filter_map(|stats| of(stats.memory.as_ref()?)));
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

/// `/proc/net/dev` as CRI has it, without what no network of the pod is: the loopback, and the link to name servers. `None` for a table without interfaces.
fn network_usage(table: &str, timestamp: i64) -> Option<NetworkUsage> {
    let of_pod = |interface: &NetworkInterfaceUsage| interface.name != "lo" && interface.name != resolver::DEVICE;
    let mut interfaces: Vec<_> = table.lines().filter_map(interface).filter(of_pod).take(INTERFACES).collect();
    if interfaces.is_empty() {
        return None;
    }
    let default = interfaces.iter().position(|interface| interface.name == DEFAULT_INTERFACE).unwrap_or(0);
    let default_interface = Some(interfaces.remove(default));
    Some(NetworkUsage { timestamp, default_interface, interfaces })
}

/// A line: the name, and after it bytes, packets, errors, and five more of what was received, then the same of what was sent.
fn interface(line: &str) -> Option<NetworkInterfaceUsage> {
    let (name, counters) = line.split_once(':')?;
    let counters: Vec<u64> = counters.split_whitespace().map_while(|counter| counter.parse().ok()).collect();
    let counter = |index: usize| Some(UInt64Value { value: *counters.get(index)? });
    Some(NetworkInterfaceUsage {
        name: name.trim().to_owned(),
        rx_bytes: Some(counter(0)?),
        rx_errors: Some(counter(2)?),
        tx_bytes: Some(counter(8)?),
        tx_errors: Some(counter(10)?),
    })
}

fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_nanos()).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     100       2    0    0    0     0          0         0      100       2    0    0    0     0       0          0
 net1:       7       1    0    0    0     0          0         0        8       1    0    0    0     0       0          0
kiyot-dns:   7       1    0    0    0     0          0         0        8       1    0    0    0     0       0          0
  eth0:    1234      12    3    0    0     0          0         0     5678      34    5    0    0     0       0          0
";

    fn value(value: u64) -> Option<UInt64Value> {
        Some(UInt64Value { value })
    }

    #[test]
    fn the_pods_interface_is_the_default_one() {
        let usage = network_usage(TABLE, 9).unwrap();
        let eth0 = usage.default_interface.unwrap();
        assert_eq!((eth0.name.as_str(), usage.timestamp), ("eth0", 9));
        assert_eq!((eth0.rx_bytes, eth0.rx_errors, eth0.tx_bytes, eth0.tx_errors), (value(1234), value(3), value(5678), value(5)));
        assert_eq!(usage.interfaces.iter().map(|interface| interface.name.as_str()).collect::<Vec<_>>(), ["net1"]);
        assert_eq!(network_usage("", 9), None);
    }

    #[test]
    fn only_what_is_missing_is_added() {
        let of_container = ContainerStats {
            cpu: Some(CpuUsage { usage_core_nano_seconds: value(5), ..Default::default() }),
            memory: Some(MemoryUsage { working_set_bytes: value(7), ..Default::default() }),
            ..Default::default()
        };
        let linux = completed(PodSandboxStats::default(), &[of_container.clone(), of_container.clone()], Some(TABLE), 9).linux.unwrap();
        assert_eq!(linux.cpu.unwrap().usage_core_nano_seconds, value(10));
        assert_eq!(linux.memory.unwrap().working_set_bytes, value(14));
        let theirs = LinuxPodSandboxStats {
            cpu: Some(CpuUsage { usage_core_nano_seconds: value(1), ..Default::default() }),
            network: Some(NetworkUsage { timestamp: 1, ..Default::default() }),
            ..Default::default()
        };
        let sandbox = PodSandboxStats { linux: Some(theirs.clone()), ..Default::default() };
        assert_eq!(completed(sandbox, &[of_container], Some(TABLE), 9).linux.unwrap(), theirs);
        assert_eq!(completed(PodSandboxStats::default(), &[], None, 9).linux.unwrap(), LinuxPodSandboxStats::default());
    }

    #[test]
    fn what_containerd_does_not_say_is_not_told_as_nothing() {
        let (containers, sandboxes) = (Some(vec![ContainerStats::default()]), Some(vec![PodSandboxStats::default()]));
        for (containers, sandboxes) in [(None, None), (containers.clone(), None), (None, sandboxes.clone())] {
            assert_eq!(told(containers, sandboxes, Some(TABLE), 9).sandbox, None);
        }
        let beat = told(containers, sandboxes, Some(TABLE), 9);
        assert!(beat.containers.len() == 1 && beat.sandbox.unwrap().linux.unwrap().network.is_some());
    }

    proptest::proptest! {
        #[test]
        fn any_table_is_read(table in "([a-z0-9: -]{0,20}\n?){0,8}") {
            let _ = network_usage(&table, 0);
        }
    }
}
