//! A table whose keys are known.

use serde_json::{Map, Value};

use super::{Field, Problem, Report};

/// From this likeness on (Jaro-Winkler, 0 to 1) a known key is proposed for an unknown one.
const LIKENESS: f64 = 0.75;

/// How many known keys are proposed for an unknown one.
const PROPOSALS: usize = 3;

/// A table: its keys are taken one by one, and [`Table::finish`] notes those that nobody took.
#[derive(Debug)]
#[must_use = "keys that nobody took are noted by finish()"]
pub struct Table<'r> {
    at: String,
    fields: Map<String, Value>,
    known: Vec<&'static str>,
    report: &'r Report,
}

impl<'r> Table<'r> {
    /// A table at a path of keys; the outermost one's is empty.
    pub fn new(at: impl Into<String>, fields: Map<String, Value>, report: &'r Report) -> Self {
        Self { at: at.into(), fields, known: Vec::new(), report }
    }

    /// The path of keys that leads to it.
    pub fn at(&self) -> &str {
        &self.at
    }

    /// The path of one of its keys.
    pub fn path_of(&self, key: &str) -> String {
        if self.at.is_empty() { key.to_owned() } else { format!("{}.{key}", self.at) }
    }

    /// Where problems are noted.
    pub fn report(&self) -> &'r Report {
        self.report
    }

    /// Whether a key is there, and not taken.
    pub fn has(&self, key: &str) -> bool {
        self.fields.get(key).is_some_and(|value| !value.is_null())
    }

    /// The value of a key, if it is there and is not null.
    pub fn take(&mut self, key: &'static str) -> Option<Field<'r>> {
        self.known.push(key);
        let value = self.fields.remove(key).filter(|value| !value.is_null())?;
        Some(Field::new(self.path_of(key), value, self.report))
    }

    /// The value of a key that must be there.
    pub fn need(&mut self, key: &'static str, allowed: &str) -> Option<Field<'r>> {
        let field = self.take(key);
        if field.is_none() {
            self.report
                .add(Problem::new(self.path_of(key), format!("is missing; allowed is {allowed}")));
        }
        field
    }

    /// Sets a target to what is read of a key, if it is there and right.
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

    /// Notes the keys that nobody took.
    pub fn finish(self) {
        for key in self.fields.keys() {
            let mut likely: Vec<(f64, &str)> =
                self.known.iter().map(|known| (strsim::jaro_winkler(key, known), *known)).collect();
            likely.retain(|(likeness, _)| *likeness >= LIKENESS);
            likely.sort_by(|(one, _), (other, _)| other.total_cmp(one));
            let (words, names) = if likely.is_empty() {
                ("allowed here are", self.known.clone())
            } else {
                (
                    "the nearest known keys are",
                    likely.into_iter().take(PROPOSALS).map(|(_, known)| known).collect(),
                )
            };
            self.report.add(Problem::new(
                self.path_of(key),
                format!("is no known key; {words}: {}", names.join(", ")),
            ));
        }
    }
}
