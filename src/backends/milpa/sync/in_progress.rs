//! Keys with work in progress.

use std::{
    collections::HashSet,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Keys with work in progress, one piece of work per key at a time.
#[derive(Debug)]
pub(crate) struct InProgress<K>(Arc<Mutex<HashSet<K>>>);

/// Work on a key. Dropping it ends the work.
#[derive(Debug)]
pub(crate) struct Work<K: Eq + Hash> {
    all: Arc<Mutex<HashSet<K>>>,
    key: K,
}

impl<K> Default for InProgress<K> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

fn lock<K>(keys: &Mutex<HashSet<K>>) -> MutexGuard<'_, HashSet<K>> {
    keys.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<K: Clone + Eq + Hash> InProgress<K> {
    pub(crate) fn begin(&self, key: K) -> Work<K> {
        lock(&self.0).insert(key.clone());
        Work { all: Arc::clone(&self.0), key }
    }

    pub(super) fn contains(&self, key: &K) -> bool {
        lock(&self.0).contains(key)
    }
}

impl<K: Eq + Hash> Drop for Work<K> {
    fn drop(&mut self) {
        lock(&self.all).remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_lasts_until_it_is_dropped() {
        let creations = InProgress::default();
        let creation = creations.begin("web");
        assert!(creations.contains(&"web") && !creations.contains(&"db"));
        drop(creation);
        assert!(!creations.contains(&"web"));
    }
}
