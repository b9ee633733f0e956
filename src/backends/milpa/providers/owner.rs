//! Owners of instances, and the tags that name them.

use std::collections::BTreeMap;

use crate::backends::milpa::id::CellId;

/// The start of the tags that say whose an instance is. No label of a pod becomes such a tag.
pub const RESERVED_PREFIX: &str = "kiyot:";
/// The tag that the console of EC2 shows as the name: namespace and name of the pod.
pub const NAME: &str = "Name";
/// That name while an instance waits in a warm pool.
const WARM_NAME: &str = "kiyot warm";
/// The tag with the name of the cluster.
pub const CLUSTER: &str = "kiyot:cluster";
/// The tag with the name of the node.
pub const NODE: &str = "kiyot:node";
/// The tag with the fingerprint of the daemon's certificate authority.
pub const FINGERPRINT: &str = "kiyot:fingerprint";
/// The tag with the id of the cell.
pub const CELL: &str = "kiyot:cell";
/// The tag with the namespace of the pod.
pub const NAMESPACE: &str = "kiyot:namespace";
/// The tag with the name of the pod.
pub const POD: &str = "kiyot:pod";

/// Bounds the tags of an instance, as EC2 does.
pub const MAX_TAGS: usize = 50;
/// Bounds the key of a tag, as EC2 does.
pub const MAX_KEY_BYTES: usize = 127;
/// Bounds the value of a tag, as EC2 does.
pub const MAX_VALUE_BYTES: usize = 255;

/// The owner of instances: a node of a cluster, and the authority that its cells trust. Instances
/// of the same node with another authority were launched by another daemon.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Owner {
    /// The name of the cluster; empty without a configured name.
    pub cluster: String,
    /// The name of the node.
    pub node: String,
    /// The fingerprint of the daemon's certificate authority.
    pub fingerprint: String,
}

/// The parts of a pod that its instance's tags show.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodTags {
    /// The namespace of the pod.
    pub namespace: String,
    /// The name of the pod.
    pub name: String,
    /// The labels of the pod.
    pub labels: BTreeMap<String, String>,
}

impl Owner {
    /// Returns the tags of an instance: the pod's labels, and above them those of the owner. Labels
    /// that are too long for a tag, or too many, are left out.
    pub fn tags(&self, cell: &CellId, pod: &PodTags) -> BTreeMap<String, String> {
        let mut name = match pod.name.as_str() {
            "" => WARM_NAME.to_owned(),
            pod_name => format!("{}/{pod_name}", pod.namespace),
        };
        name.truncate(name.floor_char_boundary(MAX_VALUE_BYTES));
        let own = [
            (NAME, name.as_str()),
            (CLUSTER, &self.cluster),
            (NODE, &self.node),
            (FINGERPRINT, &self.fingerprint),
            (CELL, cell.as_str()),
            (NAMESPACE, &pod.namespace),
            (POD, &pod.name),
        ];
        let own = own.into_iter().filter(|(_, value)| !value.is_empty());
        let mut tags: BTreeMap<String, String> =
            own.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        let labels = pod.labels.iter().filter(|(key, value)| may_be_tag(key, value));
        for (key, value) in labels.take(MAX_TAGS.saturating_sub(tags.len())) {
            tags.entry(key.clone()).or_insert_with(|| value.clone());
        }
        tags
    }
}

/// Returns true if a label may be a tag. EC2 reserves the prefix `aws:` in every case of letters.
fn may_be_tag(key: &str, value: &str) -> bool {
    let has_prefix = |prefix: &str| {
        key.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix))
    };
    !key.is_empty()
        && key.len() <= MAX_KEY_BYTES
        && value.len() <= MAX_VALUE_BYTES
        && !has_prefix(RESERVED_PREFIX)
        && !has_prefix("aws:")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn owner() -> Owner {
        Owner { cluster: "production".into(), node: "worker-1".into(), fingerprint: "0123".into() }
    }

    proptest! {
        #[test]
        fn labels_of_a_pod_never_change_the_tags_of_its_owner(
            labels in prop::collection::btree_map(
                "(kiyot:|KIYOT:|aws:)?(Name|cluster|node|fingerprint|cell|pod|[a-z]{0,140})",
                ".{0,300}",
                0..80,
            ),
        ) {
            let cell = CellId::mint().unwrap();
            let without =
                PodTags { namespace: "a".into(), name: "b".into(), ..PodTags::default() };
            let with = PodTags { labels: labels.clone(), ..without.clone() };
            let (own, tags) = (owner().tags(&cell, &without), owner().tags(&cell, &with));
            prop_assert_eq!(own.len(), 7);
            for (key, value) in &own {
                prop_assert_eq!(&tags[key], value);
            }
            prop_assert!(tags.len() <= MAX_TAGS);
            for (key, value) in tags.iter().filter(|(key, _)| !own.contains_key(*key)) {
                prop_assert_eq!(&labels[key], value);
                prop_assert!(key.len() <= MAX_KEY_BYTES && value.len() <= MAX_VALUE_BYTES);
                prop_assert!(!key.to_lowercase().starts_with(RESERVED_PREFIX));
            }
        }
    }

    #[test]
    fn labels_of_a_pod_become_tags() {
        let labels = BTreeMap::from([("app".to_owned(), "web".to_owned())]);
        let pod = PodTags { labels, namespace: "default".into(), name: "web-0".into() };
        let cell = CellId::mint().unwrap();
        let tags = owner().tags(&cell, &pod);
        assert_eq!((tags["app"].as_str(), tags[POD].as_str()), ("web", "web-0"));
    }

    #[test]
    fn owner_without_a_cluster_has_no_empty_tag() {
        let cell = CellId::mint().unwrap();
        let tags = Owner::default().tags(&cell, &PodTags::default());
        assert_eq!(tags.keys().map(String::as_str).collect::<Vec<_>>(), [NAME, CELL]);
    }
}
