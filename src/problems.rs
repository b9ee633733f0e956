//! Everything that is wrong with what a human wrote, said at once: configuration, annotations,
//! manifests. Pure.

use std::{cell::RefCell, fmt};

mod field;
mod table;

pub use field::Field;
pub use table::Table;

/// How many characters of a wrong value a problem shows.
const SHOWN_VALUE_CHARS: usize = 120;

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Where: a path of keys such as `server.drain_timeout`, or an annotation's key.
    pub at: String,
    /// What is there, as it was written; `None` if nothing is, or if it may not be shown.
    pub value: Option<String>,
    /// What is wrong with it, and what is allowed.
    pub rule: String,
}

impl Problem {
    /// A problem without a value.
    pub fn new(at: impl Into<String>, rule: impl Into<String>) -> Self {
        Self { at: at.into(), value: None, rule: rule.into() }
    }

    /// A problem with the value that is there. A long one is cut.
    pub fn with_value(
        at: impl Into<String>,
        value: impl fmt::Display,
        rule: impl Into<String>,
    ) -> Self {
        let text = value.to_string();
        let mut shown: String = text.chars().take(SHOWN_VALUE_CHARS).collect();
        if shown.len() < text.len() {
            shown.push('…');
        }
        Self { at: at.into(), value: Some(shown), rule: rule.into() }
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

/// All that is wrong with one thing. Never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems {
    /// What they are of: a file's path, or "the annotations".
    pub of: String,
    /// One by one, in the order in which they were found.
    pub list: Vec<Problem>,
}

impl Problems {
    /// A single one.
    pub fn one(of: impl Into<String>, problem: Problem) -> Self {
        Self { of: of.into(), list: vec![problem] }
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let [only] = self.list.as_slice() {
            return write!(f, "{}: {only}", self.of);
        }
        write!(f, "{}: {} problems", self.of, self.list.len())?;
        self.list.iter().try_for_each(|problem| write!(f, "\n  - {problem}"))
    }
}

impl std::error::Error for Problems {}

/// Collects problems while a thing is read.
#[derive(Debug, Default)]
pub struct Report(RefCell<Vec<Problem>>);

impl Report {
    /// Notes one.
    pub fn add(&self, problem: Problem) {
        self.0.borrow_mut().push(problem);
    }

    /// Whether there is none so far.
    pub fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    /// The value that was read, or all problems if there are any.
    pub fn finish<T>(self, of: impl Into<String>, value: T) -> Result<T, Problems> {
        let list = self.0.into_inner();
        if list.is_empty() { Ok(value) } else { Err(Problems { of: of.into(), list }) }
    }
}
