//! Mounts below the pod's directories: tmpfs and bind mounts.

use std::ffi::CString;

use kiyot_proto::cell::{MakeDir, MountTmpfs};
use rustix::{
    fd::OwnedFd,
    fs::{FileType, Mode, OFlags, fstat, openat},
    mount::{MountFlags, mount, mount_bind_recursive, mount_remount},
};

use super::{
    FileError, RelPath, beneath, mode_of,
    mount_point::{PATH_FD, fd_path, is_mount},
    tree,
};

const FLAGS: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);

/// Mounts a tmpfs, or remounts an existing one with another size, mode and owner. Size 0 leaves the
/// kernel's default limit.
pub(super) fn tmpfs(root: &OwnedFd, path: &RelPath, wanted: &MountTmpfs) -> Result<(), FileError> {
    let mode = mode_of(wanted.mode, path)?;
    let parent = tree::make_parents(root, path)?;
    let there = openat(&parent, path.name(), PATH_FD, Mode::empty());
    let mount_point = match &there {
        Ok(file) => is_mount(file).map_err(FileError::io("stat", path))?,
        Err(_) => false,
    };
    if mount_point && wanted.keep {
        return Ok(());
    }
    let size =
        if wanted.size_bytes > 0 { format!("size={},", wanted.size_bytes) } else { String::new() };
    let data = c_string(format!(
        "{size}mode={:o},uid={},gid={}",
        mode.as_raw_mode(),
        wanted.uid,
        wanted.gid
    ));
    if mount_point {
        if let Ok(file) = &there {
            let data = c_string(format!("{size}mode={:o}", mode.as_raw_mode()));
            mount_remount(fd_path(file), FLAGS, data.as_c_str())
                .map_err(FileError::io("remount", path))?;
        }
        let make = MakeDir { mode: wanted.mode, uid: wanted.uid, gid: wanted.gid, keep: false };
        return tree::make_dir(root, path, &make);
    }
    drop(there);
    tree::make_dir(
        root,
        path,
        &MakeDir { mode: wanted.mode, uid: wanted.uid, gid: wanted.gid, keep: false },
    )?;
    let dir = openat(&parent, path.name(), PATH_FD | OFlags::DIRECTORY, Mode::empty())
        .map_err(FileError::io("open", path))?;
    mount("tmpfs", fd_path(&dir), "tmpfs", FLAGS, data.as_c_str())
        .map_err(FileError::io("mount", path))
}

/// Bind-mounts `source` on `path`. Creates `path` as a file or a directory, like the source, and
/// first removes an older bind mount of another source.
pub(super) fn bind(root: &OwnedFd, source: &RelPath, path: &RelPath) -> Result<(), FileError> {
    let source_file = beneath::open(root, source.as_str(), OFlags::PATH | OFlags::NOFOLLOW)
        .map_err(FileError::io("open", source))?;
    let stat = fstat(&source_file).map_err(FileError::io("stat", source))?;
    let parent = tree::make_parents(root, path)?;
    if let Ok(there) = openat(&parent, path.name(), PATH_FD, Mode::empty())
        && is_mount(&there).map_err(FileError::io("stat", path))?
    {
        let bound = fstat(&there).map_err(FileError::io("stat", path))?;
        if (bound.st_dev, bound.st_ino) == (stat.st_dev, stat.st_ino) {
            return Ok(());
        }
        drop(there);
        tree::remove(root, path)?;
    }
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => {
            tree::make_dir(root, path, &MakeDir { mode: 0o755, keep: true, ..Default::default() })?
        }
        FileType::Symlink => {
            return Err(FileError::Rejected {
                path: source.to_string(),
                why: "a symbolic link can't be the source of a bind mount",
            });
        }
        _ => {
            let flags = OFlags::WRONLY
                | OFlags::CREATE
                | OFlags::NOFOLLOW
                | OFlags::NONBLOCK
                | OFlags::CLOEXEC;
            openat(&parent, path.name(), flags, Mode::RUSR | Mode::WUSR)
                .map_err(FileError::io("create", path))?;
        }
    }
    let target = openat(&parent, path.name(), PATH_FD, Mode::empty())
        .map_err(FileError::io("open", path))?;
    mount_bind_recursive(fd_path(&source_file), fd_path(&target))
        .map_err(FileError::io("bind-mount", path))
}

fn c_string(text: String) -> CString {
    // The text has only numbers, so it contains no NUL.
    CString::new(text).unwrap_or_default()
}
