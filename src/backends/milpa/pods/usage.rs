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

/// The same in nanoseconds.
const FRESH_NANOS: i64 = FRESH.as_secs() as i64 * 1_000_000_000;

/// The numbers of fields: `stats` in both responses to lists, `PodSandboxStats.linux`,
/// `LinuxPodSandboxStats.containers`.
const STATS: u32 = 1;
const LINUX: u32 = 2;
const CONTAINERS: u32 = 5;

/// The most interfaces of a pod that are told of, and the longest name of one, in bytes (IFNAMSIZ).
const INTERFACES: usize = 64;
const INTERFACE_NAME: usize = 15;

/// The moment at which a cell's samples came.
#[derive(Debug, Clone, Copy)]
pub(super) struct Received {
    /// For what is measured here.
    pub(super) at: Instant,
    /// The same by the node's clock, in nanoseconds since 1970.
    pub(super) clock: i64,
}

impl Received {
    /// Returns the time at which a sample was taken: as its cell says, unless that is in the
    /// future, before the sample `before` it, or older than any that is told. Rates are reckoned
    /// with it, and who stores samples refuses those of the future.
    pub(super) fn time(self, told: i64, before: i64) -> i64 {
        let oldest = self.clock.saturating_sub(FRESH_NANOS);
        if (oldest.max(before)..=self.clock).contains(&told) { told } else { self.clock }
    }

    /// Corrects times, and returns the first of them.
    fn correct<const N: usize>(self, times: [Option<&mut i64>; N], before: Option<&Usage>) -> i64 {
        let before = before.map_or(0, |usage| usage.taken);
        let corrected = times.into_iter().flatten().map(|time| {
            *time = self.time(*time, before);
            *time
        });
        corrected.min().unwrap_or(self.clock)
    }
}

/// What a container, or a pod but for its containers, used, and until when it is told.
#[derive(Debug, Clone)]
pub(super) struct Usage {
    /// `ContainerStats` without attributes, or `LinuxPodSandboxStats` without containers.
    stats: Bytes,
    /// The time of the sample in it that was taken first, by the node's clock.
    taken: i64,
    /// From then on it is too old.
    until: Instant,
}

impl Usage {
    /// Returns the new usage of a container, after `before`. The file system of the writable layer
    /// is the cell's, which the node's cadvisor does not know: only how much is used is kept.
    pub(super) fn of_container(
        mut stats: cri::ContainerStats,
        before: Option<&Self>,
        now: Received,
    ) -> Self {
        stats.attributes = None;
        if let Some(layer) = &mut stats.writable_layer {
            layer.fs_id = None;
        }
        let times = [
            stats.cpu.as_mut().map(|cpu| &mut cpu.timestamp),
            stats.memory.as_mut().map(|memory| &mut memory.timestamp),
            stats.writable_layer.as_mut().map(|layer| &mut layer.timestamp),
            stats.swap.as_mut().map(|swap| &mut swap.timestamp),
            stats.io.as_mut().map(|io| &mut io.timestamp),
        ];
        let taken = now.correct(times, before);
        Self::of(&stats, taken, now)
    }

    /// Returns the new usage of a pod, after `before`.
    pub(super) fn of_pod(
        stats: cri::PodSandboxStats,
        before: Option<&Self>,
        now: Received,
    ) -> Self {
        let mut linux =
            cri::LinuxPodSandboxStats { containers: Vec::new(), ..stats.linux.unwrap_or_default() };
        linux.network.iter_mut().for_each(bound);
        let times = [
            linux.cpu.as_mut().map(|cpu| &mut cpu.timestamp),
            linux.memory.as_mut().map(|memory| &mut memory.timestamp),
            linux.network.as_mut().map(|network| &mut network.timestamp),
            linux.process.as_mut().map(|process| &mut process.timestamp),
            linux.io.as_mut().map(|io| &mut io.timestamp),
        ];
        let taken = now.correct(times, before);
        Self::of(&linux, taken, now)
    }

    fn of(stats: &impl Message, taken: i64, now: Received) -> Self {
        Self { stats: stats.encode_to_vec().into(), taken, until: now.at + FRESH }
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

    /// Verifies P14.
    #[test]
    fn times_of_samples_are_those_of_the_cell_while_they_can_be() {
        const SECOND: i64 = 1_000_000_000;
        let clock = 1_000_000 * SECOND;
        let now = Received { at: Instant::now(), clock };
        let sample = |timestamp| cri::ContainerStats {
            cpu: Some(cri::CpuUsage { timestamp, ..Default::default() }),
            memory: Some(cri::MemoryUsage { timestamp, ..Default::default() }),
            ..Default::default()
        };
        let told = |usage: &Usage| {
            let stats = cri::ContainerStats::decode(usage.stats.clone()).unwrap();
            assert_eq!(stats.cpu.unwrap().timestamp, stats.memory.unwrap().timestamp);
            stats.cpu.unwrap().timestamp
        };
        let first = |timestamp| told(&Usage::of_container(sample(timestamp), None, now));
        // One that is a few seconds behind stays so.
        assert_eq!([clock - 5 * SECOND, clock].map(first), [clock - 5 * SECOND, clock]);
        for wild in [i64::MIN, -1, 0, 1, clock - 60 * SECOND, clock + 1, i64::MAX] {
            assert_eq!(first(wild), clock, "{wild}");
        }
        // It never goes back, and a sample that is told again is the same.
        let before = Usage::of_container(sample(clock - SECOND), None, now);
        let next = |timestamp| told(&Usage::of_container(sample(timestamp), Some(&before), now));
        assert_eq!(next(clock - SECOND), clock - SECOND);
        assert_eq!(next(clock - 2 * SECOND), clock);
        let linux = cri::LinuxPodSandboxStats {
            network: Some(cri::NetworkUsage { timestamp: i64::MAX, ..Default::default() }),
            ..Default::default()
        };
        let pod = cri::PodSandboxStats { linux: Some(linux), ..Default::default() };
        let usage = Usage::of_pod(pod, None, now);
        let linux = cri::LinuxPodSandboxStats::decode(usage.stats).unwrap();
        assert_eq!(linux.network.unwrap().timestamp, clock);
    }

    /// Verifies L8.
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
        let stats = cri::PodSandboxStats { linux, ..Default::default() };
        let usage = Usage::of_pod(stats, None, Received { at: Instant::now(), clock: 1 });
        let network =
            cri::LinuxPodSandboxStats::decode(usage.stats.clone()).unwrap().network.unwrap();
        assert_eq!((network.default_interface, network.interfaces.len()), (None, INTERFACES));
        assert!(usage.stats.len() < 4096);
    }
}
