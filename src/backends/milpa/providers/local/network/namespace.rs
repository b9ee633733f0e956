//! Named network namespaces in the form of `ip netns`.

use std::{io, path::Path};

use rustix::mount::{UnmountFlags, unmount};
use tokio::sync::Mutex;

use super::{
    super::command::{CommandError, ip},
    remove_if_there,
};

/// The directory of the names.
pub(in super::super) const DIR: &str = "/run/netns";

/// Serialises `ip netns add`, which makes the directory a shared mount at its first call; two
/// concurrent calls would mount it twice.
static ALONE: Mutex<()> = Mutex::const_new(());

/// Creates a network namespace with this name for the instance of this directory.
pub(in super::super) async fn make(name: &str, instance: &Path) -> Result<(), CommandError> {
    let _alone = ALONE.lock().await;
    ip(None, &[&["netns", "add", name]], instance).await
}

/// Removes the name of a network namespace, which then ends with its last user. An absent name is
/// fine.
pub(in super::super) fn remove(path: &Path) -> io::Result<()> {
    // A name that two daemons have bound must be unmounted twice.
    loop {
        match unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => break,
            Err(error) => return Err(error.into()),
        }
    }
    remove_if_there(path)
}
