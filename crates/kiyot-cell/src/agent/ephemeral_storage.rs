//! Measures the pod's ephemeral storage and evicts the pod over its limit, as a kubelet does.
//!
//! Counts the writable layers of containers, and all files below `pod_dir`: emptyDirs and logs.
//! Images, memory-backed volumes and deleted files that are still open don't count.

mod layers;

use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use kiyot_linux::tree::{MeasureProgress, Measurement, Usage};
use kiyot_proto::cri::{
    ContainerFilter, ContainerState, ContainerStateValue, ContainerStatus, ListContainersRequest,
    StopContainerRequest,
};
use rustix::{
    fs::{CWD, Mode, OFlags, openat},
    io::Errno,
};
use tokio::{sync::watch, task::spawn_blocking};
use tonic::Status;

use super::runtime::{QUERY_TIMEOUT, Runtime, with_timeout};
use crate::dirs::CellDir;

/// Pause between two measurements.
const MEASURE_INTERVAL: Duration = Duration::from_secs(5);
/// Entries of a tree that are measured in one step, after which the task sleeps as long as the step
/// took.
const STEP_ENTRIES: usize = 2000;
/// Consecutive measurements over the limit before the pod is evicted: a file that is moved during a
/// measurement may be counted twice.
const EVICT_AFTER_OVER_LIMIT: u32 = 2;
/// Consecutive measurements with unmeasurable directories before the pod is evicted: the pod may
/// hide usage in these directories.
const EVICT_AFTER_UNMEASURABLE: u32 = 10;
/// Deadline of a `StopContainer` call.
const KILL_TIMEOUT: Duration = Duration::from_secs(20);
/// Upper bound on the kept messages of evicted containers.
const MAX_EVICTED: usize = 1024;
/// Reason in the status of an evicted container, as the kubelet names it.
const EVICTED_REASON: &str = "Evicted";
/// Exit code of a process killed by SIGKILL.
const KILLED_EXIT_CODE: i32 = 137;

/// Limit and usage of the pod's ephemeral storage.
#[derive(Debug)]
pub struct EphemeralStorage {
    /// Limit in bytes; 0 means no limit.
    limit: watch::Sender<u64>,
    /// Usage in bytes, by the last measurement.
    used: AtomicU64,
    /// Messages of evicted containers by their ids in the cell.
    evicted: Mutex<HashMap<String, String>>,
}

impl Default for EphemeralStorage {
    fn default() -> Self {
        Self { limit: watch::Sender::new(0), used: AtomicU64::new(0), evicted: Mutex::default() }
    }
}

impl EphemeralStorage {
    /// Sets the limit in bytes; 0 means no limit.
    pub fn set_limit(&self, bytes: u64) {
        self.limit.send_if_modified(|limit| std::mem::replace(limit, bytes) != bytes);
    }

    /// Returns the usage in bytes by the last measurement, or 0 without a limit.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Sets reason and message in the status of a container that was evicted.
    pub fn set_eviction_reason(&self, status: &mut ContainerStatus) {
        if status.state() != ContainerState::ContainerExited || status.exit_code != KILLED_EXIT_CODE
        {
            return;
        }
        if let Some(message) = self.evicted().get(&status.id) {
            EVICTED_REASON.clone_into(&mut status.reason);
            status.message.clone_from(message);
        }
    }

    fn evicted(&self) -> MutexGuard<'_, HashMap<String, String>> {
        self.evicted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Measures the pod's usage and evicts the pod over its limit. Never returns.
pub async fn enforce(storage: Arc<EphemeralStorage>, runtime: Runtime, dir: CellDir) {
    let mut limits = storage.limit.subscribe();
    let (mut over_limit, mut unseen) = (0, 0);
    loop {
        let limit = *limits.borrow_and_update();
        if limit == 0 {
            storage.used.store(0, Ordering::Relaxed);
            // Fails only if the agent ends.
            let _ = limits.changed().await;
            continue;
        }
        match measure(&runtime, &dir, limit).await {
            Ok(usage) => {
                storage.used.store(usage.bytes, Ordering::Relaxed);
                over_limit = if usage.bytes > limit { over_limit + 1 } else { 0 };
                unseen = if usage.unseen > 0 { unseen + 1 } else { 0 };
                if over_limit >= EVICT_AFTER_OVER_LIMIT || unseen >= EVICT_AFTER_UNMEASURABLE {
                    let message = eviction_message(usage, limit);
                    if let Err(status) = evict(&storage, &runtime, &message).await {
                        tracing::warn!(
                            code = ?status.code(),
                            error = status.message(),
                            "eviction failed, retrying"
                        );
                    }
                } else if over_limit > 0 {
                    continue;
                }
            }
            Err(error) => {
                tracing::warn!(%error, "ephemeral storage not measured");
            }
        }
        tokio::select! {
            () = tokio::time::sleep(MEASURE_INTERVAL) => {}
            changed = limits.changed() => drop(changed),
        }
    }
}

fn eviction_message(usage: Usage, limit: u64) -> String {
    let Usage { bytes, unseen, .. } = usage;
    if bytes > limit {
        return format!(
            "the pod exceeds its limit of ephemeral storage: it uses {bytes} bytes or \
             more, limit {limit} bytes"
        );
    }
    format!(
        "the pod's ephemeral storage can not be measured: {unseen} of its directories are \
         nested too deep or moved all the time; it uses {bytes} bytes or more, limit {limit} bytes"
    )
}

/// Measures the pod's usage. Stops at the limit.
async fn measure(runtime: &Runtime, dir: &CellDir, limit: u64) -> io::Result<Usage> {
    let mut total = measure_tree(dir.pod(), limit).await?;
    if total.bytes > limit {
        return Ok(total);
    }
    let layers = layers::writable(runtime, &dir.containerd_root()).await;
    for root in layers.map_err(io::Error::other)? {
        let usage = measure_tree(root, limit.saturating_sub(total.bytes)).await?;
        total.bytes = total.bytes.saturating_add(usage.bytes);
        total.entries += usage.entries;
        total.unseen += usage.unseen;
        if total.bytes > limit {
            break;
        }
    }
    Ok(total)
}

async fn measure_tree(root: PathBuf, limit: u64) -> io::Result<Usage> {
    let Some(mut measurement) = spawn_blocking(move || open_measurement(&root)).await?? else {
        return Ok(Usage::default());
    };
    loop {
        let began = Instant::now();
        let (next, step) = spawn_blocking(move || {
            let step = measurement.step(STEP_ENTRIES);
            (measurement, step)
        })
        .await?;
        measurement = next;
        match step? {
            MeasureProgress::Done(usage) => return Ok(usage),
            MeasureProgress::Partial(usage) if usage.bytes > limit => return Ok(usage),
            MeasureProgress::Partial(_) => tokio::time::sleep(began.elapsed()).await,
        }
    }
}

fn open_measurement(root: &Path) -> io::Result<Option<Measurement>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match openat(CWD, root, flags, Mode::empty()) {
        Ok(dir) => Ok(Some(Measurement::begin(dir)?)),
        // The container was removed during the measurement.
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Kills all running containers.
async fn evict(storage: &EphemeralStorage, runtime: &Runtime, message: &str) -> Result<(), Status> {
    let filter = ContainerFilter {
        state: Some(ContainerStateValue { state: ContainerState::ContainerRunning.into() }),
        ..Default::default()
    };
    let request = ListContainersRequest { filter: Some(filter) };
    let running =
        runtime.runtime().list_containers(with_timeout(QUERY_TIMEOUT, request)).await?.into_inner();
    let mut outcome = Ok(());
    for container in running.containers {
        tracing::warn!(container = container.id, message, "container evicted");
        {
            let mut evicted = storage.evicted();
            if evicted.len() >= MAX_EVICTED {
                evicted.clear();
            }
            evicted.insert(container.id.clone(), message.to_owned());
        }
        let request = StopContainerRequest { container_id: container.id, timeout: 0 };
        if let Err(status) =
            runtime.runtime().stop_container(with_timeout(KILL_TIMEOUT, request)).await
        {
            outcome = Err(status);
        }
    }
    outcome
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn exited(id: &str, exit_code: i32) -> ContainerStatus {
        let state = ContainerState::ContainerExited.into();
        let reason = "Error".to_owned();
        ContainerStatus { id: id.to_owned(), state, exit_code, reason, ..Default::default() }
    }

    #[test]
    fn evicted_container_status_names_usage_and_limit() {
        let storage = EphemeralStorage::default();
        let usage = Usage { bytes: 4097, entries: 3, unseen: 0 };
        storage.evicted().insert("a".to_owned(), eviction_message(usage, 4096));
        let mut status = exited("a", KILLED_EXIT_CODE);
        storage.set_eviction_reason(&mut status);
        assert_eq!(status.reason, "Evicted");
        assert!(status.message.contains("uses 4097 bytes or more, limit 4096 bytes"), "{status:?}");
        for other in [exited("b", KILLED_EXIT_CODE), exited("a", 0)] {
            let mut status = other.clone();
            storage.set_eviction_reason(&mut status);
            assert_eq!(status, other);
        }
    }

    #[tokio::test]
    async fn measurement_over_the_limit_stops_early() {
        let temp = tempfile::tempdir().unwrap();
        for number in 0..STEP_ENTRIES * 3 {
            fs::write(temp.path().join(number.to_string()), "").unwrap();
        }
        let all = measure_tree(temp.path().to_owned(), u64::MAX).await.unwrap();
        assert_eq!((all.entries, all.unseen), ((STEP_ENTRIES * 3 + 1) as u64, 0));
        let some = measure_tree(temp.path().to_owned(), 4096).await.unwrap();
        assert!(some.bytes > 4096 && some.entries < all.entries, "{some:?}");
        let absent = measure_tree(temp.path().join("absent"), 1).await.unwrap();
        assert_eq!(absent, Usage::default());
    }
}
