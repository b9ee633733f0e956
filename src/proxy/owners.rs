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
const MOST: usize = 64 << 10;
/// Bytes of the longest id that is kept. Runtimes' have 64.
const LONGEST: usize = 256;

/// A container runtime, by its place among those that there are (`Registry::raw`); the node's is 0.
pub(super) type Place = usize;

/// What was learned.
#[derive(Debug, Default)]
pub(super) struct Owners(Mutex<Tables>);

#[derive(Debug, Default)]
struct Tables {
    /// Of pod sandboxes and containers.
    ids: Recent<Box<str>>,
    /// Uids of pods: an image is pulled for a pod.
    pods: Recent<Box<str>>,
    /// Digests of pods' annotations: an image is asked for with nothing else of its pod.
    annotations: Recent<u64>,
    /// The same of all pods that are with any container runtime, from requests. No other pod has
    /// them: not one of a backend that answers decoded calls.
    of_runtimes: Recent<u64>,
}

/// A map that forgets what was not looked at for long.
#[derive(Debug)]
struct Recent<K> {
    young: HashMap<K, Place>,
    old: HashMap<K, Place>,
}

impl<K> Default for Recent<K> {
    fn default() -> Self {
        Self { young: HashMap::new(), old: HashMap::new() }
    }
}

impl<K: Hash + Eq> Recent<K> {
    fn put(&mut self, key: K, place: Place) {
        if self.young.len() >= MOST / 2 {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(key, place);
    }

    fn get<Q: Hash + Eq + ToOwned<Owned = T> + ?Sized, T: Into<K>>(
        &mut self,
        key: &Q,
    ) -> Option<Place>
    where
        K: std::borrow::Borrow<Q>,
    {
        if let Some(place) = self.young.get(key) {
            return Some(*place);
        }
        let place = self.old.remove(key)?;
        self.put(key.to_owned().into(), place);
        Some(place)
    }
}

impl Owners {
    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whose an id is. A prefix of one is not known.
    pub(super) fn of_id(&self, id: &str) -> Option<Place> {
        self.tables().ids.get(id)
    }

    /// Whose the pod is that a `PullImageRequest` or `ImageStatusRequest` is for.
    pub(super) fn of_image(&self, method: Method, request: &[u8]) -> Option<Place> {
        match method {
            // sandbox_config.metadata.uid
            Method::PullImage => self.tables().pods.get(peek::string(request, &[3, 1, 2]).ok()?),
            // image.annotations
            Method::ImageStatus => self.tables().annotations.get(&digest(request, &[1, 2]).ok()??),
            _ => None,
        }
    }

    /// Learns from a request that is passed on to a container runtime which annotations its pod
    /// has.
    pub(super) fn note(&self, method: Method, request: &[u8]) {
        let path: &[u32] = match method {
            Method::RunPodSandbox => &[1, 7],
            Method::RestorePod => &[2, 7],
            // sandbox_config.annotations: made anew from the pod for each call
            Method::CreateContainer | Method::PullImage => &[3, 7],
            _ => return,
        };
        if let Ok(Some(annotations)) = digest(request, path) {
            self.tables().of_runtimes.put(annotations, 0);
        }
    }

    /// Returns whether an `ImageStatusRequest` has the annotations of a pod with a container
    /// runtime.
    pub(super) fn has_noted(&self, request: &[u8]) -> bool {
        let annotations = digest(request, &[1, 2]).ok().flatten();
        annotations.is_some_and(|annotations| self.tables().of_runtimes.get(&annotations).is_some())
    }

    /// Learns from an answer that is OK. What can't be read is skipped.
    pub(super) fn learn(&self, method: Method, place: Place, request: &[u8], answer: &[u8]) {
        // What was read before something odd is true all the same.
        let _ = self.read(method, place, request, answer);
    }

    fn read(
        &self,
        method: Method,
        place: Place,
        request: &[u8],
        answer: &[u8],
    ) -> Result<(), Malformed> {
        let tables = &mut *self.tables();
        match method {
            Method::RunPodSandbox => {
                tables.put_id(peek::string(answer, &[1])?, place);
                tables.put_pod(
                    peek::string(request, &[1, 1, 2])?,
                    digest(request, &[1, 7])?,
                    place,
                );
            }
            Method::RestorePod => {
                tables.put_id(peek::string(answer, &[1])?, place);
                tables.put_pod(
                    peek::string(request, &[2, 1, 2])?,
                    digest(request, &[2, 7])?,
                    place,
                );
                // restored_containers.container_id
                let mut ids = Vec::new();
                peek::each(answer, &[2, 2], &mut |id| ids.extend(str::from_utf8(id)))?;
                ids.into_iter().for_each(|id| tables.put_id(id, place));
            }
            Method::CreateContainer => tables.put_id(peek::string(answer, &[1])?, place),
            Method::ListPodSandbox => {
                for item in items(answer) {
                    let item = item?;
                    tables.put_id(peek::string(item, &[1])?, place);
                    tables.put_pod(peek::string(item, &[2, 2])?, digest(item, &[6])?, place);
                }
            }
            Method::ListContainers => {
                for item in items(answer) {
                    tables.put_id(peek::string(item?, &[1])?, place);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

impl Tables {
    fn put_id(&mut self, id: &str, place: Place) {
        if (1..=LONGEST).contains(&id.len()) && self.ids.get(id) != Some(place) {
            self.ids.put(id.into(), place);
        }
    }

    fn put_pod(&mut self, uid: &str, annotations: Option<u64>, place: Place) {
        if (1..=LONGEST).contains(&uid.len()) && self.pods.get(uid) != Some(place) {
            self.pods.put(uid.into(), place);
        }
        if let Some(annotations) = annotations
            && self.annotations.get(&annotations) != Some(place)
        {
            self.annotations.put(annotations, place);
        }
    }
}

/// The messages in field 1 of a list.
pub(super) fn items(answer: &[u8]) -> impl Iterator<Item = Result<&[u8], Malformed>> {
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
    peek::each(message, path, &mut |entry| {
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
        let owners = Owners::default();
        let run = cri::RunPodSandboxRequest { config: config("run"), ..Default::default() };
        let create =
            cri::CreateContainerRequest { sandbox_config: config("create"), ..Default::default() };
        let pull = cri::PullImageRequest { sandbox_config: config("pull"), ..Default::default() };
        owners.note(Method::RunPodSandbox, &run.encode_to_vec());
        owners.note(Method::CreateContainer, &create.encode_to_vec());
        owners.note(Method::PullImage, &pull.encode_to_vec());
        owners.note(Method::StopContainer, &create.encode_to_vec());
        owners.note(Method::PullImage, b"");
        for (value, is_noted) in [("run", true), ("create", true), ("pull", true), ("x", false)] {
            assert_eq!(owners.has_noted(&image(value)), is_noted, "{value}");
        }
        assert!(!owners.has_noted(b""));
    }

    #[test]
    fn ids_and_pods_are_learned_from_answers() {
        let owners = Owners::default();
        let metadata = Some(cri::PodSandboxMetadata { uid: "u1".into(), ..Default::default() });
        let config =
            cri::PodSandboxConfig { metadata, annotations: annotated("a"), ..Default::default() };
        let run = cri::RunPodSandboxRequest { config: Some(config.clone()), ..Default::default() }
            .encode_to_vec();
        owners.learn(
            Method::RunPodSandbox,
            1,
            &run,
            &cri::RunPodSandboxResponse { pod_sandbox_id: "s1".into() }.encode_to_vec(),
        );
        owners.learn(
            Method::CreateContainer,
            1,
            b"",
            &cri::CreateContainerResponse { container_id: "c1".into() }.encode_to_vec(),
        );
        assert_eq!(
            (owners.of_id("s1"), owners.of_id("c1"), owners.of_id("s"), owners.of_id("")),
            (Some(1), Some(1), None, None)
        );
        let pull = cri::PullImageRequest { sandbox_config: Some(config), ..Default::default() }
            .encode_to_vec();
        assert_eq!(owners.of_image(Method::PullImage, &pull), Some(1));
        let status = |value| {
            let image =
                Some(cri::ImageSpec { annotations: annotated(value), ..Default::default() });
            cri::ImageStatusRequest { image, ..Default::default() }.encode_to_vec()
        };
        assert_eq!(owners.of_image(Method::ImageStatus, &status("a")), Some(1));
        assert_eq!(owners.of_image(Method::ImageStatus, &status("b")), None);
        assert_eq!(owners.of_image(Method::ImageStatus, b""), None);
    }

    #[test]
    fn lists_tell_of_all_that_they_have() {
        let owners = Owners::default();
        let item = |n: usize| cri::PodSandbox {
            id: format!("s{n}"),
            metadata: Some(cri::PodSandboxMetadata { uid: format!("u{n}"), ..Default::default() }),
            annotations: annotated(&n.to_string()),
            ..Default::default()
        };
        let list =
            cri::ListPodSandboxResponse { items: (0..5).map(item).collect() }.encode_to_vec();
        owners.learn(Method::ListPodSandbox, 2, b"", &list);
        let containers =
            (0..5).map(|n| cri::Container { id: format!("c{n}"), ..Default::default() }).collect();
        owners.learn(
            Method::ListContainers,
            0,
            b"",
            &cri::ListContainersResponse { containers }.encode_to_vec(),
        );
        for n in 0..5 {
            assert_eq!(
                (owners.of_id(&format!("s{n}")), owners.of_id(&format!("c{n}"))),
                (Some(2), Some(0))
            );
        }
        // Half a list teaches what came of it, and nothing panics.
        let other = Owners::default();
        other.learn(Method::ListPodSandbox, 2, b"", &list[..list.len() - 3]);
        assert_eq!((other.of_id("s0"), other.of_id("s4")), (Some(2), None));
    }

    #[test]
    fn there_are_never_more_than_the_bound_and_the_last_ones_stay() {
        let owners = Owners::default();
        let learn = |n: usize| {
            let answer =
                cri::CreateContainerResponse { container_id: format!("id-{n}") }.encode_to_vec();
            owners.learn(Method::CreateContainer, n % 3, b"", &answer);
        };
        for n in 0..3 * MOST {
            learn(n);
            if n % 1000 == 0 {
                assert_eq!(owners.of_id("id-0"), Some(0), "what is looked at stays");
            }
        }
        let tables = owners.tables();
        assert!(tables.ids.young.len() + tables.ids.old.len() <= MOST);
        drop(tables);
        assert_eq!(owners.of_id(&format!("id-{}", 3 * MOST - 1)), Some((3 * MOST - 1) % 3));
        assert_eq!(owners.of_id("id-1"), None);
        owners.learn(
            Method::CreateContainer,
            1,
            b"",
            &cri::CreateContainerResponse { container_id: "x".repeat(LONGEST + 1) }.encode_to_vec(),
        );
        assert_eq!(owners.of_id(&"x".repeat(LONGEST + 1)), None);
    }
}
