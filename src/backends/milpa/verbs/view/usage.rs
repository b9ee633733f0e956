//! What pods use: taken from heartbeats, told from memory while it is fresh.

use std::{
    sync::{Mutex, PoisonError},
    time::Instant,
};

use bytes::Bytes;
use kiyot_proto::{cell::Heartbeat, cri};
use prost::Message as _;

use super::{
    super::{filter, restored},
    Known, LONGEST, View,
    entry::{Usage, decoded},
    lists::joined,
};
use crate::backends::milpa::id::{CellId, ContainerId, SandboxId};

/// The most containers of one heartbeat that are looked for: all lists wait meanwhile. A pod has some dozens.
const CONTAINERS: usize = 1024;

/// A whole encoded list, made by the first who asks after a change or after a part of it became too old.
#[derive(Debug, Default)]
pub(super) struct Lists(Mutex<Option<Usage>>);

impl Lists {
    /// The list is made anew when it is asked for.
    pub(super) fn clear(&mut self) {
        *self.0.get_mut().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn get<'a>(&self, now: Instant, parts: impl Iterator<Item = &'a Usage>) -> Bytes {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kept) = kept.as_ref().filter(|kept| kept.is_fresh(now)) {
            return kept.entry.clone();
        }
        let parts: Vec<_> = parts.filter(|usage| usage.is_fresh(now)).collect();
        let entry = joined(parts.iter().map(|usage| &usage.entry));
        *kept = parts.iter().map(|usage| usage.until).min().map(|until| Usage { entry: entry.clone(), until });
        entry
    }
}

/// What a cell says of its pod's usage, without what is not the cell's to say; `None` if it is longer than it may be: of interfaces it may name any number.
fn of_sandbox(mut stats: cri::PodSandboxStats) -> Option<cri::PodSandboxStats> {
    stats.attributes = None;
    stats.linux.iter_mut().for_each(|linux| linux.containers.clear());
    (stats.encoded_len() <= LONGEST).then_some(stats)
}

impl View {
    /// Takes the usage that a cell reports of its pod.
    pub(in super::super) fn heartbeat(&self, cell: &CellId, beat: Heartbeat, now: Instant) {
        let mut known = self.write();
        for stats in beat.containers.into_iter().take(CONTAINERS) {
            let id = stats.attributes.as_ref().map(|attributes| attributes.id.as_str()).unwrap_or_default();
            let Some(id) = known.in_cell(cell, id).map(|container| container.id.clone()) else { continue };
            let Some(container) = known.containers.get_mut(&id) else { continue };
            if container.state() == cri::ContainerState::ContainerRunning {
                let stats = restored::container_stats(container.item(), stats);
                container.stats = Some(Usage::of(&cri::ListContainerStatsResponse { stats: vec![stats] }, now));
            }
        }
        known.stats_list.clear();
        if let (Some(stats), Some(id)) = (beat.sandbox.and_then(of_sandbox), known.by_cell.get(cell).cloned())
            && let Some(sandbox) = known.sandboxes.get(&id).filter(|sandbox| sandbox.ready)
        {
            let containers = sandbox.containers.iter().filter_map(|id| known.containers.get(id)?.stats(now)).collect();
            let stats = restored::sandbox_stats(sandbox.item(), Some(stats), containers);
            known.set_usage(&id, Usage::of(&cri::ListPodSandboxStatsResponse { stats: vec![stats] }, now));
        }
    }

    /// Takes what a container used when it had just been started, unless a heartbeat came first: nothing yet, if the cell did not say.
    pub(in super::super) fn first_usage(&self, id: &ContainerId, sample: Option<cri::ContainerStats>, now: Instant) {
        let mut known = self.write();
        let Some(container) = known.containers.get_mut(id) else { return };
        if container.state() != cri::ContainerState::ContainerRunning || container.stats(now).is_some() {
            return;
        }
        let (timestamp, none) = (container.status.started_unix_nanos, Some(cri::UInt64Value { value: 0 }));
        let mut sample = sample.unwrap_or_default();
        sample.cpu.get_or_insert_with(|| cri::CpuUsage { timestamp, usage_core_nano_seconds: none, ..Default::default() });
        sample.memory.get_or_insert_with(|| cri::MemoryUsage { timestamp, working_set_bytes: none, ..Default::default() });
        let (stats, sandbox) = (restored::container_stats(container.item(), sample), container.sandbox.clone());
        container.stats = Some(Usage::of(&cri::ListContainerStatsResponse { stats: vec![stats.clone()] }, now));
        known.stats_list.clear();
        known.change_usage(&sandbox, |linux| linux.containers.push(stats.clone()));
    }

    /// Takes what a sandbox used when it had just been made, unless a heartbeat came first: nothing yet, if the cell did not say.
    pub(in super::super) fn first_sandbox_usage(&self, id: &SandboxId, sample: Option<cri::PodSandboxStats>, now: Instant) {
        let mut known = self.write();
        let Some(sandbox) = known.sandboxes.get(id).filter(|sandbox| sandbox.ready && sandbox.stats(now).is_none()) else { return };
        let (timestamp, none) = (sandbox.item().created_at, Some(cri::UInt64Value { value: 0 }));
        let mut sample = sample.unwrap_or_default();
        let linux = sample.linux.get_or_insert_default();
        linux.cpu.get_or_insert_with(|| cri::CpuUsage { timestamp, usage_core_nano_seconds: none, ..Default::default() });
        linux.memory.get_or_insert_with(|| cri::MemoryUsage { timestamp, working_set_bytes: none, ..Default::default() });
        let stats = restored::sandbox_stats(sandbox.item(), Some(sample), Vec::new());
        known.set_usage(id, Usage::of(&cri::ListPodSandboxStatsResponse { stats: vec![stats] }, now));
    }

    /// A `ListContainerStatsResponse` of the containers that run and had a heartbeat lately.
    pub(in super::super) fn list_container_stats(&self, filter: &filter::Containers, now: Instant) -> Bytes {
        let known = self.read();
        if filter.is_empty() {
            return known.stats_list.get(now, known.containers.values().filter_map(|container| container.stats.as_ref()));
        }
        let usage = known.containers_by(filter).filter_map(|container| container.stats.as_ref());
        joined(usage.filter(|usage| usage.is_fresh(now)).map(|usage| &usage.entry))
    }

    /// A `ListPodSandboxStatsResponse` of the sandboxes that run and had a heartbeat lately.
    pub(in super::super) fn list_sandbox_stats(&self, filter: &filter::Sandboxes, now: Instant) -> Bytes {
        let known = self.read();
        if filter.is_empty() {
            return known.sandbox_stats_list.get(now, known.sandboxes.values().filter_map(|sandbox| sandbox.stats.as_ref()));
        }
        let usage = known.sandboxes_by(filter).filter_map(|sandbox| sandbox.stats.as_ref());
        joined(usage.filter(|usage| usage.is_fresh(now)).map(|usage| &usage.entry))
    }
}

impl Known {
    fn set_usage(&mut self, id: &SandboxId, usage: Usage) {
        if let Some(sandbox) = self.sandboxes.get_mut(id) {
            sandbox.stats = Some(usage);
            self.sandbox_stats_list.clear();
        }
    }

    /// Takes a container that does not run any more out of its sandbox's usage.
    pub(super) fn no_usage_of(&mut self, sandbox: &SandboxId, container: &ContainerId) {
        let is_other = |stats: &cri::ContainerStats| stats.attributes.as_ref().is_none_or(|attributes| attributes.id != container.as_str());
        self.change_usage(sandbox, |linux| linux.containers.retain(is_other));
    }

    fn change_usage(&mut self, sandbox: &SandboxId, change: impl Fn(&mut cri::LinuxPodSandboxStats)) {
        let Some(usage) = self.sandboxes.get_mut(sandbox).and_then(|sandbox| sandbox.stats.as_mut()) else { return };
        let mut list: cri::ListPodSandboxStatsResponse = decoded(&usage.entry);
        list.stats.iter_mut().filter_map(|stats| stats.linux.as_mut()).for_each(change);
        usage.entry = prost::Message::encode_to_vec(&list).into();
        self.sandbox_stats_list.clear();
    }
}
