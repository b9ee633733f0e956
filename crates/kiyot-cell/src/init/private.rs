//! The cell's own tmpfs, with containerd's `root` and the agent's key. Large directories of
//! containerd are on the cell's disk.
//!
//! containerd writes some hundred small files and flushes its databases with each change. A cell
//! ends with its machine, so these files need no disk. containerd's metadata has the environment
//! variables of containers, which may be secrets.

use std::{
    ffi::{CStr, CString},
    fs::{self, DirBuilder},
    io,
    os::unix::{ffi::OsStrExt, fs::DirBuilderExt},
    path::Path,
};

use kiyot_linux::tree::{beneath, own};
use rustix::{
    fs::statfs,
    mount::{
        MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change, unmount,
    },
};

use super::{containerd::Snapshotter, mount_error::MountError};
use crate::dirs::{CONTAINERD_CONTENT, CellDir};

/// containerd's directory of containers and sandboxes, in which the daemon finds them after the end
/// of the cell.
const CRI: &str = "io.containerd.grpc.v1.cri";
/// Directory of snapshots on the disk.
const SNAPSHOTS: &str = "snapshots";
/// Bounds the tmpfs: containerd needs some hundred bytes per blob, snapshot and container of a
/// single pod.
const TMPFS_OPTIONS: &CStr = c"mode=0700,size=256m";
/// File systems that can hold the upper layer of an overlay (statfs(2)): ext2 to ext4, btrfs and
/// tmpfs.
const OVERLAY_FILE_SYSTEMS: [i64; 3] = [0xEF53, 0x9123_683E, 0x0102_1994];

/// Mounts the tmpfs, and in containerd's root the disk's directories of images and of writable
/// layers. Must be called before the cell's mounts become shared. Returns the snapshotter that
/// works on the disk.
pub fn mount_all(dir: &CellDir) -> Result<Snapshotter, MountError> {
    let failed = |what: &str, path: &Path, error: io::Error| MountError::new(what, path, error);
    let (private, root) = (dir.private(), dir.containerd_root());
    let plain = MountFlags::NOSUID | MountFlags::NODEV;
    mount("tmpfs", &private, "tmpfs", plain, TMPFS_OPTIONS)
        .map_err(|error| failed("mount tmpfs", &private, error.into()))?;
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(0o700);
    let create = |path: &Path| builder.create(path).map_err(|error| failed("create", path, error));
    create(&dir.agent())?;
    create(&dir.no_cni())?;
    let snapshotter =
        if supports_overlay(dir) { Snapshotter::Overlayfs } else { Snapshotter::Native };
    let snapshots = format!("io.containerd.snapshotter.v1.{}/snapshots", snapshotter.name());
    for (name, on_disk) in
        [(CONTAINERD_CONTENT, CONTAINERD_CONTENT), (CRI, CRI), (&snapshots, SNAPSHOTS)]
    {
        let disk = own(&dir.containerd_disk(), on_disk);
        let point = beneath(&root, name).map_err(|error| failed("create", &root, error.into()))?;
        create(&point)?;
        create(&disk)?;
        // A peer of the disk's mount would get all mounts below it twice.
        mount_bind(&disk, &point)
            .and_then(|()| mount_change(&point, MountPropagationFlags::PRIVATE))
            .map_err(|error| failed("bind-mount", &point, error.into()))?;
    }
    Ok(snapshotter)
}

/// Returns whether the cell's disk can hold the upper layer of an overlay. Tries to mount an
/// overlay if the file system is unknown.
fn supports_overlay(dir: &CellDir) -> bool {
    let disk = dir.containerd_disk();
    if statfs(&disk).is_ok_and(|found| OVERLAY_FILE_SYSTEMS.contains(&found.f_type)) {
        return true;
    }
    let probe = disk.join("probe");
    let works = probe_overlay(&probe).is_ok();
    let _ = kiyot_linux::tree::remove_path(&probe);
    works
}

fn probe_overlay(probe: &Path) -> io::Result<()> {
    let [lower, upper, work, merged] =
        ["lower", "upper", "work", "merged"].map(|name| own(probe, name));
    for dir in [&lower, &upper, &work, &merged] {
        fs::create_dir_all(dir)?;
    }
    let mut options = b"lowerdir=".to_vec();
    options.extend_from_slice(lower.as_os_str().as_bytes());
    options.extend_from_slice(b",upperdir=");
    options.extend_from_slice(upper.as_os_str().as_bytes());
    options.extend_from_slice(b",workdir=");
    options.extend_from_slice(work.as_os_str().as_bytes());
    let options = CString::new(options)?;
    mount("overlay", &merged, "overlay", MountFlags::empty(), options.as_c_str())?;
    let written = fs::write(merged.join("file"), "");
    unmount(&merged, UnmountFlags::DETACH)?;
    written
}
