//! Measurement of the disk usage of a tree.
//!
//! The walk descends by name and ascends by `..`, so that it keeps few files open whatever the
//! depth of the tree, and 16 bytes per level.

use std::{
    ffi::CString,
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    fs::{AtFlags, FileType, Stat, fstat, statat},
    io::Errno,
};

use crate::tree::dir;

/// The least bytes that are counted for an entry: a million empty files use the file system's
/// inodes, and their walk takes as long as the walk of other files.
const MIN_ENTRY_BYTES: u64 = 4096;
/// The size of a block in `stat`, in bytes.
const BLOCK_BYTES: u64 = 512;
/// The levels whose directories stay open. A concurrent rename can't make the walk lose its
/// position in a tree of at most this depth.
const MAX_OPEN_LEVELS: usize = 32;
/// The most levels that are measured, which limits the walk's memory to 2 MiB. Deeper directories
/// are not counted.
const MAX_LEVELS: usize = 128 << 10;

/// The disk usage of a tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// The bytes on disk. Each link of a file counts for an equal part of the file.
    pub bytes: u64,
    /// The entries: files, directories, symbolic links and all other kinds.
    pub entries: u64,
    /// The directories that were not read to their end because they are too deep or moved during
    /// the walk. Their remaining entries are not counted.
    pub unseen: u64,
}

/// Progress of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MeasureProgress {
    /// Entries are left.
    Partial(Usage),
    /// The tree was measured to its end.
    Done(Usage),
}

/// A resumable walk that measures a tree.
#[derive(Debug)]
pub struct Measurement {
    /// The ancestors of the current directory, from the root on.
    ancestors: Vec<Level>,
    /// The open directories of the uppermost ancestors.
    open: Vec<OwnedFd>,
    current: OwnedFd,
    inode: u64,
    position: u64,
    usage: Usage,
}

/// A directory that the walk returns to.
#[derive(Debug, Clone, Copy)]
struct Level {
    inode: u64,
    /// The read position at which the walk resumes.
    position: u64,
}

impl Measurement {
    /// Starts a measurement at an open directory, which counts as an entry itself.
    pub fn begin(dir: OwnedFd) -> Result<Self, Errno> {
        let stat = fstat(&dir)?;
        let mut measurement = Self {
            ancestors: Vec::new(),
            open: Vec::new(),
            current: dir,
            inode: stat.st_ino,
            position: 0,
            usage: Usage::default(),
        };
        measurement.count(&stat);
        Ok(measurement)
    }

    /// Measures about `entries` further entries.
    pub fn step(&mut self, entries: usize) -> Result<MeasureProgress, Errno> {
        let max_entries =
            self.usage.entries.saturating_add(entries as u64).max(self.usage.entries + 1);
        // Leaving a directory counts as a step too: an empty directory costs as much as a file.
        let mut steps = entries.max(1);
        while self.usage.entries < max_entries && steps > 0 {
            steps -= 1;
            match self.read(max_entries)? {
                Read::Directory(name) => self.enter(&name)?,
                Read::Limit => {}
                Read::End if self.ancestors.is_empty() => {
                    return Ok(MeasureProgress::Done(self.usage));
                }
                Read::End => self.leave()?,
            }
        }
        Ok(MeasureProgress::Partial(self.usage))
    }

    /// Counts entries of the current directory up to the next subdirectory or the limit.
    fn read(&mut self, max_entries: u64) -> Result<Read, Errno> {
        let mut stopped = Read::End;
        let (current, from) = (self.current.as_fd().try_clone_to_owned(), self.position);
        let current = current.map_err(|_| Errno::MFILE)?;
        dir::read(&current, from, |entry| {
            self.position = entry.next;
            let stat = match statat(&current, entry.name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                Err(Errno::NOENT) => return Ok(true),
                Err(error) => return Err(error),
            };
            self.count(&stat);
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                stopped = Read::Directory(entry.name.to_owned());
                return Ok(false);
            }
            if self.usage.entries >= max_entries {
                stopped = Read::Limit;
                return Ok(false);
            }
            Ok(true)
        })?;
        Ok(stopped)
    }

    fn enter(&mut self, name: &CString) -> Result<(), Errno> {
        if self.ancestors.len() == MAX_LEVELS {
            self.usage.unseen += 1;
            return Ok(());
        }
        let inner = match dir::open_dir(&self.current, name) {
            Ok(inner) => inner,
            // The directory was removed or replaced, or is a mount point.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => return Ok(()),
            Err(error) => return Err(error),
        };
        let inode = fstat(&inner)?.st_ino;
        self.ancestors.push(Level { inode: self.inode, position: self.position });
        let outer = std::mem::replace(&mut self.current, inner);
        if self.open.len() < MAX_OPEN_LEVELS && self.open.len() + 1 == self.ancestors.len() {
            self.open.push(outer);
        }
        (self.inode, self.position) = (inode, 0);
        Ok(())
    }

    /// Returns to the parent directory. If the current directory was moved, returns to the nearest
    /// ancestor that is still open.
    fn leave(&mut self) -> Result<(), Errno> {
        let Some(level) = self.ancestors.pop() else { return Ok(()) };
        if self.ancestors.len() < self.open.len()
            && let Some(dir) = self.open.pop()
        {
            self.resume(dir, level);
            return Ok(());
        }
        match dir::open_parent(&self.current) {
            Ok(dir) if fstat(&dir)?.st_ino == level.inode => self.resume(dir, level),
            Ok(_) | Err(Errno::NOENT | Errno::XDEV) => {
                self.usage.unseen += 1;
                self.ancestors.truncate(self.open.len());
                return self.leave();
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn resume(&mut self, dir: OwnedFd, level: Level) {
        (self.current, self.inode, self.position) = (dir, level.inode, level.position);
    }

    fn count(&mut self, stat: &Stat) {
        let bytes = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(BLOCK_BYTES);
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        #[allow(clippy::useless_conversion, reason = "it has 32 bits on other architectures")]
        let links = u64::from(stat.st_nlink);
        let names = if is_directory { 1 } else { links.max(1) };
        let bytes = bytes.max(MIN_ENTRY_BYTES) / names;
        self.usage.bytes = self.usage.bytes.saturating_add(bytes);
        self.usage.entries += 1;
    }
}

/// The reason why a read of a directory stopped.
enum Read {
    Directory(CString),
    Limit,
    End,
}

#[cfg(test)]
mod tests;
