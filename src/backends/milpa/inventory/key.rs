//! Keys of pods in lists, and the selection of pods by name.

use std::{cmp::Reverse, sync::Arc};

use kiyot_engine::{engine::OrderView, id::SandboxId};

/// The key of a pod in a list.
#[derive(Debug, Clone)]
pub struct PodKey {
    /// `namespace/name`, the sort key.
    pub(super) name: String,
    uid: String,
    created_unix_nanos: i64,
    /// True if a newer entry has the same name.
    pub(super) is_replaced: bool,
    pub(super) item: PodItem,
}

#[derive(Debug, Clone)]
pub(super) enum PodItem {
    Waiting(Box<OrderView>),
    Sandbox(SandboxId),
}

impl PodKey {
    pub(super) fn of_order(order: OrderView) -> Self {
        Self {
            name: order.key.pod(),
            uid: order.key.pod_uid.clone(),
            created_unix_nanos: order.since_unix_nanos,
            is_replaced: false,
            item: PodItem::Waiting(Box::new(order)),
        }
    }

    /// Returns the key of a sandbox with its `namespace/name`, uid and creation time.
    pub(super) fn of_sandbox(
        (id, name, uid, created_unix_nanos): (SandboxId, Arc<str>, Arc<str>, i64),
    ) -> Self {
        Self {
            name: name.to_string(),
            uid: uid.to_string(),
            created_unix_nanos,
            is_replaced: false,
            item: PodItem::Sandbox(id),
        }
    }

    /// Returns the key of an entry that a newer entry of the same name replaces.
    pub(super) fn replaced(self) -> Self {
        Self { is_replaced: true, ..self }
    }

    /// Returns `namespace/name`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the uid.
    pub fn uid(&self) -> &str {
        &self.uid
    }

    /// Returns whether the pod is in a namespace; true for an empty namespace.
    pub(super) fn is_in(&self, namespace: &str) -> bool {
        namespace.is_empty() || self.name.split_once('/').is_some_and(|(own, _)| own == namespace)
    }

    fn is_named(&self, name: &str) -> bool {
        let own = self.name.split_once('/').map_or("", |(_, name)| name);
        !self.is_replaced && (own == name || self.name == name)
    }

    fn sandbox(&self) -> &str {
        match &self.item {
            PodItem::Waiting(order) => order.sandbox.as_str(),
            PodItem::Sandbox(id) => id.as_str(),
        }
    }
}

/// Sorts keys by name and time, and marks all but the newest of each name as replaced.
pub(super) fn sort(keys: &mut [PodKey]) {
    keys.sort_by(|one, other| {
        (&one.name, one.created_unix_nanos).cmp(&(&other.name, other.created_unix_nanos))
    });
    for at in 1..keys.len() {
        keys[at - 1].is_replaced = keys[at - 1].name == keys[at].name;
    }
}

/// Returns the keys that a namespace and a name select; an empty one selects all.
pub(super) fn find(mut keys: Vec<PodKey>, namespace: &str, name: &str) -> Vec<PodKey> {
    keys.retain(|key| key.is_in(namespace));
    if name.is_empty() {
        return keys;
    }
    let of_sandbox = |key: &PodKey| key.sandbox() == name;
    if keys.iter().any(|key| key.is_named(name)) {
        keys.retain(|key| key.is_named(name));
    } else if keys.iter().any(of_sandbox) {
        keys.retain(of_sandbox);
    } else {
        // The newest entry of a pod.
        keys.retain(|key| key.uid == name);
        keys.sort_by_key(|key| Reverse(key.created_unix_nanos));
        keys.truncate(1);
    }
    keys
}

#[cfg(test)]
mod tests {
    use kiyot_engine::OrderKey;

    use super::*;

    fn sandbox(number: u8, name: &str, uid: &str, created: i64) -> PodKey {
        PodKey::of_sandbox((sandbox_id(number), name.into(), uid.into(), created))
    }

    fn sandbox_id(number: u8) -> SandboxId {
        SandboxId::from_random(&[number; SandboxId::RANDOM_BYTES])
    }

    fn order(number: u8, name: &str, uid: &str, since_unix_nanos: i64) -> PodKey {
        let (namespace, name) = name.split_once('/').unwrap();
        PodKey::of_order(OrderView {
            sandbox: sandbox_id(number),
            key: OrderKey {
                pod_uid: uid.to_owned(),
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                attempt: 1,
            },
            cell: None,
            since_unix_nanos,
            failures: 0,
            spot_failed: false,
            last_error: None,
        })
    }

    fn found(namespace: &str, name: &str) -> Vec<String> {
        let mut keys = vec![
            order(2, "shop/web", "uid-1", 20),
            sandbox(1, "shop/web", "uid-1", 10),
            sandbox(3, "shop/db-0", "uid-3", 30),
            sandbox(4, "shop/db-0", "uid-4", 40),
            sandbox(5, "default/db-0", "uid-5", 5),
        ];
        sort(&mut keys);
        find(keys, namespace, name).iter().map(|key| key.sandbox().to_owned()).collect()
    }

    #[test]
    fn name_selects_the_newest_pod_and_ids_select_older_pods() {
        for (namespace, name, expected) in [
            // A pod whose cell was lost, and which waits for its next cell.
            ("", "web", &[2][..]),
            ("shop", "web", &[2]),
            ("", "uid-1", &[2]),
            ("", sandbox_id(1).as_str(), &[1]),
            // A recreated pod of a StatefulSet.
            ("shop", "db-0", &[4]),
            ("", "shop/db-0", &[4]),
            ("", "uid-3", &[3]),
            ("", "db-0", &[5, 4]),
            ("default", "uid-3", &[]),
            ("", "", &[5, 3, 4, 1, 2]),
        ] {
            let expected: Vec<String> =
                expected.iter().map(|number| sandbox_id(*number).to_string()).collect();
            assert_eq!(found(namespace, name), expected, "{namespace:?} {name:?}");
        }
    }
}
