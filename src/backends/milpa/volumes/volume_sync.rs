//! Synchronisation of a volume that the kubelet writes with its copy in a cell.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use kiyot_link::log_limit::LogLimit;
use kiyot_proto::store::ReplacedFile;
use tokio::sync::Mutex;

use super::{
    files::CellFiles,
    plan::{CellPath, plan},
    reader::{self, ReadError},
    replaced::replace_in_volume,
    tree::{Attributes, CopyState, Tree},
};
use crate::backends::milpa::failure::Failure;

/// Longest listing that is read from a cell, in bytes.
const MAX_LISTING_BYTES: u32 = 4 << 20;

/// Error of synchronising a volume.
#[derive(Debug, thiserror::Error)]
pub(super) enum VolumeError {
    /// The volume can't be read on the node.
    #[error("volume {path}")]
    Read {
        /// Path on the node.
        path: PathBuf,
        #[source]
        source: ReadError,
    },
    /// The cell did not apply the changes.
    #[error("volume {path} could not be brought into the cell")]
    Cell {
        /// Path on the node.
        path: PathBuf,
        #[source]
        source: Failure,
    },
}

/// Outcome of synchronising a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Synced {
    /// The copy was up to date.
    Unchanged,
    /// The copy was updated.
    Updated,
    /// The volume is unknown on the node; the cell keeps its copy.
    Retained,
}

/// A volume that the kubelet writes, and its copy in a cell.
#[derive(Debug)]
pub(super) struct VolumeSync {
    source: PathBuf,
    place: CellPath,
    /// Known state of the copy; `None` until the cell was asked.
    state: Mutex<Option<CopyState>>,
    /// Limits the log messages that the cell can cause by snapshots.
    lines: LogLimit,
}

impl VolumeSync {
    /// Creates a volume whose copy is unknown.
    pub(super) fn new(source: PathBuf, place: CellPath) -> Self {
        Self { source, place, state: Mutex::default(), lines: LogLimit::default() }
    }

    /// Returns the path on the node.
    pub(super) fn source(&self) -> &Path {
        &self.source
    }

    /// Makes the copy equal to the volume, except for the contents of `replaced` files. Concurrent
    /// calls wait for each other.
    pub(super) async fn sync(
        &self,
        files: &dyn CellFiles,
        replaced: Arc<[ReplacedFile]>,
    ) -> Result<Synced, VolumeError> {
        let mut state = self.state.lock().await;
        let old = match state.take() {
            Some(state) => state,
            None => self.known_state(files).await.map_err(|failure| self.refused(failure))?,
        };
        let tree = match self.read(replaced).await {
            Ok(tree) => tree,
            // Not mounted again after a reboot, or not written yet: unknown, not empty.
            Err(source) if !old.entries.is_empty() => {
                let (volume, error) = (self.source.display(), &source as &dyn std::error::Error);
                if source.is_transient() {
                    tracing::debug!(%volume, error, "volume unknown on the node, copy retained");
                } else if let Some(suppressed) = self.lines.admit() {
                    tracing::warn!(
                        %volume,
                        error,
                        suppressed,
                        "volume unreadable on the node, copy retained and possibly outdated"
                    );
                }
                *state = Some(old);
                return Ok(Synced::Retained);
            }
            Err(source) => {
                *state = Some(old);
                return Err(VolumeError::Read { path: self.source.clone(), source });
            }
        };
        let changes = plan(&old, &tree, &self.place);
        let new = CopyState::of(&tree);
        if changes.is_empty() {
            *state = Some(new);
            return Ok(Synced::Unchanged);
        }
        // The listing is stored in the cell before and after, so that leftovers of an interrupted
        // update are found and removed.
        let between = old.between(&tree);
        let mut all = self.list(&between);
        all.extend(changes);
        all.extend(self.list(&new));
        *state = Some(between);
        files.change(all).await.map_err(|failure| self.refused(failure))?;
        *state = Some(new);
        Ok(Synced::Updated)
    }

    async fn read(&self, replaced: Arc<[ReplacedFile]>) -> Result<Tree, ReadError> {
        let source = self.source.clone();
        let read = tokio::task::spawn_blocking(move || {
            let mut tree = reader::read_atomic(&source)?;
            let volume = source.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            replace_in_volume(&mut tree, volume, &replaced);
            Ok(tree)
        });
        read.await.unwrap_or_else(|error| {
            Err(ReadError::Io { path: String::new(), source: std::io::Error::other(error) })
        })
    }

    /// Returns the state of a copy from a previous run of kiyot.
    async fn known_state(&self, files: &dyn CellFiles) -> Result<CopyState, Failure> {
        let listing = files.get(&self.listing(), MAX_LISTING_BYTES, false).await?;
        Ok(listing.map(|bytes| CopyState::from_listing(&bytes)).unwrap_or_default())
    }

    fn list(&self, state: &CopyState) -> Vec<kiyot_proto::cell::FileChange> {
        let at = self.listing();
        let mut changes: Vec<_> = at.parent_directory().into_iter().collect();
        changes
            .extend(at.file(Attributes { mode: 0o600, uid: 0, gid: 0 }, &state.listing().into()));
        changes
    }

    /// Returns the path of the listing: beside the volumes, where no container sees it.
    fn listing(&self) -> CellPath {
        CellPath::new(self.place.root, format!("kept/{}", self.place.path))
    }

    fn refused(&self, failure: Failure) -> VolumeError {
        VolumeError::Cell { path: self.source.clone(), source: failure }
    }
}
