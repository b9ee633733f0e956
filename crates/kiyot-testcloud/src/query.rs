//! Requests of the query API: a form with `Action` and parameters.

use std::{collections::BTreeMap, fmt::Write};

/// Most parameters of a request; a longer form is refused.
pub const MAX_PARAMETERS: usize = 4096;

/// Most bytes of a form. User-data has at most 16 KiB, before base64.
pub const MAX_FORM_BYTES: usize = 1024 * 1024;

/// A parsed form.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Query {
    /// Name of the action.
    pub action: String,
    /// All parameters except `Action` and `Version`.
    pub parameters: BTreeMap<String, String>,
}

impl Query {
    /// Makes a query from an action and its parameters.
    pub fn new(action: &str, parameters: &[(&str, &str)]) -> Self {
        let parameters =
            parameters.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Self { action: action.to_owned(), parameters: parameters.collect() }
    }

    /// Parses a form. Returns `None` if it has no action, is malformed or has too many parameters.
    pub fn parse(form: &[u8]) -> Option<Self> {
        let form = std::str::from_utf8(form).ok()?;
        let mut parameters = BTreeMap::new();
        for pair in form.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            parameters.insert(decode(key)?, decode(value)?);
            (parameters.len() <= MAX_PARAMETERS).then_some(())?;
        }
        parameters.remove("Version");
        let action = parameters.remove("Action").filter(|action| !action.is_empty())?;
        Some(Self { action, parameters })
    }

    /// Formats the query as a form.
    pub fn form(&self) -> String {
        let mut form = format!("Action={}&Version=2016-11-15", self.action);
        for (key, value) in &self.parameters {
            let _ = write!(form, "&{}={}", encode(key), encode(value));
        }
        form
    }

    /// Returns a parameter, or an empty text if it is absent.
    pub fn get(&self, key: &str) -> &str {
        self.parameters.get(key).map_or("", String::as_str)
    }

    /// Returns the values of a list such as `InstanceId.1`, `InstanceId.2`.
    pub fn list(&self, key: &str) -> Vec<&str> {
        let prefix = format!("{key}.");
        let mut values: Vec<_> = self
            .parameters
            .iter()
            .filter_map(|(key, value)| {
                Some((key.strip_prefix(&prefix)?.parse::<usize>().ok()?, value.as_str()))
            })
            .collect();
        values.sort_unstable();
        values.into_iter().map(|(_, value)| value).collect()
    }

    /// Returns the filters: names with their allowed values.
    pub fn filters(&self) -> Vec<(&str, Vec<&str>)> {
        (1..)
            .map(|number| (number, self.get(&format!("Filter.{number}.Name"))))
            .take_while(|(_, name)| !name.is_empty())
            .map(|(number, name)| (name, self.list(&format!("Filter.{number}.Value"))))
            .collect()
    }

    /// Returns the values that a filter allows, or `None` if the filter is absent.
    pub fn filter(&self, name: &str) -> Option<Vec<&str>> {
        self.filters().into_iter().find(|(own, _)| *own == name).map(|(_, values)| values)
    }

    /// Returns the query without the filters with these names.
    pub fn without_filters(&self, names: &[&str]) -> Self {
        let mut parameters = self.parameters.clone();
        parameters.retain(|key, _| !key.starts_with("Filter."));
        let kept = self.filters().into_iter().filter(|(name, _)| !names.contains(name));
        for (index, (name, values)) in kept.enumerate() {
            parameters.insert(format!("Filter.{}.Name", index + 1), name.to_owned());
            for (value_index, value) in values.into_iter().enumerate() {
                let key = format!("Filter.{}.Value.{}", index + 1, value_index + 1);
                parameters.insert(key, value.to_owned());
            }
        }
        Self { action: self.action.clone(), parameters }
    }
}

fn decode(text: &str) -> Option<String> {
    let mut bytes = text.bytes();
    let mut decoded = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'+' => b' ',
            b'%' => {
                let mut digit = || char::from(bytes.next()?).to_digit(16);
                u8::try_from(digit()? * 16 + digit()?).ok()?
            }
            byte => byte,
        });
    }
    String::from_utf8(decoded).ok()
}

fn encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::{MAX_PARAMETERS, Query};

    #[test]
    fn form_survives_parsing_and_formatting() {
        let query = Query::new("RunInstances", &[("UserData", "a+b/=&ä\n"), ("A.1", "x")]);
        assert_eq!(Query::parse(query.form().as_bytes()), Some(query));
    }

    #[test]
    fn form_without_action_or_beyond_its_bound_is_refused() {
        let long = (0..=MAX_PARAMETERS).map(|n| format!("&K{n}=v")).collect::<String>();
        for form in ["", "A=b", "Action=", "Action=%zz", &format!("Action=A{long}")] {
            assert_eq!(Query::parse(form.as_bytes()), None);
        }
    }

    #[test]
    fn filters_are_renumbered_without_the_removed() {
        let query = Query::new(
            "DescribeInstances",
            &[
                ("Filter.1.Name", "instance-state-name"),
                ("Filter.1.Value.1", "running"),
                ("Filter.2.Name", "tag:a"),
                ("Filter.2.Value.1", "b"),
                ("Filter.2.Value.10", "d"),
                ("Filter.2.Value.2", "c"),
            ],
        );
        assert_eq!(query.filter("instance-state-name"), Some(vec!["running"]));
        let kept = query.without_filters(&["instance-state-name"]);
        assert_eq!(kept.filters(), [("tag:a", vec!["b", "c", "d"])]);
    }
}
