//! Directories of the node's unpacked layers, held for cells by snapshots of the node's containerd.
//!
//! For each image, a read-only snapshot on the image's layers, which containerd's garbage
//! collection skips, keeps the layers even after the image is deleted. All cells with the image
//! share the snapshot; it is removed with the last of these cells. Snapshots of a previous daemon
//! do not say for which cells they were made: they are removed with the last of the cells that
//! existed when this daemon started. Until this daemon has found these snapshots, it removes none.

use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use containerd_client::{
    services::v1::snapshots::{
        ListSnapshotsRequest, MountsRequest, RemoveSnapshotRequest, ViewSnapshotRequest,
        snapshots_client::SnapshotsClient,
    },
    types::Mount,
};
use futures::TryStreamExt as _;
use kiyot_engine::id::CellId;
use kiyot_link::log_limit::LogLimit;
use ring::digest::{SHA256, digest};
use tokio::{
    sync::{OnceCell, RwLock},
    time::timeout,
};
use tonic::{Code, transport::Channel};

use super::node::{Containerd, NodeImages, RESPONSE_TIMEOUT};
use crate::backends::milpa::failure::Failure;

/// The snapshotter whose snapshots are directories.
const SNAPSHOTTER: &str = "overlayfs";
/// The label that exempts a snapshot from containerd's garbage collection.
const KEPT: &str = "containerd.io/gc.root";
/// The label with the state directory of a snapshot's daemon.
const OWNER: &str = "kiyot.elotl.co/state-dir";
/// Bounds the snapshots of a previous daemon that are released; the next daemon releases the rest.
const MAX_ADOPTED: usize = 10_000;
/// Bytes of the owner's digest in names of snapshots, so that two daemons on a node use different
/// names.
const OWNER_DIGEST_BYTES: usize = 8;

/// Layers of the node for cells that see its files.
#[derive(Debug)]
pub(super) struct SharedLayers {
    containerd: Containerd,
    owner: String,
    prefix: String,
    held: Mutex<Held>,
    /// Set when the snapshots of a previous daemon are among the views.
    adopted: OnceCell<()>,
    lines: LogLimit,
}

/// Held snapshots, and the cells that hold them.
#[derive(Debug, Default)]
struct Held {
    /// The snapshots, by their names in the node's containerd.
    views: HashMap<String, View>,
    /// The cells at the start of the daemon, until the snapshots of a previous daemon are found;
    /// `None` until these cells are known.
    earlier: Option<HashSet<CellId>>,
}

/// A snapshot shared by cells.
#[derive(Debug, Default)]
struct View {
    cells: HashSet<CellId>,
    /// Locked shared while the snapshot is made or read, and exclusively while it is removed.
    gate: Arc<RwLock<()>>,
}

impl SharedLayers {
    /// Creates the layers shared by a daemon. `owner` is its state directory.
    pub(super) fn new(node: NodeImages, owner: String) -> Self {
        let hash = digest(&SHA256, owner.as_bytes());
        let prefix = format!("kiyot-{}-", hex::encode(&hash.as_ref()[..OWNER_DIGEST_BYTES]));
        Self {
            containerd: Containerd::new(node),
            owner,
            prefix,
            held: Mutex::default(),
            adopted: OnceCell::new(),
            lines: LogLimit::default(),
        }
    }

    /// Returns the directories of a snapshot and of the snapshots below it, the lowest first, and
    /// holds them for a cell. Returns an empty list if their mounts are not directories.
    ///
    /// # Errors
    ///
    /// Returns NOT_FOUND if the node has not unpacked the layers.
    pub(super) async fn hold(
        &self,
        cell: &CellId,
        snapshot: &str,
    ) -> Result<Vec<PathBuf>, Failure> {
        let key = format!("{}{snapshot}", self.prefix);
        let gate = {
            let mut held = self.held();
            let view = held.views.entry(key.clone()).or_default();
            view.cells.insert(cell.clone());
            Arc::clone(&view.gate)
        };
        let _gate = gate.read().await;
        let mounts = match self.mounts(&key).await {
            Err(failure) if failure.code() == Code::NotFound => self.view(&key, snapshot).await,
            mounts => mounts,
        };
        Ok(directories(&mounts?))
    }

    /// Returns the mounts of a view. Each call reads them from containerd, which may have been
    /// replaced, with other layers in directories of the same names.
    async fn mounts(&self, key: &str) -> Result<Vec<Mount>, Failure> {
        let mounts = MountsRequest { snapshotter: SNAPSHOTTER.to_owned(), key: key.to_owned() };
        let mounts = self.containerd.request(mounts, Some(RESPONSE_TIMEOUT))?;
        let mounts = self.snapshots().await?.mounts(mounts).await;
        Ok(mounts.map_err(Failure::of_node)?.into_inner().mounts)
    }

    /// Makes a view of a snapshot, or returns the view that a concurrent call has made.
    async fn view(&self, key: &str, snapshot: &str) -> Result<Vec<Mount>, Failure> {
        let labels = [(KEPT, "true"), (OWNER, &self.owner)];
        let view = ViewSnapshotRequest {
            snapshotter: SNAPSHOTTER.to_owned(),
            key: key.to_owned(),
            parent: snapshot.to_owned(),
            labels: labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        };
        let view = self.containerd.request(view, Some(RESPONSE_TIMEOUT))?;
        match self.snapshots().await?.view(view).await {
            Ok(answer) => Ok(answer.into_inner().mounts),
            Err(status) if status.code() == Code::AlreadyExists => self.mounts(key).await,
            Err(status) => Err(Failure::of_node(status)),
        }
    }

    /// Sets the cells at the start of the daemon; later calls have no effect.
    pub(super) fn begin_with(&self, cells: impl FnOnce() -> HashSet<CellId>) {
        self.held().earlier.get_or_insert_with(cells);
    }

    /// Releases the snapshots held for a cell. After a failure, the end of the next cell or the
    /// next start of the daemon releases them.
    pub(super) async fn release(&self, cell: &CellId) {
        self.held().retain(|other| other != cell);
        self.remove_unused().await;
    }

    /// Releases the snapshots held for unknown cells.
    pub(super) async fn release_unknown(&self, known: impl Fn() -> HashSet<CellId>) {
        {
            // A cell is known before it holds a view, so known cells are read with the lock held.
            let mut held = self.held();
            let known = known();
            held.retain(|cell| known.contains(cell));
        }
        self.remove_unused().await;
    }

    /// Finds the snapshots of a previous daemon, and holds them for the cells that existed when
    /// this daemon started.
    async fn adopt(&self) -> Result<(), Failure> {
        let adopt = async || {
            let too_slow = |_| Failure::node(Code::DeadlineExceeded, "list of snapshots");
            let found = timeout(RESPONSE_TIMEOUT, self.find()).await.map_err(too_slow)??;
            let mut held = self.held();
            let not_begun = || Failure::node(Code::Unavailable, "cells are not known yet");
            // An empty set stays, because the cells are known.
            let earlier = held.earlier.as_mut().map(std::mem::take).ok_or_else(not_begun)?;
            for key in found {
                held.views.entry(key).or_default().cells.extend(earlier.iter().cloned());
            }
            Ok::<(), Failure>(())
        };
        self.adopted.get_or_try_init(adopt).await.copied()
    }

    /// Returns the names of this owner's snapshots.
    async fn find(&self) -> Result<Vec<String>, Failure> {
        let filter = format!("labels.{OWNER:?}=={:?}", self.owner);
        let list =
            ListSnapshotsRequest { snapshotter: SNAPSHOTTER.to_owned(), filters: vec![filter] };
        let list = self.containerd.request(list, Some(RESPONSE_TIMEOUT))?;
        let listed = self.snapshots().await?.list(list).await;
        let mut listed = listed.map_err(Failure::of_node)?.into_inner();
        let mut found = Vec::new();
        while let Some(part) = listed.try_next().await.map_err(Failure::of_node)? {
            let own =
                part.info.into_iter().filter(|info| info.labels.get(OWNER) == Some(&self.owner));
            let left = MAX_ADOPTED - found.len();
            found.extend(own.take(left).map(|info| info.name));
        }
        Ok(found)
    }

    /// Removes the views without cells, after the snapshots of a previous daemon are found: a view
    /// may be one of these. A cell that requests a view meanwhile waits, and makes it again.
    async fn remove_unused(&self) {
        if let Err(failure) = self.adopt().await {
            self.warn(&failure, "layers of an earlier daemon not found, no layers released");
            return;
        }
        let unused: Vec<_> = {
            let held = self.held();
            let unused = held.views.iter().filter(|(_, view)| view.cells.is_empty());
            unused.map(|(key, view)| (key.clone(), Arc::clone(&view.gate))).collect()
        };
        for (key, gate) in unused {
            let _gate = gate.write().await;
            let is_unused =
                |held: &Held| held.views.get(&key).is_some_and(|view| view.cells.is_empty());
            if !is_unused(&self.held()) {
                continue;
            }
            if let Err(failure) = self.remove(&key).await {
                self.warn(&failure, "layers of ended cells not released");
                return;
            }
            let mut held = self.held();
            if is_unused(&held) {
                held.views.remove(&key);
            }
        }
    }

    fn warn(&self, error: &Failure, what: &'static str) {
        if let Some(suppressed) = self.lines.admit() {
            tracing::warn!(%error, suppressed, "{what}");
        }
    }

    async fn remove(&self, key: &str) -> Result<(), Failure> {
        let remove =
            RemoveSnapshotRequest { snapshotter: SNAPSHOTTER.to_owned(), key: key.to_owned() };
        let remove = self.containerd.request(remove, Some(RESPONSE_TIMEOUT))?;
        match self.snapshots().await?.remove(remove).await.map_err(Failure::of_node) {
            Err(failure) if failure.code() != Code::NotFound => Err(failure),
            _ => Ok(()),
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn snapshots(&self) -> Result<SnapshotsClient<Channel>, Failure> {
        Ok(SnapshotsClient::new(self.containerd.channel().await?))
    }
}

impl Held {
    /// Keeps only what is held for these cells.
    fn retain(&mut self, is_kept: impl Fn(&CellId) -> bool) {
        for view in self.views.values_mut() {
            view.cells.retain(&is_kept);
        }
        if let Some(earlier) = &mut self.earlier {
            earlier.retain(&is_kept);
        }
    }
}

/// Returns the directories from which a read-only snapshot is mounted, the lowest first: a single
/// directory, or the lower directories of an overlay.
fn directories(mounts: &[Mount]) -> Vec<PathBuf> {
    let [mount] = mounts else { return Vec::new() };
    match mount.r#type.as_str() {
        "bind" => vec![PathBuf::from(&mount.source)],
        "overlay" => {
            let lower = mount.options.iter().find_map(|option| option.strip_prefix("lowerdir="));
            let lower = lower.map(|lower| lower.split(':').rev().map(PathBuf::from));
            lower.into_iter().flatten().collect()
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_a_view_come_from_its_mount_the_lowest_first() {
        let mount = |kind: &str, source: &str, options: &[&str]| Mount {
            r#type: kind.to_owned(),
            source: source.to_owned(),
            options: options.iter().map(|&option| option.to_owned()).collect(),
            ..Default::default()
        };
        let paths = |paths: &[&str]| -> Vec<PathBuf> { paths.iter().map(PathBuf::from).collect() };
        let bind = mount("bind", "/s/1/fs", &["ro", "rbind"]);
        assert_eq!(directories(&[bind]), paths(&["/s/1/fs"]));
        let overlay =
            mount("overlay", "overlay", &["index=off", "lowerdir=/s/3/fs:/s/2/fs:/s/1/fs"]);
        assert_eq!(directories(&[overlay]), paths(&["/s/1/fs", "/s/2/fs", "/s/3/fs"]));
        for other in [vec![], vec![mount("btrfs", "/dev/x", &["subvolid=3"])]] {
            assert_eq!(directories(&other), paths(&[]));
        }
    }
}
