//! Containers that are being created.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::backends::milpa::id::SandboxId;

/// A container's sandbox and name. Attempts of a container are created one after the other.
type Key = (SandboxId, String);

/// Containers that are being created: the cell may have them before there are records.
#[derive(Debug, Clone, Default)]
pub(crate) struct Creations(Arc<Mutex<HashSet<Key>>>);

/// The creation of a container, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Creation {
    all: Creations,
    key: Key,
}

impl Creations {
    fn lock(&self) -> MutexGuard<'_, HashSet<Key>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a creation.
    pub(crate) fn begin(&self, sandbox: &SandboxId, name: &str) -> Creation {
        let key = (sandbox.clone(), name.to_owned());
        self.lock().insert(key.clone());
        Creation { all: self.clone(), key }
    }

    /// Returns whether a container of this name is being created.
    pub(super) fn contains(&self, sandbox: &SandboxId, name: &str) -> bool {
        self.lock().contains(&(sandbox.clone(), name.to_owned()))
    }
}

impl Drop for Creation {
    fn drop(&mut self) {
        self.all.lock().remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn creation_lasts_until_it_is_dropped() {
        let (creations, sandbox) = (Creations::default(), SandboxId::mint().unwrap());
        let creation = creations.begin(&sandbox, "web");
        assert!(creations.contains(&sandbox, "web") && !creations.contains(&sandbox, "db"));
        drop(creation);
        assert!(!creations.contains(&sandbox, "web"));
    }
}
