//! Labels of objects, within Kubernetes' bounds.

use std::collections::BTreeMap;

/// Label of a cell's node. A node lists its own objects by this label.
pub const NODE_LABEL: &str = "kiyot.elotl.co/node";
/// Prefix of kiyot's own labels. Pods can't set them on a cell.
const OWN_PREFIX: &str = "kiyot.elotl.co/";
/// Prefix of labels that the kubelet adds to sandboxes. Their pods lack these labels.
const KUBELET_PREFIX: &str = "io.kubernetes.";
/// Bounds a label's value, and its name without the prefix, in bytes.
const MAX_LABEL_BYTES: usize = 63;
/// Bounds the prefix of a key, in bytes.
const MAX_PREFIX_BYTES: usize = 253;
/// Bounds the labels that are copied from a pod.
const MAX_LABELS: usize = 64;

/// Returns the labels of a cell's object: the pod's and the node's.
///
/// A kubelet sends valid labels, but CRI does not bound them. Invalid labels are left out, because
/// the API server would refuse the whole object.
pub fn labels(of_pod: &BTreeMap<String, String>, node: &str) -> BTreeMap<String, String> {
    let copied = of_pod.iter().filter(|(key, value)| {
        !key.starts_with(KUBELET_PREFIX)
            && !key.starts_with(OWN_PREFIX)
            && is_key(key)
            && is_value(value)
    });
    let mut labels: BTreeMap<String, String> =
        copied.take(MAX_LABELS).map(|(key, value)| (key.clone(), value.clone())).collect();
    labels.insert(NODE_LABEL.to_owned(), node_value(node));
    labels
}

/// Returns a node's name as a label's value. Names may be longer than values: the end of a long
/// name is replaced by a hash of the whole.
pub fn node_value(node: &str) -> String {
    if is_value(node) { node.to_owned() } else { hashed(node) }
}

/// Returns the start of a text in letters, digits and dashes, followed by a hash of the whole.
fn hashed(node: &str) -> String {
    // FNV-1a does not depend on the version of the daemon; the standard hasher does.
    let hash = node.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let plain = node.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' });
    let kept: String = plain.take(MAX_LABEL_BYTES - 17).collect();
    format!("{}-{hash:016x}", kept.trim_matches('-')).trim_start_matches('-').to_owned()
}

/// Returns whether a text is a valid key of a label.
fn is_key(key: &str) -> bool {
    let (prefix, name) =
        key.split_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    let is_subdomain =
        |prefix: &str| prefix.len() <= MAX_PREFIX_BYTES && prefix.split('.').all(is_dns_label);
    prefix.is_none_or(is_subdomain) && !name.is_empty() && is_value(name)
}

fn is_dns_label(text: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    (1..=MAX_LABEL_BYTES).contains(&text.len())
        && text.bytes().all(|byte| is_letter(byte) || byte == b'-')
        && text.bytes().next().is_some_and(is_letter)
        && text.bytes().last().is_some_and(is_letter)
}

/// Returns whether a text is a valid value of a label.
fn is_value(text: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric();
    text.is_empty()
        || text.len() <= MAX_LABEL_BYTES
            && text.bytes().all(|byte| is_letter(byte) || b"-_.".contains(&byte))
            && text.bytes().next().is_some_and(is_letter)
            && text.bytes().last().is_some_and(is_letter)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Verifies K3.
    #[test]
    fn labels_of_a_pod_are_copied_if_they_are_valid() {
        let long = "x".repeat(64);
        let of_pod = [
            ("app", "web"),
            ("app.kubernetes.io/name", "web_1.x"),
            ("empty", ""),
            ("io.kubernetes.pod.name", "web"),
            ("kiyot.elotl.co/node", "another"),
            ("bad key", "x"),
            ("/x", "x"),
            ("a/b/c", "x"),
            ("UPPER.example/x", "x"),
            ("long", &long),
            ("dash", "-x"),
            ("space", "a b"),
        ];
        let of_pod =
            of_pod.map(|(key, value)| (key.to_owned(), value.to_owned())).into_iter().collect();
        let labels = labels(&of_pod, "worker-1");
        let keys: Vec<_> = labels.keys().map(String::as_str).collect();
        assert_eq!(keys, ["app", "app.kubernetes.io/name", "empty", NODE_LABEL]);
        assert_eq!(labels[NODE_LABEL], "worker-1");
    }

    #[test]
    fn labels_are_bounded_in_number() {
        let many = (0..500).map(|number| (format!("k{number}"), String::new())).collect();
        assert_eq!(labels(&many, "n").len(), MAX_LABELS + 1);
    }

    proptest! {
        /// Verifies K3.
        #[test]
        fn name_of_a_node_is_a_valid_value(name in "\\PC{1,300}", other in "\\PC{1,300}") {
            let value = node_value(&name);
            prop_assert!(is_value(&value) && !value.is_empty(), "{value}");
            prop_assert!(name == other || node_value(&other) != value);
        }
    }
}
