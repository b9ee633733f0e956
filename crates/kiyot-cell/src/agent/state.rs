//! What is in the cell now, and what has changed since a reader looked: the state behind `Watch`.
//!
//! There is no queue of events. Each entry bears the version at which it last changed, and a reader
//! that is slow gets the newest state of each once; only removals are kept as such, so many and no
//! more.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
};

use kiyot_proto::{
    cell::{Event, LogGrown, Snapshot, event::Event as Kind},
    cri::{ContainerStatus, PodSandboxStatus},
};
use tokio::sync::watch;

/// Removals that are kept for readers. A reader that missed more gets a new snapshot.
const MAX_REMOVALS: usize = 256;

/// The state of a cell. See the module.
#[derive(Debug)]
pub struct CellState {
    inner: Mutex<Inner>,
    version: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Inner {
    version: u64,
    /// Whether containerd has been listed once.
    listed: bool,
    containers: BTreeMap<String, (u64, ContainerStatus)>,
    sandboxes: BTreeMap<String, (u64, PodSandboxStatus)>,
    logs: BTreeMap<String, (u64, u64)>,
    removals: VecDeque<(u64, Kind)>,
    /// The version of the newest removal that is no longer kept.
    compacted_version: u64,
}

impl Default for CellState {
    fn default() -> Self {
        Self { inner: Mutex::default(), version: watch::Sender::new(0) }
    }
}

impl CellState {
    /// Told of each new version. The first that is not 0 means that there is a state to read.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// All containers and sandboxes that there are.
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

    /// All logs that there are, with their sizes in bytes.
    pub fn set_logs(&self, sizes: BTreeMap<String, u64>) {
        self.change(|state| {
            // Nobody waits for news of a log that is gone.
            replace(&mut state.logs, sizes, &mut state.version, |_| {
                Kind::ContainerGone(String::new())
            });
        });
    }

    /// A container's status, as far as it is known here.
    pub fn container(&self, id: &str) -> Option<ContainerStatus> {
        self.lock().containers.get(id).map(|(_, status)| status.clone())
    }

    /// A sandbox's status, as far as it is known here.
    pub fn sandbox(&self, id: &str) -> Option<PodSandboxStatus> {
        self.lock().sandboxes.get(id).map(|(_, status)| status.clone())
    }

    /// What a reader that has seen a version must be told, in the order in which it changed, and
    /// the version that it has seen then. For a first time, or a reader that missed removals, it is
    /// a snapshot. `None` while nothing has been listed.
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

/// Makes `now` the state; what differs gets a new version each. Returns the removals.
fn replace<T: PartialEq>(
    then: &mut BTreeMap<String, (u64, T)>,
    now: BTreeMap<String, T>,
    version: &mut u64,
    gone: impl Fn(String) -> Kind,
) -> Vec<(u64, Kind)> {
    let mut next = || {
        *version += 1;
        *version
    };
    let absent: Vec<_> = then.keys().filter(|id| !now.contains_key(*id)).cloned().collect();
    let mut removals = Vec::new();
    for id in absent {
        then.remove(&id);
        removals.push((next(), gone(id)));
    }
    for (id, value) in now {
        match then.get_mut(&id) {
            Some(entry) if entry.1 == value => {}
            Some(entry) => *entry = (next(), value),
            None => {
                then.insert(id, (next(), value));
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
