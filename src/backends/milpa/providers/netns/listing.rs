//! The list of all instances. It is asked for every few seconds: of a file that has not changed since the last list only the process is looked at.

use std::{
    collections::HashMap,
    fs, io,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{Mutex, PoisonError},
};

use super::{
    super::{super::id::CellId, Instance, InstanceId},
    boot_id,
    instance::Home,
    process::Identity,
};

/// What the last list read.
#[derive(Debug, Default)]
pub(super) struct Listing {
    last: Mutex<HashMap<CellId, Read>>,
}

/// What was read of an instance.
#[derive(Debug)]
struct Read {
    stamp: Stamp,
    /// Its process, if it was started since the node was.
    launcher: Option<Identity>,
}

/// Tells a file's content from what it held before: it is only ever replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    size: u64,
    changed: (i64, i64),
}

impl Stamp {
    fn of(file: &Path) -> Option<Self> {
        let data = fs::metadata(file).ok()?;
        Some(Self { inode: data.ino(), size: data.size(), changed: (data.ctime(), data.ctime_nsec()) })
    }
}

impl Listing {
    /// The instances beneath the directory of all cells. Blocking.
    pub(super) fn list(&self, cells: &Path) -> io::Result<Vec<Instance>> {
        let homes = Home::all(cells)?;
        let boot_id = boot_id();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let mut read = HashMap::with_capacity(homes.len());
        let mut instances = Vec::with_capacity(homes.len());
        for home in homes {
            let cell = home.id().clone();
            // Before the file is read: what changes meanwhile is read the next time.
            let stamp = Stamp::of(&home.known_file());
            let launcher = match (stamp, last.remove(&cell)) {
                (Some(stamp), Some(before)) if before.stamp == stamp => before.launcher,
                _ => {
                    let known = home.known();
                    known.launcher.filter(|_| known.boot_id == boot_id)
                }
            };
            if let Some(stamp) = stamp {
                read.insert(cell.clone(), Read { stamp, launcher });
            }
            instances.push(Instance { id: InstanceId(cell.as_str().to_owned()), cell, running: launcher.is_some_and(Identity::runs) });
        }
        *last = read;
        Ok(instances)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::instance::Known, *};

    #[test]
    fn what_changes_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let (listing, home) = (Listing::default(), Home::new(dir.path(), &CellId::mint().unwrap()));
        assert_eq!(listing.list(dir.path()).unwrap(), []);
        home.make().unwrap();
        let running = || listing.list(dir.path()).unwrap().iter().map(|instance| (instance.cell == *home.id(), instance.running)).collect::<Vec<_>>();
        assert_eq!(running(), [(true, false)], "nothing is known of it yet");
        let own = Identity::of(i32::try_from(std::process::id()).unwrap());
        let runs = Known { boot_id: boot_id(), launcher: own, ..Known::default() };
        home.keep(&runs).unwrap();
        assert_eq!(running(), [(true, true)]);
        assert_eq!(running(), [(true, true)], "from memory");
        // The process has ended, and another has its number.
        let other = own.map(|own| Identity { start: own.start + 1, ..own });
        home.keep(&Known { launcher: other, ..runs.clone() }).unwrap();
        assert_eq!(running(), [(true, false)]);
        home.keep(&runs).unwrap();
        assert_eq!(running(), [(true, true)]);
        home.keep(&Known { boot_id: "before".into(), ..runs }).unwrap();
        assert_eq!(running(), [(true, false)], "of the time before a reboot");
        fs::remove_dir_all(home.dir()).unwrap();
        assert_eq!(running(), []);
    }
}
