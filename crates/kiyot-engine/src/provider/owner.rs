//! Owners of instances, and the tags that name them.

use kiyot_config::{MAX_TAG_VALUE_BYTES, NAME_TAG};

use crate::{
    id::CellId,
    provider::tags::{InstanceTags, TagRules},
    wanted::Wanted,
};

/// The tag that the console of EC2 shows as the name: namespace and name of the pod.
pub const NAME: &str = NAME_TAG;
/// The value of [`NAME`] while an instance waits in a warm pool.
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
/// The tag with `metadata.uid` of the pod.
pub const POD_UID: &str = "kiyot:pod-uid";

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

impl Owner {
    /// Returns the tags of an instance: the owner's, those of the configuration, and labels of the
    /// pod. Labels that are not allowed, or too many, are left out.
    pub fn tags(&self, rules: &TagRules, cell: &CellId, wanted: &Wanted) -> InstanceTags {
        let key = &wanted.key;
        let name = if key.name.is_empty() { WARM_NAME.to_owned() } else { key.pod() };
        let own = [
            (NAME, name.as_str()),
            (CLUSTER, &self.cluster),
            (NODE, &self.node),
            (FINGERPRINT, &self.fingerprint),
            (CELL, cell.as_str()),
            (NAMESPACE, &key.namespace),
            (POD, &key.name),
            (POD_UID, &key.pod_uid),
        ];
        let own = own.into_iter().filter(|(_, value)| !value.is_empty()).map(|(key, value)| {
            let end = value.floor_char_boundary(MAX_TAG_VALUE_BYTES);
            (key.to_owned(), value[..end].to_owned())
        });
        rules.add(own.collect(), &wanted.labels)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::wanted::OrderKey;
    use kiyot_config::{MAX_TAGS, OWN_TAG_PREFIX};

    fn owner() -> Owner {
        Owner { cluster: "production".into(), node: "worker-1".into(), fingerprint: "0123".into() }
    }

    fn pod() -> Wanted {
        let key = OrderKey {
            pod_uid: "1-2-3".into(),
            namespace: "default".into(),
            name: "web-0".into(),
            attempt: 0,
        };
        Wanted { key, ..Wanted::default() }
    }

    #[test]
    fn labels_of_a_pod_become_tags() {
        let labels = ["app", "run", "app.kubernetes.io/name", "cost-center"];
        let labels = labels.map(|key| (key.to_owned(), "web".to_owned())).into();
        let cell = CellId::mint().unwrap();
        let tags = owner().tags(&TagRules::default(), &cell, &Wanted { labels, ..pod() }).tags;
        assert_eq!((tags["app"].as_str(), tags[POD].as_str()), ("web", "web-0"));
        assert!(tags.contains_key("run") && tags.contains_key("app.kubernetes.io/name"));
        assert!(!tags.contains_key("cost-center"), "budgets and rights read it");
        assert_eq!((tags[NAME].as_str(), tags[POD_UID].as_str()), ("default/web-0", "1-2-3"));
    }

    #[test]
    fn labels_and_configured_tags_never_change_the_tags_of_the_owner() {
        let cell = CellId::mint().unwrap();
        let own = owner().tags(&TagRules::default(), &cell, &pod()).tags;
        assert_eq!(own.len(), 8);
        assert!(own.keys().all(|key| key == NAME || key.starts_with(OWN_TAG_PREFIX)));
        let forged: BTreeMap<String, String> =
            own.keys().map(|key| (key.clone(), "forged".to_owned())).collect();
        let many = (0..80).map(|number| (number.to_string(), String::new()));
        let rules = TagRules { configured: forged.clone(), labels: vec!["*".into()] };
        let labels = forged.into_iter().chain(many).collect();
        let tags = owner().tags(&rules, &cell, &Wanted { labels, ..pod() }).tags;
        assert_eq!(tags.len(), MAX_TAGS);
        for (key, value) in &own {
            assert_eq!(&tags[key], value);
        }
    }

    #[test]
    fn owner_without_a_cluster_has_no_empty_tag() {
        let cell = CellId::mint().unwrap();
        let tags = Owner::default().tags(&TagRules::default(), &cell, &Wanted::default()).tags;
        assert_eq!(tags.keys().map(String::as_str).collect::<Vec<_>>(), [NAME, CELL]);
    }
}
