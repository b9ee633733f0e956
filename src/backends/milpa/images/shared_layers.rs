//! Directories of the node's unpacked layers, held for cells by snapshots of the node's containerd.
//!
//! For each image of a cell, a read-only snapshot that its containerd does not collect stands on
//! the image's layers, and keeps them whatever becomes of the image. It ends with its cell, or when
//! a daemon starts that does not know the cell.

use std::path::PathBuf;

use containerd_client::{
    services::v1::snapshots::{
        ListSnapshotsRequest, MountsRequest, RemoveSnapshotRequest, ViewSnapshotRequest,
        snapshots_client::SnapshotsClient,
    },
    types::Mount,
};
use futures::TryStreamExt as _;
use tonic::{Code, transport::Channel};

use super::node::{Containerd, NodeImages, RESPONSE_TIMEOUT};
use crate::backends::milpa::{failure::Failure, id::CellId};

/// The snapshotter whose snapshots are directories.
const SNAPSHOTTER: &str = "overlayfs";
/// The label of what containerd's garbage collection keeps.
const KEPT: &str = "containerd.io/gc.root";
/// The label of a snapshot with the state directory of its daemon.
const OWNER: &str = "kiyot.elotl.co/state-dir";
/// The label of a snapshot with its cell.
const CELL: &str = "kiyot.elotl.co/cell";
/// Most snapshots that are released at once; the next daemon releases the others.
const MAX_RELEASED: usize = 10_000;

/// Layers of the node for cells that see its files.
#[derive(Debug)]
pub(super) struct SharedLayers {
    containerd: Containerd,
    owner: String,
}

impl SharedLayers {
    /// Creates the layers that a daemon shares. `owner` is its state directory.
    pub(super) fn new(node: NodeImages, owner: String) -> Self {
        Self { containerd: Containerd::new(node), owner }
    }

    /// Returns the directories of a snapshot and those below it, the lowest first, and holds them
    /// for a cell. Empty if they are not directories.
    ///
    /// # Errors
    ///
    /// Returns NOT_FOUND if the node has not unpacked the layers.
    pub(super) async fn hold(
        &self,
        cell: &CellId,
        snapshot: &str,
    ) -> Result<Vec<PathBuf>, Failure> {
        let key = format!("kiyot-{cell}-{snapshot}");
        let labels = [(KEPT, "true"), (OWNER, &self.owner), (CELL, cell.as_str())];
        let view = ViewSnapshotRequest {
            snapshotter: SNAPSHOTTER.to_owned(),
            key: key.clone(),
            parent: snapshot.to_owned(),
            labels: labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        };
        let view = self.containerd.request(view, Some(RESPONSE_TIMEOUT))?;
        let mut snapshots = self.snapshots().await?;
        let mounts = match snapshots.view(view).await {
            Ok(answer) => answer.into_inner().mounts,
            // Held at an earlier copy.
            Err(status) if status.code() == Code::AlreadyExists => {
                let mounts = MountsRequest { snapshotter: SNAPSHOTTER.to_owned(), key };
                let mounts = self.containerd.request(mounts, Some(RESPONSE_TIMEOUT))?;
                snapshots.mounts(mounts).await.map_err(Failure::of_node)?.into_inner().mounts
            }
            Err(status) => return Err(Failure::of_node(status)),
        };
        Ok(directories(&mounts))
    }

    /// Releases what is held for a cell. A failure is left to the daemon's next start.
    pub(super) async fn release(&self, cell: &CellId) {
        let filter = format!("labels.{CELL:?}=={:?}", cell.as_str());
        self.release_those(filter, |_| true).await;
    }

    /// Releases what is held for cells that are not known.
    pub(super) async fn release_unknown(&self, is_known: impl Fn(&str) -> bool) {
        let filter = format!("labels.{OWNER:?}=={:?}", self.owner);
        self.release_those(filter, |cell| !is_known(cell)).await;
    }

    async fn release_those(&self, filter: String, is_ended: impl Fn(&str) -> bool) {
        let released = async {
            let mut snapshots = self.snapshots().await?;
            let snapshotter = SNAPSHOTTER.to_owned();
            let list = ListSnapshotsRequest { snapshotter, filters: vec![filter] };
            let list = self.containerd.request(list, Some(RESPONSE_TIMEOUT))?;
            let mut listed = snapshots.list(list).await.map_err(Failure::of_node)?.into_inner();
            let mut ended = Vec::new();
            while let Some(part) = listed.try_next().await.map_err(Failure::of_node)? {
                for info in part.info {
                    let is_own = info.labels.get(OWNER) == Some(&self.owner);
                    let cell = info.labels.get(CELL).filter(|_| is_own);
                    if cell.is_some_and(|cell| is_ended(cell)) && ended.len() < MAX_RELEASED {
                        ended.push(info.name);
                    }
                }
            }
            for key in ended {
                let remove = RemoveSnapshotRequest { snapshotter: SNAPSHOTTER.to_owned(), key };
                let remove = self.containerd.request(remove, Some(RESPONSE_TIMEOUT))?;
                snapshots.remove(remove).await.map_err(Failure::of_node)?;
            }
            Ok::<_, Failure>(())
        };
        if let Err(failure) = released.await {
            tracing::debug!(error = %failure, "layers of ended cells not released");
        }
    }

    async fn snapshots(&self) -> Result<SnapshotsClient<Channel>, Failure> {
        Ok(SnapshotsClient::new(self.containerd.channel().await?))
    }
}

/// Returns the directories that a read-only snapshot is mounted from, the lowest first: one, or the
/// lower ones of an overlay.
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
