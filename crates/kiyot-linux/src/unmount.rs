//! Unmounting of a directory tree.

use std::{io, path::Path};

use rustix::mount::{UnmountFlags, unmount};

use crate::mountinfo;

/// Unmounts all mounts at or below a directory, the latest mount first.
pub fn unmount_beneath(dir: &Path) -> io::Result<()> {
    let mounts = mountinfo::read()?;
    for mount in mounts.iter().rev().filter(|mount| mount.point.starts_with(dir)) {
        match unmount(&mount.point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            // An earlier unmount has detached this mount too.
            Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => {}
            Err(error) => {
                return Err(io::Error::other(format!("{}: {error}", mount.point.display())));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unmount_without_mounts_succeeds() {
        unmount_beneath(Path::new("/no/such/dir")).unwrap();
    }
}
