//! The list of all instances, requested every few seconds. For an unchanged file only the process
//! is checked, and a foreign entry is logged once.

use std::{
    collections::HashMap,
    ffi::OsString,
    fs, io,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{Mutex, PoisonError},
};

use kiyot_engine::{id::CellId, provider::InstanceState};
use kiyot_linux::tree::beneath;

use crate::instance::{Home, Launcher};

/// A listed instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Listed {
    pub(super) home: Home,
    pub(super) instance_type: String,
    pub(super) pod_uid: Option<String>,
    /// See `InstanceRecord::weight_of`.
    pub(super) weight_of: String,
    pub(super) state: InstanceState,
}

/// The result of the previous list.
#[derive(Debug, Default)]
pub(super) struct Listing {
    last: Mutex<Found>,
}

#[derive(Debug, Default)]
struct Found {
    instances: HashMap<CellId, Read>,
    /// The foreign entries of the directory, as they were logged.
    strays: HashMap<OsString, Option<Stamp>>,
}

/// A cached instance.
#[derive(Debug, Clone)]
struct Read {
    /// The stamp of the record that was read; `None` if there was no record.
    stamp: Option<Stamp>,
    launcher: Launcher,
    instance_type: String,
    pod_uid: Option<String>,
    weight_of: String,
}

/// The identity of a file's content. Our files are only replaced, never changed in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    size: u64,
    changed: (i64, i64),
}

impl Stamp {
    fn of(file: &Path) -> Option<Self> {
        let data = fs::metadata(file).ok()?;
        Some(Self {
            inode: data.ino(),
            size: data.size(),
            changed: (data.ctime(), data.ctime_nsec()),
        })
    }
}

impl Listing {
    /// Returns the instances in the directory of all cells. Blocking.
    pub(super) fn list(&self, cells: &Path) -> io::Result<Vec<Listed>> {
        let (homes, strays) = Home::all(cells)?;
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        for name in last.met(cells, strays) {
            tracing::warn!(
                ?name,
                dir = %cells.display(),
                "foreign entry in the directory of cells ignored"
            );
        }
        let mut read = HashMap::with_capacity(homes.len());
        let mut instances = Vec::with_capacity(homes.len());
        for home in homes {
            let cell = home.id().clone();
            // Taken before the file is read: a change in between is found the next time.
            let stamp = Stamp::of(&home.known_file());
            let known = match (stamp, last.instances.remove(&cell)) {
                (Some(_), Some(before)) if before.stamp == stamp => before,
                _ => {
                    let known = home.known()?;
                    Read {
                        stamp,
                        launcher: known.launcher(),
                        instance_type: known.instance_type,
                        pod_uid: known
                            .attachment
                            .map(|to| to.pod_uid)
                            .filter(|uid| !uid.is_empty()),
                        weight_of: known.weight_of,
                    }
                }
            };
            let Read { launcher, instance_type, pod_uid, weight_of, .. } = known.clone();
            let state = super::state_of(launcher.runs(&cell)?);
            if stamp.is_some() {
                read.insert(cell, known);
            }
            instances.push(Listed { home, instance_type, pod_uid, weight_of, state });
        }
        last.instances = read;
        Ok(instances)
    }
}

impl Found {
    /// Records the foreign entries. Returns new and changed entries.
    fn met(&mut self, cells: &Path, strays: Vec<OsString>) -> Vec<OsString> {
        let stamp = |name: &OsString| beneath(cells, name).ok().and_then(|path| Stamp::of(&path));
        let now: HashMap<_, _> =
            strays.into_iter().map(|name| (name.clone(), stamp(&name))).collect();
        let before = std::mem::replace(&mut self.strays, now);
        let is_new =
            |(name, stamp): &(&OsString, &Option<Stamp>)| before.get(*name) != Some(*stamp);
        self.strays.iter().filter(is_new).map(|(name, _)| name.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{boot_id, instance::InstanceRecord, process::Identity},
        *,
    };

    #[test]
    fn changed_file_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let (listing, home) = (Listing::default(), Home::new(dir.path(), &CellId::mint().unwrap()));
        assert_eq!(listing.list(dir.path()).unwrap(), []);
        home.make().unwrap();
        let running = || {
            listing
                .list(dir.path())
                .unwrap()
                .iter()
                .map(|instance| (instance.home == home, instance.state.is_alive()))
                .collect::<Vec<_>>()
        };
        assert_eq!(running(), [(true, false)], "no record yet");
        let own = Identity::of(i32::try_from(std::process::id()).unwrap()).unwrap();
        let runs =
            InstanceRecord { boot_id: boot_id(), launcher: own, ..InstanceRecord::default() };
        home.keep(&runs).unwrap();
        assert_eq!(running(), [(true, true)]);
        assert_eq!(running(), [(true, true)], "from memory");
        // The process has exited, and another has its PID.
        let other = own.map(|own| Identity { start: own.start + 1, ..own });
        home.keep(&InstanceRecord { launcher: other, ..runs.clone() }).unwrap();
        assert_eq!(running(), [(true, false)]);
        home.keep(&runs).unwrap();
        assert_eq!(running(), [(true, true)]);
        home.keep(&InstanceRecord { boot_id: "before".into(), ..runs }).unwrap();
        assert_eq!(running(), [(true, false)], "a record from before a reboot");
        fs::remove_dir_all(home.dir()).unwrap();
        assert_eq!(running(), []);
    }

    #[test]
    fn foreign_entry_is_logged_once_and_after_a_change() {
        let dir = tempfile::tempdir().unwrap();
        let mut found = Found::default();
        let mut told = || {
            let (_, strays) = Home::all(dir.path()).unwrap();
            found.met(dir.path(), strays)
        };
        Home::new(dir.path(), &CellId::mint().unwrap()).make().unwrap();
        assert!(told().is_empty());
        let (stray, other) = (dir.path().join("lost+found"), dir.path().join("notes.txt"));
        fs::create_dir(&stray).unwrap();
        assert_eq!(told(), ["lost+found"]);
        assert!(told().is_empty());
        fs::write(&other, "first content").unwrap();
        assert_eq!(told(), ["notes.txt"]);
        fs::write(&other, "second content").unwrap();
        assert_eq!(told(), ["notes.txt"]);
        assert!(told().is_empty());
        // A removed entry is logged again.
        fs::remove_dir(&stray).unwrap();
        assert!(told().is_empty());
        fs::create_dir(&stray).unwrap();
        assert_eq!(told(), ["lost+found"]);
    }
}
