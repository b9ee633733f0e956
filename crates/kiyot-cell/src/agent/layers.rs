//! Layers that are unpacked on the node. The cell mounts them instead of unpacking copies.
//!
//! containerd unpacks an image when its last snapshot is absent. This module creates each snapshot
//! as containerd would, and mounts the node's directory read-only on the snapshot's directory:
//! thirty cells with the same image write its files once, not thirty times.

use std::{
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use containerd_client::{
    services::v1::{
        Info, UpdateRequest,
        content_client::ContentClient,
        snapshots::{
            CommitSnapshotRequest, PrepareSnapshotRequest, RemoveSnapshotRequest,
            StatSnapshotRequest, snapshots_client::SnapshotsClient,
        },
    },
    types::Mount,
};
use kiyot_proto::cell::UnpackedLayer;
use rustix::{
    fs::{Mode, OFlags, StatVfsMountFlags, fstat, fstatvfs, open},
    mount::{MountFlags, mount_bind, mount_remount},
};
use tokio::task::spawn_blocking;
use tonic::{Code, Status, transport::Channel};

use super::{
    digest::check_digest,
    lease::create_lease,
    runtime::{QUERY_TIMEOUT, Runtime, leased, namespaced, with_timeout},
};

/// Snapshotter whose snapshots are directories.
const SNAPSHOTTER: &str = "overlayfs";
/// Label of an image's configuration that keeps the image's last snapshot.
const KEPT_SNAPSHOT: &str = "containerd.io/gc.ref.snapshot.overlayfs";
/// Flag of a read-only mount.
const READ_ONLY: StatVfsMountFlags = StatVfsMountFlags::RDONLY;
/// Upper bound on the layers of an image; the kernel mounts fewer.
const MAX_LAYERS: usize = 512;

/// Creates the snapshots of an image from the node's layers, the lowest first.
pub async fn mount_layers(runtime: &Runtime, layers: &[UnpackedLayer]) -> Result<(), Status> {
    if layers.len() > MAX_LAYERS {
        return Err(Status::invalid_argument(format!(
            "{} layers: too many; allowed: at most {MAX_LAYERS}",
            layers.len()
        )));
    }
    let lease = create_lease(runtime).await?;
    let mut parent = "";
    for layer in layers {
        check_digest(&layer.snapshot)?;
        if !has_snapshot(runtime, &layer.snapshot).await? {
            mount_layer(runtime, layer, parent, &lease).await?;
        }
        parent = &layer.snapshot;
    }
    Ok(())
}

/// Keeps a snapshot as long as an image with this configuration exists.
pub(super) async fn keep(runtime: &Runtime, snapshot: &str, config: &str) -> Result<(), Status> {
    check_digest(snapshot)?;
    let info = Info {
        digest: config.to_owned(),
        labels: [(KEPT_SNAPSHOT.to_owned(), snapshot.to_owned())].into(),
        ..Default::default()
    };
    let paths = vec![format!("labels.{KEPT_SNAPSHOT}")];
    let update_mask = Some(prost_types::FieldMask { paths });
    let update = UpdateRequest { info: Some(info), update_mask };
    let mut content = ContentClient::new(runtime.channel());
    content.update(namespaced(with_timeout(QUERY_TIMEOUT, update))).await.map(drop)
}

fn snapshots(runtime: &Runtime) -> SnapshotsClient<Channel> {
    SnapshotsClient::new(runtime.channel())
}

async fn has_snapshot(runtime: &Runtime, name: &str) -> Result<bool, Status> {
    let stat = StatSnapshotRequest { snapshotter: SNAPSHOTTER.to_owned(), key: name.to_owned() };
    match snapshots(runtime).stat(namespaced(with_timeout(QUERY_TIMEOUT, stat))).await {
        Ok(_) => Ok(true),
        Err(status) if status.code() == Code::NotFound => Ok(false),
        Err(status) => Err(status),
    }
}

/// Creates the snapshot of a layer. After an error the snapshot is absent or complete.
async fn mount_layer(
    runtime: &Runtime,
    layer: &UnpackedLayer,
    parent: &str,
    lease: &str,
) -> Result<(), Status> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = &layer.snapshot;
    let key = format!("kiyot-{}-{number} {name}", std::process::id());
    let snapshotter = SNAPSHOTTER.to_owned();
    let prepare = PrepareSnapshotRequest {
        snapshotter: snapshotter.clone(),
        key: key.clone(),
        parent: parent.to_owned(),
        ..Default::default()
    };
    let prepare = leased(with_timeout(QUERY_TIMEOUT, prepare), lease)?;
    let prepared = snapshots(runtime).prepare(prepare).await?.into_inner();
    let made = async {
        let [mount] = &prepared.mounts[..] else {
            return Err(Status::internal(format!("snapshot {name} has not one mount")));
        };
        let own = writable_directory(mount)
            .ok_or_else(|| Status::internal(format!("snapshot {name} has no directory")))?;
        let layer = layer.clone();
        let directory = layer.directory.clone();
        let failed = |error: &dyn std::fmt::Display| {
            Status::internal(format!("cannot mount layer {directory}: {error}"))
        };
        spawn_blocking(move || mount_read_only(&layer, &own))
            .await
            .map_err(|error| failed(&error))?
            .map_err(|error| failed(&error))?;
        let commit = CommitSnapshotRequest {
            snapshotter: snapshotter.clone(),
            name: name.clone(),
            key: key.clone(),
            ..Default::default()
        };
        let commit = leased(with_timeout(QUERY_TIMEOUT, commit), lease)?;
        snapshots(runtime).commit(commit).await.map(drop)
    };
    let made: Result<(), Status> = made.await;
    if made.is_err() {
        // Best effort: containerd collects the snapshot after the end of the lease. The mount
        // stays: a commit that timed out may have succeeded, and its snapshot would be empty
        // without the mount.
        let remove = RemoveSnapshotRequest { snapshotter: snapshotter.clone(), key: key.clone() };
        let _ = snapshots(runtime).remove(namespaced(with_timeout(QUERY_TIMEOUT, remove))).await;
    }
    match made {
        // Another image has the layer.
        Err(status) if status.code() == Code::AlreadyExists => Ok(()),
        made => made,
    }
}

/// Returns the directory to which a mount's writes go: the upper directory of an overlay, or the
/// source of a bind mount. Layers without parents and all layers of the native snapshotter are bind
/// mounts.
pub(super) fn writable_directory(mount: &Mount) -> Option<PathBuf> {
    match mount.r#type.as_str() {
        "overlay" => mount
            .options
            .iter()
            .find_map(|option| option.strip_prefix("upperdir="))
            .map(PathBuf::from),
        "bind" => Some(PathBuf::from(&mount.source)),
        _ => None,
    }
}

/// Mounts a layer. containerd deletes the content of a snapshot's directory, so the layer must be
/// read-only before it is mounted there: it is first mounted read-only on itself.
fn mount_read_only(layer: &UnpackedLayer, to: &Path) -> io::Result<()> {
    const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
    let open_layer = || open(layer.directory.as_str(), DIRECTORY, Mode::empty());
    let is_read_only =
        |from: &OwnedFd| Ok::<_, io::Error>(fstatvfs(from)?.f_flag.contains(READ_ONLY));
    let mut from = open_layer()?;
    if !is_read_only(&from)? {
        mount_bind(layer.directory.as_str(), layer.directory.as_str())?;
        let flags = MountFlags::BIND | MountFlags::RDONLY;
        mount_remount(layer.directory.as_str(), flags, c"")?;
        from = open_layer()?;
        if !is_read_only(&from)? {
            return Err(io::Error::other("the mount is not read-only"));
        }
    }
    let found = fstat(&from)?;
    if (found.st_dev, found.st_ino) != (layer.device, layer.inode) {
        return Err(io::Error::other("the path is another directory than on the node"));
    }
    Ok(mount_bind(format!("/proc/self/fd/{}", from.as_raw_fd()), to)?)
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
        assert_eq!(writable_directory(&overlay), Some("/u".into()));
        let options = ["index=off", "workdir=/w", "upperdir=/root/snapshots/2/fs", "lowerdir=/l"];
        let overlay = mount("overlay", "overlay", &options);
        assert_eq!(writable_directory(&overlay), Some("/root/snapshots/2/fs".into()));
        assert_eq!(writable_directory(&mount("bind", "/s", &["rw", "rbind"])), Some("/s".into()));
        let first = mount("bind", "/root/snapshots/1/fs", &["rw", "rbind"]);
        assert_eq!(writable_directory(&first), Some("/root/snapshots/1/fs".into()));
        assert_eq!(writable_directory(&mount("overlay", "overlay", &["lowerdir=/a:/b"])), None);
        assert_eq!(writable_directory(&mount("other", "/s", &[])), None);
    }
}
