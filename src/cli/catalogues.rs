//! Catalogues that the command line names.

use std::path::Path;

use kiyot_engine::placement::CatalogueFile;
use kiyot_values::csv_rows::WrongRow;

use super::{UsageError, bounded};

/// The name of the catalogue that is built into the program.
pub(super) const BUILT_IN: &str = "ec2-us-east-1";
/// Limit on the unusable rows that are named.
const NAMED_ROWS: usize = 8;

/// Reads the catalogue that is built in, or a file.
pub(super) fn read(name: &Path) -> Result<CatalogueFile, UsageError> {
    if name == Path::new(BUILT_IN) {
        return Ok(CatalogueFile::built_in());
    }
    let text = bounded::read_file(name, CatalogueFile::MAX_BYTES)
        .map_err(|error| UsageError(format!("{}: can't be read: {error}", name.display())))?;
    CatalogueFile::parse(&text).map_err(|error| UsageError(format!("{}: {error}", name.display())))
}

/// Returns notes about unusable rows.
pub(super) fn notes(name: &Path, rows: &[WrongRow]) -> String {
    let shown = rows.iter().take(NAMED_ROWS);
    let mut notes: String =
        shown.map(|row| format!("note: {}: {row}, row skipped\n", name.display())).collect();
    if let Some(more) = rows.len().checked_sub(NAMED_ROWS).filter(|more| *more > 0) {
        notes += &format!("note: {}: {more} more rows skipped\n", name.display());
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_or_unreadable_catalogue_is_refused_with_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("types.csv");
        let refused = || read(&path).unwrap_err().0;
        assert!(refused().starts_with(&format!("{}: can't be read", path.display())));
        let header = "instance_type,vcpus,memory_mib,architectures\n";
        for (text, reason) in [
            ("", "the header has no column instance_type"),
            (header, "the file has no instance type that can be used"),
            (&format!("{header}a,2,-1,arm64\n"), "can be used; line 2: memory_mib"),
        ] {
            std::fs::write(&path, text).unwrap();
            assert!(refused().contains(reason), "{text:?}: {}", refused());
        }
    }
}
