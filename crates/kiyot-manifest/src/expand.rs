//! Expansion of `$(NAME)` in commands, arguments and variables.

use std::collections::HashMap;

/// Part of a text.
enum Part<'t> {
    /// Unchanged text.
    Text(&'t str),
    /// Name in `$(NAME)`.
    Reference(&'t str),
}

/// Replaces each `$(NAME)` of a known variable, as the kubelet does
/// (third_party/forked/golang/expansion). `$$` escapes a dollar sign.
pub fn expand(text: &str, variables: &HashMap<String, String>) -> String {
    let mut expanded = String::with_capacity(text.len());
    split(text, |part| match part {
        Part::Text(text) => expanded.push_str(text),
        Part::Reference(name) => match variables.get(name) {
            Some(value) => expanded.push_str(value),
            None => expanded.extend(["$(", name, ")"]),
        },
    });
    expanded
}

/// Returns the number of bytes that [`expand`] would return, for variables of these sizes.
/// Allocates nothing: variables that refer to each other double at each step.
pub(super) fn expanded_bytes(text: &str, variables: &HashMap<&str, u64>) -> u64 {
    let mut bytes: u64 = 0;
    split(text, |part| {
        let own = match part {
            Part::Text(text) => text.len() as u64,
            Part::Reference(name) => {
                variables.get(name).copied().unwrap_or("$()".len() as u64 + name.len() as u64)
            }
        };
        bytes = bytes.saturating_add(own);
    });
    bytes
}

/// Calls `each` with the parts of a text, in order.
fn split<'t>(text: &'t str, mut each: impl FnMut(Part<'t>)) {
    let mut rest = text;
    // Without this position, the search for `)` would run to the end for each `$(` after the last
    // `)`.
    let closed = text.rfind(')').unwrap_or_default();
    while let Some(at) = rest.find('$') {
        each(Part::Text(&rest[..at]));
        rest = &rest[at + 1..];
        if let Some(escaped) = rest.strip_prefix('$') {
            each(Part::Text("$"));
            rest = escaped;
        } else if let Some((name, after)) = rest
            .strip_prefix('(')
            .filter(|inner| text.len() - inner.len() <= closed)
            .and_then(|inner| inner.split_once(')'))
        {
            each(Part::Reference(name));
            rest = after;
        } else {
            each(Part::Text("$"));
        }
    }
    each(Part::Text(rest));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn expansion_matches_the_kubelet() {
        let variables =
            HashMap::from([("A".to_owned(), "one".to_owned()), ("E".to_owned(), String::new())]);
        for (text, expected) in [
            ("", ""),
            ("$(A)", "one"),
            ("x$(A)y$(A)", "xoneyone"),
            ("$(E)", ""),
            ("$(B)", "$(B)"),
            ("$$(A)", "$(A)"),
            ("$$$(A)", "$one"),
            ("$A", "$A"),
            ("$", "$"),
            ("$$", "$"),
            ("$(A", "$(A"),
            ("$()", "$()"),
        ] {
            assert_eq!(expand(text, &variables), expected, "{text}");
        }
    }

    proptest! {
        #[test]
        fn text_without_dollars_is_unchanged(text in "[^$]{0,40}") {
            prop_assert_eq!(expand(&text, &HashMap::new()), text);
        }

        #[test]
        fn expanded_bytes_of_arbitrary_text_equal_its_expansion(text in "[$()AB é]{0,40}") {
            let expanded = expand(&text, &HashMap::from([("A".to_owned(), "$(B)".to_owned())]));
            let bytes = expanded_bytes(&text, &HashMap::from([("A", 4)]));
            prop_assert_eq!(bytes, expanded.len() as u64);
        }
    }
}
