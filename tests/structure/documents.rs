//! Form of documents: width of lines, and links that lead somewhere.

use std::path::Path;

use crate::tree;

/// Columns of a line of a document. Rows of tables, which can't be broken, may be longer.
const MAX_DOCUMENT_COLUMNS: usize = 120;

/// Lines of a document beyond the last column, without rows of tables and words that can't be
/// broken.
fn wide_document_lines(text: &str) -> Vec<(usize, usize)> {
    let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line));
    lines
        .filter(|(_, line)| !line.starts_with('|') && line.trim().contains(' '))
        .map(|(number, line)| (number, line.chars().count()))
        .filter(|(_, columns)| *columns > MAX_DOCUMENT_COLUMNS)
        .collect()
}

/// Relative targets of the links of a document.
fn links(text: &str) -> Vec<&str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets.filter(|target| !target.contains("://")).collect()
}

/// Paths of the repository in backticks.
fn paths(text: &str) -> Vec<&str> {
    let spans = text.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    let folders = ["src/", "crates/", "tests/", "proto/", "config/", "scripts/", "docs/", "fuzz/"];
    spans
        .filter(|span| folders.iter().any(|folder| span.starts_with(folder)))
        .filter(|span| !span.contains([' ', '*', ':', '.']) || span.ends_with(".rs"))
        .collect()
}

/// The anchor that a heading gets: its words in lower case, with dashes between them.
fn anchor(heading: &str) -> String {
    let kept = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn document_lines_fit_their_columns() {
    for file in tree::files(".", ".md") {
        let wide = wide_document_lines(&tree::text(&file));
        assert!(
            wide.is_empty(),
            "{}: lines (and their columns) beyond {MAX_DOCUMENT_COLUMNS}: {wide:?}",
            file.display()
        );
    }
}

#[test]
fn lists_of_reports_and_decisions_are_complete() {
    for folder in ["docs/reports", "docs/decisions"] {
        let list = tree::text(Path::new(folder).join("README.md"));
        let listed = links(&list);
        for file in tree::files(folder, ".md") {
            let name = file.file_name().unwrap().to_str().unwrap();
            assert!(
                name == "README.md" || listed.contains(&name),
                "{folder}/README.md does not list {name}"
            );
        }
    }
}

#[test]
fn document_links_lead_to_files_and_headings() {
    for file in tree::files(".", ".md") {
        let text = tree::text(&file);
        let folder = file.parent().unwrap_or(Path::new(""));
        for link in links(&text) {
            let (path, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if path.is_empty() { file.clone() } else { folder.join(path) };
            assert!(
                tree::root().join(&target).exists(),
                "{}: {link} leads nowhere",
                file.display()
            );
            assert!(
                heading.is_empty()
                    || tree::text(&target)
                        .lines()
                        .any(|line| line.starts_with('#') && anchor(line) == heading),
                "{}: {link}: the heading does not exist",
                file.display()
            );
        }
    }
}

#[test]
fn document_paths_exist() {
    for file in tree::files(".", ".md") {
        for path in paths(&tree::text(&file)) {
            let exists = |path: &str| tree::root().join(path).exists();
            assert!(
                exists(path) || exists(&format!("{path}.rs")),
                "{}: {path} does not exist",
                file.display()
            );
        }
    }
}

#[test]
fn document_checks_find_long_lines_links_and_anchors() {
    let long = "x ".repeat(61);
    assert_eq!(wide_document_lines(&format!("| {long}|\n{long}\nfine\n")), [(2, 122)]);
    let text = "[a](b.md#c-d) [e](https://f) [g](#h)";
    let text_with_paths = "`src/a`, `src/b.rs`, `src/c *`, `other`\n```\n`tests/d`";
    assert_eq!(paths(text_with_paths), ["src/a", "src/b.rs", "tests/d"]);
    assert_eq!(links(text), ["b.md#c-d", "#h"]);
    assert_eq!(anchor("## A cell does not come up: why?"), "a-cell-does-not-come-up-why");
}
