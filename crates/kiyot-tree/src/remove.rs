//! Removal of a tree.
//!
//! A directory in the tree that is not empty is moved to the top of it before it is emptied, so
//! that no walk is deeper than two levels. What is left after a call, or a crash, is a smaller tree
//! that the next call goes on with: there is no other state. Where nothing can be moved (the disk
//! is so full that not even a name can be added), a directory without directories in it is looked
//! for, and removed where it is: that takes no space, and gives some back.

use std::{
    ffi::{CStr, CString},
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

use crate::dir::{self, Entry};

/// Beginning of the names that directories get at the top.
const MOVED_PREFIX: &str = ".kiyot-moved-";

/// Treatment of what is mounted in the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountPolicy {
    /// The removal fails (`BUSY`), and nothing beneath the mount is touched.
    Refuse,
    /// The mount is detached, and what it covered is removed.
    Detach,
}

/// Progress of a removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoveProgress {
    /// Nothing is left.
    Done,
    /// The bound was reached: the next call goes on.
    Partial,
}

/// Removes what a name in a directory stands for, with all that is in it. Absent is fine.
///
/// Works on about `entries` of the tree and returns. What comes into the tree meanwhile is removed
/// too. Holds four open files at most.
pub fn remove(
    parent: impl AsFd,
    name: &CStr,
    mounts: MountPolicy,
    entries: usize,
) -> Result<RemoveProgress, Errno> {
    let parent = parent.as_fd();
    let mut left = Budget(entries.max(1));
    loop {
        left.spend();
        match unlink(parent, name, mounts)? {
            Unlinked::Gone => return Ok(RemoveProgress::Done),
            Unlinked::NotEmpty => {}
        }
        let top = match dir::open_dir(parent, name) {
            Ok(top) => top,
            Err(Errno::NOENT) => return Ok(RemoveProgress::Done),
            Err(Errno::XDEV) => {
                detach(parent, name, mounts)?;
                continue;
            }
            // Another thing has this name by now.
            Err(Errno::NOTDIR | Errno::LOOP) if left.is_some() => continue,
            Err(error) => return Err(error),
        };
        let mut removal = Removal { top, mounts, left, moved: 0 };
        if !removal.pass()? {
            return Ok(RemoveProgress::Partial);
        }
        left = removal.left;
    }
}

/// Entries that may still be worked on.
struct Budget(usize);

impl Budget {
    fn spend(&mut self) {
        self.0 = self.0.saturating_sub(1);
    }

    fn is_some(&self) -> bool {
        self.0 > 0
    }
}

/// Removes what a path stands for, however much is in it. Blocking, for a tree of our own.
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
    left: Budget,
    /// So many names at the top may be of directories that were moved there: a stack.
    moved: u64,
}

impl Removal {
    /// Removes all that is at the top now, and what is moved there meanwhile. Returns whether the
    /// budget sufficed.
    fn pass(&mut self) -> Result<bool, Errno> {
        let top = self.top.try_clone().map_err(|_| Errno::MFILE)?;
        dir::read(&top, 0, |entry| {
            self.remove_at_top(entry.name)?;
            while let Some(last) = self.moved.checked_sub(1).filter(|_| self.left.is_some()) {
                self.moved = last;
                self.remove_at_top(&moved_name(last))?;
            }
            Ok(self.left.is_some())
        })?;
        Ok(self.left.is_some())
    }

    /// Removes an entry of the top, or what of it the budget allows.
    fn remove_at_top(&mut self, name: &CStr) -> Result<(), Errno> {
        self.left.spend();
        if unlink(self.top.as_fd(), name, self.mounts)? == Unlinked::Gone {
            return Ok(());
        }
        let Some(dir) = self.opened(name)? else { return Ok(()) };
        dir::read(&dir, 0, |entry| {
            self.left.spend();
            if unlink(dir.as_fd(), entry.name, self.mounts)? == Unlinked::NotEmpty {
                self.move_up(dir.as_fd(), entry)?;
            }
            Ok(self.left.is_some())
        })?;
        // One that is not empty is met again at the next pass.
        unlink(self.top.as_fd(), name, self.mounts).map(drop)
    }

    /// Opens a directory of the top; `None` if it is not there any more, or is none.
    fn opened(&self, name: &CStr) -> Result<Option<OwnedFd>, Errno> {
        match dir::open_dir(&self.top, name) {
            Ok(dir) => Ok(Some(dir)),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
            Err(Errno::XDEV) => detach(self.top.as_fd(), name, self.mounts).map(|()| None),
            Err(error) => Err(error),
        }
    }

    /// Moves a directory to the top, where it is removed next; if that can't be done, something in
    /// it is removed.
    fn move_up(&mut self, dir: BorrowedFd<'_>, entry: &Entry<'_>) -> Result<(), Errno> {
        loop {
            let name = moved_name(self.moved);
            let moved = renameat_with(dir, entry.name, &self.top, &*name, RenameFlags::NOREPLACE);
            match moved {
                Ok(()) => {
                    self.moved += 1;
                    return Ok(());
                }
                Err(Errno::NOENT) => return Ok(()),
                // Of an earlier call, or of the pod: it is removed as if it had been moved there.
                Err(Errno::EXIST) => self.moved += 1,
                Err(Errno::BUSY) if is_mount(dir, entry.name)? => {
                    return detach(dir, entry.name, self.mounts);
                }
                Err(_) => return self.remove_leaf(dir, entry.name),
            }
            self.left.spend();
        }
    }

    /// Removes one directory beneath a directory that has no directories in it, itself perhaps.
    fn remove_leaf(&mut self, above: BorrowedFd<'_>, name: &CStr) -> Result<(), Errno> {
        let mut name = name.to_owned();
        let mut parent = above.try_clone_to_owned().map_err(|_| Errno::MFILE)?;
        loop {
            let dir = match dir::open_dir(&parent, &name) {
                Ok(dir) => dir,
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(()),
                Err(Errno::XDEV) => return detach(parent.as_fd(), &name, self.mounts),
                Err(error) => return Err(error),
            };
            let mut inner = None;
            dir::read(&dir, 0, |entry| {
                self.left.spend();
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
    // There is no NUL in it.
    CString::new(format!("{MOVED_PREFIX}{number}")).unwrap_or_default()
}

#[derive(Debug, PartialEq, Eq)]
enum Unlinked {
    Gone,
    NotEmpty,
}

/// Removes a file, or a directory that is empty.
fn unlink(dir: BorrowedFd<'_>, name: &CStr, mounts: MountPolicy) -> Result<Unlinked, Errno> {
    loop {
        let busy = match unlinkat(dir, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => return Ok(Unlinked::Gone),
            Err(Errno::ISDIR) => match unlinkat(dir, name, AtFlags::REMOVEDIR) {
                Ok(()) | Err(Errno::NOENT) => return Ok(Unlinked::Gone),
                // A mount point is busy, whatever is in it.
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

fn handle(dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    openat(dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// Says whether something is mounted just there.
fn is_mount(dir: BorrowedFd<'_>, name: &CStr) -> Result<bool, Errno> {
    match handle(dir, name) {
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
    match handle(dir, name) {
        Ok(file) => match unmount(dir::proc_path(&file), UnmountFlags::DETACH) {
            // Nothing is mounted there any more.
            Ok(()) | Err(Errno::INVAL) => Ok(()),
            Err(error) => Err(error),
        },
        Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
pub(crate) mod tests;
