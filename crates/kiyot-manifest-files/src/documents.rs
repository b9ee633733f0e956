//! Documents of a file.

use serde_json::Value;

/// Parses the documents of a file: the first `most` of JSON, and all of YAML. JSON begins with a
/// brace, as in kubectl; YAML may too. A number that begins with 0 is octal, as in YAML 1.1, which
/// Kubernetes reads: `defaultMode: 0644`.
pub fn documents(text: &str, most: usize) -> Result<Vec<Value>, String> {
    let text = text.trim_start_matches('\u{feff}');
    if text.trim_start().starts_with('{')
        && let Ok(documents) =
            serde_json::Deserializer::from_str(text).into_iter().take(most).collect()
    {
        return Ok(documents);
    }
    let options = serde_saphyr::options! {
        // Callers count the documents, and say how many are allowed.
        budget: serde_saphyr::budget! { max_documents: usize::MAX },
        legacy_octal_numbers: true,
    };
    serde_saphyr::from_multiple_with_options(text, options)
        .map_err(|error| format!("is no YAML: {}", error.without_snippet()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Verifies M8.
    #[test]
    fn number_with_a_leading_zero_is_octal() {
        let text = "mode: 0644\nother: 0o600\nplain: 10\ntext: \"0644\"\n---\nmode: 0\n";
        let expected = json!({ "mode": 0o644, "other": 0o600, "plain": 10, "text": "0644" });
        assert_eq!(documents(text, 2), Ok(vec![expected, json!({ "mode": 0 })]));
    }

    /// Verifies M8.
    #[test]
    fn number_of_documents_is_that_of_the_caller() {
        for text in ["a: 1\n---\n", "{\"a\": 1}"] {
            assert_eq!(documents(&text.repeat(3_000), 3_000).unwrap().len(), 3_000);
        }
    }
}
