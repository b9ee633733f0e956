//! What pods use: taken from heartbeats, told from memory while it is fresh.

use std::{collections::HashSet, sync::Arc, time::Instant};

use bytes::{Bytes, BytesMut};
use kiyot_proto::{
    cell::{self, Heartbeat},
    cri,
};

use super::{
    Cache, Container, Pods, Sandbox, attributes,
    entry::decoded,
    filter,
    samples::Samples,
    usage::{Received, Usage},
};
use crate::backends::milpa::{
    clock,
    id::{CellId, ContainerId, SandboxId},
};

/// The most containers of one heartbeat that are looked for: all lists wait meanwhile. A pod has
/// some dozens.
const CONTAINERS: usize = 1024;

impl Pods {
    /// Takes the usage that a cell reports of its pod.
    pub(crate) fn heartbeat(&self, cell: &CellId, beat: Heartbeat, now: Instant) {
        let now = Received { at: now, clock: clock::now() };
        let mut cache = self.write();
        let measured = cache.measure(cell, beat.metrics, now);
        for stats in beat.containers.into_iter().take(CONTAINERS) {
            let id = stats
                .attributes
                .as_ref()
                .map(|attributes| attributes.id.as_str())
                .unwrap_or_default();
            let Some(id) = cache.in_cell(cell, id).map(|container| container.id.clone()) else {
                continue;
            };
            let Some(container) = cache.containers.get_mut(&id) else { continue };
            if container.state() == cri::ContainerState::ContainerRunning {
                container.usage = Some(Usage::of_container(stats, container.usage.as_ref(), now));
            }
        }
        let mut awaited = false;
        if let Some(id) = cache.by_cell.get(cell).cloned()
            && let Some(sandbox) = cache.sandboxes.get_mut(&id)
        {
            sandbox.ephemeral_storage = beat.ephemeral_storage;
        }
        if let (Some(stats), Some(id)) = (beat.sandbox, cache.by_cell.get(cell).cloned())
            && let Some(sandbox) = cache.sandboxes.get_mut(&id).filter(|sandbox| sandbox.ready)
        {
            sandbox.usage = Some(Usage::of_pod(stats, sandbox.usage.as_ref(), now));
            awaited = cache.awaited.remove(&id);
        }
        drop(cache);
        if awaited || measured {
            self.changed.send_replace(());
        }
    }

    /// Whether a list of metrics would leave those out of a cell that has just not been asked for
    /// them yet. A silent one is not waited for.
    pub(crate) fn awaits_metrics(&self, now: Instant) -> bool {
        self.read()
            .sandboxes
            .values()
            .any(|sandbox| sandbox.ready && sandbox.samples.is_none() && sandbox.has_usage(now))
    }

    /// What these sandboxes use is to come: they ran before this daemon did.
    pub(crate) fn expect_usage(&self, of: HashSet<SandboxId>) {
        self.write().awaited = of;
    }

    /// Whether a list of what containers use would leave one out whose cell has not said yet.
    pub(crate) fn awaits_container_stats(&self, filter: &filter::Containers) -> bool {
        let cache = self.read();
        !cache.awaited.is_empty()
            && cache
                .containers_by(filter)
                .any(|container| cache.awaited.contains(&container.sandbox))
    }

    /// The same of sandboxes.
    pub(crate) fn awaits_sandbox_stats(&self, filter: &filter::Sandboxes) -> bool {
        let cache = self.read();
        !cache.awaited.is_empty()
            && cache.sandboxes_by(filter).any(|sandbox| cache.awaited.contains(&sandbox.id))
    }

    /// Takes what a container used when it had just been started, unless a heartbeat came first:
    /// nothing yet, if the cell did not say.
    pub(crate) fn first_usage(
        &self,
        id: &ContainerId,
        sample: Option<cri::ContainerStats>,
        now: Instant,
    ) {
        let mut cache = self.write();
        let Some(container) = cache.containers.get_mut(id) else { return };
        if container.state() != cri::ContainerState::ContainerRunning || container.has_usage(now) {
            return;
        }
        let (timestamp, none) =
            (container.status.started_unix_nanos, Some(cri::UInt64Value { value: 0 }));
        let mut sample = sample.unwrap_or_default();
        sample.cpu.get_or_insert_with(|| cri::CpuUsage {
            timestamp,
            usage_core_nano_seconds: none,
            ..Default::default()
        });
        sample.memory.get_or_insert_with(|| cri::MemoryUsage {
            timestamp,
            working_set_bytes: none,
            ..Default::default()
        });
        let now = Received { at: now, clock: clock::now() };
        container.usage = Some(Usage::of_container(sample, None, now));
    }

    /// Takes what a sandbox used when it had just been made, unless a heartbeat came first: nothing
    /// yet, if the cell did not say.
    pub(crate) fn first_sandbox_usage(
        &self,
        id: &SandboxId,
        sample: Option<cri::PodSandboxStats>,
        now: Instant,
    ) {
        let mut cache = self.write();
        let Some(sandbox) =
            cache.sandboxes.get_mut(id).filter(|sandbox| sandbox.ready && !sandbox.has_usage(now))
        else {
            return;
        };
        let (timestamp, none) = (sandbox.item().created_at, Some(cri::UInt64Value { value: 0 }));
        let mut sample = sample.unwrap_or_default();
        let linux = sample.linux.get_or_insert_default();
        linux.cpu.get_or_insert_with(|| cri::CpuUsage {
            timestamp,
            usage_core_nano_seconds: none,
            ..Default::default()
        });
        linux.memory.get_or_insert_with(|| cri::MemoryUsage {
            timestamp,
            working_set_bytes: none,
            ..Default::default()
        });
        let now = Received { at: now, clock: clock::now() };
        sandbox.usage = Some(Usage::of_pod(sample, None, now));
    }

    /// A `ListContainerStatsResponse` of the containers that run and had a heartbeat lately.
    pub(crate) fn list_container_stats(&self, filter: &filter::Containers, now: Instant) -> Bytes {
        let cache = self.read();
        let mut list = BytesMut::new();
        cache.containers_by(filter).for_each(|container| container.put_usage(now, &mut list));
        list.freeze()
    }

    /// A `ListPodSandboxStatsResponse` of the sandboxes that run and had a heartbeat lately.
    pub(crate) fn list_sandbox_stats(&self, filter: &filter::Sandboxes, now: Instant) -> Bytes {
        let cache = self.read();
        let mut list = BytesMut::new();
        cache.sandboxes_by(filter).for_each(|sandbox| cache.put_usage(sandbox, now, &mut list));
        list.freeze()
    }

    /// What a container used. While its cell is silent, and after the end, nothing is known but
    /// whose usage it would be.
    pub(crate) fn usage_of_container(
        &self,
        container: &Container,
        now: Instant,
    ) -> cri::ContainerStats {
        let mut list = BytesMut::new();
        container.put_usage(now, &mut list);
        let stats = decoded::<cri::ListContainerStatsResponse>(&list.freeze()).stats.pop();
        stats.unwrap_or_else(|| decoded(&attributes::of_container(&container.item).freeze()))
    }

    /// The same of a sandbox and its containers.
    pub(crate) fn usage_of_sandbox(&self, sandbox: &Sandbox, now: Instant) -> cri::PodSandboxStats {
        let stats = self.usage_of(&sandbox.id, now);
        stats.unwrap_or_else(|| {
            let stats =
                decoded::<cri::PodSandboxStats>(&attributes::of_sandbox(&sandbox.item).freeze());
            cri::PodSandboxStats { linux: Some(cri::LinuxPodSandboxStats::default()), ..stats }
        })
    }

    /// What a sandbox and its containers used, if it runs and there was a heartbeat lately.
    pub(crate) fn usage_of(
        &self,
        sandbox: &SandboxId,
        now: Instant,
    ) -> Option<cri::PodSandboxStats> {
        let cache = self.read();
        let mut list = BytesMut::new();
        cache.put_usage(cache.sandboxes.get(sandbox)?, now, &mut list);
        decoded::<cri::ListPodSandboxStatsResponse>(&list.freeze()).stats.pop()
    }
}

impl Cache {
    /// Takes the metrics of a cell's pod: without any, they are not wanted any more. Says whether
    /// they are the first.
    fn measure(&mut self, cell: &CellId, metrics: Option<cell::Metrics>, now: Received) -> bool {
        let Some(id) = self.by_cell.get(cell).cloned() else { return false };
        let Some(sandbox) = self.sandboxes.get_mut(&id).filter(|sandbox| sandbox.ready) else {
            return false;
        };
        let Some(metrics) = metrics else {
            if sandbox.samples.take().is_some() {
                for container in &sandbox.containers {
                    if let Some(container) = self.containers.get_mut(container) {
                        container.samples = None;
                    }
                }
            }
            return false;
        };
        // One that could not be taken in time is no news of it.
        let is_first = sandbox.samples.is_none();
        if is_first || !metrics.pod.is_empty() {
            sandbox.samples = Some(Arc::new(Samples::of(
                &metrics.pod,
                metrics.timestamp,
                sandbox.samples.as_deref(),
                &mut self.shapes,
                now,
            )));
        }
        for of in metrics.containers.into_iter().take(CONTAINERS) {
            let Some(id) = self.in_cell(cell, &of.container).map(|container| container.id.clone())
            else {
                continue;
            };
            let Some(container) = self.containers.get_mut(&id) else { continue };
            if container.state() == cri::ContainerState::ContainerRunning {
                container.samples = Some(Arc::new(Samples::of(
                    &of.samples,
                    of.timestamp,
                    container.samples.as_deref(),
                    &mut self.shapes,
                    now,
                )));
            }
        }
        is_first
    }

    fn put_usage(&self, sandbox: &Sandbox, now: Instant, list: &mut BytesMut) {
        sandbox.put_usage(
            sandbox.containers.iter().filter_map(|id| self.containers.get(id)),
            now,
            list,
        );
    }
}
