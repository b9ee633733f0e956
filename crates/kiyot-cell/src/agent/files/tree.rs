//! Directories: made with their parents, and removed with all that is in them.

use kiyot_proto::cell::MakeDir;
use rustix::{
    fd::OwnedFd,
    fs::{AtFlags, Dir, FileType, Mode, OFlags, mkdirat, openat, statat, unlinkat},
    io::Errno,
};

use super::{FileError, RelPath, beneath, exists, mode_of, mounted, own};

/// How deep a tree may be that is removed; a deeper one is an error.
const DEPTH: usize = 256;
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

pub(super) fn remove(root: &OwnedFd, path: &RelPath) -> Result<(), FileError> {
    let parent = match beneath::open(root, path.parent(), OFlags::PATH | OFlags::DIRECTORY) {
        Ok(parent) => parent,
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(FileError::io("open the directory of", path)(error)),
    };
    remove_entry(&parent, path.name().as_bytes(), 0).map_err(FileError::io("remove", path))
}

fn remove_entry(dir: &OwnedFd, name: &[u8], depth: usize) -> Result<(), Errno> {
    if depth > DEPTH {
        return Err(Errno::NAMETOOLONG);
    }
    let stat = match statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(error),
    };
    while mounted::detach(dir, name)? {}
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return gone(unlinkat(dir, name, AtFlags::empty()));
    }
    let inner = match openat(dir, name, DIR, Mode::empty()) {
        Ok(inner) => inner,
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in Dir::read_from(&inner)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            remove_entry(&inner, name, depth + 1)?;
        }
    }
    gone(unlinkat(dir, name, AtFlags::REMOVEDIR))
}

fn gone(outcome: Result<(), Errno>) -> Result<(), Errno> {
    match outcome {
        Err(Errno::NOENT) => Ok(()),
        other => other,
    }
}
