//! Users of machines. Each cell's QEMU has its own user, so that cells share neither the kernel's
//! limits of a user nor access to processes.
//!
//! The owner of a cell's disk is the record: the disk exists before QEMU starts, and is removed
//! with the cell's directory, after the proven end.

use std::{
    collections::HashMap,
    fs, io,
    os::unix::fs::{MetadataExt, OpenOptionsExt, fchown},
    sync::{Arc, Mutex, PoisonError},
};

use kiyot_config::MAX_CELLS_LIMIT;
use kiyot_engine::{
    id::CellId,
    provider::{ErrorClass, ProviderError},
};

use crate::{Home, Instances};

/// The name of the disk in an instance's directory.
pub(super) const DISK: &str = "disk.img";
const DISK_MODE: u32 = 0o600;

/// The users of machines.
#[derive(Debug, Clone)]
pub(super) struct Users {
    /// The first of [`MAX_CELLS_LIMIT`] users.
    first: u32,
    /// The users of launches whose disk may not exist yet.
    pending: Arc<Mutex<HashMap<CellId, u32>>>,
}

/// A reservation of a user for a launch. After it is dropped, the owner of the disk counts.
#[derive(Debug)]
pub(super) struct ReservedUser {
    users: Users,
    cell: CellId,
    pub(super) user: u32,
}

impl Drop for ReservedUser {
    fn drop(&mut self) {
        let mut pending = self.users.pending.lock().unwrap_or_else(PoisonError::into_inner);
        pending.remove(&self.cell);
    }
}

impl Users {
    pub(super) fn new(first: u32) -> Self {
        Self { first, pending: Arc::default() }
    }

    /// Reserves the lowest user that no other cell has. Blocking.
    pub(super) fn reserve(
        &self,
        instances: &Instances,
        cell: &CellId,
    ) -> Result<ReservedUser, ProviderError> {
        let failed = |error| ProviderError::transient("find a user for QEMU", error);
        // Held while owners are read, so that concurrent launches reserve different users.
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        let homes = instances.homes().map_err(failed)?;
        let owners = homes.iter().filter_map(|home| owner(home).transpose());
        let mut taken = owners.collect::<io::Result<Vec<u32>>>().map_err(failed)?;
        taken.extend(pending.values());
        let count = u32::try_from(MAX_CELLS_LIMIT).unwrap_or(u32::MAX);
        let all = self.first..self.first.saturating_add(count);
        let user = all.clone().find(|user| !taken.contains(user)).ok_or_else(|| {
            let doing = format!("find a user for QEMU of {cell}: all of {all:?} are taken");
            ProviderError::without_cause(ErrorClass::Transient, doing)
        })?;
        pending.insert(cell.clone(), user);
        Ok(ReservedUser { users: self.clone(), cell: cell.clone(), user })
    }
}

/// Returns the user of a cell's QEMU; `None` if the disk, which is made before QEMU starts, is
/// absent.
fn owner(home: &Home) -> io::Result<Option<u32>> {
    match fs::symlink_metadata(home.file(DISK)) {
        Ok(metadata) => Ok(Some(metadata.uid())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Makes the empty disk of a cell, a sparse file that `user` and `group` own.
pub(super) fn make_disk(home: &Home, bytes: u64, user: u32, group: u32) -> io::Result<()> {
    let mut options = fs::OpenOptions::new();
    let file = options.write(true).create_new(true).mode(DISK_MODE).open(home.file(DISK))?;
    fchown(&file, Some(user), Some(group))?;
    file.set_len(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiyot_config::MilpaBackend;

    fn cell() -> CellId {
        CellId::mint().unwrap()
    }

    /// Verifies N31.
    #[test]
    fn cell_has_its_own_user_until_its_directory_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let config = MilpaBackend { state_dir: dir.path().into(), ..MilpaBackend::default() };
        let instances = Instances::new(&config, &config.qemu.network, None, "any");
        let own = rustix::process::getuid().as_raw();
        let users = Users::new(own);
        let [one, other] = [cell(), cell()];
        let first = users.reserve(&instances, &one).unwrap();
        let second = users.reserve(&instances, &other).unwrap();
        assert_eq!((first.user, second.user), (own, own + 1), "two launches at the same time");
        drop(second);
        assert_eq!(users.reserve(&instances, &other).unwrap().user, own + 1);

        // A disk keeps its user, also after a restart.
        let home = Home::new(&dir.path().join("cells"), &one);
        home.make().unwrap();
        make_disk(&home, 1 << 20, first.user, rustix::process::getgid().as_raw()).unwrap();
        drop(first);
        let restarted = Users::new(own);
        for users in [&users, &restarted] {
            assert_eq!(users.reserve(&instances, &other).unwrap().user, own + 1);
        }
        fs::remove_dir_all(home.dir()).unwrap();
        assert_eq!(users.reserve(&instances, &other).unwrap().user, own);
    }
}
