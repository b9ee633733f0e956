//! Globs: `*` stands for any text, `?` for any one character.

/// Whether a text matches a glob as a whole. Time is at most the product of their lengths.
pub(super) fn matches(pattern: &str, text: &str) -> bool {
    let (mut pattern, mut text) = (pattern.chars(), text.chars());
    // Where to go on if what follows the last `*` does not fit: it then stands for one character
    // more.
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

    /// What it means, in the plainest words.
    fn means(pattern: &[char], text: &[char]) -> bool {
        match (pattern, text) {
            ([], []) => true,
            (['*', rest @ ..], _) => (0..=text.len()).any(|skip| means(rest, &text[skip..])),
            (['?', pattern @ ..], [_, text @ ..]) => means(pattern, text),
            ([a, pattern @ ..], [b, text @ ..]) => a == b && means(pattern, text),
            _ => false,
        }
    }

    #[test]
    fn examples() {
        assert!(matches("kube-*", "kube-system"));
        assert!(matches("*", ""));
        assert!(matches("team-?", "team-é"));
        assert!(!matches("kube-*", "my-kube-system"));
        assert!(!matches("", "a"));
    }

    proptest! {
        #[test]
        fn it_is_what_it_means(pattern in "[ab*?]{0,8}", text in "[ab]{0,8}") {
            prop_assert_eq!(matches(&pattern, &text), means(&pattern.chars().collect::<Vec<_>>(), &text.chars().collect::<Vec<_>>()));
        }
    }
}
