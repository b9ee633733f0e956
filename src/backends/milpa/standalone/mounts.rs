//! Mounts of a pod's volumes on the node: directories in memory, and parts of volumes (`subPath`).
//! A cell's volumes are made like these.

use std::{
    ffi::CString,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use kiyot_linux::mountinfo;
use rustix::mount::{MountFlags, mount, mount_bind};

use crate::manifest::SubPath;

/// Mounts directories in memory, each with its limit in bytes. Those that are mounted stay.
pub(super) fn mount_memory(dirs: &[(PathBuf, Option<u64>)]) -> io::Result<()> {
    for (dir, limit) in dirs {
        if is_mounted(dir)? {
            continue;
        }
        // Without a limit it is that of the kernel, half the memory.
        let size = limit.map(|bytes| format!("size={},", bytes.max(1))).unwrap_or_default();
        // The directory has the mode and the group of the volume.
        let dir_of_node = fs::metadata(dir)?;
        let (mode, gid) = (dir_of_node.mode() & 0o7777, dir_of_node.gid());
        let options = CString::new(format!("{size}mode={mode:o},gid={gid}"))?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount("tmpfs", dir, "tmpfs", flags, options.as_c_str()).map_err(|error| of(dir, error))?;
    }
    Ok(())
}

/// Binds parts of volumes. Those that are bound stay.
pub(super) fn bind(parts: &[SubPath]) -> io::Result<()> {
    for SubPath { volume, sub_path, target, is_made } in parts {
        if is_mounted(target)? {
            continue;
        }
        let part = volume.join(sub_path);
        if *is_made && !part.exists() {
            make_dirs(volume, sub_path)?;
        }
        // Keys of a ConfigMap are links in the volume.
        let part = fs::canonicalize(&part).map_err(|error| {
            io::Error::new(error.kind(), format!("subPath {sub_path:?} of a volume: {error}"))
        })?;
        if !part.starts_with(fs::canonicalize(volume)?) {
            return Err(io::Error::other(format!("subPath {sub_path:?} leads out of its volume")));
        }
        if part.is_dir() {
            fs::create_dir_all(target)?;
        } else {
            target.parent().map_or(Ok(()), fs::create_dir_all)?;
            File::create(target)?;
        }
        mount_bind(&part, target).map_err(|error| of(target, error))?;
    }
    Ok(())
}

/// Makes directories in a volume, with the volume's mode.
fn make_dirs(volume: &Path, sub_path: &str) -> io::Result<()> {
    let mode = fs::metadata(volume)?.permissions();
    let mut dir = volume.to_owned();
    for name in sub_path.split('/').filter(|name| !name.is_empty()) {
        dir.push(name);
        match fs::create_dir(&dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            made => made?,
        }
        fs::set_permissions(&dir, mode.clone())?;
    }
    Ok(())
}

fn is_mounted(path: &Path) -> io::Result<bool> {
    Ok(mountinfo::read()?.iter().any(|mount| mount.point == path))
}

fn of(path: &Path, error: rustix::io::Errno) -> io::Error {
    io::Error::new(io::Error::from(error).kind(), format!("mount {}: {error}", path.display()))
}
