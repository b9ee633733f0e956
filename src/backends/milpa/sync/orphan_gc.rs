//! Garbage collection of orphaned sandboxes: the caller left during their creation, and no later
//! call named them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use kiyot_engine::id::SandboxId;
use kiyot_values::error_chain::error_chain;

use super::CellSync;

/// Interval between two collections.
const COLLECTION_INTERVAL: Duration = Duration::from_secs(5);

/// Sandboxes whose id no caller knows, with the time of their creation.
#[derive(Debug, Default)]
pub(super) struct Orphans(Mutex<HashMap<SandboxId, Instant>>);

impl Orphans {
    fn lock(&self) -> MutexGuard<'_, HashMap<SandboxId, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn older_than(&self, age: Duration) -> Vec<SandboxId> {
        let orphans = self.lock();
        let old = orphans.iter().filter(|(_, since)| since.elapsed() >= age);
        old.map(|(id, _)| id.clone()).collect()
    }
}

impl CellSync {
    /// Adds a sandbox whose id no caller knows yet.
    pub(crate) fn add_orphan(&self, id: &SandboxId) {
        self.orphans.lock().insert(id.clone(), Instant::now());
    }

    /// Removes a sandbox from the orphans, because a caller knows its id.
    pub(crate) fn set_owned(&self, id: &SandboxId) {
        self.orphans.lock().remove(id);
    }

    /// Removes orphaned sandboxes after the owner timeout, until the daemon stops.
    pub(super) async fn collect_orphans(self: Arc<Self>) {
        let mut ticks = tokio::time::interval(COLLECTION_INTERVAL.min(self.owner_timeout));
        loop {
            ticks.tick().await;
            for id in self.orphans.older_than(self.owner_timeout) {
                // A removal takes time, in which a call may have named the next sandbox.
                if !self.orphans.lock().contains_key(&id) {
                    continue;
                }
                tracing::warn!(
                    sandbox = %id,
                    owner_timeout_s = self.owner_timeout.as_secs(),
                    "removing an orphaned sandbox"
                );
                match self.remove_sandbox(&id).await {
                    Ok(()) => self.set_owned(&id),
                    Err(error) => tracing::warn!(
                        sandbox = %id,
                        error = error_chain(&error),
                        "orphaned sandbox not removed"
                    ),
                }
            }
        }
    }
}
