//! Distinguishes absence from a lack of the daemon's own resources (file descriptors, memory),
//! which proves nothing.

use std::io;

use rustix::io::Errno;

/// Returns the result of a read; `None` if the object is absent or itself unreadable.
///
/// Returns an error if the daemon or the node lacked resources, because the object may exist: a
/// cell that wrongly counts as ended would run beside its pod's next cell.
pub(super) fn found<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Ok(found) => Ok(Some(found)),
        Err(error) if is_shortage(&error) => Err(error),
        Err(_) => Ok(None),
    }
}

/// Returns whether an error is a lack of resources of the daemon or the node.
pub(super) fn is_shortage(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM))
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        os::fd::AsRawFd,
        path::{Path, PathBuf},
        sync::mpsc,
        thread,
    };

    use kiyot_engine::id::CellId;
    use nix::sched::{CloneFlags, unshare};
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::{
        super::{
            instance::{Home, InstanceRecord},
            listing::Listing,
            process::{Identity, of_instance},
        },
        *,
    };

    /// More file descriptors than all tests of this binary use.
    const MAX_OPEN_FILES: u64 = 2048;

    /// Runs a function on a thread with its own file descriptor table and limit.
    fn with_room(room: usize, work: impl FnOnce() + Send + 'static) {
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        let current = Some(current.unwrap_or(MAX_OPEN_FILES).min(MAX_OPEN_FILES));
        setrlimit(Resource::Nofile, Rlimit { current, maximum }).unwrap();
        let thread = thread::spawn(move || {
            unshare(CloneFlags::CLONE_FILES).unwrap();
            let first = File::open("/dev/null").unwrap();
            let mut open: Vec<_> = std::iter::from_fn(|| first.try_clone().ok()).collect();
            open.truncate(open.len() - room);
            work();
        });
        thread.join().unwrap();
    }

    /// Returns the path of a network namespace other than the test's.
    fn other_network() -> PathBuf {
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            let own = File::open("/proc/thread-self/ns/net").unwrap();
            let path = format!("/proc/self/fd/{}", own.as_raw_fd());
            // The namespace exists while this file is open.
            std::mem::forget(own);
            sender.send(path.into()).unwrap();
        });
        receiver.recv().unwrap()
    }

    /// Verifies X18.
    #[test]
    fn unreadable_process_counts_as_running() {
        let own = Identity::of(i32::try_from(std::process::id()).unwrap()).unwrap().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path(), &CellId::mint().unwrap());
        home.make().unwrap();
        home.keep(&InstanceRecord {
            launcher: Some(own),
            boot_id: super::super::boot_id(),
            ..InstanceRecord::default()
        })
        .unwrap();
        with_room(0, move || {
            assert!(is_shortage(&own.runs().unwrap_err()));
            assert!(is_shortage(&home.known().unwrap_err()));
        });
        with_room(0, move || {
            let found = of_instance(&[], "no-cell", Path::new("/no/netns"), Some(own));
            assert!(is_shortage(&found.unwrap_err()));
        });
        // Reading the list of processes fails, too.
        let other = other_network();
        with_room(0, move || {
            let found = of_instance(&[], "no-cell", &other, None);
            assert!(is_shortage(&found.unwrap_err()));
        });
        let listing = Listing::default();
        assert!(listing.list(dir.path()).unwrap()[0].state.is_alive());
        with_room(0, move || assert!(is_shortage(&listing.list(dir.path()).unwrap_err())));
        assert!(own.runs().unwrap());
    }

    #[test]
    fn absent_process_has_ended() {
        assert!(found(std::fs::read("/no/such/file")).unwrap().is_none());
        assert!(found(std::fs::read("/")).unwrap().is_none());
        assert!(found(std::fs::read("/proc/self/stat")).unwrap().is_some());
    }
}
