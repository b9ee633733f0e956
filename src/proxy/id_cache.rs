//! Whose an id is, where several container runtimes make ids: learned from the answers that pass
//! through. And which annotations their pods have, which is learned from requests.
//! Bounded: what was forgotten is asked for again.

use std::{
    collections::{BTreeMap, HashMap},
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::peek::{self, Fields, Malformed, Value};
use crate::backends::Method;

/// Ids, and pods, of which the owner is kept. Half of them are the ones that were looked at last.
const MAX_ENTRIES: usize = 64 << 10;
/// Bytes of the longest id that is kept. Runtimes' have 64.
const MAX_KEY_BYTES: usize = 256;

/// A container runtime, by its index among those that there are (`Registry::raw`); the node's is 0.
pub(super) type RuntimeIndex = usize;

/// What was learned.
#[derive(Debug, Default)]
pub(super) struct IdCache(Mutex<Maps>);

#[derive(Debug, Default)]
struct Maps {
    /// Of pod sandboxes and containers.
    ids: GenerationalMap<Box<str>>,
    /// Uids of pods: an image is pulled for a pod.
    pods: GenerationalMap<Box<str>>,
    /// Digests of pods' annotations: an image is asked for with nothing else of its pod.
    annotations: GenerationalMap<u64>,
    /// The same of all pods that are with any container runtime, from requests. No other pod has
    /// them: not one of a backend that answers decoded calls.
    runtime_annotations: GenerationalMap<u64>,
}

/// A map that forgets what was not looked at for long.
#[derive(Debug)]
struct GenerationalMap<K> {
    young: HashMap<K, RuntimeIndex>,
    old: HashMap<K, RuntimeIndex>,
}

impl<K> Default for GenerationalMap<K> {
    fn default() -> Self {
        Self { young: HashMap::new(), old: HashMap::new() }
    }
}

impl<K: Hash + Eq> GenerationalMap<K> {
    fn put(&mut self, key: K, index: RuntimeIndex) {
        if self.young.len() >= MAX_ENTRIES / 2 {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(key, index);
    }

    fn get<Q: Hash + Eq + ToOwned<Owned = T> + ?Sized, T: Into<K>>(
        &mut self,
        key: &Q,
    ) -> Option<RuntimeIndex>
    where
        K: std::borrow::Borrow<Q>,
    {
        if let Some(index) = self.young.get(key) {
            return Some(*index);
        }
        let index = self.old.remove(key)?;
        self.put(key.to_owned().into(), index);
        Some(index)
    }
}

impl IdCache {
    fn maps(&self) -> MutexGuard<'_, Maps> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whose an id is. A prefix of one is not known.
    pub(super) fn runtime_of_id(&self, id: &str) -> Option<RuntimeIndex> {
        self.maps().ids.get(id)
    }

    /// Whose the pod is that a `PullImageRequest` or `ImageStatusRequest` is for.
    pub(super) fn runtime_of_image(&self, method: Method, request: &[u8]) -> Option<RuntimeIndex> {
        match method {
            // sandbox_config.metadata.uid
            Method::PullImage => self.maps().pods.get(peek::string(request, &[3, 1, 2]).ok()?),
            // image.annotations
            Method::ImageStatus => self.maps().annotations.get(&digest(request, &[1, 2]).ok()??),
            _ => None,
        }
    }

    /// Learns from a request that is passed on to a container runtime which annotations its pod
    /// has.
    pub(super) fn note_annotations(&self, method: Method, request: &[u8]) {
        let path: &[u32] = match method {
            Method::RunPodSandbox => &[1, 7],
            Method::RestorePod => &[2, 7],
            // sandbox_config.annotations: made anew from the pod for each call
            Method::CreateContainer | Method::PullImage => &[3, 7],
            _ => return,
        };
        if let Ok(Some(annotations)) = digest(request, path) {
            self.maps().runtime_annotations.put(annotations, 0);
        }
    }

    /// Returns whether an `ImageStatusRequest` has the annotations of a pod with a container
    /// runtime.
    pub(super) fn has_runtime_annotations(&self, request: &[u8]) -> bool {
        let annotations = digest(request, &[1, 2]).ok().flatten();
        annotations
            .is_some_and(|annotations| self.maps().runtime_annotations.get(&annotations).is_some())
    }

    /// Learns from an answer that is OK. What can't be read is skipped.
    pub(super) fn learn(&self, method: Method, index: RuntimeIndex, request: &[u8], answer: &[u8]) {
        // What was read before something odd is true all the same.
        let _ = self.read(method, index, request, answer);
    }

    fn read(
        &self,
        method: Method,
        index: RuntimeIndex,
        request: &[u8],
        answer: &[u8],
    ) -> Result<(), Malformed> {
        let maps = &mut *self.maps();
        match method {
            Method::RunPodSandbox => {
                maps.put_id(peek::string(answer, &[1])?, index);
                maps.put_pod(peek::string(request, &[1, 1, 2])?, digest(request, &[1, 7])?, index);
            }
            Method::RestorePod => {
                maps.put_id(peek::string(answer, &[1])?, index);
                maps.put_pod(peek::string(request, &[2, 1, 2])?, digest(request, &[2, 7])?, index);
                // restored_containers.container_id
                let mut ids = Vec::new();
                peek::visit(answer, &[2, 2], &mut |id| ids.extend(str::from_utf8(id)))?;
                ids.into_iter().for_each(|id| maps.put_id(id, index));
            }
            Method::CreateContainer => maps.put_id(peek::string(answer, &[1])?, index),
            Method::ListPodSandbox => {
                for item in list_items(answer) {
                    let item = item?;
                    maps.put_id(peek::string(item, &[1])?, index);
                    maps.put_pod(peek::string(item, &[2, 2])?, digest(item, &[6])?, index);
                }
            }
            Method::ListContainers => {
                for item in list_items(answer) {
                    maps.put_id(peek::string(item?, &[1])?, index);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

impl Maps {
    fn put_id(&mut self, id: &str, index: RuntimeIndex) {
        if (1..=MAX_KEY_BYTES).contains(&id.len()) && self.ids.get(id) != Some(index) {
            self.ids.put(id.into(), index);
        }
    }

    fn put_pod(&mut self, uid: &str, annotations: Option<u64>, index: RuntimeIndex) {
        if (1..=MAX_KEY_BYTES).contains(&uid.len()) && self.pods.get(uid) != Some(index) {
            self.pods.put(uid.into(), index);
        }
        if let Some(annotations) = annotations
            && self.annotations.get(&annotations) != Some(index)
        {
            self.annotations.put(annotations, index);
        }
    }
}

/// The messages in field 1 of a list.
pub(super) fn list_items(answer: &[u8]) -> impl Iterator<Item = Result<&[u8], Malformed>> {
    Fields::of(answer).filter_map(|field| match field {
        Ok((1, Value::Bytes(item))) => Some(Ok(item)),
        Ok(_) => None,
        Err(malformed) => Some(Err(malformed)),
    })
}

/// A digest of the map of annotations at a path, in whatever order they are; `None` if there are
/// none.
fn digest(message: &[u8], path: &[u32]) -> Result<Option<u64>, Malformed> {
    let mut annotations = BTreeMap::new();
    peek::visit(message, path, &mut |entry| {
        // An entry that can't be read is nobody's annotation.
        if let (Ok(key), Ok(value)) = (peek::string(entry, &[1]), peek::string(entry, &[2])) {
            annotations.insert(key, value);
        }
    })?;
    let mut hasher = DefaultHasher::new();
    annotations.hash(&mut hasher);
    Ok((!annotations.is_empty()).then(|| hasher.finish()))
}

#[cfg(test)]
mod tests {
    use kiyot_proto::cri;
    use prost::Message;

    use super::*;

    fn annotated(value: &str) -> std::collections::HashMap<String, String> {
        (0..20).map(|n| (format!("key-{n}"), format!("{value}-{n}"))).collect()
    }

    /// Verifies I19.
    #[test]
    fn annotations_of_pods_are_noted_from_each_call_that_has_them() {
        let image = |value| {
            let image = cri::ImageSpec { annotations: annotated(value), ..Default::default() };
            cri::ImageStatusRequest { image: Some(image), verbose: false }.encode_to_vec()
        };
        let config = |value| {
            Some(cri::PodSandboxConfig { annotations: annotated(value), ..Default::default() })
        };
        let id_cache = IdCache::default();
        let run = cri::RunPodSandboxRequest { config: config("run"), ..Default::default() };
        let create =
            cri::CreateContainerRequest { sandbox_config: config("create"), ..Default::default() };
        let pull = cri::PullImageRequest { sandbox_config: config("pull"), ..Default::default() };
        id_cache.note_annotations(Method::RunPodSandbox, &run.encode_to_vec());
        id_cache.note_annotations(Method::CreateContainer, &create.encode_to_vec());
        id_cache.note_annotations(Method::PullImage, &pull.encode_to_vec());
        id_cache.note_annotations(Method::StopContainer, &create.encode_to_vec());
        id_cache.note_annotations(Method::PullImage, b"");
        for (value, is_noted) in [("run", true), ("create", true), ("pull", true), ("x", false)] {
            assert_eq!(id_cache.has_runtime_annotations(&image(value)), is_noted, "{value}");
        }
        assert!(!id_cache.has_runtime_annotations(b""));
    }

    #[test]
    fn ids_and_pods_are_learned_from_answers() {
        let id_cache = IdCache::default();
        let metadata = Some(cri::PodSandboxMetadata { uid: "u1".into(), ..Default::default() });
        let config =
            cri::PodSandboxConfig { metadata, annotations: annotated("a"), ..Default::default() };
        let run = cri::RunPodSandboxRequest { config: Some(config.clone()), ..Default::default() }
            .encode_to_vec();
        id_cache.learn(
            Method::RunPodSandbox,
            1,
            &run,
            &cri::RunPodSandboxResponse { pod_sandbox_id: "s1".into() }.encode_to_vec(),
        );
        id_cache.learn(
            Method::CreateContainer,
            1,
            b"",
            &cri::CreateContainerResponse { container_id: "c1".into() }.encode_to_vec(),
        );
        assert_eq!(
            (
                id_cache.runtime_of_id("s1"),
                id_cache.runtime_of_id("c1"),
                id_cache.runtime_of_id("s"),
                id_cache.runtime_of_id("")
            ),
            (Some(1), Some(1), None, None)
        );
        let pull = cri::PullImageRequest { sandbox_config: Some(config), ..Default::default() }
            .encode_to_vec();
        assert_eq!(id_cache.runtime_of_image(Method::PullImage, &pull), Some(1));
        let status = |value| {
            let image =
                Some(cri::ImageSpec { annotations: annotated(value), ..Default::default() });
            cri::ImageStatusRequest { image, ..Default::default() }.encode_to_vec()
        };
        assert_eq!(id_cache.runtime_of_image(Method::ImageStatus, &status("a")), Some(1));
        assert_eq!(id_cache.runtime_of_image(Method::ImageStatus, &status("b")), None);
        assert_eq!(id_cache.runtime_of_image(Method::ImageStatus, b""), None);
    }

    #[test]
    fn lists_tell_of_all_that_they_have() {
        let id_cache = IdCache::default();
        let item = |n: usize| cri::PodSandbox {
            id: format!("s{n}"),
            metadata: Some(cri::PodSandboxMetadata { uid: format!("u{n}"), ..Default::default() }),
            annotations: annotated(&n.to_string()),
            ..Default::default()
        };
        let list =
            cri::ListPodSandboxResponse { items: (0..5).map(item).collect() }.encode_to_vec();
        id_cache.learn(Method::ListPodSandbox, 2, b"", &list);
        let containers =
            (0..5).map(|n| cri::Container { id: format!("c{n}"), ..Default::default() }).collect();
        id_cache.learn(
            Method::ListContainers,
            0,
            b"",
            &cri::ListContainersResponse { containers }.encode_to_vec(),
        );
        for n in 0..5 {
            assert_eq!(
                (
                    id_cache.runtime_of_id(&format!("s{n}")),
                    id_cache.runtime_of_id(&format!("c{n}"))
                ),
                (Some(2), Some(0))
            );
        }
        // Half a list teaches what came of it, and nothing panics.
        let other = IdCache::default();
        other.learn(Method::ListPodSandbox, 2, b"", &list[..list.len() - 3]);
        assert_eq!((other.runtime_of_id("s0"), other.runtime_of_id("s4")), (Some(2), None));
    }

    #[test]
    fn there_are_never_more_than_the_bound_and_the_last_ones_stay() {
        let id_cache = IdCache::default();
        let learn = |n: usize| {
            let answer =
                cri::CreateContainerResponse { container_id: format!("id-{n}") }.encode_to_vec();
            id_cache.learn(Method::CreateContainer, n % 3, b"", &answer);
        };
        for n in 0..3 * MAX_ENTRIES {
            learn(n);
            if n % 1000 == 0 {
                assert_eq!(id_cache.runtime_of_id("id-0"), Some(0), "what is looked at stays");
            }
        }
        let maps = id_cache.maps();
        assert!(maps.ids.young.len() + maps.ids.old.len() <= MAX_ENTRIES);
        drop(maps);
        assert_eq!(
            id_cache.runtime_of_id(&format!("id-{}", 3 * MAX_ENTRIES - 1)),
            Some((3 * MAX_ENTRIES - 1) % 3)
        );
        assert_eq!(id_cache.runtime_of_id("id-1"), None);
        id_cache.learn(
            Method::CreateContainer,
            1,
            b"",
            &cri::CreateContainerResponse { container_id: "x".repeat(MAX_KEY_BYTES + 1) }
                .encode_to_vec(),
        );
        assert_eq!(id_cache.runtime_of_id(&"x".repeat(MAX_KEY_BYTES + 1)), None);
    }
}
