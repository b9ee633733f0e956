//! Measurement of how much of a disk a tree takes.
//!
//! The walk goes down by names and up by `..`, so that it holds a few open files however deep the
//! tree is, and remembers 16 bytes a level.

use std::{
    ffi::CString,
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    fs::{AtFlags, FileType, Stat, fstat, statat},
    io::Errno,
};

use crate::dir;

/// The least that anything in a tree counts for, in bytes: a million empty files take the file
/// system's inodes, and a walk through as many is as long.
const MIN_ENTRY_BYTES: u64 = 4096;
/// The bytes that a block of `stat` has.
const BLOCK_BYTES: u64 = 512;
/// Levels of which the directories stay open: a tree that is not deeper can be changed meanwhile
/// without the walk losing its way.
const MAX_OPEN_LEVELS: usize = 32;
/// The deepest tree that is measured, in levels: what is beneath is not counted. This bounds the
/// walk's memory to 2 MiB.
const MAX_LEVELS: usize = 128 << 10;

/// Space that a tree takes on its disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes on the disk. A file with several names counts for a part at each of them.
    pub bytes: u64,
    /// Files, directories, links and whatever else has a name.
    pub entries: u64,
    /// Directories that were not looked at, or not to their end: too deep, or moved
    /// while they were looked at. What is in them is not counted.
    pub unseen: u64,
}

/// Progress of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MeasureProgress {
    /// There is more to look at.
    Partial(Usage),
    /// All was looked at.
    Done(Usage),
}

/// A walk through a tree that counts what is in it.
#[derive(Debug)]
pub struct Measurement {
    /// Positions at which the walk goes on in the directories above, and their inodes.
    above: Vec<Level>,
    /// The uppermost of the directories above.
    open: Vec<OwnedFd>,
    current: OwnedFd,
    inode: u64,
    position: u64,
    usage: Usage,
}

#[derive(Debug, Clone, Copy)]
struct Level {
    inode: u64,
    position: u64,
}

impl Measurement {
    /// Begins with an open directory, which is counted itself.
    pub fn begin(dir: OwnedFd) -> Result<Self, Errno> {
        let stat = fstat(&dir)?;
        let mut measurement = Self {
            above: Vec::new(),
            open: Vec::new(),
            current: dir,
            inode: stat.st_ino,
            position: 0,
            usage: Usage::default(),
        };
        measurement.count(&stat);
        Ok(measurement)
    }

    /// Looks at about so many entries more.
    pub fn step(&mut self, entries: usize) -> Result<MeasureProgress, Errno> {
        let end = self.usage.entries.saturating_add(entries as u64).max(self.usage.entries + 1);
        // Each directory that is left counts too: an empty one costs as much as a file.
        let mut turns = entries.max(1);
        while self.usage.entries < end && turns > 0 {
            turns -= 1;
            match self.read(end)? {
                Read::Directory(name) => self.enter(&name)?,
                Read::Enough => {}
                Read::End if self.above.is_empty() => return Ok(MeasureProgress::Done(self.usage)),
                Read::End => self.leave()?,
            }
        }
        Ok(MeasureProgress::Partial(self.usage))
    }

    /// Counts entries of the current directory until one is a directory.
    fn read(&mut self, end: u64) -> Result<Read, Errno> {
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
            if self.usage.entries >= end {
                stopped = Read::Enough;
                return Ok(false);
            }
            Ok(true)
        })?;
        Ok(stopped)
    }

    fn enter(&mut self, name: &CString) -> Result<(), Errno> {
        if self.above.len() == MAX_LEVELS {
            self.usage.unseen += 1;
            return Ok(());
        }
        let inner = match dir::open_dir(&self.current, name) {
            Ok(inner) => inner,
            // It is not there any more, or what is mounted there is none of this tree's.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => return Ok(()),
            Err(error) => return Err(error),
        };
        let inode = fstat(&inner)?.st_ino;
        self.above.push(Level { inode: self.inode, position: self.position });
        let outer = std::mem::replace(&mut self.current, inner);
        if self.open.len() < MAX_OPEN_LEVELS && self.open.len() + 1 == self.above.len() {
            self.open.push(outer);
        }
        (self.inode, self.position) = (inode, 0);
        Ok(())
    }

    /// Goes on in the directory above. If the current one was moved meanwhile, in the next one
    /// above that is still open.
    fn leave(&mut self) -> Result<(), Errno> {
        let Some(level) = self.above.pop() else { return Ok(()) };
        if self.above.len() < self.open.len()
            && let Some(dir) = self.open.pop()
        {
            self.go_on(dir, level);
            return Ok(());
        }
        match dir::open_parent(&self.current) {
            Ok(dir) if fstat(&dir)?.st_ino == level.inode => self.go_on(dir, level),
            Ok(_) | Err(Errno::NOENT | Errno::XDEV) => {
                self.usage.unseen += 1;
                self.above.truncate(self.open.len());
                return self.leave();
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn go_on(&mut self, dir: OwnedFd, level: Level) {
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

/// Reasons for which the reading of a directory stopped.
enum Read {
    Directory(CString),
    Enough,
    End,
}

#[cfg(test)]
mod tests;
