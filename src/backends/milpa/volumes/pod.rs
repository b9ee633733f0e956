//! Synchronisation of a pod's volumes.

use std::{
    collections::BTreeMap,
    fmt,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use kiyot_engine::id::CellId;
use kiyot_link::log_limit::LogLimit;
use kiyot_proto::store::ReplacedFile;
use tokio::{
    sync::Notify,
    time::{Instant, sleep, sleep_until},
};

use super::{
    files::CellFiles,
    plan::CellPath,
    volume_sync::{Synced, VolumeError, VolumeSync},
    watch::{SharedWatcher, Watcher},
};

/// Interval of comparisons without events: a tmpfs may have been mounted over the watched
/// directory.
const RESYNC_INTERVAL: Duration = Duration::from_secs(60);

/// Wait after an event, because an update causes several events.
const SETTLE_DELAY: Duration = Duration::from_millis(100);

/// Least time between comparisons. Each snapshot of a cell requests a comparison.
const MIN_INTERVAL: Duration = Duration::from_secs(1);

/// First pause after a failure; doubled up to [`RESYNC_INTERVAL`].
const MIN_BACKOFF: Duration = Duration::from_secs(1);

pub(super) struct PodVolumes {
    cell: CellId,
    files: Mutex<Arc<dyn CellFiles>>,
    volumes: Mutex<BTreeMap<PathBuf, Arc<VolumeSync>>>,
    /// Files with another content in the cell.
    replaced: Mutex<Arc<[ReplacedFile]>>,
    /// Notified when a volume changes or is added, or the link is replaced.
    pub(super) changed: Arc<Notify>,
    /// Limits the log messages that the cell can cause.
    lines: LogLimit,
}

impl PodVolumes {
    pub(super) fn new(cell: CellId, files: Arc<dyn CellFiles>) -> Self {
        Self {
            cell,
            files: Mutex::new(files),
            volumes: Mutex::default(),
            replaced: Mutex::default(),
            changed: Arc::default(),
            lines: LogLimit::default(),
        }
    }

    /// Replaces the link to the cell.
    pub(super) fn use_files(&self, files: Arc<dyn CellFiles>) {
        *self.files.lock().unwrap_or_else(PoisonError::into_inner) = files;
    }

    pub(super) fn files(&self) -> Arc<dyn CellFiles> {
        Arc::clone(&self.files.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sets the files with another content in the cell. Ignores an empty list, which dates from
    /// before the files were known.
    pub(super) fn set_replaced(&self, files: &[ReplacedFile]) {
        if !files.is_empty() {
            *self.replaced.lock().unwrap_or_else(PoisonError::into_inner) = files.into();
        }
    }

    /// Returns the files with another content in the cell.
    pub(super) fn replaced(&self) -> Arc<[ReplacedFile]> {
        Arc::clone(&self.replaced.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns a volume, and adds it to the synchronised volumes if it is new.
    pub(super) fn volume(&self, source: PathBuf, place: CellPath) -> Arc<VolumeSync> {
        let mut volumes = self.volumes.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(
            volumes
                .entry(source.clone())
                .or_insert_with(|| Arc::new(VolumeSync::new(source, place))),
        )
    }

    /// Keeps the volumes in sync for as long as it runs.
    pub(super) async fn keep(self: Arc<Self>, watcher: Arc<SharedWatcher>) {
        let mut pause = MIN_BACKOFF;
        loop {
            // Boxed, because each pod has this task, and it mostly waits.
            let started = watcher.started();
            let synced = Box::pin(self.sync_all(started.as_deref())).await;
            let next = Instant::now() + MIN_INTERVAL;
            let wait = match synced {
                Ok(()) => {
                    pause = MIN_BACKOFF;
                    RESYNC_INTERVAL
                }
                Err(error) => {
                    if let Some(suppressed) = self.lines.admit() {
                        tracing::warn!(
                            cell = %self.cell,
                            error = &error as &dyn std::error::Error,
                            retry_in_s = pause.as_secs(),
                            suppressed,
                            "volume outdated in its cell"
                        );
                    }
                    let wait = pause;
                    pause = (pause * 2).min(RESYNC_INTERVAL);
                    wait
                }
            };
            tokio::select! {
                () = self.changed.notified() => sleep(SETTLE_DELAY).await,
                () = sleep(wait) => {}
            }
            sleep_until(next).await;
        }
    }

    /// Synchronises all volumes, and returns the first failure.
    async fn sync_all(&self, watcher: Option<&Watcher>) -> Result<(), VolumeError> {
        let volumes: Vec<Arc<VolumeSync>> =
            self.volumes.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        let mut result = Ok(());
        for volume in volumes {
            // Watched before it is read, so that no change is missed. A volume that can't be
            // watched is still compared periodically.
            if let Some(Err(error)) =
                watcher.map(|watcher| watcher.add(volume.source(), &self.changed))
            {
                tracing::debug!(volume = %volume.source().display(), %error, "volume not watched");
            }
            match volume.sync(&*self.files(), self.replaced()).await {
                Ok(Synced::Updated) => {
                    tracing::debug!(
                        cell = %self.cell,
                        volume = %volume.source().display(),
                        "volume updated in its cell"
                    );
                }
                Ok(Synced::Unchanged | Synced::Retained) => {}
                Err(error) => result = result.and(Err(error)),
            }
        }
        result
    }
}

impl fmt::Debug for PodVolumes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pod").field("cell", &self.cell).finish_non_exhaustive()
    }
}
