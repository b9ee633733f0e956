//! Limits on the connections of the admin API, by the rights of their callers.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::access::Access;

/// The limits.
#[derive(Debug)]
pub(super) struct ConnectionLimits {
    readers: Arc<Semaphore>,
    root: Arc<Semaphore>,
}

impl ConnectionLimits {
    /// Returns limits on the connections of readers, and of callers with full access.
    pub(super) fn new(readers: usize, root: usize) -> Self {
        Self { readers: Arc::new(Semaphore::new(readers)), root: Arc::new(Semaphore::new(root)) }
    }

    /// Returns a permit for a connection; `None` at the limit.
    pub(super) fn admit(&self, access: Access) -> Option<OwnedSemaphorePermit> {
        let permits = match access {
            Access::Full => &self.root,
            Access::ReadOnly(_) => &self.readers,
        };
        Arc::clone(permits).try_acquire_owned().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_at_their_limit_leave_root_its_connections() {
        let limits = ConnectionLimits::new(2, 1);
        let reader = Access::ReadOnly(1000);
        let readers = [limits.admit(reader), limits.admit(reader)];
        assert!(readers.iter().all(Option::is_some));
        assert!(limits.admit(Access::ReadOnly(1001)).is_none());
        let root = limits.admit(Access::Full);
        assert!(root.is_some() && limits.admit(Access::Full).is_none());
        drop(readers);
        assert!(limits.admit(reader).is_some(), "an ended connection leaves its place");
        drop(root);
        assert!(limits.admit(Access::Full).is_some());
    }
}
