//! Directories of the containers' writable layers.

use std::path::{Path, PathBuf};

use containerd_client::{
    services::v1::snapshots::{
        ListSnapshotsRequest, MountsRequest, snapshots_client::SnapshotsClient,
    },
    types::Mount,
};
use tonic::{Code, Status};

use crate::agent::runtime::{QUERY_TIMEOUT, Runtime, namespaced, with_timeout};

/// Snapshotters that a cell's containerd is configured with.
const SNAPSHOTTERS: [&str; 2] = ["overlayfs", "native"];
/// Upper bound on the layers per snapshotter, those of exited containers included.
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
                        .filter_map(directory)
                        .filter(|directory| directory.starts_with(root)),
                ),
                // The container was removed in between.
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

/// Returns the directory that takes the writes of a mount.
fn directory(mount: &Mount) -> Option<PathBuf> {
    match mount.r#type.as_str() {
        "overlay" => mount
            .options
            .iter()
            .find_map(|option| option.strip_prefix("upperdir="))
            .map(PathBuf::from),
        // A layer without parents, or any layer of the native snapshotter.
        "bind" => Some(PathBuf::from(&mount.source)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writable_directory_of_overlay_is_its_upperdir() {
        let mount = |kind: &str, source: &str, options: &[&str]| Mount {
            r#type: kind.to_owned(),
            source: source.to_owned(),
            options: options.iter().map(|option| (*option).to_owned()).collect(),
            ..Default::default()
        };
        let overlay = mount("overlay", "overlay", &["workdir=/w", "upperdir=/u", "lowerdir=/l"]);
        assert_eq!(directory(&overlay), Some("/u".into()));
        assert_eq!(directory(&mount("bind", "/s", &["rw", "rbind"])), Some("/s".into()));
        assert_eq!(directory(&mount("overlay", "overlay", &["lowerdir=/a:/b"])), None);
        assert_eq!(directory(&mount("other", "/s", &[])), None);
    }
}
