//! Places of typed values, for checks that their types don't make.

use kiyot_values::problems::{Field, Problem, Report};
use serde_json::Value;

/// Place of a value.
#[derive(Debug, Clone)]
pub(super) struct Place<'r> {
    at: String,
    report: &'r Report,
}

impl<'r> Place<'r> {
    /// Names a place of a report.
    pub(super) fn new(at: impl Into<String>, report: &'r Report) -> Self {
        Self { at: at.into(), report }
    }

    /// Returns the place as a path of keys.
    pub(super) fn at(&self) -> &str {
        &self.at
    }

    /// Returns the collector of problems.
    pub(super) fn collector(&self) -> &'r Report {
        self.report
    }

    /// Returns the place of a field.
    pub(super) fn of(&self, key: &str) -> Self {
        Self::new(format!("{}.{key}", self.at), self.report)
    }

    /// Returns a value with its place, for a check.
    pub(super) fn field(&self, value: impl Into<Value>) -> Field<'r> {
        Field::new(&self.at, value.into(), self.report)
    }

    /// Returns a field with its place, for a check. As in Go, an empty text is absent.
    pub(super) fn take(&self, key: &str, value: Option<impl Into<Value>>) -> Option<Field<'r>> {
        let value = value.map(Into::into).filter(|value| value.as_str() != Some(""))?;
        Some(self.of(key).field(value))
    }

    /// Returns a required field with its place.
    pub(super) fn need(
        &self,
        key: &str,
        value: Option<impl Into<Value>>,
        allowed: &str,
    ) -> Option<Field<'r>> {
        let field = self.take(key, value);
        if field.is_none() {
            self.of(key).report(format!("is missing; allowed: {allowed}"));
        }
        field
    }

    /// Reads the items of a list with their places, and omits refused items.
    pub(super) fn items<T, U>(
        &self,
        key: &str,
        items: Option<Vec<T>>,
        read: impl Fn(Self, T) -> Option<U>,
    ) -> Vec<U> {
        let place = |index| Self::new(format!("{}.{key}[{index}]", self.at), self.report);
        let items = items.unwrap_or_default().into_iter().enumerate();
        items.filter_map(|(index, item)| read(place(index), item)).collect()
    }

    /// Reports a problem of this place.
    pub(super) fn report(&self, rule: impl Into<String>) {
        self.report.add(Problem::new(&self.at, rule));
    }

    /// Reports the value of this place.
    pub(super) fn refuse(&self, value: impl std::fmt::Display, rule: impl Into<String>) {
        self.report.add(Problem::with_value(&self.at, value, rule));
    }
}
