//! Keys with our prefix that are neither known nor misspelt.

use kiyot_engine::request::keys::{KEYS, PREFIX};

use super::misspelling::meant_by;

/// Limit on the keys that a log line shows.
const MAX_SHOWN_KEYS: usize = 8;
/// Limit on the characters of a key that a log line shows.
const MAX_SHOWN_KEY_CHARS: usize = 80;

/// Returns the unknown keys with the prefix of [`KEYS`], in order, without misspelt keys, which
/// [`parse`](super::parse) refuses. A pod runs in spite of unknown keys, because another version
/// may know them.
pub fn unknown_keys<'a>(
    annotations: impl IntoIterator<Item = (&'a String, &'a String)>,
) -> Vec<&'a str> {
    let keys = annotations.into_iter().map(|(key, _)| key.as_str());
    let is_unknown =
        |key: &&str| key.starts_with(PREFIX) && !KEYS.contains(key) && meant_by(key).is_none();
    let mut unknown: Vec<&str> = keys.filter(is_unknown).collect();
    unknown.sort_unstable();
    unknown
}

/// Returns keys for a log line: the first few, shortened and without control characters, and the
/// number of the others.
pub fn shown_keys(keys: &[&str]) -> String {
    let shown: Vec<String> = keys.iter().take(MAX_SHOWN_KEYS).map(|key| shown(key)).collect();
    let text = shown.join(", ");
    match keys.len().saturating_sub(MAX_SHOWN_KEYS) {
        0 => text,
        more => format!("{text} and {more} more"),
    }
}

/// Returns a key without control characters, shortened if long.
fn shown(key: &str) -> String {
    let mut letters = key.chars();
    let start: String = letters.by_ref().take(MAX_SHOWN_KEY_CHARS).collect();
    let end = if letters.next().is_some() { "…" } else { "" };
    format!("{}{end}", start.escape_debug())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Verifies A6.
    #[test]
    fn list_of_unknown_keys_is_bounded() {
        assert_eq!(shown_keys(&["a", "b\n\u{1b}[2J"]), "a, b\\n\\u{1b}[2J");
        let long = "x".repeat(1 << 20);
        assert_eq!(shown_keys(&[&long]), format!("{}…", "x".repeat(MAX_SHOWN_KEY_CHARS)));
        let many = ["k"; 100_000];
        assert_eq!(shown_keys(&many), "k, k, k, k, k, k, k, k and 99992 more");
    }

    proptest! {
        #[test]
        fn list_is_short_and_has_no_control_characters(
            keys in prop::collection::vec("(?s).{0,120}", 0..12),
        ) {
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            let text = shown_keys(&keys);
            prop_assert!(!text.contains(char::is_control));
            // An escaped character has at most ten characters.
            let most = MAX_SHOWN_KEYS * 10 * (MAX_SHOWN_KEY_CHARS + 1) + " and 9999 more".len();
            prop_assert!(text.chars().count() <= most);
        }
    }
}
