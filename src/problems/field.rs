//! One value of a table.

use std::{collections::BTreeMap, fmt, ops::RangeInclusive, str::FromStr};

use serde_json::Value;

use super::{Problem, Report, Table};

/// One value, with the path of keys that leads to it. Its readers note a problem and return `None`
/// if it is not what they read.
#[derive(Debug)]
pub struct Field<'r> {
    at: String,
    value: Value,
    report: &'r Report,
    secret: bool,
}

impl<'r> Field<'r> {
    /// A value at a path.
    pub fn new(at: impl Into<String>, value: Value, report: &'r Report) -> Self {
        Self { at: at.into(), value, report, secret: false }
    }

    /// The same, never shown in a problem.
    pub fn secret(mut self) -> Self {
        self.secret = true;
        self
    }

    /// The path of keys that leads to it.
    pub fn at(&self) -> &str {
        &self.at
    }

    /// Notes that it is not what is allowed.
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

    /// A text.
    pub fn text(self) -> Option<String> {
        match self.value {
            Value::String(text) => Some(text),
            _ => self.refused("allowed is a text in quotes"),
        }
    }

    /// `true` or `false`.
    pub fn flag(self) -> Option<bool> {
        self.value.as_bool().or_else(|| self.refused("allowed is true or false"))
    }

    /// A whole number in a range.
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
                "allowed is a whole number from {} to {}",
                range.start(),
                range.end()
            ))
        })
    }

    /// A text that a function reads. `allowed` says what it reads.
    pub fn read<T>(self, allowed: &str, read: impl FnOnce(&str) -> Option<T>) -> Option<T> {
        self.value.as_str().and_then(read).or_else(|| self.refused(format!("allowed is {allowed}")))
    }

    /// A text, or a number as it is written, that a function reads: YAML has quantities as both.
    pub fn read_text_or_number<T>(
        mut self,
        allowed: &str,
        read: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        if self.value.is_number() {
            self.value = self.value.to_string().into();
        }
        self.read(allowed, read)
    }

    /// A text that has a parser.
    pub fn parsed<T: FromStr>(self, allowed: &str) -> Option<T> {
        self.read(allowed, |text| text.parse().ok())
    }

    /// One of a few words, each with its meaning.
    pub fn choice<T: Copy>(self, choices: &[(&str, T)]) -> Option<T> {
        let found =
            self.value.as_str().and_then(|text| choices.iter().find(|(word, _)| *word == text));
        let words =
            || choices.iter().map(|(word, _)| format!("{word:?}")).collect::<Vec<_>>().join(", ");
        found
            .map(|(_, meaning)| *meaning)
            .or_else(|| self.refused(format!("allowed is one of {}", words())))
    }

    /// A table.
    pub fn table(self) -> Option<Table<'r>> {
        match self.value {
            Value::Object(fields) => Some(Table::new(self.at, fields, self.report)),
            _ => self.refused("allowed is a table"),
        }
    }

    /// A list's items. None of what is not a list.
    pub fn items(self) -> Vec<Self> {
        let Value::Array(items) = self.value else {
            self.refuse("allowed is a list");
            return Vec::new();
        };
        let item = |(index, value)| Self {
            at: format!("{}[{index}]", self.at),
            value,
            report: self.report,
            secret: self.secret,
        };
        items.into_iter().enumerate().map(item).collect()
    }

    /// A list of texts.
    pub fn texts(self) -> Vec<String> {
        self.items().into_iter().filter_map(Self::text).collect()
    }

    /// A table whose keys are free.
    pub fn entries(self) -> Vec<(String, Self)> {
        let Value::Object(fields) = self.value else {
            self.refuse("allowed is a table");
            return Vec::new();
        };
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

    /// A table of texts whose keys are free.
    pub fn text_entries(self) -> BTreeMap<String, String> {
        self.entries().into_iter().filter_map(|(key, field)| Some((key, field.text()?))).collect()
    }
}
