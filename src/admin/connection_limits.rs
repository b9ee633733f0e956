//! Limits on the connections of the admin API, by the rights and the users of their callers, and on
//! calls that last or take memory.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;

use super::access::Access;

/// The numbers of connections and calls that are allowed at a time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Connections of all readers.
    pub(super) readers: usize,
    /// Connections of a reader.
    pub(super) reader: usize,
    /// Connections of callers with full access.
    pub(super) root: usize,
    /// Logs that callers with full access follow: fewer than `root`, to leave connections for other
    /// calls.
    pub(super) followed: usize,
    /// Connections that get only the reason of their refusal.
    pub(super) refused: usize,
    /// Requests with a manifest that are read and answered. Callers with full access have this
    /// limit, and all readers together have it too.
    pub(super) manifests: usize,
}

/// Counts open connections and calls.
#[derive(Debug)]
pub(super) struct ConnectionLimits {
    limits: Limits,
    /// The connections by user; `None` stands for callers with full access.
    open: Mutex<HashMap<Option<u32>, usize>>,
    followed: Arc<Semaphore>,
    refused: Arc<Semaphore>,
    manifests_of_root: Arc<Semaphore>,
    manifests_of_readers: Arc<Semaphore>,
}

/// A connection that was admitted. Dropping it frees its place.
#[derive(Debug)]
pub(super) struct Admitted {
    limits: Arc<ConnectionLimits>,
    user: Option<u32>,
}

impl ConnectionLimits {
    /// Returns limits without connections.
    pub(super) fn new(limits: Limits) -> Arc<Self> {
        let [followed, refused] =
            [limits.followed, limits.refused].map(|number| Arc::new(Semaphore::new(number)));
        let [manifests_of_root, manifests_of_readers] =
            [(); 2].map(|()| Arc::new(Semaphore::new(limits.manifests)));
        Arc::new(Self {
            limits,
            open: Mutex::default(),
            followed,
            refused,
            manifests_of_root,
            manifests_of_readers,
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Option<u32>, usize>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a connection, or returns RESOURCE_EXHAUSTED with the limit.
    pub(super) fn admit(self: &Arc<Self>, access: Access) -> Result<Admitted, Status> {
        let Limits { readers, reader, root, .. } = self.limits;
        let user = match access {
            Access::Full => None,
            Access::ReadOnly(uid) => Some(uid),
        };
        let mut open = self.lock();
        let own = open.get(&user).copied().unwrap_or_default();
        let of_readers: usize =
            open.iter().filter(|(user, _)| user.is_some()).map(|(_, number)| number).sum();
        let reached = match user {
            None if own >= root => Some(format!("root has {own} connections; allowed: {root}")),
            Some(uid) if own >= reader => {
                Some(format!("user {uid} has {own} connections; allowed: {reader}"))
            }
            Some(_) if of_readers >= readers => {
                Some(format!("readers have {of_readers} connections; allowed: {readers}"))
            }
            _ => None,
        };
        if let Some(reached) = reached {
            return Err(Status::resource_exhausted(reached));
        }
        *open.entry(user).or_default() += 1;
        Ok(Admitted { limits: Arc::clone(self), user })
    }

    /// Returns a permit for a log that is followed, or RESOURCE_EXHAUSTED with the limit.
    pub(super) fn follow(&self) -> Result<OwnedSemaphorePermit, Status> {
        Arc::clone(&self.followed).try_acquire_owned().map_err(|_| {
            let followed = self.limits.followed;
            Status::resource_exhausted(format!("{followed} logs are followed; allowed: {followed}"))
        })
    }

    /// Waits for the turn of a request with a manifest; the semaphores are never closed.
    pub(super) async fn manifest(&self, access: Access) -> Option<OwnedSemaphorePermit> {
        let turns = match access {
            Access::Full => &self.manifests_of_root,
            Access::ReadOnly(_) => &self.manifests_of_readers,
        };
        Arc::clone(turns).acquire_owned().await.ok()
    }

    /// Returns a permit for a connection that is refused with a reason; `None` if too many are
    /// refused.
    pub(super) fn refuse(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.refused).try_acquire_owned().ok()
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut open = self.limits.lock();
        if let Some(number) = open.get_mut(&self.user) {
            *number = number.saturating_sub(1);
            if *number == 0 {
                open.remove(&self.user);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Arc<ConnectionLimits> {
        let limits =
            Limits { readers: 3, reader: 2, root: 2, followed: 1, refused: 1, manifests: 1 };
        ConnectionLimits::new(limits)
    }

    /// Verifies O25.
    #[test]
    fn readers_at_their_limit_leave_root_its_connections() {
        let limits = limits();
        let (one, other) = (Access::ReadOnly(1000), Access::ReadOnly(1001));
        let mut readers = vec![limits.admit(one).unwrap(), limits.admit(one).unwrap()];
        let refused = limits.admit(one).unwrap_err();
        assert_eq!(refused.message(), "user 1000 has 2 connections; allowed: 2");
        readers.push(limits.admit(other).unwrap());
        let refused = limits.admit(other).unwrap_err();
        assert_eq!(refused.message(), "readers have 3 connections; allowed: 3");
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        let root = [limits.admit(Access::Full), limits.admit(Access::Full)];
        assert!(root.iter().all(Result::is_ok));
        let refused = limits.admit(Access::Full).unwrap_err();
        assert_eq!(refused.message(), "root has 2 connections; allowed: 2");
        drop(readers);
        assert!(limits.admit(one).is_ok(), "an ended connection frees its place");
        drop(root);
        assert!(limits.admit(Access::Full).is_ok());
    }

    /// Verifies O25.
    #[test]
    fn followed_logs_leave_connections_for_other_calls() {
        let limits = limits();
        let first = limits.follow().unwrap();
        let refused = limits.follow().unwrap_err();
        assert_eq!(refused.message(), "1 logs are followed; allowed: 1");
        drop(first);
        assert!(limits.follow().is_ok());
        let refusing = limits.refuse();
        assert!(refusing.is_some() && limits.refuse().is_none());
    }

    /// Verifies O25.
    #[tokio::test]
    async fn manifests_of_readers_leave_root_its_turn() {
        let limits = limits();
        let reader = limits.manifest(Access::ReadOnly(1000)).await;
        let other = tokio::spawn({
            let limits = Arc::clone(&limits);
            async move { drop(limits.manifest(Access::ReadOnly(1001)).await) }
        });
        drop(limits.manifest(Access::Full).await);
        assert!(!other.is_finished());
        drop(reader);
        other.await.unwrap();
    }
}
