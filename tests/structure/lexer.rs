//! A lexer for the parts of Rust source that the checks need: comments, literals and words.

/// A part of a source file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Token {
    /// Line number, from 1.
    pub(crate) line: usize,
    pub(crate) kind: Kind,
}

/// The kind of a token, with its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A line of an outer (`///`) or inner (`//!`) doc comment, without the marker.
    Doc(&'static str, String),
    /// A string literal without its quotes. Escapes stay; a line continuation is removed.
    Text(String),
    /// A raw string literal without its quotes.
    RawText(String),
    /// An identifier, keyword or number.
    Word(String),
    /// A single other character.
    Sign(char),
}

/// Splits a source file into tokens. Ordinary comments and character literals are skipped.
pub(crate) fn tokens(source: &str) -> Vec<Token> {
    let mut lexer = Lexer { rest: source, line: 1, tokens: Vec::new() };
    while lexer.step() {}
    lexer.tokens
}

struct Lexer<'a> {
    rest: &'a str,
    line: usize,
    tokens: Vec<Token>,
}

impl<'a> Lexer<'a> {
    /// Consumes this many bytes and returns them.
    fn take(&mut self, bytes: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(bytes);
        self.line += taken.matches('\n').count();
        self.rest = rest;
        taken
    }

    fn push(&mut self, line: usize, kind: Kind) {
        self.tokens.push(Token { line, kind });
    }

    /// Consumes one token, comment or space. Returns false at the end of the source.
    fn step(&mut self) -> bool {
        let line = self.line;
        let Some(first) = self.rest.chars().next() else { return false };
        if self.rest.starts_with("//") {
            let text = self.take(self.rest.find('\n').unwrap_or(self.rest.len()));
            // Four slashes are an ordinary comment.
            for marker in ["///", "//!"] {
                if let Some(doc) = text.strip_prefix(marker)
                    && !doc.starts_with('/')
                {
                    self.push(line, Kind::Doc(marker, doc.trim().to_owned()));
                }
            }
        } else if self.rest.starts_with("/*") {
            self.block_comment();
        } else if let Some(length) = raw_string(self.rest) {
            let text = self.take(length);
            let (open, close) = (text.find('"').unwrap_or(0), text.rfind('"').unwrap_or(length));
            self.push(line, Kind::RawText(text[open + 1..close].to_owned()));
        } else if first == '"' || self.rest.starts_with("b\"") {
            let quote = self.rest.find('"').unwrap_or(0);
            let length = quoted(&self.rest[quote..], '"');
            let text = self.take(quote + length);
            self.push(line, Kind::Text(continued(text[quote + 1..].trim_end_matches('"'))));
        } else if first == '\'' && is_char_literal(self.rest) {
            self.take(quoted(self.rest, '\''));
        } else if first.is_alphanumeric() || first == '_' {
            let end = self.rest.find(|c: char| !c.is_alphanumeric() && c != '_');
            let word = self.take(end.unwrap_or(self.rest.len())).to_owned();
            self.push(line, Kind::Word(word));
        } else {
            self.take(first.len_utf8());
            if !first.is_whitespace() {
                self.push(line, Kind::Sign(first));
            }
        }
        true
    }

    /// Consumes a block comment with its nested comments.
    fn block_comment(&mut self) {
        let mut depth = 0;
        while !self.rest.is_empty() {
            if self.rest.starts_with("/*") {
                depth += 1;
                self.take(2);
            } else if self.rest.starts_with("*/") {
                depth -= 1;
                self.take(2);
                if depth == 0 {
                    return;
                }
            } else {
                self.take(self.rest.chars().next().map_or(1, char::len_utf8));
            }
        }
    }
}

/// Returns the length of a raw string literal at the beginning of a text.
fn raw_string(text: &str) -> Option<usize> {
    let after = text.strip_prefix("br").or_else(|| text.strip_prefix('r'))?;
    let hashes = after.len() - after.trim_start_matches('#').len();
    let body = after[hashes..].strip_prefix('"')?;
    let close = format!("\"{}", "#".repeat(hashes));
    Some(text.len() - body.len() + body.find(&close)? + close.len())
}

/// Returns the length of a literal with escapes that begins and ends with a quote.
fn quoted(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, letter) in text.char_indices().skip(1) {
        match letter {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if letter == quote => return at + letter.len_utf8(),
            _ => {}
        }
    }
    text.len()
}

/// Returns whether a text begins with a character literal, not with a lifetime.
fn is_char_literal(text: &str) -> bool {
    let mut letters = text.chars().skip(1);
    match letters.next() {
        Some('\\') => true,
        Some(_) => letters.next() == Some('\''),
        None => false,
    }
}

/// Removes line continuations: a backslash at the end of a line, and the indentation of the next.
fn continued(text: &str) -> String {
    let mut parts = text.split("\\\n");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |all, part| all + part.trim_start())
}

#[test]
fn tokens_distinguish_comments_literals_and_words() {
    let source = concat!(
        "//! Inner.\n/// Outer \"x\".\n//// Four.\n// Plain.\n",
        "fn a<'b>(c: &'b str) { /* x /* y */ \"z\" */ ",
        "d!(\"e \\\"f\\\" \\\n   g\", 'h', '\\''); }\n",
        "const I: &str = r#\"j \"k\" \"#; const L: &[u8] = b\"m\";\n",
    );
    let found = tokens(source);
    let docs: Vec<_> = found
        .iter()
        .filter_map(|token| match &token.kind {
            Kind::Doc(marker, text) => Some((token.line, *marker, text.as_str())),
            _ => None,
        })
        .collect();
    assert_eq!(docs, [(1, "//!", "Inner."), (2, "///", "Outer \"x\".")]);
    let texts: Vec<_> = found
        .iter()
        .filter_map(|token| match &token.kind {
            Kind::Text(text) | Kind::RawText(text) => Some((token.line, text.as_str())),
            _ => None,
        })
        .collect();
    assert_eq!(texts, [(5, "e \\\"f\\\" g"), (7, "j \"k\" "), (7, "m")]);
    assert!(found.contains(&Token { line: 7, kind: Kind::Word("L".to_owned()) }));
    assert!(!found.contains(&Token { line: 5, kind: Kind::Word("z".to_owned()) }));
}
