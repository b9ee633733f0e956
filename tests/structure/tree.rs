//! Files of the repository.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Folders without the repository's sources.
const SKIPPED: [&str; 3] = ["target", "artifacts", "corpus"];

pub(crate) fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Reads a file, by its path from the root.
pub(crate) fn text(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Lists the files beneath a folder whose names end with `ending`, sorted, by their paths from the
/// root.
pub(crate) fn files(folder: &str, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    walk(&root().join(folder), ending, &mut found);
    found.sort();
    found
}

fn walk(folder: &Path, ending: &str, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if entry.file_type().unwrap().is_dir() {
            if !SKIPPED.contains(&name.as_str()) && !name.starts_with('.') {
                walk(&entry.path(), ending, found);
            }
        } else if name.ends_with(ending) {
            found.push(entry.path().strip_prefix(root()).unwrap().to_owned());
        }
    }
}
