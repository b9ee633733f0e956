//! Log files on the node.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::PathBuf,
    sync::Arc,
};

use bytes::Bytes;

use crate::blocking::blocking;

/// Files flushed to the disk, with their lengths at that time.
#[cfg(test)]
pub(super) static SYNCED: std::sync::Mutex<Vec<(FileId, u64)>> = std::sync::Mutex::new(Vec::new());

/// Log file open for appending. Never opened through a link.
#[derive(Debug)]
pub(super) struct NodeFile {
    path: PathBuf,
    file: Arc<File>,
    id: FileId,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileEnd {
    /// Length of the file in bytes.
    pub(super) length: u64,
    /// True if the last line is incomplete.
    pub(super) within_line: bool,
}

/// Device and inode of a file.
pub(super) type FileId = (u64, u64);

impl NodeFile {
    /// Opens the file for appending, and creates it if absent.
    pub(super) async fn open(path: PathBuf) -> io::Result<Self> {
        Self::open_or(path, true).await
    }

    /// Opens the file for appending; `None` if it is absent.
    pub(super) async fn existing(path: PathBuf) -> io::Result<Option<Self>> {
        match Self::open_or(path, false).await {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn open_or(path: PathBuf, make: bool) -> io::Result<Self> {
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        blocking(move || {
            let file = OpenOptions::new()
                .read(true)
                .append(true)
                .create(make)
                .mode(0o640)
                .custom_flags(flags.bits().cast_signed())
                .open(&path)?;
            let metadata = file.metadata()?;
            if !metadata.is_file() {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
            }
            Ok(Self { path, file: Arc::new(file), id: (metadata.dev(), metadata.ino()) })
        })
        .await
    }

    /// Opens the file that now has this name.
    pub(super) async fn reopen(&self) -> io::Result<Self> {
        Self::open(self.path.clone()).await
    }

    pub(super) fn id(&self) -> FileId {
        self.id
    }

    pub(super) async fn end(&self) -> io::Result<FileEnd> {
        let file = Arc::clone(&self.file);
        blocking(move || {
            let length = file.metadata()?.len();
            let mut last = [b'\n'];
            if let Some(before) = length.checked_sub(1) {
                // Reads nothing if the file was truncated meanwhile.
                file.read_at(&mut last, before)?;
            }
            Ok(FileEnd { length, within_line: last != *b"\n" })
        })
        .await
    }

    /// Returns whether the file was deleted or renamed, and another file has its name.
    pub(super) async fn is_replaced(&self) -> io::Result<bool> {
        let (file, path) = (Arc::clone(&self.file), self.path.clone());
        blocking(move || {
            Ok(file.metadata()?.nlink() == 0
                && path.symlink_metadata().is_ok_and(|there| there.is_file()))
        })
        .await
    }

    /// Appends all bytes. After an error, any part of them may be in the file.
    pub(super) async fn append(&self, bytes: Bytes) -> io::Result<()> {
        let file = Arc::clone(&self.file);
        blocking(move || (&*file).write_all(&bytes)).await
    }

    /// Flushes appended bytes to the disk.
    pub(super) async fn sync(&self) -> io::Result<()> {
        let file = Arc::clone(&self.file);
        #[cfg(test)]
        SYNCED
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .push((self.id, file.metadata()?.len()));
        blocking(move || file.sync_data()).await
    }
}

/// Returns the length of a file in bytes; 0 if it is absent.
pub(super) async fn length_of(path: PathBuf) -> u64 {
    let length = blocking(move || {
        Ok(path
            .symlink_metadata()
            .ok()
            .filter(std::fs::Metadata::is_file)
            .map_or(0, |metadata| metadata.len()))
    });
    length.await.unwrap_or_default()
}
