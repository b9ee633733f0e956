//! Documents of a file.

use serde_json::Value;
use serde_saphyr::Error;

/// Most documents and items of lists of a manifest, empty ones included.
pub const MAX_DOCUMENTS: usize = 10_000;
/// Most values of a YAML document, keys included, after each alias is replaced: a table with a
/// single entry takes about 700 bytes of memory.
const MAX_NODES: usize = 280_000;
/// Most values of the documents of a file.
const MAX_FILE_NODES: usize = 600_000;
/// Most values at anchors of a document. The parser keeps copies of these values.
const MAX_ANCHORED: usize = 20_000;
/// Deepest nesting of YAML tables and lists.
const MAX_DEPTH: usize = 64;
/// Start of a line that begins a document.
const MARKER: &str = "---";

/// Returns the documents of a file as kubectl counts them: a document without a value is null. JSON
/// begins with a brace; YAML may too. Reading ends at a malformed document.
pub(crate) fn documents(text: &str) -> Box<dyn Iterator<Item = Result<Value, String>> + '_> {
    let text = text.trim_start_matches('\u{feff}');
    let most = MAX_DOCUMENTS + 1;
    if text.trim_start().starts_with('{')
        && let Ok(documents) = serde_json::Deserializer::from_str(text)
            .into_iter()
            .take(most)
            .collect::<Result<Vec<_>, _>>()
    {
        return Box::new(documents.into_iter().map(Ok));
    }
    let mut left = MAX_FILE_NODES;
    let mut is_malformed = false;
    Box::new(parts(text).into_iter().take(most).flat_map(move |(line, part)| {
        if is_malformed {
            return Vec::new();
        }
        let parsed = parse(part, MAX_NODES.min(left));
        is_malformed = parsed.is_err();
        match parsed {
            Ok(values) if values.is_empty() => vec![Ok(Value::Null)],
            Ok(values) => {
                left = left.saturating_sub(values.iter().map(nodes).sum());
                values.into_iter().map(Ok).collect()
            }
            Err(error) => vec![Err(rule(&error, line))],
        }
    }))
}

/// Splits YAML at the lines that begin a document, with the number of lines before each part.
/// Directives belong to the next document.
fn parts(text: &str) -> Vec<(u64, &str)> {
    let mut parts = Vec::new();
    let (mut start, mut start_line, mut at) = (0, 0, 0);
    let mut has_directive = false;
    for (line, number) in text.split_inclusive('\n').zip(0..) {
        let is_marker = line
            .strip_prefix(MARKER)
            .is_some_and(|rest| rest.trim_start() != rest || rest.is_empty());
        if is_marker && !has_directive {
            parts.push((start_line, &text[start..at]));
            (start, start_line) = (at, number);
        }
        has_directive = line.starts_with('%') || (has_directive && !is_marker);
        at += line.len();
    }
    parts.push((start_line, &text[start..]));
    // The part before the first marker may be empty.
    parts.retain(|(_, part)| !part.trim().is_empty());
    parts
}

/// Parses a part of a file. A number that begins with 0 is octal, as in YAML 1.1, which Kubernetes
/// reads: `defaultMode: 0644`.
fn parse(part: &str, most: usize) -> Result<Vec<Value>, Error> {
    let options = serde_saphyr::options! {
        // An alias counts as the values that it refers to.
        budget: serde_saphyr::budget! {
            enforce_alias_anchor_ratio: false, max_nodes: most, max_depth: MAX_DEPTH,
            max_recorded_anchor_events: MAX_ANCHORED,
        },
        legacy_octal_numbers: true,
    };
    serde_saphyr::from_multiple_with_options(part, options)
}

/// Counts the values of a document, keys included.
fn nodes(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(nodes).sum::<usize>(),
        Value::Object(fields) => 1 + fields.values().map(|value| 1 + nodes(value)).sum::<usize>(),
        _ => 1,
    }
}

/// Returns the rule that a malformed part breaks, with its place in the file.
fn rule(error: &Error, lines_before: u64) -> String {
    let error = error.without_snippet();
    if let Error::AliasError { error, .. } = error {
        return rule(error, lines_before);
    }
    let place = error.location().map_or_else(String::new, |at| {
        format!(" at line {}, column {}", lines_before + at.line(), at.column())
    });
    match error {
        Error::DuplicateMappingKey { key, .. } => {
            let key = key.as_ref().map_or_else(String::new, |key| format!(" {key:?}"));
            format!("has the key{key} twice{place}; allowed: each key of a table once")
        }
        Error::Budget { .. }
        | Error::AliasReplayLimitExceeded { .. }
        | Error::AliasReplayStackDepthExceeded { .. } => format!(
            "is too large{place}; allowed: {MAX_NODES} values in a document and {MAX_FILE_NODES} \
             in a file once each alias is replaced, {MAX_ANCHORED} at anchors, {MAX_DEPTH} in each \
             other"
        ),
        _ => format!("is not YAML{place}; allowed: YAML or JSON as kubectl reads it"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn all(text: &str) -> Result<Vec<Value>, String> {
        documents(text).collect()
    }

    /// Verifies M8.
    #[test]
    fn number_with_a_leading_zero_is_octal() {
        let text = "mode: 0644\nother: 0o600\nplain: 10\ntext: \"0644\"\n---\nmode: 0\n";
        let expected = json!({ "mode": 0o644, "other": 0o600, "plain": 10, "text": "0644" });
        assert_eq!(all(text), Ok(vec![expected, json!({ "mode": 0 })]));
    }

    /// Verifies M8.
    #[test]
    fn thousands_of_documents_are_read() {
        for text in ["a: 1\n---\n", "{\"a\": 1}"] {
            let documents = all(&text.repeat(3_000)).unwrap();
            assert_eq!(documents.iter().filter(|value| !value.is_null()).count(), 3_000);
        }
        // Documents beyond the limit are not parsed.
        assert_eq!(all(&"---\na: 1\n".repeat(20_000)).unwrap().len(), MAX_DOCUMENTS + 1);
    }

    /// Verifies M8.
    #[test]
    fn document_with_only_comments_counts() {
        let (value, null) = (json!({ "a": 1 }), Value::Null);
        for (text, expected) in [
            ("---\na: 1\n", vec![value.clone()]),
            ("# x\n---\na: 1\n...\n", vec![null.clone(), value.clone()]),
            ("a: 1\n---\n# x\n---\n--- # y\na: 1\n", {
                vec![value.clone(), null.clone(), null, value.clone()]
            }),
            ("a: 1\r\n---\r\na: 1\r\n", vec![value.clone(), value.clone()]),
            ("%YAML 1.1\n---\na: 1\n---\na: 1\n", vec![value.clone(), value]),
            ("a: |\n  ---\n  x\n", vec![json!({ "a": "---\nx\n" })]),
            ("---a: 1\n", vec![json!({ "---a": 1 })]),
            ("", vec![]),
        ] {
            assert_eq!(all(text), Ok(expected), "{text}");
        }
    }

    /// Verifies M8.
    #[test]
    fn malformed_document_is_named_by_its_place_in_words_of_the_project() {
        let twice =
            "has the key \"image\" twice at line 4, column 1; allowed: each key of a table once";
        for (text, expected) in [
            ("a: 1\n---\nimage: a\nimage: b\n---\na: 1\n", twice),
            ("a: 1\n---\na: [", "is not YAML at line 3, column "),
            ("a: *b", "is not YAML at line 1, column "),
            (&("[".repeat(70) + &"]".repeat(70)), "is too large at line 1, column "),
        ] {
            let error = all(text).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    /// Verifies M12.
    #[test]
    fn values_of_documents_and_aliases_are_counted() {
        let list = |items: usize| format!("[{}]", "0,".repeat(items));
        assert_eq!(all(&list(MAX_NODES - 2)).unwrap().len(), 1);
        assert!(all(&list(MAX_NODES)).unwrap_err().starts_with("is too large"));
        let aliases = format!("a: &a {}\nb: [{}]", list(1000), "*a,".repeat(400));
        assert!(all(&aliases).unwrap_err().starts_with("is too large"));
        let anchored = |items: usize| all(&format!("a: &a {}", list(items)));
        assert!(anchored(MAX_ANCHORED / 2).is_ok());
        assert!(anchored(MAX_ANCHORED).unwrap_err().starts_with("is too large"));
        let many = format!("---\na: &a {}\nb: [{}]\n", list(1000), "*a,".repeat(90)).repeat(7);
        let read: Vec<_> = documents(&many).collect();
        assert!(read.len() == 7 && read[5].is_ok() && read[6].is_err(), "{}", read.len());
    }
}
