//! Tags of instances besides the owner's: configured tags, and labels of pods.

use std::{collections::BTreeMap, fmt};

use kiyot_config::{self as config, MAX_TAGS, TagFault, check_tag_key, check_tag_value};
use kiyot_values::glob;

/// Bounds the labels that a log entry names.
const MAX_NAMED: usize = 20;
/// Bounds the bytes of each name.
const MAX_NAME_BYTES: usize = 128;

/// The tags of all instances, and the labels that become tags.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TagRules {
    /// The tags of all instances.
    pub configured: BTreeMap<String, String>,
    /// Globs of labels. Labels become tags in the order of the globs.
    pub labels: Vec<String>,
}

impl Default for TagRules {
    fn default() -> Self {
        Self { configured: BTreeMap::new(), labels: config::Ec2::default().label_tags }
    }
}

/// The tags of an instance.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InstanceTags {
    /// The tags; never more than EC2 allows.
    pub tags: BTreeMap<String, String>,
    /// The labels that match the rules and did not become tags.
    pub left_out: LeftOut,
}

/// Labels that did not become tags, with the reasons. The displayed text is bounded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeftOut(pub BTreeMap<String, LeftOutReason>);

/// The reason why a label did not become a tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LeftOutReason {
    /// EC2 does not allow it.
    #[error("{0}")]
    Fault(TagFault),
    /// The configuration has a tag of this key.
    #[error("key of a configured tag")]
    Configured,
    /// See [`MAX_TAGS`].
    #[error("more than {MAX_TAGS} tags")]
    TooMany,
}

impl TagRules {
    /// Returns the rules of a backend.
    pub fn of(config: &config::MilpaBackend) -> Self {
        let config::Ec2 { tags, label_tags, .. } = &config.ec2;
        Self { configured: tags.clone(), labels: label_tags.clone() }
    }

    /// Adds the tags of the configuration and of a pod's labels to the owner's few tags. No label
    /// replaces another tag.
    pub(super) fn add(
        &self,
        own: BTreeMap<String, String>,
        labels: &BTreeMap<String, String>,
    ) -> InstanceTags {
        let mut tags = own;
        for (key, value) in &self.configured {
            if tags.len() < MAX_TAGS {
                tags.entry(key.clone()).or_insert_with(|| value.clone());
            }
        }
        let rank = |key: &str| self.labels.iter().position(|pattern| glob::matches(pattern, key));
        let mut wanted: Vec<_> =
            labels.iter().filter_map(|(key, value)| Some((rank(key)?, key, value))).collect();
        wanted.sort();
        let mut left_out = BTreeMap::new();
        for (_, key, value) in wanted {
            let fault = check_tag_key(key).and_then(|()| check_tag_value(value)).err();
            let reason = match fault {
                Some(fault) => LeftOutReason::Fault(fault),
                None if tags.contains_key(key) => LeftOutReason::Configured,
                None if tags.len() >= MAX_TAGS => LeftOutReason::TooMany,
                None => {
                    tags.insert(key.clone(), value.clone());
                    continue;
                }
            };
            left_out.insert(key.clone(), reason);
        }
        InstanceTags { tags, left_out: LeftOut(left_out) }
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (key, reason)) in self.0.iter().take(MAX_NAMED).enumerate() {
            let separator = if number == 0 { "" } else { ", " };
            let named = &key[..key.floor_char_boundary(MAX_NAME_BYTES)];
            let cut = if named.len() < key.len() { "…" } else { "" };
            write!(f, "{separator}{}{cut} ({reason})", named.escape_debug())?;
        }
        match self.0.len().saturating_sub(MAX_NAMED) {
            0 => Ok(()),
            further => write!(f, " and {further} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn texts(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn rules(labels: &[&str]) -> TagRules {
        let labels = labels.iter().map(|glob| (*glob).to_owned()).collect();
        TagRules { configured: texts(&[("team", "web")]), labels }
    }

    #[test]
    fn labels_of_the_list_become_tags() {
        let labels = texts(&[
            ("app", "shop"),
            ("app.kubernetes.io/name", "shop"),
            ("pod-template-hash", "123"),
        ]);
        for (globs, expected) in [
            (&["*"][..], &["app", "app.kubernetes.io/name", "pod-template-hash", "team"][..]),
            (&["app", "run"], &["app", "team"]),
            (&["app.kubernetes.io/*"], &["app.kubernetes.io/name", "team"]),
            (&[], &["team"]),
        ] {
            let InstanceTags { tags, left_out } = rules(globs).add(BTreeMap::new(), &labels);
            assert_eq!(tags.keys().collect::<Vec<_>>(), expected, "{globs:?}");
            assert_eq!(left_out, LeftOut::default(), "a label that is not wanted is not reported");
        }
    }

    #[test]
    fn label_that_does_not_become_a_tag_has_a_reason() {
        let (long, value) = ("k".repeat(200), "v".repeat(300));
        let labels = texts(&[
            (&long, "x"),
            ("aws:x", "x"),
            ("kiyot:node", "forged"),
            ("team", "forged"),
            ("value", &value),
        ]);
        let own = texts(&[("kiyot:node", "worker-1")]);
        let InstanceTags { tags, left_out } = rules(&["*"]).add(own, &labels);
        assert_eq!(tags, texts(&[("kiyot:node", "worker-1"), ("team", "web")]));
        let expected = format!(
            "aws:x (reserved key), kiyot:node (reserved key), {}… (key of more than 127 bytes), \
             team (key of a configured tag), value (value of more than 255 bytes)",
            &long[..128]
        );
        assert_eq!(left_out.to_string(), expected);
    }

    #[test]
    fn labels_beyond_the_limit_are_left_out_in_the_order_of_the_list() {
        let many: BTreeMap<String, String> =
            (0..80).map(|number| (format!("a-{number:02}"), String::new())).collect();
        let labels = [many, texts(&[("run", "job")])].into_iter().flatten().collect();
        let InstanceTags { tags, left_out } = rules(&["run", "*"]).add(BTreeMap::new(), &labels);
        assert_eq!((tags.len(), tags["run"].as_str()), (MAX_TAGS, "job"));
        assert_eq!(left_out.0.len(), 81 - (MAX_TAGS - 1));
        let text = left_out.to_string();
        assert!(text.starts_with("a-48 (more than 50 tags), a-49"), "{text}");
        assert!(text.ends_with(" and 12 more"), "{text}");
    }

    proptest! {
        #[test]
        fn labels_never_exceed_the_limit_and_change_no_other_tag(
            labels in prop::collection::btree_map("(kiyot:|aws:)?[a-z]{0,140}", ".{0,300}", 0..80),
            configured in prop::collection::btree_map("[a-z]{1,2}", "[a-z]{0,3}", 0..20),
        ) {
            let own: BTreeMap<String, String> =
                (0..8).map(|number| (format!("kiyot:{number}"), String::new())).collect();
            let labels_of_all = vec!["*".to_owned()];
            let rules = TagRules { configured: configured.clone(), labels: labels_of_all };
            let InstanceTags { tags, left_out } = rules.add(own.clone(), &labels);
            prop_assert!(tags.len() <= MAX_TAGS);
            for (key, value) in own.iter().chain(&configured) {
                prop_assert_eq!(&tags[key], value);
            }
            for (key, value) in &labels {
                let is_tag = tags.get(key) == Some(value) && !own.contains_key(key);
                prop_assert!(is_tag || left_out.0.contains_key(key), "{}", key);
            }
        }
    }
}
