//! What is mounted at a name: to be asked, and to be taken away.

use std::os::fd::AsRawFd;

use rustix::{
    fd::OwnedFd,
    fs::{AtFlags, Mode, OFlags, StatxAttributes, StatxFlags, openat, statx},
    io::Errno,
    mount::{UnmountFlags, unmount},
};

/// How a file is opened that is only pointed at, whatever it is.
pub(super) const HANDLE: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The way to name an open file to calls that take a path.
pub(super) fn proc_path(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Whether something is mounted just there.
pub(super) fn is_mount(file: &OwnedFd) -> Result<bool, Errno> {
    Ok(statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?
        .stx_attributes
        .contains(StatxAttributes::MOUNT_ROOT))
}

/// Detaches the topmost mount at a name. Whether there was one.
pub(super) fn detach(dir: &OwnedFd, name: &[u8]) -> Result<bool, Errno> {
    let file = match openat(dir, name, HANDLE, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(false),
        Err(error) => return Err(error),
    };
    if !is_mount(&file)? {
        return Ok(false);
    }
    unmount(proc_path(&file), UnmountFlags::DETACH)?;
    Ok(true)
}
