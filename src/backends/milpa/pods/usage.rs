//! Usage in memory: encoded, without attributes, and for a pod without its containers. So nothing
//! is kept twice, and a container's usage is dropped with the container.
//!
//! A kubelet short of memory first evicts the pods without statistics, so lists have a pod until it
//! ends. The last sample of a silent cell keeps its time: with a later time the pod would look
//! idle. A kubelet reads an absent `cpu` or `memory` as zero, but not an absent number in them.

use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use kiyot_proto::cri;
use prost::{Message, encoding::key_len};

use super::{Container, Sandbox, attributes, lists::append_field};

/// Time for which the usage of a heartbeat is recent: with its measurement and transfer, no recent
/// usage is older than 15 s.
pub(super) const USAGE_TTL: Duration = Duration::from_secs(14);

/// [`USAGE_TTL`] in nanoseconds.
const USAGE_TTL_NANOS: i64 = USAGE_TTL.as_secs() as i64 * 1_000_000_000;

/// Field numbers: `stats` in both list responses, `PodSandboxStats.linux`,
/// `LinuxPodSandboxStats.containers`.
const FIELD_STATS: u32 = 1;
const FIELD_LINUX: u32 = 2;
const FIELD_CONTAINERS: u32 = 5;

/// Most interfaces of a pod that are listed.
const MAX_INTERFACES: usize = 64;
/// Longest name of an interface (IFNAMSIZ).
const MAX_INTERFACE_NAME_BYTES: usize = 15;

/// The receipt of a cell's samples.
#[derive(Debug, Clone, Copy)]
pub(super) struct Received {
    /// By the monotonic clock.
    pub(super) at: Instant,
    /// By the node's clock, in nanoseconds since 1970.
    pub(super) clock: i64,
}

impl Received {
    /// Returns the time of a sample: the cell's time, or the receipt if the cell's time is in the
    /// future, earlier than the sample `before`, or not recent. Rates are computed from these
    /// times, and time series databases refuse samples of the future.
    pub(super) fn time(self, reported: i64, before: i64) -> i64 {
        let oldest = self.clock.saturating_sub(USAGE_TTL_NANOS);
        if (oldest.max(before)..=self.clock).contains(&reported) { reported } else { self.clock }
    }

    /// Corrects times, and returns the earliest.
    fn correct<const N: usize>(self, times: [Option<&mut i64>; N], before: Option<&Usage>) -> i64 {
        let before = before.map_or(0, |usage| usage.taken);
        let corrected = times.into_iter().flatten().map(|time| {
            *time = self.time(*time, before);
            *time
        });
        corrected.min().unwrap_or(self.clock)
    }
}

/// The usage of a container, or of a pod without its containers.
#[derive(Debug, Clone)]
pub(super) struct Usage {
    /// Encoded `ContainerStats` without attributes, or `LinuxPodSandboxStats` without containers.
    stats: Bytes,
    /// Time of its earliest sample, by the node's clock.
    taken: i64,
    /// Nanoseconds since the previous sample; 0 for the first.
    pub(super) window: i64,
    /// End of the time in which it is recent.
    until: Instant,
}

impl Usage {
    /// Returns the new usage of a container, after `before`. Drops the id of the writable layer's
    /// file system: the node's cadvisor does not know file systems of cells.
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
        let known = || cri::ContainerStats::decode(before?.stats.clone()).ok();
        complete(&mut stats.cpu, &mut stats.memory, taken, || {
            known().map(|of| (of.cpu, of.memory))
        });
        Self::of(&stats, taken, before, now)
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
        let known = || cri::LinuxPodSandboxStats::decode(before?.stats.clone()).ok();
        complete(&mut linux.cpu, &mut linux.memory, taken, || {
            known().map(|of| (of.cpu, of.memory))
        });
        Self::of(&linux, taken, before, now)
    }

    fn of(stats: &impl Message, taken: i64, before: Option<&Self>, now: Received) -> Self {
        let window = before.map_or(0, |before| match taken.saturating_sub(before.taken) {
            // A repeated sample.
            ..=0 => before.window,
            window => window,
        });
        Self { stats: stats.encode_to_vec().into(), taken, window, until: now.at + USAGE_TTL }
    }

    /// Returns whether it is recent.
    fn is_fresh(&self, now: Instant) -> bool {
        now < self.until
    }
}

/// Samples that are listed.
#[derive(Debug, Clone, Copy)]
pub(super) enum Listed {
    /// Recent samples.
    Recent(Instant),
    /// The last samples; an entry without a sample has no numbers.
    All,
}

impl Listed {
    /// Returns the sample of an entry that has not ended; for [`Self::All`] the result of
    /// `unmeasured` if the entry has no sample.
    fn sample(self, usage: Option<&Usage>, unmeasured: impl FnOnce() -> Bytes) -> Option<Bytes> {
        match (self, usage) {
            (Self::Recent(now), usage) => {
                usage.filter(|usage| usage.is_fresh(now)).map(|usage| usage.stats.clone())
            }
            (Self::All, Some(usage)) => Some(usage.stats.clone()),
            (Self::All, None) => Some(unmeasured()),
        }
    }
}

impl Container {
    /// Appends its usage to a `ListContainerStatsResponse`.
    pub(super) fn append_usage(&self, listed: Listed, list: &mut BytesMut) {
        self.append_usage_as(FIELD_STATS, listed, list);
    }

    fn append_usage_as(&self, number: u32, listed: Listed, to: &mut BytesMut) {
        // The numbers of a running container are unknown while its cell is silent after a restart
        // of the daemon.
        let number_if_unmeasured =
            (self.state() == cri::ContainerState::ContainerCreated).then_some(0);
        let unmeasured = || {
            let created = self.meta().created_unix_nanos;
            let stats = cri::ContainerStats {
                cpu: Some(cpu(created, number_if_unmeasured)),
                memory: Some(memory(created, number_if_unmeasured)),
                ..Default::default()
            };
            stats.encode_to_vec().into()
        };
        if !self.exited()
            && let Some(stats) = listed.sample(self.usage.as_ref(), unmeasured)
        {
            append_field(number, &[&attributes::of_container(&self.item), &stats], to);
        }
    }
}

impl Sandbox {
    /// Returns whether it has recent usage.
    pub(super) fn has_usage(&self, now: Instant) -> bool {
        self.usage.as_ref().is_some_and(|usage| usage.is_fresh(now))
    }

    /// Appends its usage and its containers' usage to a `ListPodSandboxStatsResponse`.
    pub(super) fn append_usage<'a>(
        &self,
        containers: impl Iterator<Item = &'a Container>,
        listed: Listed,
        list: &mut BytesMut,
    ) {
        let unmeasured = || {
            let created = self.meta().created_unix_nanos;
            let stats = cri::LinuxPodSandboxStats {
                cpu: Some(cpu(created, None)),
                memory: Some(memory(created, None)),
                ..Default::default()
            };
            stats.encode_to_vec().into()
        };
        if !self.ready {
            return;
        }
        let Some(stats) = listed.sample(self.usage.as_ref(), unmeasured) else { return };
        let mut of_containers = BytesMut::new();
        containers.for_each(|container| {
            container.append_usage_as(FIELD_CONTAINERS, listed, &mut of_containers)
        });
        let mut linux = BytesMut::with_capacity(
            2 * key_len(FIELD_LINUX) + stats.len() + of_containers.len() + size_of::<u64>(),
        );
        append_field(FIELD_LINUX, &[&stats, &of_containers], &mut linux);
        append_field(FIELD_STATS, &[&attributes::of_sandbox(&self.item), &linux], list);
    }
}

/// Returns CPU usage with this number.
pub(super) fn cpu(timestamp: i64, number: Option<u64>) -> cri::CpuUsage {
    let number = number.map(|value| cri::UInt64Value { value });
    cri::CpuUsage { timestamp, usage_core_nano_seconds: number, ..Default::default() }
}

/// Returns memory usage with this number.
pub(super) fn memory(timestamp: i64, number: Option<u64>) -> cri::MemoryUsage {
    let number = number.map(|value| cri::UInt64Value { value });
    cri::MemoryUsage { timestamp, working_set_bytes: number, ..Default::default() }
}

/// Completes a report without CPU or memory usage: from the previous report, else without numbers.
fn complete(
    own_cpu: &mut Option<cri::CpuUsage>,
    own_memory: &mut Option<cri::MemoryUsage>,
    taken: i64,
    known: impl FnOnce() -> Option<(Option<cri::CpuUsage>, Option<cri::MemoryUsage>)>,
) {
    if own_cpu.is_none() || own_memory.is_none() {
        let (known_cpu, known_memory) = known().unwrap_or_default();
        own_cpu.get_or_insert_with(|| known_cpu.unwrap_or_else(|| cpu(taken, None)));
        own_memory.get_or_insert_with(|| known_memory.unwrap_or_else(|| memory(taken, None)));
    }
}

/// Limits a cell's report on its network: with a report that is too long, a list of all pods would
/// fail. All other usage of a pod is numbers.
fn bound(network: &mut cri::NetworkUsage) {
    let is_name =
        |interface: &cri::NetworkInterfaceUsage| interface.name.len() <= MAX_INTERFACE_NAME_BYTES;
    network.interfaces.retain(is_name);
    network.interfaces.truncate(MAX_INTERFACES);
    network.default_interface = network.default_interface.take().filter(is_name);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies P14.
    #[test]
    fn sample_times_are_the_cells_within_bounds() {
        const SECOND: i64 = 1_000_000_000;
        let clock = 1_000_000 * SECOND;
        let now = Received { at: Instant::now(), clock };
        let sample = |timestamp| cri::ContainerStats {
            cpu: Some(cri::CpuUsage { timestamp, ..Default::default() }),
            memory: Some(cri::MemoryUsage { timestamp, ..Default::default() }),
            ..Default::default()
        };
        let reported = |usage: &Usage| {
            let stats = cri::ContainerStats::decode(usage.stats.clone()).unwrap();
            assert_eq!(stats.cpu.unwrap().timestamp, stats.memory.unwrap().timestamp);
            stats.cpu.unwrap().timestamp
        };
        let first = |timestamp| reported(&Usage::of_container(sample(timestamp), None, now));
        // A lag of a few seconds stays.
        assert_eq!([clock - 5 * SECOND, clock].map(first), [clock - 5 * SECOND, clock]);
        for wild in [i64::MIN, -1, 0, 1, clock - 60 * SECOND, clock + 1, i64::MAX] {
            assert_eq!(first(wild), clock, "{wild}");
        }
        // Times never go back, and a repeated sample keeps its time.
        let before = Usage::of_container(sample(clock - SECOND), None, now);
        let next =
            |timestamp| reported(&Usage::of_container(sample(timestamp), Some(&before), now));
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

    #[test]
    fn window_is_the_time_between_two_samples() {
        const SECOND: i64 = 1_000_000_000;
        let clock = 1_000_000 * SECOND;
        let now = Received { at: Instant::now(), clock };
        let usage = |timestamp, before: Option<&Usage>| {
            let cpu = Some(cri::CpuUsage { timestamp, ..Default::default() });
            let linux = Some(cri::LinuxPodSandboxStats { cpu, ..Default::default() });
            Usage::of_pod(cri::PodSandboxStats { linux, ..Default::default() }, before, now)
        };
        let first = usage(clock - 12 * SECOND, None);
        let second = usage(clock - 2 * SECOND, Some(&first));
        let repeated = usage(clock - 2 * SECOND, Some(&second));
        let windows = [&first, &second, &repeated].map(|usage| usage.window);
        assert_eq!(windows, [0, 10 * SECOND, 10 * SECOND]);
    }

    /// Verifies L8.
    #[test]
    fn interfaces_of_a_cell_are_bounded() {
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
        assert_eq!((network.default_interface, network.interfaces.len()), (None, MAX_INTERFACES));
        assert!(usage.stats.len() < 4096);
    }
}
