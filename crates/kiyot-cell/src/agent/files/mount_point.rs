//! Mount points, and paths that refer to open files.

use std::os::fd::AsRawFd;

use rustix::{
    fd::OwnedFd,
    fs::{AtFlags, OFlags, StatxAttributes, StatxFlags, statx},
    io::Errno,
};

/// Flags that open a file of any type without access to its content.
pub(super) const PATH_FD: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Returns a path of an open file, for system calls that take no descriptor.
pub(super) fn fd_path(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Returns whether the open file is the root of a mount.
pub(super) fn is_mount(file: &OwnedFd) -> Result<bool, Errno> {
    Ok(statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?
        .stx_attributes
        .contains(StatxAttributes::MOUNT_ROOT))
}
