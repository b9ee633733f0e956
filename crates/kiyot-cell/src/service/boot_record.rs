//! Record of the machine's only boot as a cell.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
};

use crate::dirs::CellDir;

/// The machine may not run its cell.
#[derive(Debug, thiserror::Error)]
pub enum BootRecordError {
    /// The machine has run its cell.
    #[error("machine has run its cell before, and never runs it again: {0:?} exists")]
    Second(PathBuf),
    /// The record can't be written.
    #[error("cannot write the record of the boot: {0:?}")]
    Io(PathBuf, #[source] io::Error),
}

/// Records the boot on disk; fails if a boot is already recorded.
pub(super) fn begin(dir: &CellDir) -> Result<(), BootRecordError> {
    let path = dir.boot_record();
    let failed = |error| BootRecordError::Io(path.clone(), error);
    let file = match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            return Err(BootRecordError::Second(path));
        }
        opened => opened.map_err(failed)?,
    };
    file.sync_all().map_err(failed)?;
    // Syncs the entry in the directory, too.
    File::open(dir.path()).and_then(|parent| parent.sync_all()).map_err(failed)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Verifies V21.
    #[test]
    fn second_boot_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let dir = CellDir::open(dir.path()).unwrap();
        begin(&dir).unwrap();
        let error = begin(&dir).unwrap_err().to_string();
        assert!(error.contains("never runs it again"), "{error}");
    }

    #[test]
    fn boot_without_a_record_on_disk_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let cell = CellDir::open(dir.path()).unwrap();
        drop(dir);
        let error = begin(&cell).unwrap_err();
        let BootRecordError::Io(path, _) = error else { panic!("{error}") };
        assert_eq!(path.parent(), Some(cell.path() as &Path));
    }
}
