//! Bounded map for credentials and small blobs, and locks by key. In memory only.

use std::{
    borrow::Borrow,
    collections::{HashMap, VecDeque},
    fmt,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use tokio::sync::OwnedMutexGuard;

/// Map that evicts its oldest entry when full.
pub(super) struct BoundedMap<K, V> {
    limit: usize,
    entries: Mutex<(HashMap<K, V>, VecDeque<K>)>,
}

impl<K: Clone + Eq + Hash, V: Clone> BoundedMap<K, V> {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, entries: Mutex::default() }
    }

    /// Inserts or replaces an entry.
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

    /// Returns a copy of a value.
    pub(super) fn get<Q>(&self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        self.locked().0.get(key).cloned()
    }

    /// Returns whether a key has a value.
    pub(super) fn contains<Q>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        self.locked().0.contains_key(key)
    }

    /// Removes all entries with matching keys.
    pub(super) fn forget(&self, is_such: impl Fn(&K) -> bool) {
        let (map, order) = &mut *self.locked();
        order.retain(|key| !is_such(key));
        map.retain(|key, _| !is_such(key));
    }

    fn locked(&self) -> MutexGuard<'_, (HashMap<K, V>, VecDeque<K>)> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Hides the values, which may be secrets.
impl<K, V> fmt::Debug for BoundedMap<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recent").field("limit", &self.limit).finish_non_exhaustive()
    }
}

/// Locks by key.
#[derive(Debug)]
pub(super) struct KeyLocks<K> {
    keys: Mutex<HashMap<K, Weak<tokio::sync::Mutex<()>>>>,
}

impl<K> Default for KeyLocks<K> {
    fn default() -> Self {
        Self { keys: Mutex::default() }
    }
}

impl<K: Eq + Hash> KeyLocks<K> {
    /// Locks a key until the guard is dropped.
    pub(super) async fn lock(&self, key: K) -> OwnedMutexGuard<()> {
        self.of(key).lock_owned().await
    }

    /// Locks a key until the guard is dropped; `None` if it is locked.
    pub(super) fn try_lock(&self, key: K) -> Option<OwnedMutexGuard<()>> {
        self.of(key).try_lock_owned().ok()
    }

    fn of(&self, key: K) -> Arc<tokio::sync::Mutex<()>> {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        keys.retain(|_, lock| lock.strong_count() > 0);
        let known = keys.get(&key).and_then(Weak::upgrade);
        known.unwrap_or_else(|| {
            let lock = Arc::default();
            keys.insert(key, Arc::downgrade(&lock));
            lock
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_map_evicts_oldest_entry() {
        let recent = BoundedMap::new(2);
        for (key, value) in [(1, 'a'), (2, 'b'), (1, 'c'), (3, 'd')] {
            recent.put(key, value);
        }
        assert_eq!([1, 2, 3].map(|key| recent.get(&key)), [None, Some('b'), Some('d')]);
        recent.forget(|key| *key == 2);
        assert_eq!(recent.get(&2), None);
    }

    #[tokio::test]
    async fn lock_of_a_key_is_exclusive() {
        let image_locks = KeyLocks::default();
        let first = image_locks.lock("a").await;
        let other = image_locks.lock("b").await;
        assert!(futures::FutureExt::now_or_never(image_locks.lock("a")).is_none());
        assert!(image_locks.try_lock("a").is_none());
        drop((first, other));
        drop(image_locks.try_lock("a").unwrap());
        drop(image_locks.lock("a").await);
        drop(image_locks.lock("c").await);
        assert_eq!(image_locks.keys.lock().unwrap().len(), 1);
    }
}
