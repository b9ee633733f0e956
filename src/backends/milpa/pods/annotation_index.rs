//! Index of pods by their annotations: an `ImageStatus` does not name its pod, but has all current
//! annotations of the pod.

use std::{
    collections::HashMap,
    hash::{BuildHasher, Hasher},
};

use kiyot_engine::id::SandboxId;
use kiyot_proto::{cri, store};
use prost::Message;

use super::{Cache, Pods, Sandbox, remove_from};

/// Prefix of the annotations that the kubelet itself gives each pod (kubernetes
/// pkg/kubelet/types).
const KUBELET_PREFIX: &str = "kubernetes.io/config.";

/// Annotation with the time at which this run of the kubelet saw the pod first, in nanoseconds. It
/// differs between pods, and changes with a restart of the kubelet.
const SEEN_ANNOTATION: &str = "kubernetes.io/config.seen";

type Annotations = HashMap<String, String>;

/// A hash of annotations, by which a sandbox is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Key {
    /// The hash of all annotations.
    All(u64),
    /// The hash of the kubelet's own annotations, which `kubectl annotate` does not change.
    OfKubelet(u64),
    /// The hash of all other annotations, which a restart of the kubelet does not change.
    OfPod(u64),
}

/// The keys of one sandbox.
pub(super) type Keys = [Option<Key>; 3];

fn is_of_kubelet(key: &str) -> bool {
    key.starts_with(KUBELET_PREFIX)
}

/// Returns the kubelet's own annotations or all others, sorted.
fn part(annotations: &Annotations, of_kubelet: bool) -> Vec<(&String, &String)> {
    let mut part: Vec<_> =
        annotations.iter().filter(|(key, _)| is_of_kubelet(key) == of_kubelet).collect();
    part.sort_unstable();
    part
}

impl Sandbox {
    /// Returns its pod's annotations as of the last call of the kubelet.
    pub(crate) fn current_annotations(&self) -> Annotations {
        let meta = self.meta();
        if meta.current_annotations.is_empty() {
            meta.config.unwrap_or_default().annotations
        } else {
            meta.current_annotations
        }
    }
}

impl Pods {
    pub(super) fn keys(&self, meta: &store::SandboxMeta) -> Keys {
        let first = meta.config.as_ref().map(|config| &config.annotations);
        match first {
            _ if !meta.current_annotations.is_empty() => self.keys_of(&meta.current_annotations),
            Some(first) => self.keys_of(first),
            None => Keys::default(),
        }
    }

    fn keys_of(&self, annotations: &Annotations) -> Keys {
        let (of_kubelet, of_pod) = (part(annotations, true), part(annotations, false));
        let mut all: Vec<_> = annotations.iter().collect();
        all.sort_unstable();
        let is_seen = annotations.get(SEEN_ANNOTATION).is_some_and(|seen| !seen.is_empty());
        [
            (!all.is_empty()).then(|| Key::All(self.hash(&all))),
            is_seen.then(|| Key::OfKubelet(self.hash(&of_kubelet))),
            Some(Key::OfPod(self.hash(&of_pod))),
        ]
    }

    fn hash(&self, sorted: &[(&String, &String)]) -> u64 {
        let mut hasher = self.hashing.build_hasher();
        for (key, value) in sorted {
            hasher.write_usize(key.len());
            hasher.write(key.as_bytes());
            hasher.write_usize(value.len());
            hasher.write(value.as_bytes());
        }
        hasher.finish()
    }

    /// Publishes the changed record of a sandbox. Responses keep the annotations of RunPodSandbox,
    /// as containerd's do.
    pub(crate) fn set_meta(&self, id: &SandboxId, meta: &store::SandboxMeta) {
        let keys = self.keys(meta);
        let cache = &mut *self.write();
        let Some(sandbox) = cache.sandboxes.get_mut(id) else { return };
        let before = std::mem::replace(&mut sandbox.annotations, keys);
        sandbox.meta = meta.encode_to_vec().into();
        cache.unindex(id, before);
        cache.index(id, keys);
    }

    /// Finds the running sandbox of the pod whose image is queried: the newest sandbox with exactly
    /// these annotations, else the only sandbox to which this run of the kubelet gave the same.
    /// `None` without annotations.
    pub(crate) fn sandbox_of_annotations(&self, image: &cri::ImageSpec) -> Option<Sandbox> {
        let [all, of_kubelet, _] = self.keys_of(&image.annotations);
        let same = self.running_with(all, |annotations| *annotations == image.annotations).pop();
        same.or_else(|| {
            let wanted = part(&image.annotations, true);
            let mut of_run =
                self.running_with(of_kubelet, |annotations| part(annotations, true) == wanted);
            of_run.pop().filter(|_| of_run.is_empty())
        })
    }

    /// Finds the running sandboxes whose pods have these annotations except for the kubelet's own:
    /// after a restart of the kubelet the query may be for any of them.
    pub(crate) fn sandboxes_like(&self, image: &cri::ImageSpec) -> Vec<Sandbox> {
        if image.annotations.is_empty() {
            return Vec::new();
        }
        let [_, _, of_pod] = self.keys_of(&image.annotations);
        let wanted = part(&image.annotations, false);
        self.running_with(of_pod, |annotations| part(annotations, false) == wanted)
    }

    /// Returns the running sandboxes of a key whose annotations match, in creation order.
    fn running_with(
        &self,
        key: Option<Key>,
        matches: impl Fn(&Annotations) -> bool,
    ) -> Vec<Sandbox> {
        let candidates: Vec<_> = {
            let cache = self.read();
            let ids = key.and_then(|key| cache.by_annotations.get(&key));
            ids.into_iter()
                .flatten()
                .filter_map(|id| cache.sandboxes.get(id))
                .filter(|sandbox| sandbox.ready)
                .cloned()
                .collect()
        };
        candidates.into_iter().filter(|sandbox| matches(&sandbox.current_annotations())).collect()
    }
}

impl Cache {
    pub(super) fn index(&mut self, id: &SandboxId, keys: Keys) {
        for key in keys.into_iter().flatten() {
            self.by_annotations.entry(key).or_default().push(id.clone());
        }
    }

    pub(super) fn unindex(&mut self, id: &SandboxId, keys: Keys) {
        for key in keys.into_iter().flatten() {
            remove_from(&mut self.by_annotations, &key, id);
        }
    }
}
