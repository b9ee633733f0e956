//! Versioned state of the cell, which `Watch` streams.
//!
//! Events are not queued. Each entry has the version of its last change, so a slow reader gets only
//! the newest state of each entry. Removals are kept in a bounded log, which is compacted like
//! etcd's: a reader behind the compacted version gets a new snapshot.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
};

use kiyot_link::rehearsal;
use kiyot_proto::{
    cell::{Event, LogGrown, Snapshot, event::Event as Kind},
    cri::{ContainerStatus, PodSandboxStatus},
};
use tokio::sync::watch;

/// Removals kept for readers.
const MAX_REMOVALS: usize = 256;

/// Pods, containers and logs of the cell, each with the version of its last change.
#[derive(Debug)]
pub struct CellState {
    inner: Mutex<Inner>,
    version: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Inner {
    version: u64,
    /// True once containerd has been listed.
    listed: bool,
    containers: BTreeMap<String, (u64, ContainerStatus)>,
    sandboxes: BTreeMap<String, (u64, PodSandboxStatus)>,
    logs: BTreeMap<String, (u64, u64)>,
    removals: VecDeque<(u64, Kind)>,
    /// Version of the newest removal that was dropped from the log.
    compacted_version: u64,
}

impl Default for CellState {
    fn default() -> Self {
        Self { inner: Mutex::default(), version: watch::Sender::new(0) }
    }
}

impl CellState {
    /// Returns a receiver of the newest version, which is 0 until containerd has been listed.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Replaces all sandboxes and containers.
    pub fn set_pods(&self, sandboxes: Vec<PodSandboxStatus>, containers: Vec<ContainerStatus>) {
        self.change(|state| {
            if !state.listed {
                state.listed = true;
                state.version += 1;
            }
            let sandboxes =
                sandboxes.into_iter().map(|status| (status.id.clone(), status)).collect();
            let containers =
                containers.into_iter().map(|status| (status.id.clone(), status)).collect();
            let mut removals =
                replace(&mut state.sandboxes, sandboxes, &mut state.version, Kind::SandboxGone);
            removals.extend(replace(
                &mut state.containers,
                containers,
                &mut state.version,
                Kind::ContainerGone,
            ));
            for removal in removals {
                if state.removals.len() == MAX_REMOVALS
                    && let Some((version, _)) = state.removals.pop_front()
                {
                    state.compacted_version = version;
                }
                state.removals.push_back(removal);
            }
        });
    }

    /// Replaces all logs by path, with their sizes in bytes.
    pub fn set_logs(&self, sizes: BTreeMap<String, u64>) {
        self.change(|state| {
            // Removed logs are not reported.
            replace(&mut state.logs, sizes, &mut state.version, |_| {
                Kind::ContainerGone(String::new())
            });
        });
    }

    /// Returns the last known status of a container.
    pub fn container(&self, id: &str) -> Option<ContainerStatus> {
        self.lock().containers.get(id).map(|(_, status)| status.clone())
    }

    /// Returns the last known status of a sandbox.
    pub fn sandbox(&self, id: &str) -> Option<PodSandboxStatus> {
        self.lock().sandboxes.get(id).map(|(_, status)| status.clone())
    }

    /// Returns the id of the pod's sandbox. The sandbox of a rehearsal that could not be removed
    /// may be listed too.
    pub fn pod_sandbox(&self) -> Option<String> {
        let state = self.lock();
        let sandboxes = state.sandboxes.values().map(|(_, status)| status);
        let newest =
            sandboxes.filter(|status| !is_rehearsal(status)).max_by_key(|status| status.created_at);
        newest.map(|status| status.id.clone())
    }

    /// Returns the changes since a version, in order, and the current version. A new reader, and a
    /// reader behind the compacted version, gets a snapshot. Returns `None` until containerd has
    /// been listed.
    pub fn events_since(&self, seen: Option<u64>) -> Option<(Vec<Event>, u64)> {
        let state = self.lock();
        if !state.listed {
            return None;
        }
        let events = match seen {
            Some(seen) if seen >= state.compacted_version => changes(&state, seen),
            _ => vec![Event { event: Some(Kind::Snapshot(snapshot(&state))) }],
        };
        Some((events, state.version))
    }

    fn change(&self, change: impl FnOnce(&mut Inner)) {
        let version = {
            let mut state = self.lock();
            change(&mut state);
            if state.listed { state.version } else { 0 }
        };
        self.version.send_if_modified(|known| {
            let newer = version > *known;
            *known = version.max(*known);
            newer
        });
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_rehearsal(sandbox: &PodSandboxStatus) -> bool {
    let metadata = sandbox.metadata.as_ref();
    metadata.is_some_and(|metadata| metadata.namespace == rehearsal::NAMESPACE)
}

/// Replaces entries by `now`, gives each changed entry a new version, and returns the removals.
fn replace<T: PartialEq>(
    entries: &mut BTreeMap<String, (u64, T)>,
    now: BTreeMap<String, T>,
    version: &mut u64,
    removed: impl Fn(String) -> Kind,
) -> Vec<(u64, Kind)> {
    let mut next = || {
        *version += 1;
        *version
    };
    let absent: Vec<_> = entries.keys().filter(|id| !now.contains_key(*id)).cloned().collect();
    let mut removals = Vec::new();
    for id in absent {
        entries.remove(&id);
        removals.push((next(), removed(id)));
    }
    for (id, value) in now {
        match entries.get_mut(&id) {
            Some(entry) if entry.1 == value => {}
            Some(entry) => *entry = (next(), value),
            None => {
                entries.insert(id, (next(), value));
            }
        }
    }
    removals
}

fn snapshot(state: &Inner) -> Snapshot {
    Snapshot {
        sandboxes: state.sandboxes.values().map(|(_, status)| status.clone()).collect(),
        containers: state.containers.values().map(|(_, status)| status.clone()).collect(),
        logs: state
            .logs
            .iter()
            .map(|(path, (_, size))| LogGrown { path: path.clone(), size: *size })
            .collect(),
    }
}

fn changes(state: &Inner, seen: u64) -> Vec<Event> {
    let mut changes: Vec<(u64, Kind)> = Vec::new();
    let newer = |version: &u64| *version > seen;
    changes.extend(state.removals.iter().filter(|(version, _)| newer(version)).cloned());
    changes.extend(
        state
            .sandboxes
            .values()
            .filter(|(version, _)| newer(version))
            .map(|(version, status)| (*version, Kind::Sandbox(status.clone()))),
    );
    changes.extend(
        state
            .containers
            .values()
            .filter(|(version, _)| newer(version))
            .map(|(version, status)| (*version, Kind::Container(status.clone()))),
    );
    changes.extend(state.logs.iter().filter(|(_, (version, _))| newer(version)).map(
        |(path, (version, size))| {
            (*version, Kind::Log(LogGrown { path: path.clone(), size: *size }))
        },
    ));
    changes.sort_by_key(|(version, _)| *version);
    changes.into_iter().map(|(_, event)| Event { event: Some(event) }).collect()
}

#[cfg(test)]
mod tests;
