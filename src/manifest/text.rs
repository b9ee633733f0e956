//! Text of a file: YAML or JSON of several documents.

use serde_json::Value;

/// Parses the first `most` documents of a file. JSON begins with a brace, as in kubectl; YAML may
/// too.
pub(super) fn documents(text: &str, most: usize) -> Result<Vec<Value>, String> {
    let text = text.trim_start_matches('\u{feff}');
    if text.trim_start().starts_with('{')
        && let Ok(documents) =
            serde_json::Deserializer::from_str(text).into_iter().take(most).collect()
    {
        return Ok(documents);
    }
    serde_saphyr::from_multiple(text)
        .map_err(|error| format!("is no YAML: {}", error.without_snippet()))
}
