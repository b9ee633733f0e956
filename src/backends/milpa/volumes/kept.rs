//! One volume that the kubelet writes, and its copy in a cell.

use std::path::{Path, PathBuf};

use tokio::sync::Mutex;
use tonic::Status;

use super::{
    files::Files,
    plan::{Place, plan},
    reader::{self, ReadError},
    tree::{Attributes, Shadow, Tree},
};

/// Longest listing that is read from a cell.
const MAX_LISTING: u32 = 4 << 20;

/// Why a volume's copy isn't what the volume is.
#[derive(Debug, thiserror::Error)]
pub(super) enum VolumeError {
    /// It can't be read on the node.
    #[error("volume {path}")]
    Read {
        /// On the node.
        path: PathBuf,
        /// Why.
        #[source]
        source: ReadError,
    },
    /// The cell did not take it.
    #[error("volume {path} could not be brought into the cell")]
    Cell {
        /// On the node.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<Status>,
    },
}

/// What bringing a volume into a cell did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Brought {
    /// The cell had it.
    Same,
    /// The cell has it now.
    Changed,
    /// It is unknown on the node; the cell keeps what it has.
    Kept,
}

/// One volume that the kubelet writes, and its copy in a cell.
#[derive(Debug)]
pub(super) struct Kept {
    source: PathBuf,
    place: Place,
    /// What is known of the copy; `None` until the cell has been asked.
    shadow: Mutex<Option<Shadow>>,
}

impl Kept {
    /// A volume whose copy isn't known.
    pub(super) fn new(source: PathBuf, place: Place) -> Self {
        Self { source, place, shadow: Mutex::default() }
    }

    /// Where it is on the node.
    pub(super) fn source(&self) -> &Path {
        &self.source
    }

    /// Makes the copy what the volume is now. One at a time.
    pub(super) async fn bring(&self, files: &dyn Files) -> Result<Brought, VolumeError> {
        let mut shadow = self.shadow.lock().await;
        let old = match shadow.take() {
            Some(shadow) => shadow,
            None => self.listed(files).await.map_err(|status| self.refused(status))?,
        };
        let tree = match self.read().await {
            Ok(tree) => tree,
            // Not mounted again after a reboot, or not written yet: that is no empty volume.
            Err(source) if !old.entries.is_empty() => {
                let (volume, error) = (self.source.display(), &source as &dyn std::error::Error);
                if source.is_of_no_concern() {
                    tracing::debug!(%volume, error, "a volume is unknown on the node; the cell keeps its copy");
                } else {
                    tracing::warn!(%volume, error, "a volume can't be read on the node; the cell keeps its copy, which may be old");
                }
                *shadow = Some(old);
                return Ok(Brought::Kept);
            }
            Err(source) => {
                *shadow = Some(old);
                return Err(VolumeError::Read { path: self.source.clone(), source });
            }
        };
        let changes = plan(&old, &tree, &self.place);
        let new = Shadow::of(&tree);
        if changes.is_empty() {
            *shadow = Some(new);
            return Ok(Brought::Same);
        }
        // Kept in the cell before and after, so that what an interrupted update leaves is found and
        // removed.
        let between = old.between(&tree);
        let mut all = self.list(&between);
        all.extend(changes);
        all.extend(self.list(&new));
        *shadow = Some(between);
        files.change(all).await.map_err(|status| self.refused(status))?;
        *shadow = Some(new);
        Ok(Brought::Changed)
    }

    async fn read(&self) -> Result<Tree, ReadError> {
        let source = self.source.clone();
        let read = tokio::task::spawn_blocking(move || reader::read_atomic(&source)).await;
        read.unwrap_or_else(|error| {
            Err(ReadError::Io { path: String::new(), source: std::io::Error::other(error) })
        })
    }

    /// What an earlier run of kiyot brought.
    async fn listed(&self, files: &dyn Files) -> Result<Shadow, Status> {
        let listing = files.get(&self.listing(), MAX_LISTING, false).await?;
        Ok(listing.map(|bytes| Shadow::from_listing(&bytes)).unwrap_or_default())
    }

    fn list(&self, shadow: &Shadow) -> Vec<kiyot_proto::cell::FileChange> {
        let at = self.listing();
        let mut changes: Vec<_> = at.directory_above().into_iter().collect();
        changes
            .extend(at.file(Attributes { mode: 0o600, uid: 0, gid: 0 }, &shadow.listing().into()));
        changes
    }

    /// Where names and kinds of the copy are kept: beside the volumes, where no container sees
    /// them.
    fn listing(&self) -> Place {
        Place::new(self.place.root, format!("kept/{}", self.place.path))
    }

    fn refused(&self, status: Status) -> VolumeError {
        VolumeError::Cell { path: self.source.clone(), source: Box::new(status) }
    }
}
