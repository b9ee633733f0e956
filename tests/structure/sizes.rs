//! Lengths of source files.

use crate::tree;

/// Lines of a source file.
const MAX_LINES: usize = 800;

#[test]
fn files_fit_their_lines() {
    for folder in ["src", "crates", "tests", "benches", "fuzz"] {
        for file in tree::files(folder, ".rs") {
            let lines = tree::text(&file).lines().count();
            assert!(
                lines <= MAX_LINES,
                "{} has {lines} lines; allowed: {MAX_LINES}",
                file.display()
            );
        }
    }
}
