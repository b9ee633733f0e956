//! Tags of instances, set by a launch or by a pod that takes a warm cell.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use crate::{
    engine::{Effect, Engine, Notice},
    id::{CellId, SandboxId},
    provider::InstanceTags,
    wanted::Wanted,
};

/// Bounds the remembered pods: a forgotten pod is reported again.
const MAX_REPORTED_PODS: usize = 1024;

/// The pods whose unusable labels were reported, the last first.
#[derive(Debug, Default)]
pub(in crate::engine) struct ReportedPods(VecDeque<String>);

impl ReportedPods {
    /// Remembers a pod. Returns whether the pod is new.
    fn insert(&mut self, uid: &str) -> bool {
        if self.0.iter().any(|reported| reported == uid) {
            return false;
        }
        self.0.truncate(MAX_REPORTED_PODS - 1);
        self.0.push_front(uid.to_owned());
        true
    }
}

impl Engine {
    /// Returns the tags of a cell's instance for a pod. If the provider has tags, reports the pod's
    /// unusable labels, once for each pod.
    pub(in crate::engine) fn tags_for(
        &mut self,
        cell: &CellId,
        wanted: &Wanted,
        has_tags: bool,
    ) -> BTreeMap<String, String> {
        let InstanceTags { tags, left_out } =
            self.config.owner.tags(&self.config.tag_rules, cell, wanted);
        let key = &wanted.key;
        let has_left_out = has_tags && !left_out.0.is_empty();
        if has_left_out && self.reported.insert(&key.pod_uid) {
            let pod = key.pod();
            self.emit(cell, Effect::Log(Notice::LabelsLeftOut { pod, left_out }));
        }
        tags
    }

    /// Returns the tags that change when a pod takes a warm cell. If an earlier pod abandoned the
    /// cell, the tags of its labels become empty.
    pub(in crate::engine) fn tags_at_bind(
        &mut self,
        id: &CellId,
        sandbox: &SandboxId,
    ) -> BTreeMap<String, String> {
        let cell = self.cells.get(id).filter(|cell| cell.pool.is_some());
        let (Some(cell), Some(order)) = (cell, self.orders.get(sandbox)) else {
            return BTreeMap::new();
        };
        if !self.providers.callee(cell).is_some_and(|it| it.capabilities.has_tags) {
            return BTreeMap::new();
        }
        // The request of a previous daemon's cell is unknown: then all tags are set.
        let request = cell.launch.request.clone();
        let wanted = Arc::clone(&order.wanted);
        let mut tags = self.tags_for(id, &wanted, true);
        for (key, value) in request.iter().flat_map(|request| &request.spec.tags) {
            if tags.get(key) == Some(value) {
                tags.remove(key);
            } else {
                tags.entry(key.clone()).or_default();
            }
        }
        tags
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pod_is_reported_once_while_it_is_remembered() {
        let mut reported = ReportedPods::default();
        assert!(reported.insert("first") && !reported.insert("first"));
        for number in 0..MAX_REPORTED_PODS {
            assert!(reported.insert(&number.to_string()));
        }
        assert_eq!(reported.0.len(), MAX_REPORTED_PODS);
        assert!(reported.insert("first"));
    }
}
