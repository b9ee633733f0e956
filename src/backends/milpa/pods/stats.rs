//! Statistics of pods, from heartbeats.

use std::{collections::HashSet, sync::Arc, time::Instant};

use bytes::{Bytes, BytesMut};
use kiyot_engine::id::{CellId, ContainerId, SandboxId};
use kiyot_proto::{
    cell::{self, Heartbeat},
    cri,
};

use super::{
    Cache, Container, Pods, Sandbox, attributes,
    entry::decoded,
    filter,
    samples::Samples,
    usage::{self, Listed, Received, Usage},
};
use crate::backends::milpa::clock;

/// Most containers of a heartbeat that are looked up: all lists wait meanwhile. A pod has some
/// dozens.
const MAX_HEARTBEAT_CONTAINERS: usize = 1024;

impl Pods {
    /// Applies the usage that a cell reports of its pod.
    pub(crate) fn heartbeat(&self, cell: &CellId, beat: Heartbeat, now: Instant) {
        let now = Received { at: now, clock: clock::now() };
        let mut cache = self.write();
        let measured = cache.measure(cell, beat.metrics, now);
        for stats in beat.containers.into_iter().take(MAX_HEARTBEAT_CONTAINERS) {
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
        let mut awaiting_usage = false;
        if let Some(id) = cache.by_cell.get(cell).cloned()
            && let Some(sandbox) = cache.sandboxes.get_mut(&id)
        {
            sandbox.ephemeral_storage = beat.ephemeral_storage;
        }
        if let (Some(stats), Some(id)) = (beat.sandbox, cache.by_cell.get(cell).cloned())
            && let Some(sandbox) = cache.sandboxes.get_mut(&id).filter(|sandbox| sandbox.ready)
        {
            sandbox.usage = Some(Usage::of_pod(stats, sandbox.usage.as_ref(), now));
            awaiting_usage = cache.awaiting_usage.remove(&id);
        }
        drop(cache);
        if awaiting_usage || measured {
            self.changed.send_replace(());
        }
    }

    /// Returns whether a connected cell has not sent its metrics yet after a subscription.
    pub(crate) fn awaits_metrics(&self, now: Instant) -> bool {
        self.read()
            .sandboxes
            .values()
            .any(|sandbox| sandbox.ready && sandbox.samples.is_none() && sandbox.has_usage(now))
    }

    /// Sets the recovered sandboxes whose usage is still to be reported.
    pub(crate) fn expect_usage(&self, of: HashSet<SandboxId>) {
        self.write().awaiting_usage = of;
    }

    /// Returns whether usage of a listed container is still to be reported.
    pub(crate) fn awaits_container_stats(&self, filter: &filter::Containers) -> bool {
        let cache = self.read();
        !cache.awaiting_usage.is_empty()
            && cache
                .containers_by(filter)
                .any(|container| cache.awaiting_usage.contains(&container.sandbox))
    }

    /// Returns whether usage of a listed sandbox is still to be reported.
    pub(crate) fn awaits_sandbox_stats(&self, filter: &filter::Sandboxes) -> bool {
        let cache = self.read();
        !cache.awaiting_usage.is_empty()
            && cache.sandboxes_by(filter).any(|sandbox| cache.awaiting_usage.contains(&sandbox.id))
    }

    /// Sets the usage of a container that has just started, unless a heartbeat has set it. Without
    /// a sample the usage is zero.
    pub(crate) fn set_first_usage(
        &self,
        id: &ContainerId,
        sample: Option<cri::ContainerStats>,
        now: Instant,
    ) {
        let mut cache = self.write();
        let Some(container) = cache.containers.get_mut(id) else { return };
        if container.state() != cri::ContainerState::ContainerRunning || container.usage.is_some() {
            return;
        }
        let started = container.status.started_unix_nanos;
        let mut sample = sample.unwrap_or_default();
        sample.cpu.get_or_insert_with(|| usage::cpu(started, Some(0)));
        sample.memory.get_or_insert_with(|| usage::memory(started, Some(0)));
        let now = Received { at: now, clock: clock::now() };
        container.usage = Some(Usage::of_container(sample, None, now));
    }

    /// Sets the usage of a new sandbox, unless a heartbeat has set it. Without a sample the usage
    /// is zero.
    pub(crate) fn set_first_sandbox_usage(
        &self,
        id: &SandboxId,
        sample: Option<cri::PodSandboxStats>,
        now: Instant,
    ) {
        let mut cache = self.write();
        let Some(sandbox) =
            cache.sandboxes.get_mut(id).filter(|sandbox| sandbox.ready && sandbox.usage.is_none())
        else {
            return;
        };
        let created = sandbox.item().created_at;
        let mut sample = sample.unwrap_or_default();
        let linux = sample.linux.get_or_insert_default();
        linux.cpu.get_or_insert_with(|| usage::cpu(created, Some(0)));
        linux.memory.get_or_insert_with(|| usage::memory(created, Some(0)));
        let now = Received { at: now, clock: clock::now() };
        sandbox.usage = Some(Usage::of_pod(sample, None, now));
    }

    /// Returns a `ListContainerStatsResponse` of the containers that have not ended.
    pub(crate) fn list_container_stats(&self, filter: &filter::Containers) -> Bytes {
        let cache = self.read();
        let mut list = BytesMut::new();
        cache
            .containers_by(filter)
            .for_each(|container| container.append_usage(Listed::All, &mut list));
        list.freeze()
    }

    /// Returns a `ListPodSandboxStatsResponse` of the ready sandboxes.
    pub(crate) fn list_sandbox_stats(&self, filter: &filter::Sandboxes) -> Bytes {
        let cache = self.read();
        let mut list = BytesMut::new();
        cache
            .sandboxes_by(filter)
            .for_each(|sandbox| cache.append_usage(sandbox, Listed::All, &mut list));
        list.freeze()
    }

    /// Returns the usage of a container. After the exit it has only attributes.
    pub(crate) fn usage_of_container(&self, container: &Container) -> cri::ContainerStats {
        let mut list = BytesMut::new();
        container.append_usage(Listed::All, &mut list);
        let stats = decoded::<cri::ListContainerStatsResponse>(&list.freeze()).stats.pop();
        stats.unwrap_or_else(|| decoded(&attributes::of_container(&container.item).freeze()))
    }

    /// Returns the usage of a sandbox and its containers. After its end it has only attributes.
    pub(crate) fn usage_of_sandbox(&self, sandbox: &Sandbox) -> cri::PodSandboxStats {
        let stats = self.listed_usage(&sandbox.id, Listed::All);
        stats.unwrap_or_else(|| {
            let stats =
                decoded::<cri::PodSandboxStats>(&attributes::of_sandbox(&sandbox.item).freeze());
            cri::PodSandboxStats { linux: Some(cri::LinuxPodSandboxStats::default()), ..stats }
        })
    }

    /// Returns the time between the last two samples of a pod, in nanoseconds; 0 after the first.
    pub(crate) fn usage_window(&self, id: &SandboxId) -> i64 {
        let cache = self.read();
        let usage = cache.sandboxes.get(id).and_then(|sandbox| sandbox.usage.as_ref());
        usage.map_or(0, |usage| usage.window)
    }

    /// Returns the recent usage of a ready sandbox and its containers.
    pub(crate) fn usage_of(
        &self,
        sandbox: &SandboxId,
        now: Instant,
    ) -> Option<cri::PodSandboxStats> {
        self.listed_usage(sandbox, Listed::Recent(now))
    }

    fn listed_usage(&self, sandbox: &SandboxId, listed: Listed) -> Option<cri::PodSandboxStats> {
        let cache = self.read();
        let mut list = BytesMut::new();
        cache.append_usage(cache.sandboxes.get(sandbox)?, listed, &mut list);
        decoded::<cri::ListPodSandboxStatsResponse>(&list.freeze()).stats.pop()
    }
}

impl Cache {
    /// Applies the metrics of a cell's pod. A heartbeat without metrics removes them. Returns
    /// whether the metrics are the first.
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
        // Empty metrics were not measured in time: the previous metrics stay.
        let is_first = sandbox.samples.is_none();
        if is_first || !metrics.pod.is_empty() {
            sandbox.samples = Some(Arc::new(Samples::new(
                &metrics.pod,
                metrics.timestamp,
                sandbox.samples.as_deref(),
                &mut self.shapes,
                now,
            )));
        }
        for of in metrics.containers.into_iter().take(MAX_HEARTBEAT_CONTAINERS) {
            let Some(id) = self.in_cell(cell, &of.container).map(|container| container.id.clone())
            else {
                continue;
            };
            let Some(container) = self.containers.get_mut(&id) else { continue };
            if container.state() == cri::ContainerState::ContainerRunning {
                container.samples = Some(Arc::new(Samples::new(
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

    fn append_usage(&self, sandbox: &Sandbox, listed: Listed, list: &mut BytesMut) {
        sandbox.append_usage(
            sandbox.containers.iter().filter_map(|id| self.containers.get(id)),
            listed,
            list,
        );
    }
}
