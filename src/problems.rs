//! Problems of configurations, annotations and manifests, reported all at once.

use std::{cell::RefCell, fmt};

mod field;
mod table;

pub use field::Field;
pub use table::Table;

/// Characters of a wrong value that a problem shows.
const SHOWN_VALUE_CHARS: usize = 120;

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

/// All problems of an input. Never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems {
    /// Source: a file's path, or "the annotations".
    pub of: String,
    /// Problems, in the order of their discovery.
    pub list: Vec<Problem>,
}

impl Problems {
    /// Returns a single problem.
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

/// Collector of problems.
#[derive(Debug, Default)]
pub struct Report(RefCell<Vec<Problem>>);

impl Report {
    /// Adds a problem.
    pub fn add(&self, problem: Problem) {
        self.0.borrow_mut().push(problem);
    }

    /// Says if there is no problem.
    pub fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    /// Returns the value, or all problems if there are any.
    pub fn finish<T>(self, of: impl Into<String>, value: T) -> Result<T, Problems> {
        let list = self.0.into_inner();
        if list.is_empty() { Ok(value) } else { Err(Problems { of: of.into(), list }) }
    }
}
