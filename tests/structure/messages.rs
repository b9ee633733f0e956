//! Messages that docs/operate.md quotes from events, statuses and the log, and its alerts.

use std::path::Path;

use crate::{
    lexer::{self, Kind},
    source::without_tests,
    tree,
};

const PAGE: &str = "docs/operate.md";

/// The tables that quote the program: the header row, and the column with the quotes.
const TABLES: [(&str, usize); 3] = [
    ("| class | words in the event | do |", 1),
    ("| status | words | do |", 1),
    ("| message | meaning; do |", 0),
];

/// Returns the texts in backticks in a column of the table with this header row.
fn quoted<'a>(page: &'a str, head: &str, column: usize) -> Vec<&'a str> {
    let rows = page.lines().skip_while(|line| *line != head).skip(2);
    let rows = rows.take_while(|line| line.starts_with('|'));
    let cells = rows.filter_map(|row| row.trim_start_matches('|').split('|').nth(column));
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect()
}

/// Returns whether a source is a part of the daemon, its agent or its tool.
fn is_production(file: &Path) -> bool {
    let names: Vec<&str> = file.iter().filter_map(|name| name.to_str()).collect();
    match names.as_slice() {
        ["crates", "kiyot-testkit" | "kiyot-testcloud", ..] => false,
        ["src", inner @ ..] | ["crates", _, "src", inner @ ..] => {
            !inner.iter().any(|name| ["tests", "tests.rs"].contains(name))
        }
        _ => false,
    }
}

/// Returns the string literals of a source without its unit tests (at its end).
fn literals(source: &str) -> Vec<String> {
    let texts =
        lexer::tokens(without_tests(source)).into_iter().filter_map(|token| match token.kind {
            Kind::Text(text) => Some(text.replace("\\\"", "\"")),
            Kind::RawText(text) => Some(text),
            _ => None,
        });
    texts.collect()
}

/// Returns whether a literal has these words, at least two.
fn has_words(literal: &str, words: &str) -> bool {
    let is_whole = |at: usize| {
        !literal[..at].ends_with(char::is_alphanumeric)
            && !literal[at + words.len()..].starts_with(char::is_alphanumeric)
    };
    words.contains(' ') && literal.match_indices(words).any(|(at, _)| is_whole(at))
}

#[test]
fn quoted_messages_exist_in_the_sources() {
    let page = tree::text(PAGE);
    let sources = [tree::files("src", ".rs"), tree::files("crates", ".rs")].concat();
    let sources = sources.iter().filter(|file| is_production(file));
    let literals: Vec<String> = sources.flat_map(|file| literals(&tree::text(file))).collect();
    for (head, column) in TABLES {
        let quoted = quoted(&page, head, column);
        assert!(!quoted.is_empty(), "{PAGE} lacks the table {head:?}");
        let is_absent = |words: &&&str| !literals.iter().any(|literal| has_words(literal, words));
        let absent: Vec<_> = quoted.iter().filter(is_absent).collect();
        assert!(absent.is_empty(), "{PAGE} quotes what no source has: {absent:?}");
    }
}

#[test]
fn alerts_are_listed() {
    let page = tree::text(PAGE);
    let rules = tree::text("deploy/prometheus/kiyot-rules.yaml");
    let alerts = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    let absent: Vec<_> = alerts.filter(|alert| !page.contains(alert)).collect();
    assert!(absent.is_empty(), "{PAGE} lacks {absent:?}");
}

#[test]
fn messages_match_words_of_literals_only() {
    let page = "| message | meaning; do |\n| --- | --- |\n| `a b`, `c d` | `e f` |\n\n| `g` | |\n";
    assert_eq!(quoted(page, "| message | meaning; do |", 0), ["a b", "c d"]);
    assert!(quoted(page, "| other |", 0).is_empty());
    let source = "// Comment.\nx!(\"pod \\\"{}\\\" lost its \\\n    cell\");\n\
                  #[cfg(test)]\nmod tests;\nconst A: &str = \"cell ended\";\n\
                  #[cfg(test)]\nmod tests { const B: &str = \"a test\"; }\n";
    assert_eq!(literals(source), ["pod \"{}\" lost its cell", "cell ended"]);
    assert!(has_words("pod lost its cell", "lost its cell"));
    assert!(!has_words("pod lost its cells", "lost its cell"));
    assert!(!has_words("pod lost its cell", "its the cell"));
    assert!(!has_words("pod lost its cell", "cell"));
    let is = |file: &str| is_production(Path::new(file));
    assert!(is("src/cli.rs") && is("crates/kiyot-cell/src/agent.rs"));
    assert!(!is("src/cli/tests.rs") && !is("src/a/tests/b.rs"));
    assert!(!is("crates/kiyot-cell/tests/c.rs") && !is("crates/kiyot-testkit/src/log.rs"));
}
