//! Layers unpacked on the node, for cells that see the node's files: the cell mounts these layers
//! instead of unpacking its own copies.

use std::{io, os::unix::fs::MetadataExt as _, path::PathBuf};

use kiyot_engine::id::CellId;
use kiyot_proto::cell::UnpackedLayer;
use serde::Deserialize;
use tokio::time::timeout;

use super::{
    copy::{CopyError, JSON_TIMEOUT, json},
    manifest::{Manifest, ManifestError},
    node::Node,
    receiver::Receiver,
    reference::{digest_of, is_digest},
    shared_layers::SharedLayers,
};
use crate::{
    backends::milpa::failure::{Code, Failure},
    blocking::blocking,
};

#[derive(Deserialize)]
struct Config {
    rootfs: RootFs,
}

#[derive(Deserialize)]
struct RootFs {
    diff_ids: Vec<String>,
}

/// Mounts an image's layers, as unpacked on the node, in a cell. The node keeps them until the cell
/// ends. Returns the snapshot of the last layer; `None` if the cell must unpack its own layers.
pub(super) async fn mount(
    node: &dyn Node,
    shared: &SharedLayers,
    cell: &CellId,
    receiver: &dyn Receiver,
    manifest: &Manifest,
) -> Option<String> {
    let mounted = async {
        let layers = find(node, shared, cell, manifest).await?;
        let Some(last) = layers.last() else { return Ok(None) };
        let snapshot = last.snapshot.clone();
        receiver.mount_layers(layers).await?;
        Ok::<_, CopyError>(Some(snapshot))
    };
    match mounted.await {
        Ok(snapshot) => snapshot,
        Err(error) => {
            tracing::debug!(
                %cell,
                image = manifest.config.digest,
                error = &error as &dyn std::error::Error,
                "layers of the node not mounted, the cell unpacks them"
            );
            None
        }
    }
}

/// Returns the unpacked layers of an image, the lowest first; empty if they are not directories.
async fn find(
    node: &dyn Node,
    shared: &SharedLayers,
    cell: &CellId,
    manifest: &Manifest,
) -> Result<Vec<UnpackedLayer>, CopyError> {
    let config = &manifest.config;
    let stalled = |_| CopyError::Stalled(config.digest.clone(), JSON_TIMEOUT.as_secs());
    let json = timeout(JSON_TIMEOUT, json(node, config)).await.map_err(stalled)??;
    let parsed: Config = serde_json::from_slice(&json)
        .map_err(|error| ManifestError::Json(config.digest.clone(), error.to_string()))?;
    let diff_ids = parsed.rootfs.diff_ids;
    if diff_ids.len() != manifest.layers.len() {
        let what = format!("{} layers, {} in its manifest", diff_ids.len(), manifest.layers.len());
        return Err(ManifestError::Json(config.digest.clone(), what).into());
    }
    if let Some(wrong) = diff_ids.iter().find(|id| !is_digest(id)) {
        return Err(ManifestError::Digest(wrong.clone()).into());
    }
    let snapshots = chain_ids(&diff_ids);
    let Some(last) = snapshots.last() else { return Ok(Vec::new()) };
    let directories = shared.hold(cell, last).await?;
    if directories.len() != snapshots.len() {
        return Ok(Vec::new());
    }
    let layers = blocking(move || {
        let layers = snapshots.into_iter().zip(directories);
        layers.map(|(snapshot, directory)| layer(snapshot, directory)).collect()
    });
    let failed = |error: io::Error| Failure::node(Code::Internal, format!("a layer: {error}"));
    Ok(layers.await.map_err(failed)?)
}

/// Describes a layer. The cell checks device and inode, because it lacks some mounts of the node,
/// so that the same path may be another directory there.
fn layer(snapshot: String, directory: PathBuf) -> io::Result<UnpackedLayer> {
    let metadata = directory.metadata()?;
    let (device, inode) = (metadata.dev(), metadata.ino());
    let directory = directory.into_os_string().into_string();
    let directory = directory.map_err(|_| io::Error::other("its path is not UTF-8"))?;
    Ok(UnpackedLayer { snapshot, directory, device, inode })
}

/// Returns the names of the layers' snapshots (`ChainID` of the OCI image specification).
fn chain_ids(diff_ids: &[String]) -> Vec<String> {
    let mut chain: Vec<String> = Vec::with_capacity(diff_ids.len());
    for diff_id in diff_ids {
        let next = match chain.last() {
            None => diff_id.clone(),
            Some(below) => digest_of(format!("{below} {diff_id}").as_bytes()),
        };
        chain.push(next);
    }
    chain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chain_ids_match_the_image_specification() {
        let diff_ids = ["11", "22", "33"].map(|hex| format!("sha256:{}", hex.repeat(32)));
        // By sha256sum.
        let expected = [
            diff_ids[0].clone(),
            "sha256:9932074217c35353d2e03a3f5a86549f7c67bfeb0ba53e23d69f4d4c8f7958f5".to_owned(),
            "sha256:50127c0d6b338be78246434b4bce23ecf75e505158ea0bbd15effeb162fbf3ec".to_owned(),
        ];
        assert_eq!(chain_ids(&diff_ids), expected);
        assert_eq!(chain_ids(&[]), Vec::<String>::new());
    }
}
