//! The files of `-f`.

use std::{io, path::PathBuf};

use kiyot_manifest::files::File;
use kiyot_proto::admin::ManifestFile;

use crate::error::Error;

/// Reads files, directories and the standard input, as kubectl does.
pub(super) fn read(names: &[PathBuf]) -> Result<Vec<ManifestFile>, Error> {
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let files = kiyot_manifest::files::read(names, &mut io::stdin()).map_err(Error::Usage)?;
    let message = |File { name, text }| ManifestFile { name, text };
    Ok(files.into_iter().map(message).collect())
}
