//! What is remembered of images: what cells have, and what pods may pull with. In memory only.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use kiyot_proto::cri;
use prost::Message;
use tokio::sync::OwnedMutexGuard;

/// The longest id or user of it then, in bytes.
const MAX_WORD: usize = 4096;

/// The most that is remembered of one image, in bytes: there may be thousands, and it is a cell's
/// word.
const MAX_IMAGE: usize = 64 << 10;

/// An image without its names and annotations, if there is too much of them.
pub(super) fn bounded(image: &cri::Image) -> cri::Image {
    if image.encoded_len() <= MAX_IMAGE {
        return image.clone();
    }
    let word = |text: &str| text[..text.floor_char_boundary(MAX_WORD)].to_owned();
    cri::Image {
        id: word(&image.id),
        size: image.size,
        uid: image.uid,
        username: word(&image.username),
        pinned: image.pinned,
        ..cri::Image::default()
    }
}

/// A map that forgets what was put first when it is full.
pub(super) struct Recent<K, V> {
    limit: usize,
    entries: Mutex<(HashMap<K, V>, VecDeque<K>)>,
}

impl<K: Clone + Eq + Hash, V: Clone> Recent<K, V> {
    /// Remembers so many.
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, entries: Mutex::default() }
    }

    /// Remembers one, in place of another under the same key.
    pub(super) fn put(&self, key: K, value: V) {
        let (map, order) = &mut *self.locked();
        if map.insert(key.clone(), value).is_none() {
            order.push_back(key);
            if order.len() > self.limit
                && let Some(oldest) = order.pop_front()
            {
                map.remove(&oldest);
            }
        }
    }

    /// What is remembered.
    pub(super) fn get(&self, key: &K) -> Option<V> {
        self.locked().0.get(key).cloned()
    }

    /// What is remembered under the newest such key.
    pub(super) fn find(&self, is_such: impl Fn(&K) -> bool) -> Option<V> {
        let (map, order) = &*self.locked();
        order.iter().rev().find(|key| is_such(key)).and_then(|key| map.get(key).cloned())
    }

    /// Forgets all with such a key.
    pub(super) fn forget(&self, is_such: impl Fn(&K) -> bool) {
        let (map, order) = &mut *self.locked();
        order.retain(|key| !is_such(key));
        map.retain(|key, _| !is_such(key));
    }

    fn locked(&self) -> MutexGuard<'_, (HashMap<K, V>, VecDeque<K>)> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Its values may be secrets.
impl<K, V> fmt::Debug for Recent<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recent").field("limit", &self.limit).finish_non_exhaustive()
    }
}

/// One turn at a time for each key.
#[derive(Debug)]
pub(super) struct Turns<K> {
    keys: Mutex<HashMap<K, Weak<tokio::sync::Mutex<()>>>>,
}

impl<K> Default for Turns<K> {
    fn default() -> Self {
        Self { keys: Mutex::default() }
    }
}

impl<K: Eq + Hash> Turns<K> {
    /// Waits for the turn, which lasts until what is returned is dropped.
    pub(super) async fn take(&self, key: K) -> OwnedMutexGuard<()> {
        let turn = {
            let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
            keys.retain(|_, turn| turn.strong_count() > 0);
            let known = keys.get(&key).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let turn = Arc::default();
                keys.insert(key, Arc::downgrade(&turn));
                turn
            })
        };
        turn.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_forgotten() {
        let recent = Recent::new(2);
        for (key, value) in [(1, 'a'), (2, 'b'), (1, 'c'), (3, 'd')] {
            recent.put(key, value);
        }
        assert_eq!([1, 2, 3].map(|key| recent.get(&key)), [None, Some('b'), Some('d')]);
        assert_eq!(recent.find(|_| true), Some('d'));
        assert_eq!(recent.find(|key| *key < 3), Some('b'));
        recent.forget(|key| *key == 2);
        assert_eq!(recent.get(&2), None);
    }

    #[test]
    fn an_image_with_endless_names_is_remembered_without_them() {
        let usual = cri::Image {
            id: "sha256:0".to_owned(),
            repo_tags: vec!["busybox".to_owned()],
            ..cri::Image::default()
        };
        assert_eq!(bounded(&usual), usual);
        let endless = cri::Image {
            repo_tags: vec!["tag".repeat(1000); 1000],
            username: "u".repeat(1 << 20),
            size: 7,
            ..usual
        };
        let kept = bounded(&endless);
        assert!(kept.encoded_len() < MAX_IMAGE && kept.repo_tags.is_empty());
        assert_eq!((kept.id, kept.size, kept.username.len()), (endless.id, 7, MAX_WORD));
    }

    #[tokio::test]
    async fn turns_are_taken_one_after_another() {
        let turns = Turns::default();
        let first = turns.take("a").await;
        let other = turns.take("b").await;
        assert!(futures::FutureExt::now_or_never(turns.take("a")).is_none());
        drop((first, other));
        drop(turns.take("a").await);
        drop(turns.take("c").await);
        assert_eq!(turns.keys.lock().unwrap().len(), 1);
    }
}
