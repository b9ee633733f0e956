//! Cache of the container runtime of each id, for nodes with several container runtimes. Ids are
//! learned from responses, annotations of pods from requests. Bounded: evicted ids are looked up
//! again.

use std::{
    collections::{BTreeMap, HashMap},
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::peek::{self, Fields, Malformed, Value};
use crate::backends::Method;

/// Bound on the entries of a map. The least recently used half is evicted at once.
const MAX_ENTRIES: usize = 64 << 10;
/// Bound on the bytes of a cached id. Ids that runtimes make have 64 bytes.
const MAX_KEY_BYTES: usize = 256;

/// Index of a container runtime in `Registry::raw`. The node backend has 0.
pub(super) type RuntimeIndex = usize;

#[derive(Debug, Default)]
pub(super) struct IdCache(Mutex<Maps>);

#[derive(Debug, Default)]
struct Maps {
    /// Keyed by the ids of pod sandboxes and containers.
    ids: GenerationalMap<Box<str>>,
    /// Keyed by uids of pods, for `PullImage`.
    pods: GenerationalMap<Box<str>>,
    /// Keyed by digests of pods' annotations, the only key that `ImageStatus` has.
    annotations: GenerationalMap<u64>,
    /// Digests of the annotations of all pods of container runtimes, from requests. Pods of decoded
    /// backends have other annotations.
    runtime_annotations: GenerationalMap<u64>,
}

/// Evicts the least recently used entries by generations.
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

    /// Returns the runtime of a whole id.
    pub(super) fn runtime_of_id(&self, id: &str) -> Option<RuntimeIndex> {
        self.maps().ids.get(id)
    }

    /// Returns the runtime of the pod that a `PullImageRequest` or `ImageStatusRequest` is for.
    pub(super) fn runtime_of_image(&self, method: Method, request: &[u8]) -> Option<RuntimeIndex> {
        match method {
            // sandbox_config.metadata.uid
            Method::PullImage => self.maps().pods.get(peek::string(request, &[3, 1, 2]).ok()?),
            // image.annotations
            Method::ImageStatus => self.maps().annotations.get(&digest(request, &[1, 2]).ok()??),
            _ => None,
        }
    }

    /// Learns the annotations of a container runtime's pod from a request.
    pub(super) fn learn_annotations(&self, method: Method, request: &[u8]) {
        let path: &[u32] = match method {
            Method::RunPodSandbox => &[1, 7],
            Method::RestorePod => &[2, 7],
            // sandbox_config.annotations, which the kubelet makes anew for each call
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

    /// Learns ids and pods from a successful response. Malformed parts are skipped.
    pub(super) fn learn(
        &self,
        method: Method,
        index: RuntimeIndex,
        request: &[u8],
        response: &[u8],
    ) {
        // The part before a malformed field is valid.
        let _ = self.read(method, index, request, response);
    }

    fn read(
        &self,
        method: Method,
        index: RuntimeIndex,
        request: &[u8],
        response: &[u8],
    ) -> Result<(), Malformed> {
        let maps = &mut *self.maps();
        match method {
            Method::RunPodSandbox => {
                maps.put_id(peek::string(response, &[1])?, index);
                maps.put_pod(peek::string(request, &[1, 1, 2])?, digest(request, &[1, 7])?, index);
            }
            Method::RestorePod => {
                maps.put_id(peek::string(response, &[1])?, index);
                maps.put_pod(peek::string(request, &[2, 1, 2])?, digest(request, &[2, 7])?, index);
                // restored_containers.container_id
                let mut ids = Vec::new();
                peek::visit(response, &[2, 2], &mut |id| ids.extend(str::from_utf8(id)))?;
                ids.into_iter().for_each(|id| maps.put_id(id, index));
            }
            Method::CreateContainer => maps.put_id(peek::string(response, &[1])?, index),
            Method::ListPodSandbox => {
                for item in list_items(response) {
                    let item = item?;
                    maps.put_id(peek::string(item, &[1])?, index);
                    maps.put_pod(peek::string(item, &[2, 2])?, digest(item, &[6])?, index);
                }
            }
            Method::ListContainers => {
                for item in list_items(response) {
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

/// Returns the messages in field 1 of a list.
pub(super) fn list_items(response: &[u8]) -> impl Iterator<Item = Result<&[u8], Malformed>> {
    Fields::new(response).filter_map(|field| match field {
        Ok((1, Value::Bytes(item))) => Some(Ok(item)),
        Ok(_) => None,
        Err(malformed) => Some(Err(malformed)),
    })
}

/// Returns a digest of the annotations at a path, independent of their order; `None` without
/// annotations.
fn digest(message: &[u8], path: &[u32]) -> Result<Option<u64>, Malformed> {
    let mut annotations = BTreeMap::new();
    peek::visit(message, path, &mut |entry| {
        // Malformed entries are skipped.
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
    fn annotations_of_pods_are_learned_from_each_call_that_has_them() {
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
        id_cache.learn_annotations(Method::RunPodSandbox, &run.encode_to_vec());
        id_cache.learn_annotations(Method::CreateContainer, &create.encode_to_vec());
        id_cache.learn_annotations(Method::PullImage, &pull.encode_to_vec());
        id_cache.learn_annotations(Method::StopContainer, &create.encode_to_vec());
        id_cache.learn_annotations(Method::PullImage, b"");
        for (value, is_known) in [("run", true), ("create", true), ("pull", true), ("x", false)] {
            assert_eq!(id_cache.has_runtime_annotations(&image(value)), is_known, "{value}");
        }
        assert!(!id_cache.has_runtime_annotations(b""));
    }

    #[test]
    fn ids_and_pods_are_learned_from_responses() {
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
    fn ids_and_pods_are_learned_from_all_entries_of_a_list() {
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
        // A truncated list is learned up to its end.
        let other = IdCache::default();
        other.learn(Method::ListPodSandbox, 2, b"", &list[..list.len() - 3]);
        assert_eq!((other.runtime_of_id("s0"), other.runtime_of_id("s4")), (Some(2), None));
    }

    #[test]
    fn entries_are_bounded_and_the_last_used_stay() {
        let id_cache = IdCache::default();
        let learn = |n: usize| {
            let response =
                cri::CreateContainerResponse { container_id: format!("id-{n}") }.encode_to_vec();
            id_cache.learn(Method::CreateContainer, n % 3, b"", &response);
        };
        for n in 0..3 * MAX_ENTRIES {
            learn(n);
            if n % 1000 == 0 {
                assert_eq!(id_cache.runtime_of_id("id-0"), Some(0), "a used entry stays");
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
