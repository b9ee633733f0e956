//! Style of Rust sources: openings of docs, width of lines, log and error texts, test names.
//! CONTRIBUTING.md has the rules with their reasons.

use crate::{
    lexer::{self, Kind, Token},
    tree,
};

/// Folders with Rust sources.
const FOLDERS: [&str; 6] = ["src", "crates", "tests", "benches", "examples", "fuzz"];

/// Columns of a line of Rust.
const MAX_RUST_COLUMNS: usize = 100;
/// First words that a doc comment must not have, because they hide its subject.
const RIDDLES: [&str; 11] =
    ["What", "Who", "Whose", "Whether", "Why", "It", "One", "As", "Of", "To", "From"];

/// First words that a test name must not have: it is `subject_condition_result`.
const EMPTY_WORDS: [&str; 19] = [
    "a", "an", "the", "it", "its", "one", "this", "that", "there", "what", "who", "whose", "whom",
    "which", "whether", "when", "where", "why", "how",
];

/// Macros that log, by their names in the crate `tracing`.
const LOG_MACROS: [&str; 6] = ["trace", "debug", "info", "warn", "error", "event"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Check {
    DocOpening,
    Width,
    LogText,
    ErrorText,
    TestName,
}

impl Check {
    /// Returns the lines of a source that violate this check, with their numbers.
    fn violations(self, source: &str) -> Vec<(usize, String)> {
        let tokens = lexer::tokens(source);
        match self {
            Self::DocOpening => doc_openings(&tokens),
            Self::Width => wide_lines(source, &tokens),
            Self::LogText => texts(log_texts(&tokens)),
            Self::ErrorText => texts(error_texts(&tokens)),
            Self::TestName => test_names(&tokens),
        }
    }

    /// Runs this check on all Rust sources.
    ///
    /// # Panics
    /// For violations, with the line of each.
    fn run(self) {
        let mut found = Vec::new();
        for folder in FOLDERS {
            for file in tree::files(folder, ".rs") {
                for (line, text) in self.violations(&tree::text(&file)) {
                    found.push(format!("{}:{line}: {text}", file.display()));
                }
            }
        }
        assert!(found.is_empty(), "{self:?}: {} violations:\n{}", found.len(), found.join("\n"));
    }
}

/// Doc comments whose first word is a riddle.
fn doc_openings(tokens: &[Token]) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut previous = None;
    for token in tokens {
        let Kind::Doc(marker, text) = &token.kind else { continue };
        let continues = previous == Some((token.line - 1, *marker));
        previous = Some((token.line, *marker));
        let word = text.split(|c: char| !c.is_alphanumeric() && c != '-').next();
        let word = word.unwrap_or_default();
        if !continues && RIDDLES.contains(&word) {
            found.push((token.line, format!("the doc opens with {word:?}: {text}")));
        }
    }
    found
}

/// Lines beyond the last column. The lines of raw strings can't be broken and are not counted.
fn wide_lines(source: &str, tokens: &[Token]) -> Vec<(usize, String)> {
    let raw: Vec<_> = tokens
        .iter()
        .filter_map(|token| match &token.kind {
            Kind::RawText(text) => Some(token.line..=token.line + text.matches('\n').count()),
            _ => None,
        })
        .collect();
    source
        .lines()
        .enumerate()
        .map(|(index, line)| (index + 1, line.chars().count()))
        .filter(|(line, columns)| {
            *columns > MAX_RUST_COLUMNS && !raw.iter().any(|lines| lines.contains(line))
        })
        .map(|(line, columns)| (line, format!("{columns} columns; allowed: {MAX_RUST_COLUMNS}")))
        .collect()
}

/// Messages of log macros with their lines.
fn log_texts(tokens: &[Token]) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        let Kind::Word(name) = &token.kind else { continue };
        let opens = |offset: usize, sign| {
            tokens.get(at + offset).is_some_and(|token| token.kind == Kind::Sign(sign))
        };
        if LOG_MACROS.contains(&name.as_str()) && opens(1, '!') && opens(2, '(') {
            found.extend(message(&tokens[at + 3..]));
        }
    }
    found
}

/// Returns the first argument of a macro that begins with a string literal.
fn message(arguments: &[Token]) -> Option<(usize, &str)> {
    let (mut depth, mut begins) = (0, true);
    for token in arguments {
        match &token.kind {
            Kind::Sign('(' | '[' | '{') => depth += 1,
            Kind::Sign(')' | ']' | '}') if depth == 0 => return None,
            Kind::Sign(')' | ']' | '}') => depth -= 1,
            Kind::Text(text) | Kind::RawText(text) if begins && depth == 0 => {
                return Some((token.line, text));
            }
            _ => {}
        }
        begins = depth == 0 && token.kind == Kind::Sign(',');
    }
    None
}

/// Messages of `#[error("...")]` with their lines.
fn error_texts(tokens: &[Token]) -> Vec<(usize, &str)> {
    let attributes = tokens.windows(5).filter_map(|window| match window {
        [
            Token { kind: Kind::Sign('#'), .. },
            Token { kind: Kind::Sign('['), .. },
            Token { kind: Kind::Word(word), .. },
            Token { kind: Kind::Sign('('), .. },
            Token { kind: Kind::Text(text), line },
        ] if word == "error" => Some((*line, text.as_str())),
        _ => None,
    });
    attributes.collect()
}

/// Texts that begin with a capital or end with a full stop.
fn texts(all: Vec<(usize, &str)>) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (line, text) in all {
        if begins_with_capital(text) {
            found.push((line, format!("the text begins with a capital: {text:?}")));
        }
        if text.ends_with('.') && !text.ends_with("...") {
            found.push((line, format!("the text ends with a full stop: {text:?}")));
        }
    }
    found
}

/// Returns whether a text begins with a capitalized word. Names such as CNI, RunPodSandbox and
/// HTTP/2 are allowed.
fn begins_with_capital(text: &str) -> bool {
    let word = text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
    let mut letters = word.chars();
    letters.next().is_some_and(char::is_uppercase)
        && !letters.any(|letter| letter.is_uppercase() || letter.is_numeric())
}

/// Tests whose names begin with an empty word.
fn test_names(tokens: &[Token]) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut is_test = false;
    for (at, token) in tokens.iter().enumerate() {
        let next = |offset: usize| tokens.get(at + offset).map(|token| &token.kind);
        if token.kind == Kind::Sign('#') && next(1) == Some(&Kind::Sign('[')) {
            let attribute = tokens[at..]
                .iter()
                .take_while(|token| !matches!(token.kind, Kind::Sign(']' | '(')));
            is_test |=
                attribute.last().map(|token| &token.kind) == Some(&Kind::Word("test".to_owned()));
        } else if token.kind == Kind::Word("fn".to_owned()) {
            if let Some(Kind::Word(name)) = next(1) {
                let word = name.split('_').next().unwrap_or_default();
                if is_test && EMPTY_WORDS.contains(&word) {
                    found.push((
                        token.line,
                        format!("the test's name begins with {word:?}: {name}"),
                    ));
                }
            }
            is_test = false;
        }
    }
    found
}

#[test]
fn docs_open_with_their_subject() {
    Check::DocOpening.run();
}

#[test]
fn rust_lines_fit_their_columns() {
    Check::Width.run();
}

#[test]
fn log_messages_are_lower_case_without_a_full_stop() {
    Check::LogText.run();
}

#[test]
fn error_messages_are_lower_case_without_a_full_stop() {
    Check::ErrorText.run();
}

#[test]
fn test_names_begin_with_their_subject() {
    Check::TestName.run();
}

#[test]
fn doc_opening_check_finds_riddles_and_skips_later_lines() {
    let source = concat!(
        "//! What it is.\n\n/// Whose it is,\n/// What follows is a second line.\nstruct A;\n",
        "/// Returns it.\n/// It is fine here.\nfn b() {}\n/// One-time tokens.\nfn c() {}\n",
        "/// As, here.\nfn d() {}\n// What a comment.\nfn e() {}\n",
    );
    let lines: Vec<_> =
        Check::DocOpening.violations(source).into_iter().map(|(line, _)| line).collect();
    assert_eq!(lines, [1, 3, 11]);
}

#[test]
fn width_check_counts_characters_and_skips_raw_strings() {
    let source = format!(
        "// {}\n// {}\nconst A: &str = r\"{}\";\nlet b = \"{}\";\n",
        "ä".repeat(97),
        "x".repeat(98),
        "y".repeat(200),
        "z".repeat(100),
    );
    let found = Check::Width.violations(&source);
    assert_eq!(found.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [2, 4]);
    assert_eq!(found[0].1, "101 columns; allowed: 100");
}

#[test]
fn log_check_finds_capitals_and_full_stops() {
    let source = concat!(
        "fn f() {\n",
        "info!(cell = %id, \"A cell enrolled\");\n",
        "tracing::warn!(\"connection lost.\");\n",
        "error!(error = &format!(\"Not {}.\", x), \"the store \\\n   failed.\");\n",
        "debug!(\"CNI plugin {name} failed\"); trace!(\"RunPodSandbox\");\n",
        "info!(\"waiting ...\");\n",
        "warn!(count, \"{name} lost\"); println!(\"Not a log.\"); let error = \"Text.\";\n}\n",
    );
    let found = Check::LogText.violations(source);
    assert_eq!(
        found,
        [
            (2, "the text begins with a capital: \"A cell enrolled\"".to_owned()),
            (3, "the text ends with a full stop: \"connection lost.\"".to_owned()),
            (4, "the text ends with a full stop: \"the store failed.\"".to_owned()),
        ]
    );
}

#[test]
fn error_check_finds_capitals_and_full_stops() {
    let source = concat!(
        "#[error(\"The store failed\")]\nA,\n#[error(\"no {0}.\")]\nB,\n",
        "#[error(transparent)]\nC,\n#[error(\"{0} is absent\")]\nD,\n",
        "#[error(\"TLS failed\")]\nE,\n",
    );
    let lines: Vec<_> =
        Check::ErrorText.violations(source).into_iter().map(|(line, _)| line).collect();
    assert_eq!(lines, [1, 3]);
}

#[test]
fn test_name_check_finds_empty_words_of_tests_only() {
    let source = concat!(
        "#[test]\nfn a_pod_runs() {}\n",
        "#[tokio::test(start_paused = true)]\nasync fn what_runs() {}\n",
        "fn the_helper() {}\n#[test]\n#[ignore = \"slow\"]\nfn how_it_ends() {}\n",
        "#[cfg(test)]\nmod tests { fn it_helps() {} }\n#[test]\nfn agent_restart_keeps_pod() {}\n",
    );
    let lines: Vec<_> =
        Check::TestName.violations(source).into_iter().map(|(line, _)| line).collect();
    assert_eq!(lines, [2, 4, 8]);
}
