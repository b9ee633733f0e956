//! How long files are.

use crate::tree;

/// Lines of the longest file that is allowed.
const MAX_LINES: usize = 800;

#[test]
fn no_file_is_too_long() {
    for folder in ["src", "crates", "tests", "benches", "fuzz"] {
        for file in tree::files(folder, ".rs") {
            let lines = tree::text(&file).lines().count();
            assert!(
                lines <= MAX_LINES,
                "{} has {lines} lines; allowed are {MAX_LINES}",
                file.display()
            );
        }
    }
}
