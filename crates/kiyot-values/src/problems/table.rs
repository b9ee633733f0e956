//! Tables with known keys.

use serde_json::{Map, Value};

use super::{Field, Problem, Report};

/// Least similarity (Jaro-Winkler, 0 to 1) of a known key that is proposed for an unknown key.
const LIKENESS: f64 = 0.75;

/// Known keys proposed for an unknown key.
const PROPOSALS: usize = 3;

/// Longest unknown key for which known keys are proposed, in bytes.
const MAX_LIKELY_BYTES: usize = 128;

/// Table whose keys are taken one by one. [`Table::finish`] reports the rest.
#[derive(Debug)]
#[must_use = "finish() reports the keys that were not taken"]
pub struct Table<'r> {
    at: String,
    fields: Map<String, Value>,
    known: Vec<&'static str>,
    report: &'r Report,
}

impl<'r> Table<'r> {
    /// Wraps a table at a path of keys; the outermost path is empty.
    pub fn new(at: impl Into<String>, fields: Map<String, Value>, report: &'r Report) -> Self {
        Self { at: at.into(), fields, known: Vec::new(), report }
    }

    /// Returns the path of keys.
    pub fn at(&self) -> &str {
        &self.at
    }

    /// Returns the path of a key.
    pub fn path_of(&self, key: &str) -> String {
        if self.at.is_empty() { key.to_owned() } else { format!("{}.{key}", self.at) }
    }

    /// Returns the collector of problems.
    pub fn report(&self) -> &'r Report {
        self.report
    }

    /// Takes the value of a key, unless it is absent or null.
    pub fn take(&mut self, key: &'static str) -> Option<Field<'r>> {
        self.known.push(key);
        let value = self.fields.remove(key).filter(|value| !value.is_null())?;
        Some(Field::new(self.path_of(key), value, self.report))
    }

    /// Takes the value of a required key.
    pub fn need(&mut self, key: &'static str, allowed: &str) -> Option<Field<'r>> {
        let field = self.take(key);
        if field.is_none() {
            self.report
                .add(Problem::new(self.path_of(key), format!("is missing; allowed: {allowed}")));
        }
        field
    }

    /// Sets a target to the value of a key, if it is present and valid.
    pub fn set<T>(
        &mut self,
        key: &'static str,
        target: &mut T,
        read: impl FnOnce(Field<'r>) -> Option<T>,
    ) {
        if let Some(value) = self.take(key).and_then(read) {
            *target = value;
        }
    }

    /// Reports the keys that are left.
    pub fn finish(self) {
        self.report.add_all(self.fields.keys().map(|key| {
            let (words, names) = match likely(key, &self.known) {
                likely if likely.is_empty() => ("allowed", self.known.clone()),
                likely => ("did you mean", likely),
            };
            Problem::new(
                self.path_of(key),
                format!("is an unknown key; {words}: {}", names.join(", ")),
            )
        }));
    }
}

/// Returns the known keys that are similar to an unknown key.
pub fn likely(key: &str, known: &[&'static str]) -> Vec<&'static str> {
    if key.len() > MAX_LIKELY_BYTES {
        return Vec::new();
    }
    let mut likely: Vec<(f64, &str)> =
        known.iter().map(|known| (strsim::jaro_winkler(key, known), *known)).collect();
    likely.retain(|(likeness, _)| *likeness >= LIKENESS);
    likely.sort_by(|(one, _), (other, _)| other.total_cmp(one));
    likely.into_iter().take(PROPOSALS).map(|(_, known)| known).collect()
}

#[cfg(test)]
mod tests;
