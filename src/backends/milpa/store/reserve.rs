//! Space that the store has on its disk before it needs it: a pod that fills the disk must not keep
//! the ends of others from being recorded.
//!
//! The store's own file has blocks behind its end, and for all that is within it. The file grows
//! into them. File systems that write everything to new places (btrfs, ZFS) know no such space.

use std::{fs, io};

use rustix::{
    fs::{FallocateFlags, fallocate},
    io::Errno,
};

/// The space behind the end of the file, in bytes: the records of about a thousand pods.
pub(super) const RESERVE_BYTES: u64 = 16 << 20;

/// The space of one file.
#[derive(Debug)]
pub(super) struct Reserve {
    file: fs::File,
    /// The file's length when its space was taken last.
    taken_at: Option<u64>,
    /// Set once a failed reservation was logged.
    is_missing: bool,
}

impl Reserve {
    /// The space of an open file. Touches nothing.
    pub(super) fn of(file: fs::File) -> Self {
        Self { file, taken_at: None, is_missing: false }
    }

    /// Takes the space, if the file has another length than before.
    pub(super) fn keep(&mut self) {
        match self.take() {
            Ok(()) if self.is_missing => {
                self.is_missing = false;
                tracing::info!("space reserved for the store's records again");
            }
            Ok(()) => {}
            Err(error) if !self.is_missing => {
                self.is_missing = true;
                tracing::warn!(%error, bytes = RESERVE_BYTES, "no space can be reserved for the store's records: a full disk will keep ends of pods from being recorded");
            }
            Err(_) => {}
        }
    }

    fn take(&mut self) -> io::Result<()> {
        let length = self.file.metadata()?.len();
        if self.taken_at == Some(length) {
            return Ok(());
        }
        self.taken_at = None;
        let bytes = length.saturating_add(RESERVE_BYTES);
        loop {
            match fallocate(&self.file, FallocateFlags::KEEP_SIZE, 0, bytes) {
                Err(Errno::INTR) => {}
                taken => break taken?,
            }
        }
        self.taken_at = Some(length);
        Ok(())
    }
}
