//! Directories: made with their parents, and removed with all that is in them.

use std::ffi::CString;

use kiyot_proto::cell::MakeDir;
use kiyot_tree::{MountPolicy, RemoveProgress};
use rustix::{
    fd::OwnedFd,
    fs::{Mode, OFlags, mkdirat, openat},
    io::Errno,
};

use super::{FileError, RelPath, beneath, exists, mode_of, own};

/// Entries of a tree that one change removes; the next removal goes on.
const REMOVED_ENTRIES: usize = 1_000_000;
const DIR: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

pub(super) fn make_dir(root: &OwnedFd, path: &RelPath, make: &MakeDir) -> Result<(), FileError> {
    let mode = mode_of(make.mode, path)?;
    let parent = make_parents(root, path)?;
    if make.keep && exists(&parent, path)? {
        return Ok(());
    }
    make_one(&parent, path.name(), Mode::RWXU).map_err(FileError::io("make", path))?;
    let dir =
        openat(&parent, path.name(), DIR, Mode::empty()).map_err(FileError::io("open", path))?;
    own(&dir, path, make.uid, make.gid, mode)
}

/// Makes the directory that a path's last name is in, and all above it, and opens it.
pub(super) fn make_parents(root: &OwnedFd, path: &RelPath) -> Result<OwnedFd, FileError> {
    let error = |error| FileError::io("make the directory of", path)(error);
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

/// Whether it had to be made.
fn make_one(dir: &OwnedFd, name: &str, mode: Mode) -> Result<bool, Errno> {
    match mkdirat(dir, name, mode) {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Removes what a path stands for, with all that is in it and all that is mounted there.
pub(super) fn remove(root: &OwnedFd, path: &RelPath) -> Result<(), FileError> {
    let parent = match beneath::open(root, path.parent(), OFlags::PATH | OFlags::DIRECTORY) {
        Ok(parent) => parent,
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(FileError::io("open the directory of", path)(error)),
    };
    // There is no NUL in a path.
    let name = CString::new(path.name()).unwrap_or_default();
    match kiyot_tree::remove(&parent, &name, MountPolicy::Detach, REMOVED_ENTRIES) {
        Ok(RemoveProgress::Done) => Ok(()),
        Ok(RemoveProgress::Partial) => Err(FileError::Order {
            path: path.to_string(),
            why: "only a part of it could be removed: there is more than 1000000 in it",
        }),
        Err(error) => Err(FileError::io("remove", path)(error)),
    }
}
