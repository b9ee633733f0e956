//! Opening of paths below a directory without following links.

use kiyot_linux::tree::RelPath;
use rustix::{
    fd::OwnedFd,
    fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2},
    io::Errno,
};

use super::{FileError, mount_point::fd_path};

/// Opens a path below a directory (openat2(2), `RESOLVE_BENEATH`). Fails on any symbolic link, the
/// last component included.
pub(super) fn open(dir: &OwnedFd, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    loop {
        // EAGAIN means a concurrent rename: the lookup is repeated.
        match openat2(
            dir,
            if path.is_empty() { "." } else { path },
            flags | OFlags::CLOEXEC,
            Mode::empty(),
            resolve,
        ) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return other,
        }
    }
}

/// Opens the parent directory of a path.
pub(super) fn parent(dir: &OwnedFd, path: &RelPath) -> Result<OwnedFd, FileError> {
    open(dir, path.parent(), OFlags::PATH | OFlags::DIRECTORY)
        .map_err(FileError::io("open the parent of", path))
}

/// Opens a regular file. Returns `None` if the path is absent.
pub(super) fn open_regular(
    dir: &OwnedFd,
    path: &RelPath,
    access: OFlags,
) -> Result<Option<OwnedFd>, FileError> {
    // The type is checked before the file is opened for access, as opening a device has side
    // effects.
    let file = match open(dir, path.as_str(), OFlags::PATH) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(FileError::io("open", path)(error)),
    };
    let stat = fstat(&file).map_err(FileError::io("stat", path))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(FileError::Rejected { path: path.to_string(), why: "not a regular file" });
    }
    let flags = access | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    openat(CWD, fd_path(&file), flags, Mode::empty()).map(Some).map_err(FileError::io("open", path))
}

/// Reads from a position to the end of the file or the limit.
pub(super) fn read(file: &OwnedFd, position: u64, limit: usize) -> Result<Vec<u8>, Errno> {
    let available = super::length(file)?.saturating_sub(position);
    let mut content = vec![0; usize::try_from(available).unwrap_or(usize::MAX).min(limit)];
    let mut filled = 0;
    while filled < content.len() {
        match rustix::io::pread(file, &mut content[filled..], position + filled as u64) {
            Ok(0) => break,
            Ok(length) => filled += length,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    content.truncate(filled);
    Ok(content)
}
