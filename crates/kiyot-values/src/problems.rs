//! Problems of configurations, annotations and manifests, reported all at once.

use std::{
    cell::RefCell,
    fmt::{self, Write},
};

mod field;
mod table;

pub use field::Field;
pub use table::Table;
pub use table::likely;

/// Characters of a wrong value that a problem shows.
const SHOWN_VALUE_CHARS: usize = 120;
/// Characters of a path of keys that a problem shows.
const SHOWN_PATH_CHARS: usize = 512;
/// Characters of a rule that a problem shows.
const SHOWN_RULE_CHARS: usize = 1024;
/// Most problems that a report lists. It counts the others.
pub const MAX_PROBLEMS: usize = 100;
/// Bytes of a report's list, after which further problems are only counted.
const MAX_LIST_BYTES: usize = 64 * 1024;

/// Problem of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Path of keys such as `server.drain_timeout`, or an annotation's key.
    pub at: String,
    /// Present value; `None` if absent or secret.
    pub value: Option<String>,
    /// Error and allowed values.
    pub rule: String,
}

impl Problem {
    /// Returns a problem without a value.
    pub fn new(at: impl Into<String>, rule: impl Into<String>) -> Self {
        Self { at: at.into(), value: None, rule: rule.into() }
    }

    /// Returns a problem with the present value, shortened if long.
    pub fn with_value(
        at: impl Into<String>,
        value: impl fmt::Display,
        rule: impl Into<String>,
    ) -> Self {
        let value = Some(shown(SHOWN_VALUE_CHARS, value));
        Self { at: at.into(), value, rule: rule.into() }
    }

    fn bytes(&self) -> usize {
        self.at.len() + self.value.as_ref().map_or(0, String::len) + self.rule.len()
    }
}

/// Returns a value as text, shortened to `chars` characters. The rest is not rendered.
pub fn shown(chars: usize, value: impl fmt::Display) -> String {
    let mut beginning = Beginning { text: String::new(), left: chars };
    if write!(beginning, "{value}").is_err() {
        beginning.text.push('…');
    }
    beginning.text
}

/// Shortens a text in place to `chars` characters.
fn shorten(text: &mut String, chars: usize) {
    if let Some((at, _)) = text.char_indices().nth(chars) {
        *text = format!("{}…", &text[..at]);
    }
}

/// Collects the beginning of a text. Writing more is an error.
struct Beginning {
    text: String,
    /// Characters that still fit.
    left: usize,
}

impl fmt::Write for Beginning {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = text.char_indices().nth(self.left).map(|(at, _)| at);
        let fitting = &text[..end.unwrap_or(text.len())];
        self.left = self.left.saturating_sub(fitting.chars().count());
        self.text.push_str(fitting);
        if end.is_some() { Err(fmt::Error) } else { Ok(()) }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Some(value) => write!(f, "{} = {}: {}", self.at, value, self.rule),
            None => write!(f, "{}: {}", self.at, self.rule),
        }
    }
}

/// All problems of an input. Never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems {
    /// Source: a file's path, or "the annotations".
    pub of: String,
    /// Problems, in the order of their discovery: [`MAX_PROBLEMS`] at most.
    pub list: Vec<Problem>,
    /// Number of further problems.
    pub more: usize,
    /// Remarks that may explain the problems, such as unknown fields.
    pub notes: Vec<String>,
}

impl Problems {
    /// Returns a single problem.
    pub fn one(of: impl Into<String>, problem: Problem) -> Self {
        let report = Report::default();
        report.add(problem);
        report.problems(of)
    }

    /// Adds remarks.
    #[must_use]
    pub fn with_notes(mut self, notes: Vec<String>) -> Self {
        self.notes = notes;
        self
    }

    /// Returns the text with as many problems as fit in `bytes`, at least the first.
    pub fn within(mut self, bytes: usize) -> String {
        while !self.notes.is_empty() && self.to_string().len() > bytes {
            self.notes.pop();
        }
        while self.list.len() > 1 && self.to_string().len() > bytes {
            self.more += 1;
            self.list.pop();
        }
        self.to_string()
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { of, list, more, notes } = self;
        if let ([only], 0) = (list.as_slice(), more) {
            write!(f, "{of}: {only}")?;
        } else {
            write!(f, "{of}: {} problems", list.len() + more)?;
            list.iter().try_for_each(|problem| write!(f, "\n  - {problem}"))?;
            if *more > 0 {
                write!(f, "\n  and {more} more")?;
            }
        }
        notes.iter().try_for_each(|note| write!(f, "\n  note: {note}"))
    }
}

impl std::error::Error for Problems {}

/// Collector of problems. Its list is bounded in number and bytes; it counts the others.
#[derive(Debug, Default)]
pub struct Report(RefCell<Collected>);

#[derive(Debug, Default)]
struct Collected {
    list: Vec<Problem>,
    /// Bytes of the list.
    bytes: usize,
    more: usize,
}

impl Report {
    /// Adds a problem, with shortened texts.
    pub fn add(&self, mut problem: Problem) {
        let mut collected = self.0.borrow_mut();
        if collected.is_full() {
            collected.more += 1;
            return;
        }
        shorten(&mut problem.at, SHOWN_PATH_CHARS);
        shorten(&mut problem.rule, SHOWN_RULE_CHARS);
        collected.bytes += problem.bytes();
        collected.list.push(problem);
    }

    /// Adds problems. Takes only as many from the iterator as are listed, and counts the others.
    pub fn add_all(&self, problems: impl ExactSizeIterator<Item = Problem>) {
        let mut problems = problems;
        while !self.0.borrow().is_full() {
            let Some(problem) = problems.next() else { return };
            self.add(problem);
        }
        self.0.borrow_mut().more += problems.len();
    }

    /// Adds all problems of another report.
    pub fn add_report(&self, other: Self) {
        let Collected { list, more, .. } = other.0.into_inner();
        list.into_iter().for_each(|problem| self.add(problem));
        self.0.borrow_mut().more += more;
    }

    /// Returns the number of problems.
    pub fn len(&self) -> usize {
        let collected = self.0.borrow();
        collected.list.len() + collected.more
    }

    /// Returns whether there is no problem.
    pub fn is_empty(&self) -> bool {
        self.0.borrow().list.is_empty()
    }

    /// Returns the value, or the problems if there are any.
    pub fn finish<T>(self, of: impl Into<String>, value: T) -> Result<T, Problems> {
        if self.is_empty() { Ok(value) } else { Err(self.problems(of)) }
    }

    fn problems(self, of: impl Into<String>) -> Problems {
        let Collected { list, more, .. } = self.0.into_inner();
        Problems { of: of.into(), list, more, notes: Vec::new() }
    }
}

impl Collected {
    fn is_full(&self) -> bool {
        self.list.len() >= MAX_PROBLEMS || self.bytes >= MAX_LIST_BYTES
    }
}

#[cfg(test)]
mod tests;
