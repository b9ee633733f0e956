//! Expansion of `$(NAME)` in commands, arguments and variables.

use std::collections::HashMap;

/// Replaces each `$(NAME)` of a known variable, as the kubelet does
/// (third_party/forked/golang/expansion). `$$` escapes a dollar sign.
pub fn expand(text: &str, variables: &HashMap<String, String>) -> String {
    let mut expanded = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        expanded.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(escaped) = rest.strip_prefix('$') {
            expanded.push('$');
            rest = escaped;
        } else if let Some((name, after)) =
            rest.strip_prefix('(').and_then(|inner| inner.split_once(')'))
        {
            match variables.get(name) {
                Some(value) => expanded.push_str(value),
                None => expanded.extend(["$(", name, ")"]),
            }
            rest = after;
        } else {
            expanded.push('$');
        }
    }
    expanded + rest
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
        fn arbitrary_text_expands_without_panic(text in "[$()AB é]{0,40}") {
            expand(&text, &HashMap::from([("A".to_owned(), "$(B)".to_owned())]));
        }
    }
}
