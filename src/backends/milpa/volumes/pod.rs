//! The volumes of one pod, kept in step.

use std::{
    collections::BTreeMap,
    fmt,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, time::sleep};

use super::{
    files::Files,
    kept::{Brought, Kept, VolumeError},
    plan::Place,
    watch::Watcher,
};
use crate::backends::milpa::id::CellId;

/// Volumes are compared so often even without news: a tmpfs may have been mounted over what is
/// watched.
const RESYNC: Duration = Duration::from_secs(60);

/// An update is several changes; this long they are waited for.
const SETTLE: Duration = Duration::from_millis(100);

/// Pause after a failure; doubled up to [`RESYNC`].
const BACKOFF: Duration = Duration::from_secs(1);

/// The volumes of one pod.
pub(super) struct Pod {
    cell: CellId,
    files: Mutex<Arc<dyn Files>>,
    volumes: Mutex<BTreeMap<PathBuf, Arc<Kept>>>,
    /// Told when a volume has news, or there is another one, or another link.
    pub(super) news: Arc<Notify>,
}

impl Pod {
    /// Without a volume yet.
    pub(super) fn new(cell: CellId, files: Arc<dyn Files>) -> Self {
        Self { cell, files: Mutex::new(files), volumes: Mutex::default(), news: Arc::default() }
    }

    /// Goes on with another link to the same cell.
    pub(super) fn use_files(&self, files: Arc<dyn Files>) {
        *self.files.lock().unwrap_or_else(PoisonError::into_inner) = files;
    }

    /// The cell's files.
    pub(super) fn files(&self) -> Arc<dyn Files> {
        Arc::clone(&self.files.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// One of its volumes, which is kept from now on.
    pub(super) fn volume(&self, source: PathBuf, place: Place) -> Arc<Kept> {
        let mut volumes = self.volumes.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(
            volumes.entry(source.clone()).or_insert_with(|| Arc::new(Kept::new(source, place))),
        )
    }

    /// Keeps its volumes in step for as long as it runs.
    pub(super) async fn keep(self: Arc<Self>, watcher: Option<Arc<Watcher>>) {
        let mut pause = BACKOFF;
        loop {
            // Boxed: there is a task like this for each pod, and it mostly waits.
            let wait = match Box::pin(self.bring_all(watcher.as_deref())).await {
                Ok(()) => {
                    pause = BACKOFF;
                    RESYNC
                }
                Err(error) => {
                    tracing::warn!(cell = %self.cell, error = &error as &dyn std::error::Error, seconds = pause.as_secs(), "a volume is not up to date in its cell; it is tried again");
                    let wait = pause;
                    pause = (pause * 2).min(RESYNC);
                    wait
                }
            };
            tokio::select! {
                () = self.news.notified() => sleep(SETTLE).await,
                () = sleep(wait) => {}
            }
        }
    }

    /// Brings all; the first failure is returned when the others have had their turn.
    async fn bring_all(&self, watcher: Option<&Watcher>) -> Result<(), VolumeError> {
        let volumes: Vec<Arc<Kept>> =
            self.volumes.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        let mut result = Ok(());
        for volume in volumes {
            // Watched first: what comes while it is read is news. What can't be watched is still
            // compared from time to time.
            if let Some(Err(error)) =
                watcher.map(|watcher| watcher.add(volume.source(), &self.news))
            {
                tracing::debug!(volume = %volume.source().display(), %error, "a volume can't be watched for now");
            }
            match volume.bring(&*self.files()).await {
                Ok(Brought::Changed) => {
                    tracing::debug!(cell = %self.cell, volume = %volume.source().display(), "a volume was updated in its cell")
                }
                Ok(Brought::Same | Brought::Kept) => {}
                Err(error) => result = result.and(Err(error)),
            }
        }
        result
    }
}

impl fmt::Debug for Pod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pod").field("cell", &self.cell).finish_non_exhaustive()
    }
}
