//! Directories of the containers' writable layers.

use std::path::{Path, PathBuf};

use containerd_client::services::v1::snapshots::{
    ListSnapshotsRequest, MountsRequest, snapshots_client::SnapshotsClient,
};
use tonic::{Code, Status};

use crate::agent::{
    layers::writable_directory,
    runtime::{QUERY_TIMEOUT, Runtime, namespaced, with_timeout},
};

/// Snapshotters with which a cell's containerd may be configured.
const SNAPSHOTTERS: [&str; 2] = ["overlayfs", "native"];
/// Upper bound on the layers per snapshotter, including layers of exited containers.
const MAX_LAYERS: usize = 1024;

/// Returns the directories of writable layers below containerd's root.
pub(super) async fn writable(runtime: &Runtime, root: &Path) -> Result<Vec<PathBuf>, Status> {
    let mut client = SnapshotsClient::new(runtime.channel());
    let mut layers = Vec::new();
    for snapshotter in SNAPSHOTTERS {
        let request = ListSnapshotsRequest {
            snapshotter: snapshotter.to_owned(),
            filters: vec!["kind==active".to_owned()],
        };
        let mut parts = match client.list(namespaced(with_timeout(QUERY_TIMEOUT, request))).await {
            Ok(parts) => parts.into_inner(),
            // The file system doesn't support this snapshotter.
            Err(status) if is_absent(&status) => continue,
            Err(status) => return Err(status),
        };
        let mut keys = Vec::new();
        loop {
            match parts.message().await {
                Ok(Some(part)) => keys.extend(part.info.into_iter().map(|info| info.name)),
                Ok(None) => break,
                Err(status) if is_absent(&status) => break,
                Err(status) => return Err(status),
            }
        }
        for key in keys.into_iter().take(MAX_LAYERS) {
            let request = MountsRequest { snapshotter: snapshotter.to_owned(), key };
            match client.mounts(namespaced(with_timeout(QUERY_TIMEOUT, request))).await {
                Ok(answer) => layers.extend(
                    answer
                        .into_inner()
                        .mounts
                        .iter()
                        .filter_map(writable_directory)
                        .filter(|directory| directory.starts_with(root)),
                ),
                // The container was removed since the list.
                Err(status) if status.code() == Code::NotFound => {}
                Err(status) => return Err(status),
            }
        }
    }
    Ok(layers)
}

fn is_absent(status: &Status) -> bool {
    matches!(status.code(), Code::NotFound | Code::InvalidArgument)
}
