//! Failures of mounts.

use std::{
    io,
    path::{Path, PathBuf},
};

/// A mount failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}: {path:?}")]
pub struct MountError {
    what: String,
    path: PathBuf,
    source: io::Error,
}

impl MountError {
    pub(super) fn new(what: impl Into<String>, path: &Path, source: io::Error) -> Self {
        Self { what: what.into(), path: path.to_owned(), source }
    }
}
