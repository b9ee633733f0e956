//! Mounts of a pod's volumes on the node: directories in memory, and parts of volumes (`subPath`).
//! A cell's volumes are made like these.

use std::{
    ffi::CString,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use kiyot_linux::mountinfo;
use rustix::mount::{MountFlags, mount, mount_bind};

use crate::manifest::{DATA, Entry, SubPath};

/// Makes and mounts directories in memory, each with its limit in bytes. Those that are mounted
/// stay. Files of others are removed: they are of an earlier daemon, which had Secrets on the disk.
pub(super) fn mount_memory(dirs: &[(PathBuf, Option<u64>)]) -> io::Result<()> {
    for (dir, limit) in dirs {
        if is_own_file_system(dir)? {
            continue;
        }
        match fs::remove_dir_all(dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => fs::create_dir_all(dir)?,
        }
        // Without a limit it is that of the kernel, half the memory. Mode and group of the volume
        // are set with its files.
        let size = limit.map(|bytes| format!("size={},", bytes.max(1))).unwrap_or_default();
        let options = CString::new(format!("{size}mode=700"))?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount("tmpfs", dir, "tmpfs", flags, options.as_c_str()).map_err(|error| of(dir, error))?;
    }
    Ok(())
}

/// Keeps the entries of volumes in memory whose files are not there: the node was started again
/// since they were made.
pub(super) fn retain_absent(entries: &mut Vec<Entry>, dirs: &[(PathBuf, Option<u64>)]) {
    let is_absent = |dir: &Path| dir.join(DATA).symlink_metadata().is_err();
    let absent: Vec<_> = dirs.iter().map(|(dir, _)| dir).filter(|dir| is_absent(dir)).collect();
    entries.retain(|entry| absent.iter().any(|dir| entry.path().starts_with(dir)));
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

/// Returns true for a directory that is the root of a mounted file system, whatever links lead to
/// it.
fn is_own_file_system(dir: &Path) -> io::Result<bool> {
    let device = match fs::metadata(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        found => found?.dev(),
    };
    let parent = dir.parent().ok_or(io::ErrorKind::InvalidInput)?;
    Ok(device != fs::metadata(parent)?.dev())
}

fn is_mounted(path: &Path) -> io::Result<bool> {
    Ok(mountinfo::read()?.iter().any(|mount| mount.point == path))
}

fn of(path: &Path, error: rustix::io::Errno) -> io::Error {
    io::Error::new(io::Error::from(error).kind(), format!("mount {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Verifies D10.
    #[test]
    fn entries_of_volumes_whose_files_are_absent_are_retained() {
        let dir = tempfile::tempdir().unwrap();
        let [kept, lost, disk] = ["kept", "lost", "disk"].map(|name| dir.path().join(name));
        let entry = |dir: &Path| Entry::Directory { path: dir.join("..1"), mode: 0o755 };
        for dir in [&kept, &lost, &disk] {
            fs::create_dir(dir).unwrap();
        }
        symlink("..1", kept.join(DATA)).unwrap();
        let mut entries = [&kept, &lost, &disk].map(|dir| entry(dir)).to_vec();
        retain_absent(&mut entries, &[(kept, None), (lost.clone(), None)]);
        assert_eq!(entries, [entry(&lost)]);
    }
}
