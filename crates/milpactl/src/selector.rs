//! Label selectors, equality-based and set-based, as kubectl reads them.

use std::collections::HashMap;

/// Bounds the requirements of a selector.
const MAX_REQUIREMENTS: usize = 64;

/// A selector: all its requirements must hold.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Selector {
    requirements: Vec<Requirement>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Requirement {
    key: String,
    operator: Operator,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Operator {
    Exists,
    Absent,
    In(Vec<String>),
    NotIn(Vec<String>),
}

impl Selector {
    /// Parses a selector such as `app=web,env!=test,tier in (front, back),!canary`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let parts = split(text)?;
        if parts.len() > MAX_REQUIREMENTS {
            return Err(format!(
                "selector has {} requirements; allowed: at most {MAX_REQUIREMENTS}",
                parts.len()
            ));
        }
        let requirements: Result<_, _> = parts.into_iter().map(Requirement::parse).collect();
        Ok(Self { requirements: requirements? })
    }

    /// Returns whether labels satisfy all requirements.
    pub(crate) fn selects(&self, labels: &HashMap<String, String>) -> bool {
        self.requirements.iter().all(|requirement| {
            let value = labels.get(&requirement.key);
            match &requirement.operator {
                Operator::Exists => value.is_some(),
                Operator::Absent => value.is_none(),
                Operator::In(values) => value.is_some_and(|value| values.contains(value)),
                // As in Kubernetes, an absent label satisfies this.
                Operator::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
            }
        })
    }
}

/// Splits at the commas outside of parentheses.
fn split(text: &str) -> Result<Vec<&str>, String> {
    let (mut parts, mut begin, mut is_inside) = (Vec::new(), 0, false);
    for (at, character) in text.char_indices() {
        match character {
            '(' if !is_inside => is_inside = true,
            ')' if is_inside => is_inside = false,
            '(' | ')' => return Err(invalid(text)),
            ',' if !is_inside => {
                parts.push(&text[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[begin..]);
    if is_inside { Err(invalid(text)) } else { Ok(parts) }
}

fn invalid(text: &str) -> String {
    format!(
        "selector {text:?} is invalid; allowed: such as app=web,env!=test,tier in (a,b),!canary"
    )
}

impl Requirement {
    fn parse(text: &str) -> Result<Self, String> {
        let of = |key: &str, operator| {
            let (key, invalid) = (key.trim(), || Err(invalid(text)));
            if is_word(key) { Ok(Self { key: key.to_owned(), operator }) } else { invalid() }
        };
        let text = text.trim();
        if let Some((key, value)) = text.split_once("!=") {
            return of(key, Operator::NotIn(vec![value_of(value, text)?]));
        }
        if let Some((key, value)) = text.split_once('=') {
            let value = value.strip_prefix('=').unwrap_or(value);
            return of(key, Operator::In(vec![value_of(value, text)?]));
        }
        if let Some(set) = text.strip_suffix(')') {
            let (head, values) = set.split_once('(').ok_or_else(|| invalid(text))?;
            let values: Result<Vec<_>, _> =
                values.split(',').map(|value| value_of(value, text)).collect();
            let (values, mut words) = (values?, head.split_whitespace());
            return match (words.next(), words.next(), words.next()) {
                (Some(key), Some("in"), None) => of(key, Operator::In(values)),
                (Some(key), Some("notin"), None) => of(key, Operator::NotIn(values)),
                _ => Err(invalid(text)),
            };
        }
        match text.strip_prefix('!') {
            Some(key) => of(key, Operator::Absent),
            None => of(text, Operator::Exists),
        }
    }
}

fn value_of(value: &str, text: &str) -> Result<String, String> {
    let value = value.trim();
    if value.is_empty() || is_word(value) { Ok(value.to_owned()) } else { Err(invalid(text)) }
}

/// Returns whether a text has only characters of label keys and values.
fn is_word(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./".contains(&byte);
    !text.is_empty() && text.len() <= 320 && text.bytes().all(is_allowed)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn selects(selector: &str, labels: &[(&str, &str)]) -> bool {
        let labels =
            labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Selector::parse(selector).unwrap().selects(&labels)
    }

    #[test]
    fn every_form_of_kubectl_selects() {
        let labels = [("app", "web"), ("tier", "back")];
        for (selector, expected) in [
            ("app=web", true),
            ("app==web", true),
            ("app=db", false),
            ("app!=db", true),
            ("env!=test", true),
            ("app", true),
            ("!app", false),
            ("!env", true),
            ("tier in (front, back)", true),
            ("tier in (front)", false),
            ("tier notin (front)", true),
            ("env notin (a)", true),
            ("app=web,tier in (back),!env", true),
            ("app=web,tier in (front),!env", false),
        ] {
            assert_eq!(selects(selector, &labels), expected, "{selector}");
        }
    }

    #[test]
    fn malformed_selector_is_refused() {
        for selector in ["", "a b", "a in b", "a in (b", "a) in (b", "=x", "!", "a=b c", "a,,b"] {
            let error = Selector::parse(selector).unwrap_err();
            assert!(error.contains("is invalid; allowed:"), "{selector}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_selector_or_an_error(text in ".{0,60}") {
            let _ = Selector::parse(&text).map(|selector| selector.selects(&HashMap::new()));
        }

        #[test]
        fn equality_and_its_negation_exclude_each_other(
            key in "[a-z]{1,5}",
            value in "[a-z]{0,3}",
            labels in proptest::collection::hash_map("[a-z]{1,2}", "[a-z]{0,2}", 0..5),
        ) {
            let equal = Selector::parse(&format!("{key}={value}")).unwrap().selects(&labels);
            let other = Selector::parse(&format!("{key}!={value}")).unwrap().selects(&labels);
            prop_assert_ne!(equal, other);
        }
    }
}
