//! Catalogues that the command line names.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

use super::{UsageError, bounded::bounded};
use crate::backends::milpa::placement::{CatalogueFile, SetAside};

/// The name of the catalogue that is built into the program.
pub(super) const BUILT_IN: &str = "ec2-us-east-1";
/// Rows that are named of those that can't be used.
const NAMED_ROWS: usize = 8;

/// Reads the catalogue that is built in, or a file.
pub(super) fn read(name: &Path) -> Result<CatalogueFile, UsageError> {
    if name == Path::new(BUILT_IN) {
        return Ok(CatalogueFile::built_in());
    }
    let text = read_file(name)
        .map_err(|error| UsageError(format!("{}: can't be read: {error}", name.display())))?;
    CatalogueFile::parse(&text).map_err(|error| UsageError(format!("{}: {error}", name.display())))
}

fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    bounded(File::open(path)?, CatalogueFile::MAX_BYTES).read_to_end(&mut text)?;
    Ok(text)
}

/// Returns notes of the rows that can't be used.
pub(super) fn notes(name: &Path, rows: &[SetAside]) -> String {
    let shown = rows.iter().take(NAMED_ROWS);
    let mut notes: String =
        shown.map(|row| format!("note: {}: {row}, row not used\n", name.display())).collect();
    if let Some(more) = rows.len().checked_sub(NAMED_ROWS).filter(|more| *more > 0) {
        notes += &format!("note: {}: {more} more rows not used\n", name.display());
    }
    notes
}
