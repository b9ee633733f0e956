//! Globs: `*` matches any text, `?` any single character.

/// Returns whether a whole text matches a glob.
///
/// After a mismatch only the last `*` is extended: a longer match of an earlier `*` can't help,
/// because the last `*` can match that text too. So the steps are at most the product of the
/// lengths.
pub fn matches(pattern: &str, text: &str) -> bool {
    let (mut pattern, mut text) = (pattern.chars(), text.chars());
    // The point after the last `*`, to retry with a `*` that matches another character.
    let mut retry = None;
    loop {
        let (mut next_pattern, mut next_text) = (pattern.clone(), text.clone());
        match (next_pattern.next(), next_text.next()) {
            (Some('*'), _) => {
                retry = Some((next_pattern.clone(), text.clone()));
                pattern = next_pattern;
                continue;
            }
            (None, None) => return true,
            (Some(wanted), Some(found)) if wanted == '?' || wanted == found => {
                (pattern, text) = (next_pattern, next_text);
                continue;
            }
            _ => {}
        }
        let Some((after, rest)) = &mut retry else { return false };
        if rest.next().is_none() {
            return false;
        }
        (pattern, text) = (after.clone(), rest.clone());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::matches;

    /// The definition of a match, by recursion.
    fn is_match(pattern: &[char], text: &[char]) -> bool {
        match (pattern, text) {
            ([], []) => true,
            (['*', rest @ ..], _) => (0..=text.len()).any(|skip| is_match(rest, &text[skip..])),
            (['?', pattern @ ..], [_, text @ ..]) => is_match(pattern, text),
            ([a, pattern @ ..], [b, text @ ..]) => a == b && is_match(pattern, text),
            _ => false,
        }
    }

    #[test]
    fn glob_matches_only_the_whole_text() {
        assert!(matches("kube-*", "kube-system"));
        assert!(matches("*", ""));
        assert!(matches("team-?", "team-é"));
        assert!(!matches("kube-*", "my-kube-system"));
        assert!(!matches("", "a"));
    }

    proptest! {
        /// Verifies A5.
        #[test]
        fn match_agrees_with_its_definition(pattern in "[ab*?]{0,8}", text in "[ab]{0,8}") {
            let chars = |text: &str| text.chars().collect::<Vec<_>>();
            prop_assert_eq!(matches(&pattern, &text), is_match(&chars(&pattern), &chars(&text)));
        }
    }
}
