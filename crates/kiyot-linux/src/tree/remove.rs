//! Removal of a tree.
//!
//! Before a non-empty directory is emptied, it is moved to the top of the tree, so that no walk is
//! deeper than two levels. The tree is the only state: after a partial call or a crash, the next
//! call continues with a smaller tree. If a rename fails (a full disk may have no space for a
//! directory entry), a leaf directory is removed in place, which frees space.

use std::{
    ffi::{CStr, CString},
    hash::{BuildHasher, Hasher, RandomState},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, StatxAttributes, StatxFlags},
    fs::{openat, renameat_with, statx, unlinkat},
    io::Errno,
    mount::{UnmountFlags, unmount},
};

use crate::tree::dir::{self, DirEntry};

/// The prefix of the names of directories that were moved to the top.
const MOVED_PREFIX: &str = ".kiyot-moved-";

/// The treatment of mount points in the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountPolicy {
    /// The removal fails with `BUSY`, and leaves the mounted tree untouched.
    Refuse,
    /// The mount is detached, and the directory under it is removed.
    Detach,
}

/// Progress of a removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoveProgress {
    /// The tree is removed.
    Done,
    /// The limit of entries was reached. Another call continues.
    Partial,
}

/// Removes a file or a directory tree by its name in a directory. An absent name is not an error.
///
/// Works on about `entries` entries and returns. Also removes entries that are added meanwhile.
/// Keeps at most four files open.
pub fn remove(
    parent: impl AsFd,
    name: &CStr,
    mounts: MountPolicy,
    entries: usize,
) -> Result<RemoveProgress, Errno> {
    let parent = parent.as_fd();
    let mut budget = Budget(entries.max(1));
    loop {
        budget.spend();
        match unlink(parent, name, mounts)? {
            Unlinked::Done => return Ok(RemoveProgress::Done),
            Unlinked::NotEmpty => {}
        }
        let top = match dir::open_dir(parent, name) {
            Ok(top) => top,
            Err(Errno::NOENT) => return Ok(RemoveProgress::Done),
            Err(Errno::XDEV) => {
                detach(parent, name, mounts)?;
                continue;
            }
            // Another kind of file has replaced the directory meanwhile.
            Err(Errno::NOTDIR | Errno::LOOP) if budget.is_some() => continue,
            Err(error) => return Err(error),
        };
        let mut removal = Removal::new(top, mounts, budget);
        if !removal.pass()? {
            return Ok(RemoveProgress::Partial);
        }
        budget = removal.budget;
    }
}

/// The number of entries that a call may still work on.
struct Budget(usize);

impl Budget {
    fn spend(&mut self) {
        self.0 = self.0.saturating_sub(1);
    }

    fn is_some(&self) -> bool {
        self.0 > 0
    }
}

/// Removes a file or a whole directory tree by path. Blocks; only for the daemon's own trees.
pub fn remove_path(path: &Path) -> io::Result<()> {
    let name = path.file_name().and_then(|name| CString::new(name.as_bytes()).ok());
    let (Some(parent), Some(name)) = (path.parent(), name) else {
        return Err(io::Error::other(format!("{} has no name", path.display())));
    };
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    let parent = match openat(CWD, parent, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(()),
        parent => parent?,
    };
    while remove(&parent, &name, MountPolicy::Refuse, usize::MAX)? == RemoveProgress::Partial {}
    Ok(())
}

struct Removal {
    top: OwnedFd,
    mounts: MountPolicy,
    budget: Budget,
    /// The first number of directories that are moved to the top.
    base: u64,
    /// The next number. Moved directories may use the numbers from `base` up to it, as a stack.
    moved: u64,
}

impl Removal {
    /// Starts at a random number, so that names left by earlier calls don't collide: each collision
    /// would cost a rename. Those directories are removed as entries of the top.
    fn new(top: OwnedFd, mounts: MountPolicy, budget: Budget) -> Self {
        // Halved, so that counting up does not overflow.
        let base = RandomState::new().build_hasher().finish() / 2;
        Self { top, mounts, budget, base, moved: base }
    }

    /// Removes all entries of the top, and directories that are moved there meanwhile. Returns
    /// whether the budget was sufficient.
    fn pass(&mut self) -> Result<bool, Errno> {
        let top = self.top.try_clone().map_err(|_| Errno::MFILE)?;
        dir::read(&top, 0, |entry| {
            self.remove_at_top(entry.name)?;
            while self.moved > self.base && self.budget.is_some() {
                self.moved -= 1;
                self.remove_at_top(&moved_name(self.moved))?;
            }
            Ok(self.budget.is_some())
        })?;
        Ok(self.budget.is_some())
    }

    /// Removes an entry of the top, as far as the budget allows.
    fn remove_at_top(&mut self, name: &CStr) -> Result<(), Errno> {
        self.budget.spend();
        if unlink(self.top.as_fd(), name, self.mounts)? == Unlinked::Done {
            return Ok(());
        }
        let Some(dir) = self.open_at_top(name)? else { return Ok(()) };
        dir::read(&dir, 0, |entry| {
            self.budget.spend();
            if unlink(dir.as_fd(), entry.name, self.mounts)? == Unlinked::NotEmpty {
                self.move_up(dir.as_fd(), entry)?;
            }
            Ok(self.budget.is_some())
        })?;
        // The next pass removes a directory that is still not empty.
        unlink(self.top.as_fd(), name, self.mounts).map(drop)
    }

    /// Opens a directory of the top. Returns `None` if it was removed or replaced.
    fn open_at_top(&self, name: &CStr) -> Result<Option<OwnedFd>, Errno> {
        match dir::open_dir(&self.top, name) {
            Ok(dir) => Ok(Some(dir)),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
            Err(Errno::XDEV) => detach(self.top.as_fd(), name, self.mounts).map(|()| None),
            Err(error) => Err(error),
        }
    }

    /// Moves a directory to the top, where it is removed next, unless the budget ends before the
    /// search for a free name. If a rename fails, removes a leaf of the directory.
    fn move_up(&mut self, dir: BorrowedFd<'_>, entry: &DirEntry<'_>) -> Result<(), Errno> {
        loop {
            let name = moved_name(self.moved);
            let moved = renameat_with(dir, entry.name, &self.top, &*name, RenameFlags::NOREPLACE);
            match moved {
                Ok(()) => {
                    self.moved += 1;
                    return Ok(());
                }
                Err(Errno::NOENT) => return Ok(()),
                // The pod made this name. It is removed as if the directory had been moved here.
                Err(Errno::EXIST) => self.moved += 1,
                Err(Errno::BUSY) if is_mount(dir, entry.name)? => {
                    return detach(dir, entry.name, self.mounts);
                }
                Err(_) => return self.remove_leaf(dir, entry.name),
            }
            self.budget.spend();
            if !self.budget.is_some() {
                return Ok(());
            }
        }
    }

    /// Removes a directory without subdirectories at or beneath a name.
    fn remove_leaf(&mut self, parent: BorrowedFd<'_>, name: &CStr) -> Result<(), Errno> {
        let mut name = name.to_owned();
        let mut parent = parent.try_clone_to_owned().map_err(|_| Errno::MFILE)?;
        loop {
            let dir = match dir::open_dir(&parent, &name) {
                Ok(dir) => dir,
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(()),
                Err(Errno::XDEV) => return detach(parent.as_fd(), &name, self.mounts),
                Err(error) => return Err(error),
            };
            let mut inner = None;
            dir::read(&dir, 0, |entry| {
                self.budget.spend();
                if unlink(dir.as_fd(), entry.name, self.mounts)? == Unlinked::NotEmpty {
                    inner = Some(entry.name.to_owned());
                }
                Ok(inner.is_none())
            })?;
            let Some(inner) = inner else {
                return unlink(parent.as_fd(), &name, self.mounts).map(drop);
            };
            (parent, name) = (dir, inner);
        }
    }
}

fn moved_name(number: u64) -> CString {
    // The name has no NUL.
    CString::new(format!("{MOVED_PREFIX}{number}")).unwrap_or_default()
}

#[derive(Debug, PartialEq, Eq)]
enum Unlinked {
    Done,
    NotEmpty,
}

/// Removes a file or an empty directory.
fn unlink(dir: BorrowedFd<'_>, name: &CStr, mounts: MountPolicy) -> Result<Unlinked, Errno> {
    loop {
        let busy = match unlinkat(dir, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => return Ok(Unlinked::Done),
            Err(Errno::ISDIR) => match unlinkat(dir, name, AtFlags::REMOVEDIR) {
                Ok(()) | Err(Errno::NOENT) => return Ok(Unlinked::Done),
                // A mount point fails with BUSY instead, whether empty or not.
                Err(Errno::NOTEMPTY | Errno::EXIST) => return Ok(Unlinked::NotEmpty),
                Err(Errno::NOTDIR) => continue,
                Err(error) => error,
            },
            Err(error) => error,
        };
        if busy != Errno::BUSY {
            return Err(busy);
        }
        if !is_mount(dir, name)? {
            return Err(busy);
        }
        detach(dir, name, mounts)?;
    }
}

fn open_path(dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    openat(dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// Returns whether a name is a mount point.
fn is_mount(dir: BorrowedFd<'_>, name: &CStr) -> Result<bool, Errno> {
    match open_path(dir, name) {
        Ok(file) => Ok(statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?
            .stx_attributes
            .contains(StatxAttributes::MOUNT_ROOT)),
        Err(Errno::NOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Detaches the topmost mount at a name.
fn detach(dir: BorrowedFd<'_>, name: &CStr, mounts: MountPolicy) -> Result<(), Errno> {
    if mounts == MountPolicy::Refuse {
        return Err(Errno::BUSY);
    }
    match open_path(dir, name) {
        Ok(file) => match unmount(dir::proc_path(&file), UnmountFlags::DETACH) {
            // No mount is left at this name.
            Ok(()) | Err(Errno::INVAL) => Ok(()),
            Err(error) => Err(error),
        },
        Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
pub(crate) mod tests;
