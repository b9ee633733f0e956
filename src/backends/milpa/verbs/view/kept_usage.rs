//! Usage in memory: encoded, without what is known of its container or sandbox anyway, and that of
//! a pod without its containers'. So nothing is kept twice, and what a container used goes with it.

use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use kiyot_proto::cri;
use prost::{Message, encoding::key_len};

use super::{Container, Sandbox, attributes, lists::put};

/// How long what a heartbeat said is told: with the time that it took to measure and to come, no
/// usage is older than 15 s.
pub(super) const FRESH: Duration = Duration::from_secs(14);

/// The numbers of fields: `stats` in both responses to lists, `PodSandboxStats.linux`,
/// `LinuxPodSandboxStats.containers`.
const STATS: u32 = 1;
const LINUX: u32 = 2;
const CONTAINERS: u32 = 5;

/// The most interfaces of a pod that are told of, and the longest name of one, in bytes (IFNAMSIZ).
const INTERFACES: usize = 64;
const INTERFACE_NAME: usize = 15;

/// What a container, or a pod but for its containers, used, and until when it is told.
#[derive(Debug, Clone)]
pub(super) struct Usage {
    /// `ContainerStats` without attributes, or `LinuxPodSandboxStats` without containers.
    stats: Bytes,
    /// From then on it is too old.
    until: Instant,
}

impl Usage {
    /// What came now of a container. The file system of the writable layer is the cell's, which the
    /// node's cadvisor does not know: only how much is used is kept.
    pub(super) fn of_container(mut stats: cri::ContainerStats, now: Instant) -> Self {
        stats.attributes = None;
        if let Some(layer) = &mut stats.writable_layer {
            layer.fs_id = None;
        }
        Self::of(&stats, now)
    }

    /// What came now of a pod.
    pub(super) fn of_pod(stats: cri::PodSandboxStats, now: Instant) -> Self {
        let mut linux =
            cri::LinuxPodSandboxStats { containers: Vec::new(), ..stats.linux.unwrap_or_default() };
        linux.network.iter_mut().for_each(bound);
        Self::of(&linux, now)
    }

    fn of(stats: &impl Message, now: Instant) -> Self {
        Self { stats: stats.encode_to_vec().into(), until: now + FRESH }
    }

    fn is_fresh(&self, now: Instant) -> bool {
        now < self.until
    }
}

impl Container {
    /// Whether there was a heartbeat lately.
    pub(super) fn has_usage(&self, now: Instant) -> bool {
        self.usage.as_ref().is_some_and(|usage| usage.is_fresh(now))
    }

    /// Appends its usage to a `ListContainerStatsResponse`, if it runs and there was a heartbeat
    /// lately.
    pub(super) fn put_usage(&self, now: Instant, list: &mut BytesMut) {
        self.put_usage_as(STATS, now, list);
    }

    fn put_usage_as(&self, number: u32, now: Instant, to: &mut BytesMut) {
        let Some(usage) = self.usage.as_ref().filter(|usage| usage.is_fresh(now)) else { return };
        put(number, &[&attributes::of_container(&self.item), &usage.stats], to);
    }
}

impl Sandbox {
    /// Whether there was a heartbeat lately.
    pub(super) fn has_usage(&self, now: Instant) -> bool {
        self.usage.as_ref().is_some_and(|usage| usage.is_fresh(now))
    }

    /// Appends its usage and that of its containers to a `ListPodSandboxStatsResponse`, if it runs
    /// and there was a heartbeat lately.
    pub(super) fn put_usage<'a>(
        &self,
        containers: impl Iterator<Item = &'a Container>,
        now: Instant,
        list: &mut BytesMut,
    ) {
        let Some(usage) = self.usage.as_ref().filter(|usage| usage.is_fresh(now)) else { return };
        let mut of_containers = BytesMut::new();
        containers
            .for_each(|container| container.put_usage_as(CONTAINERS, now, &mut of_containers));
        let mut linux = BytesMut::with_capacity(
            2 * key_len(LINUX) + usage.stats.len() + of_containers.len() + size_of::<u64>(),
        );
        put(LINUX, &[&usage.stats, &of_containers], &mut linux);
        put(STATS, &[&attributes::of_sandbox(&self.item), &linux], list);
    }
}

/// Leaves as much of a cell's words on its network as is told: a list that one cell makes too long
/// would be an error for all. All else in a pod's usage are numbers.
fn bound(network: &mut cri::NetworkUsage) {
    let is_name = |interface: &cri::NetworkInterfaceUsage| interface.name.len() <= INTERFACE_NAME;
    network.interfaces.retain(is_name);
    network.interfaces.truncate(INTERFACES);
    network.default_interface = network.default_interface.take().filter(is_name);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_cell_says_of_its_network_is_bounded() {
        let interface = |name: String| cri::NetworkInterfaceUsage { name, ..Default::default() };
        let network = cri::NetworkUsage {
            default_interface: Some(interface("e".repeat(1 << 20))),
            interfaces: (0..10_000)
                .map(|n| interface(format!("net{n}")))
                .chain([interface("n".repeat(1 << 20))])
                .collect(),
            ..Default::default()
        };
        let linux =
            Some(cri::LinuxPodSandboxStats { network: Some(network), ..Default::default() });
        let usage =
            Usage::of_pod(cri::PodSandboxStats { linux, ..Default::default() }, Instant::now());
        let network =
            cri::LinuxPodSandboxStats::decode(usage.stats.clone()).unwrap().network.unwrap();
        assert_eq!((network.default_interface, network.interfaces.len()), (None, INTERFACES));
        assert!(usage.stats.len() < 4096);
    }
}
