//! Use of the cell's disk by the pod, and the end of its containers when it is too much, as a
//! kubelet evicts a pod.
//!
//! Counted are the containers' writable layers, and all beneath `pod_dir`: emptyDirs and logs. Not
//! counted are images, what is in memory, and files that have no name any more.

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

use kiyot_proto::cri::{
    ContainerFilter, ContainerState, ContainerStateValue, ContainerStatus, ListContainersRequest,
    StopContainerRequest,
};
use kiyot_tree::{MeasureProgress, Measurement, Usage};
use rustix::{
    fs::{CWD, Mode, OFlags, openat},
    io::Errno,
};
use tokio::{sync::watch, task::spawn_blocking};
use tonic::Status;

use super::runtime::{ASK, Runtime, within};
use crate::dirs::CellDir;

/// How long to wait from one measurement to the next.
const PERIOD: Duration = Duration::from_secs(5);
/// Entries of a tree that are looked at before others get a turn, for as long as it took.
const STEP_ENTRIES: usize = 2000;
/// Measurements in a row that must be over the limit: a file that is moved while it is measured may
/// be counted twice.
const OVER: u32 = 2;
/// Measurements in a row in which something could not be looked at, after which the pod is taken
/// for one that hides what it takes.
const UNSEEN: u32 = 10;
/// How long containerd may take to kill a container.
const KILL: Duration = Duration::from_secs(20);
/// Containers of which it is remembered why they were ended.
const REMEMBERED: usize = 1024;
/// Reason of the end, as a kubelet calls it.
const REASON: &str = "Evicted";
/// The exit code of a process that was killed.
const KILLED: i32 = 137;

/// The limit of the cell's pod, and what it takes.
#[derive(Debug)]
pub struct Disk {
    /// In bytes; 0: there is none.
    limit: watch::Sender<u64>,
    /// In bytes, by the last measurement.
    used: AtomicU64,
    /// Messages of containers that were ended, by their ids in the cell.
    evicted: Mutex<HashMap<String, String>>,
}

impl Default for Disk {
    fn default() -> Self {
        Self { limit: watch::Sender::new(0), used: AtomicU64::new(0), evicted: Mutex::default() }
    }
}

impl Disk {
    /// Takes the limit that the daemon sets, in bytes; 0: there is none.
    pub fn set_limit(&self, bytes: u64) {
        self.limit.send_if_modified(|limit| std::mem::replace(limit, bytes) != bytes);
    }

    /// Bytes that the pod takes, by the last measurement; 0 if there was none.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Completes what containerd says of a container that was ended for what the pod takes.
    pub fn explain(&self, status: &mut ContainerStatus) {
        if status.state() != ContainerState::ContainerExited || status.exit_code != KILLED {
            return;
        }
        if let Some(message) = self.evicted().get(&status.id) {
            REASON.clone_into(&mut status.reason);
            status.message.clone_from(message);
        }
    }

    fn evicted(&self) -> MutexGuard<'_, HashMap<String, String>> {
        self.evicted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Measures what the pod takes and ends its containers when it is too much. Never returns.
pub async fn enforce(disk: Arc<Disk>, runtime: Runtime, dir: CellDir) {
    let mut limits = disk.limit.subscribe();
    let (mut over, mut unseen) = (0, 0);
    loop {
        let limit = *limits.borrow_and_update();
        if limit == 0 {
            disk.used.store(0, Ordering::Relaxed);
            // It fails only when the agent ends.
            let _ = limits.changed().await;
            continue;
        }
        match measure(&runtime, &dir, limit).await {
            Ok(usage) => {
                disk.used.store(usage.bytes, Ordering::Relaxed);
                over = if usage.bytes > limit { over + 1 } else { 0 };
                unseen = if usage.unseen > 0 { unseen + 1 } else { 0 };
                if over >= OVER || unseen >= UNSEEN {
                    let message = message(usage, limit);
                    if let Err(status) = evict(&disk, &runtime, &message).await {
                        tracing::warn!(code = ?status.code(), error = status.message(), "containers of a pod over its limit could not be ended yet");
                    }
                } else if over > 0 {
                    continue;
                }
            }
            Err(error) => {
                tracing::warn!(%error, "the pod's use of the disk can not be measured");
            }
        }
        tokio::select! {
            () = tokio::time::sleep(PERIOD) => {}
            changed = limits.changed() => drop(changed),
        }
    }
}

fn message(usage: Usage, limit: u64) -> String {
    let Usage { bytes, unseen, .. } = usage;
    if bytes > limit {
        return format!(
            "the pod exceeds its limit of ephemeral storage: it uses {bytes} bytes or more, limit {limit} bytes"
        );
    }
    format!(
        "the pod's ephemeral storage can not be measured: {unseen} of its directories are nested too deep or moved all the time; it uses {bytes} bytes or more, limit {limit} bytes"
    )
}

/// Measures what the pod takes; no more once that is over the limit.
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
    let Some(mut measurement) = spawn_blocking(move || begin(&root)).await?? else {
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

fn begin(root: &Path) -> io::Result<Option<Measurement>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match openat(CWD, root, flags, Mode::empty()) {
        Ok(dir) => Ok(Some(Measurement::begin(dir)?)),
        // The container was removed meanwhile.
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Kills all containers that run.
async fn evict(disk: &Disk, runtime: &Runtime, message: &str) -> Result<(), Status> {
    let filter = ContainerFilter {
        state: Some(ContainerStateValue { state: ContainerState::ContainerRunning.into() }),
        ..Default::default()
    };
    let request = ListContainersRequest { filter: Some(filter) };
    let running = runtime.runtime().list_containers(within(ASK, request)).await?.into_inner();
    let mut outcome = Ok(());
    for container in running.containers {
        tracing::warn!(container = container.id, message, "container evicted");
        {
            let mut evicted = disk.evicted();
            if evicted.len() >= REMEMBERED {
                evicted.clear();
            }
            evicted.insert(container.id.clone(), message.to_owned());
        }
        let request = StopContainerRequest { container_id: container.id, timeout: 0 };
        if let Err(status) = runtime.runtime().stop_container(within(KILL, request)).await {
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
    fn end_of_an_evicted_container_names_the_bytes() {
        let disk = Disk::default();
        let usage = Usage { bytes: 4097, entries: 3, unseen: 0 };
        disk.evicted().insert("a".to_owned(), message(usage, 4096));
        let mut status = exited("a", KILLED);
        disk.explain(&mut status);
        assert_eq!(status.reason, "Evicted");
        assert!(status.message.contains("uses 4097 bytes or more, limit 4096 bytes"), "{status:?}");
        for other in [exited("b", KILLED), exited("a", 0)] {
            let mut status = other.clone();
            disk.explain(&mut status);
            assert_eq!(status, other);
        }
    }

    #[tokio::test]
    async fn measurement_of_a_tree_ends_once_it_is_over_the_limit() {
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
