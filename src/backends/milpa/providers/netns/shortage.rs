//! What the daemon can't see because it has no open file or memory left: that says nothing of what
//! it looked at.

use std::io;

use rustix::io::Errno;

/// What was read; `None` if it is not there, or can't be read for a reason of its own.
///
/// An error if daemon or node had nothing left to look with: whatever it is may be there all the
/// same. A cell that is taken for gone by that would be ended, or run beside its pod's next one.
pub(super) fn found<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Ok(found) => Ok(Some(found)),
        Err(error) if is_shortage(&error) => Err(error),
        Err(_) => Ok(None),
    }
}

/// Whether it is we who lack something.
pub(super) fn is_shortage(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM))
}

#[cfg(test)]
mod tests {
    use std::{fs::File, path::Path, thread};

    use nix::sched::{CloneFlags, unshare};
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::{
        super::{
            super::super::id::CellId,
            instance::{Home, Known},
            listing::Listing,
            process::{Identity, of_instance},
        },
        *,
    };

    /// More open files than all tests of this program have.
    const MOST: u64 = 2048;

    /// Runs something in a thread of which the open files are its own, and that may open so many
    /// more.
    fn with_room(room: usize, work: impl FnOnce() + Send + 'static) {
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        let current = Some(current.unwrap_or(MOST).min(MOST));
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

    /// Verifies X18.
    #[test]
    fn what_can_not_be_looked_at_is_neither_gone_nor_ended() {
        let own = Identity::of(i32::try_from(std::process::id()).unwrap()).unwrap().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path(), &CellId::mint().unwrap());
        home.make().unwrap();
        home.keep(&Known {
            launcher: Some(own),
            boot_id: super::super::boot_id(),
            ..Known::default()
        })
        .unwrap();
        with_room(0, move || {
            assert!(is_shortage(&own.runs().unwrap_err()));
            assert!(is_shortage(&home.known().unwrap_err()));
        });
        // The list of processes can be opened, and then none of them.
        with_room(1, || {
            assert!(is_shortage(
                &of_instance(&[], "no-cell", Path::new("/no/netns"), None).unwrap_err()
            ))
        });
        let listing = Listing::default();
        assert!(listing.list(dir.path()).unwrap()[0].running);
        with_room(0, move || assert!(is_shortage(&listing.list(dir.path()).unwrap_err())));
        assert!(own.runs().unwrap());
    }

    #[test]
    fn what_is_not_there_is_not_there() {
        assert!(found(std::fs::read("/no/such/file")).unwrap().is_none());
        assert!(found(std::fs::read("/")).unwrap().is_none());
        assert!(found(std::fs::read("/proc/self/stat")).unwrap().is_some());
    }
}
