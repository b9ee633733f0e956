//! Directories: creation with parents, and removal of trees.

use std::ffi::CString;

use kiyot_linux::tree::{MountPolicy, RemoveProgress};
use kiyot_proto::cell::MakeDir;
use rustix::{
    fd::OwnedFd,
    fs::{Mode, OFlags, mkdirat, openat},
    io::Errno,
};

use super::{FileError, RelPath, beneath, exists, mode_of, set_owner_and_mode};

/// Upper bound on the entries that one change removes. A repeated removal continues.
const MAX_REMOVED_ENTRIES: usize = 1_000_000;
const DIR: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

pub(super) fn make_dir(root: &OwnedFd, path: &RelPath, make: &MakeDir) -> Result<(), FileError> {
    let mode = mode_of(make.mode, path)?;
    let parent = make_parents(root, path)?;
    if make.keep && exists(&parent, path)? {
        return Ok(());
    }
    make_one(&parent, path.name(), Mode::RWXU).map_err(FileError::io("create", path))?;
    let dir =
        openat(&parent, path.name(), DIR, Mode::empty()).map_err(FileError::io("open", path))?;
    set_owner_and_mode(&dir, path, make.uid, make.gid, mode)
}

/// Creates the parent directories of a path, and opens the last of them.
pub(super) fn make_parents(root: &OwnedFd, path: &RelPath) -> Result<OwnedFd, FileError> {
    let error = |error| FileError::io("create the parent of", path)(error);
    let mut dir = beneath::open(root, "", OFlags::PATH | OFlags::DIRECTORY).map_err(error)?;
    for name in path.parent().split('/').filter(|name| !name.is_empty()) {
        let made = make_one(&dir, name, Mode::RWXU).map_err(error)?;
        let next = openat(&dir, name, DIR, Mode::empty()).map_err(error)?;
        if made {
            rustix::fs::fchmod(&next, Mode::from_raw_mode(0o755)).map_err(error)?;
        }
        dir = next;
    }
    Ok(dir)
}

/// Creates a directory. Returns whether it was absent.
fn make_one(dir: &OwnedFd, name: &str, mode: Mode) -> Result<bool, Errno> {
    match mkdirat(dir, name, mode) {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Removes a path with everything below it, mounts included.
pub(super) fn remove(root: &OwnedFd, path: &RelPath) -> Result<(), FileError> {
    let parent = match beneath::open(root, path.parent(), OFlags::PATH | OFlags::DIRECTORY) {
        Ok(parent) => parent,
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(FileError::io("open the parent of", path)(error)),
    };
    // A `RelPath` contains no NUL.
    let name = CString::new(path.name()).unwrap_or_default();
    match kiyot_linux::tree::remove(&parent, &name, MountPolicy::Detach, MAX_REMOVED_ENTRIES) {
        Ok(RemoveProgress::Done) => Ok(()),
        Ok(RemoveProgress::Partial) => Err(FileError::Rejected {
            path: path.to_string(),
            why: "removed in part: more than 1000000 entries",
        }),
        Err(error) => Err(FileError::io("remove", path)(error)),
    }
}
