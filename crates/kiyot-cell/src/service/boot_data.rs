//! Boot data of the cell, from the script that installed it, or otherwise from the metadata
//! service.

use std::{fs, fs::File, io, io::Read, path::PathBuf};

use kiyot_link::bootstrap::{CellFile, CellFileError, Machine};

use super::metadata::{self, MetadataError};
use crate::dirs::CellDir;

/// Upper bound on the boot data, in bytes: EC2's limit on the user data of an instance.
const MAX_BYTES: u64 = 16 * 1024;

/// The boot data can't be read.
#[derive(Debug, thiserror::Error)]
pub enum BootDataError {
    /// The script's file can't be read or removed.
    #[error("boot data {0:?}")]
    Io(PathBuf, #[source] io::Error),
    /// The metadata service did not return the boot data.
    #[error("user data of the instance")]
    Metadata(#[from] MetadataError),
    /// The content is invalid.
    #[error(transparent)]
    Invalid(#[from] CellFileError),
    /// The boot data is for a cell in namespaces of its node.
    #[error("boot data has no field \"machine\"")]
    NoMachine,
}

/// Reads the boot data.
pub(super) fn read(dir: &CellDir) -> Result<(CellFile, Machine), BootDataError> {
    let path = dir.boot_data();
    let content = match File::open(&path) {
        Ok(file) => {
            let failed = |error| BootDataError::Io(path.clone(), error);
            let mut content = Vec::new();
            // A longer file is truncated, and so invalid.
            file.take(MAX_BYTES).read_to_end(&mut content).map_err(failed)?;
            fs::remove_file(&path).map_err(failed)?;
            content
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            metadata::user_data(metadata::ADDRESS.into(), MAX_BYTES)?
        }
        Err(error) => return Err(BootDataError::Io(path, error)),
    };
    let file = CellFile::parse(&path, &content)?;
    let machine = file.machine.clone().ok_or(BootDataError::NoMachine)?;
    Ok((file, machine))
}
