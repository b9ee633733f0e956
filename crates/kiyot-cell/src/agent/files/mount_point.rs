//! Mounts at a name: lookup and detachment.

use std::os::fd::AsRawFd;

use rustix::{
    fd::OwnedFd,
    fs::{AtFlags, OFlags, StatxAttributes, StatxFlags, statx},
    io::Errno,
};

/// How a file is opened that is only pointed at, whatever it is.
pub(super) const PATH_FD: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The way to name an open file to calls that take a path.
pub(super) fn fd_path(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Whether something is mount_point just there.
pub(super) fn is_mount(file: &OwnedFd) -> Result<bool, Errno> {
    Ok(statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?
        .stx_attributes
        .contains(StatxAttributes::MOUNT_ROOT))
}
