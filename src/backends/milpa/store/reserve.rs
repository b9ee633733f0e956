//! Preallocated disk space for the store: a pod that fills the disk must not keep the daemon from
//! recording the ends of other pods.
//!
//! The store's file gets blocks for all of its length and beyond its end, and grows into them.
//! Copy-on-write file systems (btrfs, ZFS) allocate new blocks at each write, so that preallocation
//! does not help there.

use std::{fs, io};

use rustix::{
    fs::{FallocateFlags, fallocate},
    io::Errno,
};

/// The preallocated bytes beyond the end of the file: the records of about a thousand pods.
pub(super) const RESERVE_BYTES: u64 = 16 << 20;

/// Preallocated space of an open file.
#[derive(Debug)]
pub(super) struct Reserve {
    file: fs::File,
    /// The file's length at the last preallocation.
    allocated_at: Option<u64>,
    /// Set once a failed preallocation was logged.
    has_failed: bool,
}

impl Reserve {
    /// Wraps an open file, without preallocation yet.
    pub(super) fn new(file: fs::File) -> Self {
        Self { file, allocated_at: None, has_failed: false }
    }

    /// Preallocates space if the length of the file has changed. An error is logged once.
    pub(super) fn refill(&mut self) {
        match self.allocate() {
            Ok(()) if self.has_failed => {
                self.has_failed = false;
                tracing::info!("space reserved for the store's records again");
            }
            Ok(()) => {}
            Err(error) if !self.has_failed => {
                self.has_failed = true;
                tracing::warn!(
                    %error,
                    bytes = RESERVE_BYTES,
                    "no space can be reserved for the store's records: \
                     a full disk will prevent ends of pods from being recorded"
                );
            }
            Err(_) => {}
        }
    }

    fn allocate(&mut self) -> io::Result<()> {
        let length = self.file.metadata()?.len();
        if self.allocated_at == Some(length) {
            return Ok(());
        }
        self.allocated_at = None;
        let bytes = length.saturating_add(RESERVE_BYTES);
        loop {
            match fallocate(&self.file, FallocateFlags::KEEP_SIZE, 0, bytes) {
                Err(Errno::INTR) => {}
                allocated => break allocated?,
            }
        }
        self.allocated_at = Some(length);
        Ok(())
    }
}
