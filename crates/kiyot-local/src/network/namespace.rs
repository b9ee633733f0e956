//! Named network namespaces, made in containerd's way.
//!
//! `ip netns add` is not used: its first call mounts the directory of the names over itself, with
//! the names in it. containerd can't remove names that are mounted twice, and the pods on the node
//! with these names would never end.

use std::{
    fs::{DirBuilder, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::Path,
    thread,
};

use nix::sched::{CloneFlags, unshare};
use rustix::{
    io::Errno,
    mount::{
        MountPropagationFlags, UnmountFlags, mount_bind, mount_change, unmount as unmount_top,
    },
};
use tokio::sync::oneshot;

use crate::network::remove_if_there;

/// Creates a network namespace with its name at a path.
pub(crate) async fn make(path: &Path) -> io::Result<()> {
    let (sender, made) = oneshot::channel();
    let path = path.to_owned();
    // unshare(2) affects only this thread, which ends with the call.
    thread::Builder::new().name("new-netns".to_owned()).spawn(move || {
        let _ = sender.send(make_on_thread(&path));
    })?;
    made.await.map_err(io::Error::other)?
}

fn make_on_thread(path: &Path) -> io::Result<()> {
    if let Some(dir) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o755).create(dir)?;
    }
    // The mount point.
    OpenOptions::new().write(true).create_new(true).mode(0o444).open(path)?;
    unshare(CloneFlags::CLONE_NEWNET)?;
    Ok(mount_bind("/proc/thread-self/ns/net", path)?)
}

/// Removes the name of a network namespace, which then ends with its last user. Succeeds if the
/// name is absent.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    unmount(path)?;
    match remove_if_there(path) {
        Err(error) if is_busy(&error) => {
            let removed =
                thread::scope(|scope| scope.spawn(|| remove_covered(path)).join().map_err(drop));
            removed.unwrap_or_else(|()| Err(io::Error::other("the removal has panicked")))
        }
        removed => removed,
    }
}

/// Removes a name after `ip netns add` has mounted its directory over itself, which leaves the
/// name's first mount without a path. In a new mount namespace, in which nothing is mounted on the
/// name, the name can be removed; the kernel then removes its mounts in other namespaces. Changes
/// the calling thread.
fn remove_covered(path: &Path) -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    loop {
        unmount(path)?;
        match remove_if_there(path) {
            Err(error) if is_busy(&error) => {
                let dir = path.parent().unwrap_or(path);
                unmount_top(dir, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?;
            }
            removed => return removed,
        }
    }
}

fn is_busy(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::BUSY)
}

/// Unmounts everything on a path: two daemons may each have made a mount.
fn unmount(path: &Path) -> io::Result<()> {
    loop {
        match unmount_top(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            Err(Errno::INVAL | Errno::NOENT) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt, path::PathBuf};

    use rustix::mount::mount_bind_recursive;

    use super::*;

    /// Runs a function on a thread with its own mounts.
    fn with_own_mounts(work: impl FnOnce() + Send + 'static) {
        let thread = thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNS).unwrap();
            mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
            work();
        });
        thread.join().unwrap();
    }

    fn mounts_beneath(dir: &Path) -> Vec<PathBuf> {
        let table = fs::read("/proc/thread-self/mountinfo").unwrap();
        let mounts = kiyot_linux::mountinfo::parse(&table).into_iter().map(|mount| mount.point);
        mounts.filter(|point| point.starts_with(dir)).collect()
    }

    /// Verifies N29.
    #[test]
    fn creation_mounts_only_the_name() {
        let dir = tempfile::tempdir().unwrap();
        with_own_mounts(move || {
            let path = dir.path().join("names/kiyot-a");
            make_on_thread(&path).unwrap();
            assert_eq!(mounts_beneath(dir.path()), [path.as_path()]);
            let own = fs::metadata("/proc/self/ns/net").unwrap();
            assert_ne!(fs::metadata(&path).unwrap().ino(), own.ino());
            assert_eq!(make_on_thread(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
            remove(&path).unwrap();
            assert!(!path.exists() && mounts_beneath(dir.path()).is_empty());
            remove(&path).unwrap();
        });
    }

    /// Verifies N29.
    #[test]
    fn name_is_removed_after_its_directory_was_mounted_over_itself() {
        let dir = tempfile::tempdir().unwrap();
        with_own_mounts(move || {
            let names = dir.path().join("names");
            let (path, other) = (names.join("kiyot-a"), names.join("cni-b"));
            make_on_thread(&path).unwrap();
            make_on_thread(&other).unwrap();
            // As `ip netns add` does.
            mount_bind_recursive(&names, &names).unwrap();
            mount_change(&names, MountPropagationFlags::SHARED | MountPropagationFlags::REC)
                .unwrap();
            assert_eq!(mounts_beneath(&path).len(), 2);
            remove(&path).unwrap();
            assert!(!path.exists() && mounts_beneath(&path).is_empty());
            assert_eq!(mounts_beneath(&other).len(), 2, "mounts of other names stay");
            assert!(names.is_dir());
        });
    }
}
