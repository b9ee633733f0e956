//! Credentials with which pods may pull. In memory only.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use tokio::sync::OwnedMutexGuard;

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
        recent.forget(|key| *key == 2);
        assert_eq!(recent.get(&2), None);
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
