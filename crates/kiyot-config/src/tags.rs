//! Tags of instances: EC2's rules for configured tags and labels of pods.

/// Bounds the tags of an instance.
pub const MAX_TAGS: usize = 50;
/// Bounds the tags of the configuration, which leave room for the daemon's own and for labels.
pub const MAX_CONFIGURED_TAGS: usize = 20;
/// Bounds the key of a tag; EC2 allows 127 characters.
pub const MAX_TAG_KEY_BYTES: usize = 127;
/// Bounds the value of a tag; EC2 allows 255 characters.
pub const MAX_TAG_VALUE_BYTES: usize = 255;
/// The tag that the console of EC2 shows as the name, which the daemon sets.
pub const NAME_TAG: &str = "Name";
/// The prefix of the tags that name an instance's owner.
pub const OWN_TAG_PREFIX: &str = "kiyot:";
/// The prefix of the tags that AWS sets.
pub const AWS_TAG_PREFIX: &str = "aws:";

/// The rule that a tag breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TagFault {
    /// The daemon or AWS sets tags of this key. EC2 compares prefixes in any case of letters.
    #[error("reserved key")]
    ReservedKey,
    /// See [`MAX_TAG_KEY_BYTES`].
    #[error("key of more than {MAX_TAG_KEY_BYTES} bytes")]
    LongKey,
    /// See [`MAX_TAG_VALUE_BYTES`].
    #[error("value of more than {MAX_TAG_VALUE_BYTES} bytes")]
    LongValue,
    /// An empty key, or a control character.
    #[error("empty key or control character")]
    Malformed,
}

/// Checks the key of a tag that the daemon does not set itself.
pub fn check_tag_key(key: &str) -> Result<(), TagFault> {
    let begins = |prefix: &str| {
        key.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix))
    };
    match () {
        () if key == NAME_TAG || begins(OWN_TAG_PREFIX) || begins(AWS_TAG_PREFIX) => {
            Err(TagFault::ReservedKey)
        }
        () if key.len() > MAX_TAG_KEY_BYTES => Err(TagFault::LongKey),
        () if key.is_empty() || key.contains(char::is_control) => Err(TagFault::Malformed),
        () => Ok(()),
    }
}

/// Checks the value of a tag.
pub fn check_tag_value(value: &str) -> Result<(), TagFault> {
    match () {
        () if value.len() > MAX_TAG_VALUE_BYTES => Err(TagFault::LongValue),
        () if value.contains(char::is_control) => Err(TagFault::Malformed),
        () => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tag_keeps_the_rules_of_ec2_and_of_the_daemon() {
        let (longest, long) = ("k".repeat(MAX_TAG_KEY_BYTES), "k".repeat(MAX_TAG_KEY_BYTES + 1));
        for (key, expected) in [
            ("app", Ok(())),
            ("app.kubernetes.io/name", Ok(())),
            ("name", Ok(())),
            ("kiyot", Ok(())),
            (&longest, Ok(())),
            ("Name", Err(TagFault::ReservedKey)),
            ("kiyot:node", Err(TagFault::ReservedKey)),
            ("Kiyot:Node", Err(TagFault::ReservedKey)),
            ("AWS:x", Err(TagFault::ReservedKey)),
            (&long, Err(TagFault::LongKey)),
            ("", Err(TagFault::Malformed)),
            ("a\nb", Err(TagFault::Malformed)),
        ] {
            assert_eq!(check_tag_key(key), expected, "{key:?}");
        }
        let (longest, long) = ("v".repeat(MAX_TAG_VALUE_BYTES), "é".repeat(MAX_TAG_VALUE_BYTES));
        for (value, expected) in [
            ("", Ok(())),
            (&longest, Ok(())),
            (&long, Err(TagFault::LongValue)),
            ("a\0", Err(TagFault::Malformed)),
        ] {
            assert_eq!(check_tag_value(value), expected, "{value:?}");
        }
    }
}
