//! Named network namespaces, as `ip netns` keeps them.

use std::{io, path::Path};

use rustix::mount::{UnmountFlags, unmount};
use tokio::sync::Mutex;

use super::{
    super::command::{CommandError, ip},
    remove_if_there,
};

/// Where they are.
pub(in super::super) const DIR: &str = "/run/netns";

/// `ip netns add` makes the directory a shared mount the first time; two at once would do that
/// twice.
static ALONE: Mutex<()> = Mutex::const_new(());

/// Makes a network namespace of that name for the instance whose directory this is.
pub(in super::super) async fn make(name: &str, instance: &Path) -> Result<(), CommandError> {
    let _alone = ALONE.lock().await;
    ip(None, &[&["netns", "add", name]], instance).await
}

/// Takes a network namespace's name away; with that it is gone once nothing uses it. Absent is
/// fine.
pub(in super::super) fn remove(path: &Path) -> io::Result<()> {
    // A name that two daemons have bound is unmounted twice.
    loop {
        match unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => break,
            Err(error) => return Err(error.into()),
        }
    }
    remove_if_there(path)
}
