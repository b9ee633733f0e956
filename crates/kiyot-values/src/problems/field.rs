//! Values of tables.

use std::{collections::BTreeMap, fmt, ops::RangeInclusive, str::FromStr};

use serde_json::Value;

use super::{Problem, Report, Table};

/// Most items of a list.
const MAX_ITEMS: usize = 1024;
/// Most entries of a table with arbitrary keys.
const MAX_ENTRIES: usize = 10_000;

/// Value with its path of keys. Its readers report a problem and return `None` for any other type.
#[derive(Debug)]
pub struct Field<'r> {
    at: String,
    value: Value,
    report: &'r Report,
    secret: bool,
}

impl<'r> Field<'r> {
    /// Wraps a value at a path.
    pub fn new(at: impl Into<String>, value: Value, report: &'r Report) -> Self {
        Self { at: at.into(), value, report, secret: false }
    }

    /// Wraps a secret value, which problems don't show.
    pub fn secret(mut self) -> Self {
        self.secret = true;
        self
    }

    /// Returns the path of keys.
    pub fn at(&self) -> &str {
        &self.at
    }

    /// Reports a value that isn't allowed.
    pub fn refuse(&self, rule: impl Into<String>) {
        self.report.add(match &self.value {
            _ if self.secret => Problem::new(&self.at, rule),
            Value::Object(_) => Problem::with_value(&self.at, "a table", rule),
            value => Problem::with_value(&self.at, value, rule),
        });
    }

    fn refused<T>(&self, rule: impl Into<String>) -> Option<T> {
        self.refuse(rule);
        None
    }

    /// Reads a text.
    pub fn text(self) -> Option<String> {
        match self.value {
            Value::String(text) => Some(text),
            _ => self.refused("is invalid; allowed: a text in quotes"),
        }
    }

    /// Reads a boolean.
    pub fn flag(self) -> Option<bool> {
        self.value.as_bool().or_else(|| self.refused("is invalid; allowed: true or false"))
    }

    /// Reads an integer in a range.
    pub fn number<N: TryFrom<i64> + PartialOrd + fmt::Display>(
        self,
        range: RangeInclusive<N>,
    ) -> Option<N> {
        let number = self
            .value
            .as_i64()
            .and_then(|number| N::try_from(number).ok())
            .filter(|number| range.contains(number));
        number.or_else(|| {
            self.refused(format!(
                "is invalid; allowed: a whole number from {} to {}",
                range.start(),
                range.end()
            ))
        })
    }

    /// Reads a text with a parser; `allowed` describes what it accepts.
    pub fn read<T>(self, allowed: &str, read: impl FnOnce(&str) -> Option<T>) -> Option<T> {
        self.value
            .as_str()
            .and_then(read)
            .or_else(|| self.refused(format!("is invalid; allowed: {allowed}")))
    }

    /// Reads a text with a parser whose error is the rule that the text breaks.
    pub fn try_read<T, E: fmt::Display>(
        self,
        read: impl FnOnce(&str) -> Result<T, E>,
    ) -> Option<T> {
        match self.value.as_str().map(read) {
            Some(Ok(read)) => Some(read),
            Some(Err(rule)) => self.refused(rule.to_string()),
            None => self.refused("is invalid; allowed: a text in quotes"),
        }
    }

    /// Reads a text that implements `FromStr`.
    pub fn parsed<T: FromStr>(self, allowed: &str) -> Option<T> {
        self.read(allowed, |text| text.parse().ok())
    }

    /// Reads a keyword.
    pub fn choice<T: Copy>(self, choices: &[(&str, T)]) -> Option<T> {
        let found =
            self.value.as_str().and_then(|text| choices.iter().find(|(word, _)| *word == text));
        let words =
            || choices.iter().map(|(word, _)| format!("{word:?}")).collect::<Vec<_>>().join(", ");
        found
            .map(|(_, meaning)| *meaning)
            .or_else(|| self.refused(format!("is invalid; allowed: {}", words())))
    }

    /// Reads a table.
    pub fn table(self) -> Option<Table<'r>> {
        match self.value {
            Value::Object(fields) => Some(Table::new(self.at, fields, self.report)),
            _ => self.refused("is invalid; allowed: a table"),
        }
    }

    /// Reads a list of at most 1,024 items; empty for a longer list, and for any other type.
    pub fn items(self) -> Vec<Self> {
        let Value::Array(items) = self.value else {
            self.refuse("is invalid; allowed: a list");
            return Vec::new();
        };
        if items.len() > MAX_ITEMS {
            let rule = format!("has {} items; allowed: {MAX_ITEMS}", items.len());
            self.report.add(Problem::new(self.at, rule));
            return Vec::new();
        }
        let item = |(index, value)| Self {
            at: format!("{}[{index}]", self.at),
            value,
            report: self.report,
            secret: self.secret,
        };
        items.into_iter().enumerate().map(item).collect()
    }

    /// Reads a list of texts.
    pub fn texts(self) -> Vec<String> {
        self.items().into_iter().filter_map(Self::text).collect()
    }

    /// Reads a table with at most 10,000 arbitrary keys; empty for a longer table, and for any
    /// other type.
    pub fn entries(self) -> Vec<(String, Self)> {
        let Value::Object(fields) = self.value else {
            self.refuse("is invalid; allowed: a table");
            return Vec::new();
        };
        if fields.len() > MAX_ENTRIES {
            let rule = format!("has {} keys; allowed: {MAX_ENTRIES}", fields.len());
            self.report.add(Problem::new(self.at, rule));
            return Vec::new();
        }
        let entry = |(key, value): (String, Value)| {
            let field = Self {
                at: format!("{}.{key}", self.at),
                value,
                report: self.report,
                secret: self.secret,
            };
            (key, field)
        };
        fields.into_iter().map(entry).collect()
    }

    /// Reads a table of texts with arbitrary keys.
    pub fn text_entries(self) -> BTreeMap<String, String> {
        self.entries().into_iter().filter_map(|(key, field)| Some((key, field.text()?))).collect()
    }
}

#[cfg(test)]
mod tests;
